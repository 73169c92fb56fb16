from __future__ import annotations

import pytest

from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


def texts_of(chunks: list[dict], number: int) -> list[str]:
    texts = [""] * number
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def test_text_and_token_ids_answer_alike(connect: Connect) -> None:
    client = connect()
    text = (await client.complete("abc")).json
    ids = (await client.complete([97, 98, 99])).json
    assert text["object"] == "text_completion" and text["id"].startswith("cmpl-")
    assert text["choices"] == ids["choices"]
    assert text["choices"] == [
        {"index": 0, "text": "you said: abc", "logprobs": None, "finish_reason": "stop"}
    ]
    assert text["usage"]["total_tokens"] == 3 + 13


@pytest.mark.parametrize("prompts", [["a", "bb"], [[97], [98, 98]], ["a", [98, 98]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_make_several_choices(
    connect: Connect, prompts: list, stream: bool
) -> None:
    client = connect()
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await client.complete(prompts, **options)
    expected = ["you said: a", "you said: bb"]
    if stream:
        chunks = answer.chunks
        assert texts_of(chunks, 2) == expected
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["stop", "stop"]
        usage = chunks[-1]["usage"]
    else:
        choices = answer.json["choices"]
        assert [choice["text"] for choice in choices] == expected
        assert [choice["index"] for choice in choices] == [0, 1]
        usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 23)


async def test_a_list_of_one_prompt_is_one_choice(connect: Connect) -> None:
    assert len((await connect().complete(["abc"])).json["choices"]) == 1


async def test_a_completion_without_a_limit_is_short(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: "x" * 100))
    body = (await client.complete("abc")).json
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_stream_has_no_role(connect: Connect) -> None:
    chunks = (await connect().complete("abc", stream=True)).chunks
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(set(chunk["choices"][0]) == set(chunks[0]["choices"][0]) for chunk in chunks)
    assert chunks[-1]["choices"][0]["text"] == ""


async def test_one_prompt_too_long_refuses_them_all(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=8))
    answer = await client.complete(["ok", "far too long"])
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert await client.open_requests() == 0

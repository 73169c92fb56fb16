from __future__ import annotations

from typing import Any

import pytest

from .client import chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeTokenizer

pytestmark = pytest.mark.anyio

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
RENDER = "/v1/chat/completions/render"


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_there_and_back(connect: Connect, prefix: str) -> None:
    client = connect()
    body = {"prompt": "héé", "return_token_strs": True}
    there = (await client.post(f"{prefix}/tokenize", body)).json
    assert there == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 233, 233],
        "token_strs": ["h", "é", "é"],
    }
    back = await client.post(f"{prefix}/detokenize", {"tokens": there["tokens"]})
    assert back.json == {"prompt": "héé"}


async def test_row_52_the_first_token_is_put_in_front_once(connect: Connect) -> None:
    client = connect(FakeEngine(tokenizer=FakeTokenizer(bos_id=1)))
    for fields, ids in [
        ({}, [1, 97]),
        ({"add_special_tokens": True}, [1, 97]),
        ({"add_special_tokens": False}, [97]),
    ]:
        assert (await client.post("/tokenize", {"prompt": "a"} | fields)).json["tokens"] == ids
    rendered = (await client.post(RENDER, chat_body("a"))).json
    assert 1 not in rendered["token_ids"]  # the template writes its own


async def test_a_conversation_is_counted_as_it_would_be_answered(connect: Connect) -> None:
    client = connect()
    body = chat_body("hi", tools=[TOOL])
    answered = (await client.post("/v1/chat/completions", body)).json["usage"]["prompt_tokens"]
    assert (await client.post("/tokenize", body)).json["count"] == answered
    rendered = (await client.post(RENDER, body)).json
    assert rendered["count"] == len(rendered["token_ids"]) == answered
    assert rendered["prompt"] == "tool: f\nuser: hi\n"
    without = (await client.post(RENDER, body | {"tool_choice": "none"})).json
    assert without["prompt"] == rendered["prompt"]  # the same conversation, without a call


async def test_a_model_without_tools_in_its_template_is_told_of_them(connect: Connect) -> None:
    client = connect(FakeEngine(tokenizer=FakeTokenizer(template=None)))
    rendered = (await client.post(RENDER, chat_body("hi", tools=[TOOL]))).json
    assert rendered["prompt"].startswith("system: ") and '"name": "f"' in rendered["prompt"]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", chat_body(prompt="x"), "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", chat_body(continue_final_message=True), "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1024]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        (RENDER, {"messages": [], "x": 1}, "messages"),
        (RENDER, chat_body(max_tokens=-1), "max_tokens"),
    ],
)
async def test_what_is_refused(connect: Connect, path: str, body: Any, param: str) -> None:
    answer = await connect().post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


async def test_another_models_name_is_not_found(connect: Connect) -> None:
    client = connect()
    for path, body in [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        (RENDER, chat_body()),
    ]:
        assert (await client.post(path, body | {"model": "other"})).status == 404

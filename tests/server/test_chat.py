from __future__ import annotations

import asyncio

import pytest

from leyline.errors import CapacityError
from leyline.server import ServerConfig

from .client import chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def text_of(chunks: list[dict]) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def reasons_of(chunks: list[dict]) -> list[str]:
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [reason for reason in reasons if reason is not None]


async def test_a_whole_answer(connect: Connect) -> None:
    answer = await connect().chat("hello")
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake-model" and isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "you said: user: hello\n"},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert "session" not in body
    assert body["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 22,
        "total_tokens": 34,
        "prompt_tokens_details": {
            "cached_tokens": 2,
            "spliced_tokens": 0,
            "recomputed_tokens": 10,
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_is_spelt_as_clients_expect(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: "abcdefg"))
    answer = await client.chat(stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    first, *middle, last, counts = answer.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in middle] == [
        {"content": "abc"},
        {"content": "def"},
        {"content": "g"},
    ]
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert counts["choices"] == [] and counts["usage"]["completion_tokens"] == 7
    assert all("usage" not in chunk for chunk in [first, *middle, last])
    heads = {(chunk["id"], chunk["created"], chunk["model"]) for chunk in answer.chunks}
    assert len(heads) == 1
    assert {chunk["object"] for chunk in answer.chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_a_stream_without_usage_asked_for_has_none(connect: Connect, options: object) -> None:
    answer = await connect().chat(stream=True, stream_options=options)
    assert all("usage" not in chunk for chunk in answer.chunks)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 1}, {"max_tokens": 5}, {"stop": "said"}, {"stop": ["zz", "u"]}]
)
async def test_streamed_and_whole_answers_agree(connect: Connect, chunk: int, fields: dict) -> None:
    client = connect(FakeEngine(chunk=chunk))
    whole = (await client.chat("héé 👋\u2028\u0085 x", **fields)).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = (await client.chat("héé 👋\u2028\u0085 x", **fields, **options)).chunks
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert reasons_of(chunks) == [whole["choices"][0]["finish_reason"]]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_an_empty_answer_still_has_one_finish_reason(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: ""))
    chunks = (await client.chat(stream=True)).chunks
    assert text_of(chunks) == "" and reasons_of(chunks) == ["stop"]
    assert (await client.chat()).json["choices"][0]["message"]["content"] == ""


async def test_a_cut_answer_says_length(connect: Connect) -> None:
    answer = await connect().chat(max_tokens=1)
    assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_a_session_is_named_in_the_answer(connect: Connect) -> None:
    client = connect()
    whole = (await client.chat(session_id="s1")).json
    assert whole["session"] == {"id": "s1", "version": 1}
    chunks = (await client.chat(session_id="s1", stream=True)).chunks
    with_session = [chunk for chunk in chunks if "session" in chunk]
    assert [chunk["session"] for chunk in with_session] == [{"id": "s1", "version": 2}]
    assert with_session[0]["choices"][0]["finish_reason"] == "stop"


async def test_only_a_session_has_a_state(connect: Connect) -> None:
    client = connect(FakeEngine(sessions={"s1": FakeSession("0123", spliced=1)}))
    assert (await client.chat(session_id="s1")).json["usage"]["state"] == "spliced"
    assert (await client.chat(session_id="s2")).json["usage"]["state"] == "exact"
    assert "state" not in (await client.chat()).json["usage"]


async def test_an_edited_history_says_where_it_differs_and_what_became_of_it(
    connect: Connect,
) -> None:
    client = connect(FakeEngine(edited_history=True))
    whole = (await client.chat(session_id="s1")).json
    assert whole["usage"]["prompt_tokens_details"]["first_difference"] == 7
    (receipt,) = whole["session"]["receipts"]
    assert receipt["mode"] == "amortize" and receipt["kept"] == 1
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, counts = (await client.chat(session_id="s1", **options)).chunks
    assert last["session"]["receipts"] == [receipt]
    assert counts["usage"]["prompt_tokens_details"]["first_difference"] == 7


@pytest.mark.parametrize("mode", ["forget", "amortize", "heal", None])
async def test_the_mode_for_edited_histories_reaches_the_engine(
    connect: Connect, mode: str | None
) -> None:
    client = connect()
    assert (await client.chat(session_id="s1", edit_mode=mode)).status == 200
    assert (await client.chat(session_id="s1")).status == 200
    assert client.engine.turns == [("s1", mode), ("s1", None)]


async def test_a_lost_splice_is_reported(connect: Connect) -> None:
    answer = await connect(FakeEngine(degraded=True)).chat()
    assert answer.json["usage"]["degraded"] is True


async def test_a_busy_session_says_conflict(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    first = client.open("POST", CHAT, chat_body(session_id="s1", stream=True))
    await first.first_bytes()
    second = await client.chat(session_id="s1")
    assert second.status == 409 and second.error["code"] == "session_busy"
    client.engine.allow(99)
    assert (await first.finish()).lines


async def test_every_field_reaches_the_engine(connect: Connect) -> None:
    client = connect()
    await client.chat(
        "x",
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=-5,
        stop=["a", "b"],
        max_tokens=9,
        max_completion_tokens=7,
        ignore_eos=True,
        cache_salt="tenant",
    )
    ((kind, messages, (params, salt)),) = client.engine.seen
    assert kind == "chat" and salt == "tenant"
    assert messages == [{"role": "user", "content": "x"}]
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.5, 40)
    assert (params.seed, params.stop, params.max_tokens) == (-5, ("a", "b"), 7)
    assert params.ignore_eos


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "seed", "max_tokens", "stop"])
async def test_null_is_the_same_as_absent(connect: Connect, field: str) -> None:
    client = connect()
    await client.chat()
    await client.chat(**{field: None})
    (_, _, absent), (_, _, null) = client.engine.seen
    assert absent == null


async def test_unknown_and_harmless_fields_are_ignored(connect: Connect) -> None:
    answer = await connect().chat(
        user="u" * 10_000,
        store=False,
        metadata={"a": "\ud83d"},
        service_tier="auto",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        n=1,
        logprobs=False,
        frequency_penalty=0.0,
        presence_penalty=0,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        something_new={"deep": [1, 2]},
    )
    assert answer.status == 200


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
@pytest.mark.parametrize(
    "content, text",
    [
        ("plain", "plain"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "input_text", "text": "one"}], "one"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
async def test_content_of_every_form_on_every_role(
    connect: Connect, role: str, content: object, text: str
) -> None:
    client = connect()
    answer = await client.post(CHAT, {"messages": [{"role": role, "content": content}]})
    assert answer.status == 200
    seen = "system" if role == "developer" else role
    assert client.engine.seen[0][1] == [{"role": seen, "content": text}]


async def test_row_27_several_parts_stay_parts_for_the_template_to_join(connect: Connect) -> None:
    client = connect()
    for role in ("system", "user", "assistant", "tool"):
        parts = [{"type": "text", "text": "one"}, {"type": "output_text", "text": "two"}]
        answer = await client.post(CHAT, {"messages": [{"role": role, "content": parts}]})
        assert answer.status == 200
        (seen,) = client.engine.seen[-1][1]
        assert seen["content"] == [{"type": "text", "text": text} for text in ("one", "two")]


async def test_absent_null_and_empty_content_beside_tool_calls_render_alike(
    connect: Connect,
) -> None:
    client = connect()
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
        assistant = {"role": "assistant", "tool_calls": calls, **content}
        result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
        assert (await client.post(CHAT, {"messages": [assistant, result]})).status == 200
    first, *others = [messages for _, messages, _ in client.engine.seen]
    assert first[0]["tool_calls"] == calls and first[1]["tool_call_id"] == "c1"
    assert all(messages == first for messages in others)


async def test_reasoning_that_is_text_reaches_the_template_and_no_other(connect: Connect) -> None:
    client = connect()
    for given, seen in [
        ({"reasoning_content": "hm"}, {"reasoning_content": "hm"}),
        ({"reasoning": "hm"}, {"reasoning": "hm"}),
        ({"reasoning_content": "", "reasoning": None}, {}),
        ({"reasoning": {"summary": []}, "reasoning_content": [1], "reasoning_details": []}, {}),
    ]:
        message = {"role": "assistant", "content": "x"}
        assert (await client.post(CHAT, {"messages": [message | given]})).status == 200
        assert client.engine.seen[-1][1] == [message | seen]


async def test_our_own_answer_is_accepted_back(connect: Connect) -> None:
    client = connect()
    message = (await client.chat()).json["choices"][0]["message"]
    body = {"messages": [{"role": "user", "content": "hi"}, message]}
    assert (await client.post(CHAT, body)).status == 200


async def test_a_request_that_fails_before_a_whole_answer_gets_its_status(connect: Connect) -> None:
    client = connect()
    client.engine.failures[1] = CapacityError("no room")
    answer = await client.chat()
    assert answer.status == 503 and answer.error["code"] == "capacity_exceeded"
    assert (await client.chat()).status == 200


async def test_a_request_that_fails_in_a_stream_says_so_in_the_stream(connect: Connect) -> None:
    client = connect()
    client.engine.failures[1] = CapacityError("no room")
    answer = await client.chat(stream=True)
    assert answer.status == 200
    assert answer.chunks[-1]["error"]["code"] == "capacity_exceeded"
    assert answer.chunks[-1]["error"]["type"] == "server_error"


async def test_a_refusal_at_the_start_of_a_stream_is_an_ordinary_error(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=8))
    answer = await client.chat("far too long", stream=True)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "maximum context length" in answer.error["message"]


async def test_the_served_name_and_no_name_are_accepted(connect: Connect) -> None:
    client = connect(config=ServerConfig(served_model_name="org/name"))
    for fields in ({}, {"model": None}, {"model": "org/name"}):
        answer = await client.chat(**fields)
        assert answer.status == 200 and answer.json["model"] == "org/name"


@pytest.mark.parametrize("name", ["gpt-4", "", "../../etc/passwd", "a\nINFO forged", "x" * 200])
async def test_another_name_is_not_found(connect: Connect, name: str) -> None:
    answer = await connect().chat(model=name)
    assert answer.status == 404
    error = answer.error
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["type"] == "not_found_error" and "\n" not in error["message"]


async def test_requests_run_together(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True, chunk=100))
    exchanges = [client.open("POST", CHAT, chat_body(f"n{n}")) for n in range(20)]
    while await client.open_requests() < 20:
        pass
    client.engine.allow(99)
    answers = await asyncio.gather(*(exchange.finish() for exchange in exchanges))
    texts = [answer.json["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [f"you said: user: n{n}\n" for n in range(20)]
    assert client.engine.largest_batch == 20

"""`/v1/messages` over the application: what goes to the engine, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline.errors import CapacityError, EngineClosedError
from leyline.server.ask import Ask
from leyline.server.messages_form import SIGNATURE
from leyline.server.parsers.pieces import Content, Reasoning

from .client import Answer, Client
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession
from .messages_scripts import (
    PATH,
    Scripted,
    body_of,
    called,
    knowing_tools,
    over,
    said,
    script_answers,
)

pytestmark = pytest.mark.anyio

LONG = "x" * 500
USE = {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "/a"}}
TOOL = {"name": "read", "input_schema": {"type": "object"}}


@pytest.fixture
def client(connect: Connect) -> Client:
    return connect(knowing_tools())


def gated(connect: Connect) -> Client:
    return connect(FakeEngine(gated=True))


def events(answer: Answer) -> list[tuple[str, Any]]:
    """The events of a stream, whose names are their types."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.body.decode("ascii").split("\n\n")
    assert rest == ""
    told: list[tuple[str, Any]] = []
    for block in blocks:
        first, second = block.split("\n")
        body = json.loads(second.removeprefix("data: "))
        assert first == f"event: {body['type']}"
        told.append((body["type"], body))
    return told


def error_of(answer: Answer) -> dict[str, Any]:
    """The error of an answer that must be one, in Anthropic's shape."""
    body = answer.json
    assert set(body) - {"request_id"} == {"type", "error"} and body["type"] == "error", body
    assert set(body["error"]) >= {"type", "message"} and body["error"]["message"]
    assert int(answer.headers["content-length"]) == len(answer.body)
    return body["error"]


async def test_a_whole_answer(client: Client) -> None:
    answer = await client.post(PATH + "?beta=true", body_of("hello", model="fake-model"))
    assert answer.status == 200
    body = answer.json
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [{"type": "text", "text": "you said: user: hello\n"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 22,
            "output_tokens_details": {"thinking_tokens": 0},
            "spliced_tokens": 0,
            "recomputed_tokens": 10,
        },
    }


async def test_a_stream(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: "abcd"))
    told = events(await client.post(PATH, body_of(stream=True)))
    assert [name for name, _ in told] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [body["delta"]["text"] for name, body in told if name == "content_block_delta"]
    assert deltas == ["abc", "d"]
    assert told[0][1]["message"]["id"].startswith("msg_")
    closing = told[-2][1]
    assert closing["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert closing["usage"]["input_tokens"] + closing["usage"]["cache_read_input_tokens"] == 9
    assert closing["usage"]["output_tokens"] == 4


async def test_what_the_engine_is_given(client: Client) -> None:
    fields = {
        "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "temperature": 0.25,
        "stop_sequences": ["STOP"],
        "metadata": {"user_id": "u"},
        "cache_salt": "pepper",
        "edit_mode": "amortize",
        "session_id": "s1",
        "anything": {"else": [1]},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "k"}
    answer = await client.post(PATH, body_of(**fields), headers=headers)
    assert answer.status == 200 and answer.json["session"] == {"id": "s1", "version": 1}
    assert answer.json["usage"]["state"] == "exact"
    ((_, messages, (params, salt)),) = client.engine.seen
    assert messages == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
    ]
    assert "pepper" in salt and client.engine.turns == [("s1", "amortize")]
    assert (params.temperature, params.max_tokens) == (0.25, 1000)
    assert params.stop == ("STOP",)
    (rendering,) = client.engine.renderings
    assert rendering.variables == {"enable_thinking": True, "thinking": True}
    assert [tool["function"]["name"] for tool in rendering.tools] == ["read"]
    assert rendering.opens_reply and not rendering.continues_reply


async def test_a_reply_that_is_begun_is_gone_on_with(client: Client) -> None:
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The ("}]
    assert (await client.post(PATH, body_of(messages=begun))).status == 200
    (rendering,) = client.engine.renderings
    assert rendering.continues_reply and not rendering.opens_reply
    call = [begun[0], {"role": "assistant", "content": [USE]}]
    answer = await client.post(PATH, body_of(messages=call))
    assert answer.status == 400 and error_of(answer)["param"] == "messages[1]"
    assert len(client.engine.seen) == 1


async def test_claude_codes_header_names_a_session_that_can_be_done_without(
    client: Client,
) -> None:
    headers = {"x-claude-code-session-id": "a b/ü"}
    assert (await client.post(PATH, body_of(), headers=headers)).json["session"]["version"] == 1
    (name,) = client.engine.sessions
    client.engine.sessions[name].busy = True
    answer = await client.post(PATH, body_of(), headers=headers)
    assert answer.status == 200 and "session" not in answer.json
    client.engine.sessions["s1"] = FakeSession("x", busy=True)
    refused = await client.post(PATH, body_of(session_id="s1"), headers=headers)
    assert refused.status == 409 and error_of(refused)["code"] == "session_busy"


async def test_limits_and_stop_sequences(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: "abcdef"))
    answer = await client.post(PATH, body_of(max_tokens=2))
    assert answer.json["stop_reason"] == "max_tokens"
    assert answer.json["content"] == [{"type": "text", "text": "ab"}]
    stopped = await client.post(PATH, body_of(stop_sequences=["cd"]))
    assert stopped.json["content"] == [{"type": "text", "text": "ab"}]


CLEAR_USES = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 0},
    "keep": {"type": "tool_uses", "value": 0},
}
CLEAR_THOUGHTS = {"type": "clear_thinking_20251015"}


def worked(**fields: Any) -> dict[str, Any]:
    """A conversation of three turns with calls, thoughts and long results."""
    messages: list[dict[str, Any]] = []
    for number in range(3):
        thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": SIGNATURE}
        use = USE | {"id": f"c{number}"}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": LONG}
        messages += [
            {"role": "user", "content": f"task {number}"},
            {"role": "assistant", "content": [thinking, use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": f"done {number}"},
        ]
    return body_of(messages=[*messages, {"role": "user", "content": "now"}], **fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_old_results_and_thoughts_are_cleared_in_a_session(
    client: Client, stream: bool
) -> None:
    managed = {"edits": [CLEAR_THOUGHTS, CLEAR_USES]}
    body = worked(context_management=managed, session_id="s1", stream=stream)
    answer = await client.post(PATH, body)
    last = events(answer)[-2][1] if stream else answer.json
    thoughts, uses = last["context_management"]["applied_edits"]
    assert thoughts["type"] == CLEAR_THOUGHTS["type"] and thoughts["cleared_thinking_turns"] == 2
    assert uses["type"] == CLEAR_USES["type"] and uses["cleared_tool_uses"] == 3
    assert uses["cleared_input_tokens"] > 1000
    assert last["session"] == {"id": "s1", "version": 1}
    ((_, seen, _),) = client.engine.seen
    assert [one["reasoning_content"] for one in seen if "reasoning_content" in one] == ["thought 2"]
    assert all(len(one["content"]) < 100 for one in seen if one["role"] == "tool")
    assert len([one for one in seen if "tool_calls" in one]) == 3
    if stream:
        others = [body for _, body in events(answer)[:-2]]
        assert not any("context_management" in body or "session" in body for body in others)


async def test_without_being_asked_nothing_is_cleared_or_said(client: Client) -> None:
    for fields in ({}, {"context_management": None}):
        answer = await client.post(PATH, worked(**fields))
        assert "context_management" not in answer.json
    assert len(client.engine.seen[0][1][2]["content"]) == 500
    answer = await client.post(PATH, worked(context_management={"edits": []}))
    assert answer.json["context_management"] == {"applied_edits": []}


async def test_all_thoughts_may_be_kept(client: Client) -> None:
    keep = {"edits": [CLEAR_THOUGHTS | {"keep": "all"}]}  # what claude-code sends
    answer = await client.post(PATH, worked(context_management=keep))
    assert answer.json["context_management"] == {"applied_edits": []}


async def test_tokens_are_counted(client: Client) -> None:
    counting = PATH + "/count_tokens"
    body = {"messages": [{"role": "user", "content": "hello"}], "system": "be", "tools": [TOOL]}
    rendered = "tool: read\nsystem: be\nuser: hello\n"
    answer = await client.post(counting, body)
    assert (answer.status, answer.json) == (200, {"input_tokens": len(rendered)})
    answered = await client.post(PATH, body | {"max_tokens": 9})
    usage = answered.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(rendered)
    assert len(client.engine.seen) == 1


async def test_tokens_are_counted_as_edited_and_as_they_were(client: Client) -> None:
    body = worked(context_management={"edits": [CLEAR_USES]})
    counts = (await client.post(PATH + "/count_tokens?beta=true", body)).json
    plain = (await client.post(PATH + "/count_tokens", worked())).json
    assert counts["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    assert counts["input_tokens"] < plain["input_tokens"] - 1000


async def test_a_tool_loop(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def scripted(ask: Ask) -> Scripted:
        asked.append(ask)
        if len(asked) > 1:
            return Scripted([said(Content("It says x.")), over()])
        call = called(0, "read", '{"path":', ' "/a"}')
        return Scripted(
            [said(Reasoning("I must"), Reasoning(" look")), said(*call), over("tool_calls")]
        )

    script_answers(monkeypatch, scripted)
    messages: list[Any] = [{"role": "user", "content": "What is in /a?"}]
    first = (await client.post(PATH, body_of(messages=messages, tools=[TOOL]))).json
    assert first["stop_reason"] == "tool_use"
    thinking, use = first["content"]
    assert thinking == {"type": "thinking", "thinking": "I must look", "signature": SIGNATURE}
    assert use == {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "/a"}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "x"}
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    second = (await client.post(PATH, body_of(messages=messages, tools=[TOOL]))).json
    assert second["stop_reason"] == "end_turn"
    _, reply, answered = asked[1].messages
    assert reply["reasoning_content"] == "I must look"
    assert reply["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"path": "/a"}'}
    assert answered == {"role": "tool", "tool_call_id": "call_0", "content": "x"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_with_its_models_own_markup(connect: Connect, stream: bool) -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "/a"}}\n</tool_call>'
    client = connect(knowing_tools(reply=lambda _: f"<think>hm</think>I look.\n{call}"))
    body = body_of(tools=[TOOL], thinking={"type": "adaptive"}, stream=stream)
    answer = await client.post(PATH, body)
    if not stream:
        thinking, text, use = answer.json["content"]
        assert (thinking["thinking"], text["text"].strip()) == ("hm", "I look.")
        assert (use["name"], use["input"]) == ("read", {"path": "/a"})
        assert answer.json["stop_reason"] == "tool_use"
        assert answer.json["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        return
    told = events(answer)
    starts = [body["content_block"] for name, body in told if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use"]
    deltas = [body["delta"] for name, body in told if name == "content_block_delta"]
    assert "".join(one.get("partial_json", "") for one in deltas) == '{"path": "/a"}'
    assert told[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_no_cut_leaves_a_call_that_could_be_run(connect: Connect) -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "/a"}}\n</tool_call>'
    client = connect(knowing_tools(reply=lambda _: call))
    for cut in range(1, len(call) + 1):
        answer = (await client.post(PATH, body_of(tools=[TOOL], max_tokens=cut))).json
        inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
        assert answer["stop_reason"] == ("tool_use" if cut == len(call) else "max_tokens")
        assert inputs == [{"path": "/a"}] or (inputs == [] and cut < len(call))


async def test_an_error_in_a_stream_is_its_last_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = CapacityError("The cache is full.")
    answer = Scripted([said(Content("abc")), full])
    script_answers(monkeypatch, lambda _: answer)
    told = events(await client.post(PATH, body_of(stream=True)))
    assert [name for name, _ in told][-2:] == ["content_block_delta", "error"]
    error = told[-1][1]["error"]
    assert error["message"] == "The cache is full." and error["code"] == full.code
    assert answer.is_left


async def test_an_error_nobody_foresaw_says_nothing_about_its_cause(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Ask) -> Scripted:
        raise RuntimeError("secret")

    script_answers(monkeypatch, fail)
    answer = await client.post(PATH, body_of())
    assert answer.status == 500 and error_of(answer)["type"] == "api_error"
    assert b"secret" not in answer.body
    broken = Scripted([said(Content("x")), over()])
    broken.applied_edits = [{"not": {"json"}}]
    script_answers(monkeypatch, lambda _: broken)
    told = events(await client.post(PATH, body_of(stream=True)))
    assert told[-1][0] == "error" and told[-1][1]["error"]["type"] == "api_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_gives_the_request_up(connect: Connect, stream: bool) -> None:
    client = gated(connect)
    exchange = client.open("POST", PATH, body_of(stream=stream))
    while not await client.open_requests():
        pass
    await exchange.hang_up()
    assert await client.open_requests() == 0 and len(client.engine.cancelled) == 1


async def test_a_dead_engine_is_an_error_of_the_same_shape(connect: Connect) -> None:
    client = connect()
    client.worker.stop()
    answer = await client.post(PATH, body_of())
    error = error_of(answer)
    assert answer.status == EngineClosedError.status and error["code"] == EngineClosedError.code


async def test_a_body_as_claude_code_sends_it(client: Client) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    named = [{"name": f"tool_{n}", "description": "x", "input_schema": {}} for n in range(24)]
    body = {
        "model": "fake-model",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **mark},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                    {"type": "text", "text": "hi", **mark},
                ],
            }
        ],
        "tools": [*named, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {"x-claude-code-session-id": "0b6f", "anthropic-beta": "claude-code-20250219"}
    told = events(await client.post(PATH + "?beta=true", body, headers=headers))
    assert told[-1][0] == "message_stop"
    assert told[-2][1]["context_management"] == {"applied_edits": []}
    assert told[-2][1]["session"] == {"id": "0b6f", "version": 1}
    ((_, messages, _),) = client.engine.seen
    assert messages[0] == {"role": "system", "content": "You are an agent."}
    assert len(messages) == 2 and len(messages[1]["content"]) == 2
    (rendering,) = client.engine.renderings
    assert len(rendering.tools) == 24
    assert rendering.variables == {
        "reasoning_effort": "high",
        "enable_thinking": True,
        "thinking": True,
    }

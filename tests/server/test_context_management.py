"""Policies that a request asks for: run beside the engine, reported in the answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from leyline.errors import InvalidRequestError

from .client import chat_body
from .conftest import Connect

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LONG = "x" * 500
CUT = {"edits": [{"type": "truncate_older_than", "n": 0, "max_chars": 100}]}
BODY: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": LONG},
    ]
}


async def test_the_engine_gets_what_the_policies_made_of_it(connect: Connect) -> None:
    client = connect()
    answer = await client.post(CHAT, BODY | {"context_management": CUT})
    ((_, messages, _),) = client.engine.seen
    assert len(messages[2]["content"]) < 200 and messages[:2] == BODY["messages"][:2]
    (report,) = answer.json["context_management"]["applied_edits"]
    assert report["type"] == "truncate_older_than" and report["truncated_messages"] == 1
    assert report["cleared_input_tokens"] > 300


async def test_without_being_asked_nothing_is_said(connect: Connect) -> None:
    client = connect()
    for fields in ({}, {"context_management": None}):
        answer = await client.post(CHAT, BODY | fields)
        assert answer.status == 200 and "context_management" not in answer.json
        assert client.engine.seen[-1][1] == BODY["messages"]


@pytest.mark.parametrize("asked", [{}, {"edits": []}, {"edits": None}])
async def test_nothing_to_do_is_reported_as_nothing(connect: Connect, asked: Any) -> None:
    answer = await connect().post(CHAT, BODY | {"context_management": asked})
    assert answer.json["context_management"] == {"applied_edits": []}


async def test_the_servers_own_policies_are_reported_unasked(connect: Connect) -> None:
    client = connect()
    client.engine.trim = lambda messages, *_: (messages[1:], [{"type": "own"}])  # type: ignore
    answer = await client.post(CHAT, BODY)
    assert answer.json["context_management"] == {"applied_edits": [{"type": "own"}]}
    assert len(client.engine.seen[0][1]) == 2


@pytest.mark.parametrize("include_usage", [False, True])
async def test_in_a_stream_the_last_chunk_says_it(connect: Connect, include_usage: bool) -> None:
    client = connect()
    options = {"stream": True, "stream_options": {"include_usage": include_usage}}
    answer = await client.post(CHAT, BODY | options | {"context_management": CUT})
    *others, last = answer.chunks
    assert last["context_management"]["applied_edits"][0]["truncated_messages"] == 1
    assert all("context_management" not in chunk for chunk in others)
    assert ("usage" in last) is include_usage
    assert all("usage" not in chunk for chunk in others)
    finishes = [c for chunk in answer.chunks for c in chunk["choices"] if c["finish_reason"]]
    assert len(finishes) == 1


async def test_a_stream_without_policies_is_as_it_was(connect: Connect) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await connect().post(CHAT, BODY | options)
    assert all("context_management" not in chunk for chunk in answer.chunks)


async def test_tool_results_and_thinking_are_cleared_as_hosted_apis_do(connect: Connect) -> None:
    client = connect()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "long thoughts", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": LONG},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "reasoning_content": "more thoughts"},
        {"role": "user", "content": "d"},
    ]
    clear = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 0}}
    edits = [
        {"type": "clear_thinking_20251015"},
        clear | {"keep": {"type": "tool_uses", "value": 0}},
    ]
    body = {"messages": messages, "context_management": {"edits": edits}}
    reports = (await client.post(CHAT, body)).json["context_management"]["applied_edits"]
    assert [report["type"] for report in reports] == [edit["type"] for edit in edits]
    seen = client.engine.seen[0][1]
    assert "reasoning_content" not in seen[1] and seen[4]["reasoning_content"] == "more thoughts"
    assert len(seen[2]["content"]) < 100 and seen[1]["tool_calls"] == [call]


async def test_policies_run_beside_the_engine_and_the_event_loop(connect: Connect) -> None:
    client = connect()
    threads: list[threading.Thread] = []
    client.engine.policy = lambda: threads.append(threading.current_thread())
    assert (await client.post(CHAT, BODY)).status == 200
    (thread,) = threads
    engines = await client.worker.call(threading.current_thread)
    assert thread not in (threading.current_thread(), engines)


async def test_a_slow_policy_keeps_nobody_else_waiting(connect: Connect) -> None:
    client = connect()
    entered, release = threading.Event(), threading.Event()

    def slow_once() -> None:
        if not entered.is_set():
            entered.set()
            release.wait()

    client.engine.policy = slow_once
    slow = client.open("POST", CHAT, BODY)
    while not entered.is_set():
        assert (await client.get("/health")).status == 200
    assert (await client.chat("meanwhile")).status == 200
    assert (await client.complete("meanwhile")).status == 200
    release.set()
    assert (await slow.finish()).status == 200


async def test_hanging_up_on_a_policy_submits_nothing(connect: Connect) -> None:
    client = connect()
    entered, release = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        release.wait()

    client.engine.policy = slow
    exchange = client.open("POST", CHAT, chat_body(session_id="s1", stream=True))
    while not entered.is_set():
        await client.open_requests()
    await exchange.hang_up()
    client.engine.policy = None
    release.set()
    assert await client.open_requests() == 0
    assert client.engine.seen == [] and client.engine.sessions == {}
    assert (await client.chat(session_id="s1")).status == 200


async def test_a_policy_that_refuses_has_its_error_in_the_one_shape(connect: Connect) -> None:
    client = connect()

    def refuse() -> None:
        raise InvalidRequestError("no", param="messages")

    client.engine.policy = refuse
    for stream in (False, True):
        answer = await client.chat(stream=stream)
        assert answer.status == 400 and answer.error["param"] == "messages"
    assert client.engine.seen == []


async def test_what_is_malformed_is_refused_before_any_policy_runs(connect: Connect) -> None:
    client = connect()
    client.engine.policy = lambda: pytest.fail("a policy ran")
    answer = await client.chat(context_management={"edits": [{"type": "?"}]}, session_id="s1")
    assert answer.status == 400
    assert answer.error["param"] == "context_management.edits[0].type"
    assert client.engine.sessions == {}

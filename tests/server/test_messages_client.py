"""The Messages API over a real socket, with Anthropic's own client as the judge of what it says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import anthropic
import pytest
import uvicorn

from leyline.errors import CapacityError
from leyline.server import Worker, create_app
from leyline.server.ask import Ask
from leyline.server.messages_history import converted
from leyline.server.messages_schema import MessagesRequest

from .fake_engine import FakeEngine
from .messages_scripts import Scripted, random_script, script_answers

NUM_SCRIPTS = 60
TOOL: Any = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
EDITS: Any = [
    {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1, "cleared_input_tokens": 9}
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on a thread, with an engine that says it back."""
    worker = Worker(FakeEngine())
    worker.start()
    app = create_app(worker)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()
    worker.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def asking(content: str = "hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "fake-model", "max_tokens": 1000, "messages": messages, **fields}


def same(message: Any) -> dict[str, Any]:
    """A message as plain values, without what is each answer's own or only in one form."""
    body = message.to_dict()
    own = {"id", "session", "parsed_output"}
    usage = {key: value for key, value in body["usage"].items() if value is not None}
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    kinds = {key: usage[key] for key in (*inputs, "output_tokens", "output_tokens_details")}
    rest = {key: value for key, value in body.items() if key not in own and value is not None}
    return {**rest, "usage": kinds}


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asking("héé 👋"))
    assert message.content[0].type == "text"
    assert message.content[0].text == "you said: user: héé 👋\n"
    assert message.stop_reason == "end_turn" and message.model == "fake-model"
    total = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert total == len("user: héé 👋\n")


def test_a_streamed_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asking("a\u2028b\u0085c")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "you said: user: a\u2028b\u0085c\n"
    assert same(final) == same(client.messages.create(**asking("a\u2028b\u0085c")))


def test_every_script_is_understood_alike_in_both_forms(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client puts a stream together by itself; that must be what the whole answer says."""

    def scripted(ask: Ask) -> Scripted:
        return Scripted(random_script(Random(int(ask.messages[-1]["content"]))), EDITS)

    script_answers(monkeypatch, scripted)
    kinds: set[str] = set()
    for seed in range(NUM_SCRIPTS):
        whole = client.beta.messages.create(**asking(str(seed)), betas=["x-2025-01-01"])
        with client.beta.messages.stream(**asking(str(seed))) as stream:
            streamed = stream.get_final_message()
        assert same(whole) == same(streamed)
        assert whole.context_management is not None
        assert whole.context_management.to_dict() == {"applied_edits": EDITS}
        kinds |= {block.type for block in whole.content} | {str(whole.stop_reason)}
        again = asking(str(seed), tools=[TOOL])
        again["messages"] += [whole.to_param(), {"role": "user", "content": "0"}]
        client.beta.messages.create(**again)  # what was said is taken back
    assert kinds >= {"text", "thinking", "tool_use", "end_turn", "stop_sequence", "max_tokens"}


def test_what_is_taken_back_is_what_was_said(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(
        monkeypatch, lambda ask: Scripted(random_script(Random(ask.messages[-1]["content"])))
    )
    for seed in range(20):
        answer = client.messages.create(**asking(str(seed)))
        sent = json.loads(json.dumps(answer.to_param(), default=lambda block: block.to_dict()))
        body = MessagesRequest.model_validate(asking() | {"messages": [sent]})
        (message,) = converted(body.system, body.messages)
        blocks = answer.content
        text = "".join(block.text for block in blocks if block.type == "text")
        thought = "".join(block.thinking for block in blocks if block.type == "thinking")
        calls = [block for block in blocks if block.type == "tool_use"]
        assert message["content"] == text and message.get("reasoning_content", "") == thought
        told = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert told == [call.input for call in calls]


def test_a_stream_of_raw_events(client: anthropic.Anthropic) -> None:
    told = [event.type for event in client.messages.create(**asking(), stream=True)]
    assert told[0] == "message_start" and told[-2:] == ["message_delta", "message_stop"]


def test_tokens(client: anthropic.Anthropic) -> None:
    messages: Any = asking("hello")["messages"]
    counted = client.messages.count_tokens(model="fake-model", messages=messages, system="be")
    assert counted.input_tokens == len("system: be\nuser: hello\n")
    managed: Any = {"edits": [{"type": "clear_thinking_20251015"}]}
    beta = client.beta.messages.count_tokens(
        model="fake-model", messages=messages, context_management=managed
    )
    assert beta.context_management is not None
    assert beta.context_management.original_input_tokens == beta.input_tokens


def test_context_management_on_a_session(client: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "x" * 500}
    messages: Any = [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    nothing: Any = {"type": "tool_uses", "value": 0}
    edit: Any = {"type": "clear_tool_uses_20250919", "trigger": nothing, "keep": nothing}
    fields: Any = asking() | {"messages": messages, "context_management": {"edits": [edit]}}
    headers = {"x-claude-code-session-id": "claude-1"}
    whole = client.beta.messages.create(**fields, extra_headers=headers)
    with client.beta.messages.stream(**fields, extra_body={"session_id": "mine"}) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.context_management is not None
        (applied,) = message.context_management.applied_edits
        assert applied.type == "clear_tool_uses_20250919" and applied.cleared_tool_uses == 1
        assert applied.cleared_input_tokens > 300
    assert whole.to_dict()["session"] == {"id": "claude-1", "version": 1}


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**asking(model="claude"))
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**asking(max_tokens=0))


def test_an_error_in_a_stream_reaches_the_client(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(monkeypatch, lambda _: Scripted([CapacityError("The cache is full.")]))
    stream = client.messages.create(**asking(), stream=True)
    with pytest.raises(anthropic.APIStatusError, match="The cache is full"):
        list(stream)

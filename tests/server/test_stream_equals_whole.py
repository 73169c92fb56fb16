"""A streamed answer, put together, is the whole answer: whatever was asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyline.sampling import SamplingParams
from leyline.server import Worker, create_app

from .client import Answer, Client
from .fake_engine import FakeEngine, FakeTemplate, FakeTokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}{", "b": [1, "é"]}}\n</tool_call>'
PIECES = ["so", " ", "\n", "é", "👋", "<", "<think>", "</think>", "hm. ", "END", "EN", "{", CALL,
          '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
          '<tool_call>{"name": "f", "arg', "<tool_", "\u2028"]  # fmt: skip
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS = [{"type": "web_search"}, {"type": "function", "function": FUNCTION}]
SOURCE = 'tools tool_calls <tool_call> {"arguments": <think>'

some = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
replies = st.lists(st.lists(st.sampled_from(PIECES), max_size=7).map("".join), min_size=1)
SAMPLING: dict[str, Any] = {
    "n": st.integers(1, 3),
    "seed": st.integers(0, 9),
    "stop": st.lists(st.sampled_from(["END", "E", "é", "</tool", "never", " so"]), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "max_tokens": st.integers(1, 60),
    "min_tokens": st.integers(0, 5),
    "return_token_ids": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.integers(-100, 100), max_size=2),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine(tokenizer=FakeTokenizer(FakeTemplate(SOURCE)))
    worker = Worker(engine)
    worker.start()
    yield Client(create_app(worker), worker, engine)
    worker.stop()


def both(client: Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The whole answer, and the chunks of the streamed one."""

    async def exchange(**more: Any) -> Answer:
        return await client.post(path, body | more)

    whole = asyncio.run(exchange())
    assert whole.status == 200, whole.body
    options = {"include_usage": True}
    streamed = asyncio.run(exchange(stream=True, stream_options=options))
    assert streamed.status == 200, streamed.body
    return whole.json, streamed.chunks


def choices_of(chunks: list[dict[str, Any]], number: int) -> list[list[dict[str, Any]]]:
    """The chunks' choices by index, each with exactly one finish reason, on its last."""
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *rest, last = chunks
    assert last["choices"] == [] and all("usage" not in chunk for chunk in rest)
    found: list[list[dict[str, Any]]] = [[] for _ in range(number)]
    for chunk in rest:
        (choice,) = chunk["choices"]
        found[choice["index"]].append(choice)
    for choices in found:
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons.pop() is not None and set(reasons) <= {None}
    return found


def joined(deltas: list[dict[str, Any]], name: str) -> str:
    return "".join(delta[name] for delta in deltas if delta.get(name))


def calls_of(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls put together by the rules that clients know: the head first, then arguments."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert set(call["function"]) == {"name", "arguments"}
                assert call["function"]["arguments"] == ""
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and call["index"] == len(calls) - 1
                assert set(call["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return [{name: call[name] for name in ("type", "function")} for call in calls]


def chat_choice(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice of a streamed chat, as the whole answer spells it."""
    first, *others = (choice["delta"] for choice in choices)
    assert first == {"role": "assistant", "content": ""} and others[-1] == {}
    content, calls = joined(others, "content"), calls_of(others)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if joined(others, "reasoning"):
        message["reasoning"] = joined(others, "reasoning")
        message["reasoning_content"] = joined(others, "reasoning_content")
    if calls:
        message["tool_calls"] = calls
    entries = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", ())]
    ids = [one for choice in choices for one in choice.get("token_ids", ())]
    last = choices[-1]
    return {
        "message": message,
        "finish_reason": last["finish_reason"],
        "stop_reason": last.get("stop_reason"),
        "logprobs": entries,
        "token_ids": ids,
    }


def whole_chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole chat, without what is made up for each answer."""
    message = dict(choice["message"])
    if "tool_calls" in message:
        calls = message["tool_calls"]
        assert all(isinstance(call["id"], str) and call["id"] for call in calls)
        message["tool_calls"] = [{n: c[n] for n in ("type", "function")} for c in calls]
    return {
        "message": message,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "token_ids": choice.get("token_ids", []),
    }


def is_whole(call: dict[str, Any]) -> bool:
    """Whether a call's arguments are JSON."""
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    return True


CHATS = st.fixed_dictionaries(
    {},
    optional=SAMPLING
    | {
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "parallel_tool_calls": st.booleans(),
        "reasoning_effort": st.sampled_from(["none", "high"]),
    },
)


def scripted(client: Client, said: list[str], chunk: int, opening: str = "") -> None:
    """Make the engine say one of some texts, by its seed."""

    def choose(_: str, params: SamplingParams) -> str:
        return said[(params.seed or 0) % len(said)]

    client.engine.choose, client.engine.chunk = choose, chunk
    client.engine.tokenizer.opening = opening


@given(said=replies, chunk=st.integers(1, 40), opening=st.sampled_from(["", "<think>\n"]),
       fields=CHATS, with_tools=st.booleans(), tops=st.none() | st.integers(0, 3))  # fmt: skip
@settings(parent=some)
def test_chats(
    client: Client,
    said: list[str],
    chunk: int,
    opening: str,
    fields: dict[str, Any],
    with_tools: bool,
    tops: int | None,
) -> None:
    scripted(client, said, chunk, opening)
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    if with_tools:
        body["tools"] = TOOLS
    elif body.get("tool_choice") == "required":
        del body["tool_choice"]
    if tops is not None:
        body |= {"logprobs": True, "top_logprobs": tops}
    whole, chunks = both(client, "/v1/chat/completions", body)
    choices = choices_of(chunks, len(whole["choices"]))
    assert list(map(chat_choice, choices)) == list(map(whole_chat_choice, whole["choices"]))
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        calls = choice["message"].get("tool_calls", ())
        assert choice["finish_reason"] != "tool_calls" or any(map(is_whole, calls))
    if tops is not None:
        told = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
        assert told == whole["usage"]["completion_tokens"]


COMPLETIONS = st.fixed_dictionaries(
    {},
    optional=SAMPLING
    | {
        "echo": st.booleans(),
        "logprobs": st.integers(0, 3),
        "max_tokens": st.integers(0, 60),
    },
)


def text_choice(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice of a streamed completion, as the whole answer spells it."""
    merged: dict[str, Any] = {"text": "".join(choice["text"] for choice in choices)}
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        merged[name] = [one for logprobs in told for one in logprobs[name]]
    merged["token_ids"] = [one for choice in choices for one in choice.get("token_ids", ())]
    last = choices[-1]
    names = ("finish_reason", "stop_reason", "prompt_token_ids")
    return merged | {name: last.get(name) for name in names}


@given(said=replies, chunk=st.integers(1, 40), fields=COMPLETIONS,
       prompts=st.lists(st.sampled_from(["a", "b ", "é👋"]) | st.just([97, 98]), min_size=1,
                        max_size=3))  # fmt: skip
@settings(parent=some)
def test_completions(
    client: Client, said: list[str], chunk: int, fields: dict[str, Any], prompts: list[Any]
) -> None:
    scripted(client, said, chunk)
    if not fields.get("echo") and fields.get("max_tokens") == 0:
        fields = fields | {"echo": True}
    body = {"prompt": prompts, **fields}
    whole, chunks = both(client, "/v1/completions", body)
    choices = choices_of(chunks, len(whole["choices"]))
    assert len(choices) == len(prompts) * fields.get("n", 1)
    assert list(map(text_choice, choices)) == [text_choice([one]) for one in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"]
    for at, choice in enumerate(whole["choices"]):
        prompt = prompts[at // fields.get("n", 1)]
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        assert choice["text"].startswith(text if fields.get("echo") else "")
        if choice["logprobs"]:
            offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
            spelt = [
                choice["text"][at:][: len(token)] for at, token in zip(offsets, tokens, strict=True)
            ]
            assert spelt == tokens or "stop_reason" in choice


def test_a_difference_would_be_seen(client: Client) -> None:
    """The twin: a piece that only the stream has makes the comparison fail."""
    scripted(client, [f"<think>a</think>b{CALL}"], 5)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    whole, chunks = both(client, "/v1/chat/completions", body)
    (choices,) = choices_of(chunks, 1)
    (expected,) = map(whole_chat_choice, whole["choices"])
    assert chat_choice(choices) == expected
    assert expected["message"]["reasoning"] == "a" and expected["message"]["content"] == "b"
    (call,) = expected["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "}{", "b": [1, "é"]}
    for at in range(1, len(choices) - 1):
        try:
            put_together = chat_choice(choices[:at] + choices[at + 1 :])
        except AssertionError:  # a call without its head
            continue
        assert put_together != expected

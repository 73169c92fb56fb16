"""Requests that are refused at the door: status, code and the field's name, and nothing else.

After each of them the engine must not have seen a thing and must serve the next request.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .client import JSON, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, DIRECTIVES = "/v1/chat/completions", "/v1/completions", "/v1/directives"
HUGE = 10**400

NUMBERS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 2**31, 2**64, 1.5, 1.0, True, "5", [], {}],
    "temperature": [-1, -1e-9, 2.1, 1e30, HUGE, True, "0.5", float("nan"), float("inf"), []],
    "top_p": [0, -0.1, 1.1, HUGE, True, "1", float("nan"), float("-inf")],
    "top_k": [-2, 0.01, 1.0, 2**31, 2**64, HUGE, True, "5", float("nan"), float("inf")],
    "seed": [-(2**63) - 1, 2**63, 2**64, 1e30, 1.0, True, "5", HUGE],
    "stop": [1, True, {}, [1], [None], "", [""], ["x"] * 17, "x" * 1025, ["\ud83d"], [["a"]]],
    "stream": ["yes", 1, 0.0, []],
    "stream_options": [1, "x", [], {"include_usage": "x"}],
    "model": [1, True, [], "\ud83d", "x" * 257],
    "ignore_eos": [1, "true"],
    "cache_salt": ["", 1, "x" * 257, "\udc00"],
}
UNSUPPORTED: dict[str, list[Any]] = {
    "n": [2, 0, -1, 10**9, True, "1", 1.5],
    "best_of": [2, True],
    "presence_penalty": [0.1, -2, "0", False],
    "frequency_penalty": [0.1],
    "repetition_penalty": [1.1],
    "logit_bias": [{"5": 1}, [1]],
    "logprobs": [True, 1, 0, 5],
    "top_logprobs": [1, 20],
    "min_p": [0.1],
    "min_tokens": [1],
    "stop_token_ids": [[5]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "return_token_ids": [True],
    "echo": [True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "x"],
    "structured_outputs": [{"choice": ["a"]}],
    "guided_json": [{}],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "max_completion_tokens": [0, -1, 2**31, True],
    "session_id": ["", "a b", "a/b", "é", "x" * 257, 5, "a\n", "\ud83d", ".", "..", [], True],
    "prompt_cache_key": [5, True, [], {}, "\ud83d"],
    "edit_mode": ["", "AMORTIZE", "lobotomise", 1, True, [], {}, float("nan"), "\ud83d"],
}
CHAT_UNSUPPORTED: dict[str, list[Any]] = {
    "tools": [[{"type": "function", "function": {"name": "f"}}], {}, "x"],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "modalities": [["text", "audio"]],
    "continue_final_message": [True],
    "chat_template": ["{{ messages }}"],
}
MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ({}, "messages"),
    ("hi", "messages"),
    ([1], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        "messages[0].content",
    ),
    ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
    ([{"role": "tool", "content": [{"type": "text", "text": "\ude00"}]}], "messages[0].content"),
    ([{"role": "user", "content": "x"}, {"role": "user", "name": 1}], "messages[1].name"),
    ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"id": "\ud83d"}]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}] * 257}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x"}] * 4097, "messages"),
]
PROMPTS: list[Any] = [
    None, 5, True, {}, "", [], [[]], [""], ["a", ""], [None], [1, "a"], ["a", 1], [1.0], [True],
    [-1], [2**31], [2**64], [HUGE], [[1], [-1]], [[[1]]], "\ud83d", ["\ud83d"], ["a"] * 33,
]  # fmt: skip
DIRECTIVE_FIELDS: list[tuple[str, Any, str]] = [
    ("start", None, "start"),
    ("start", "0", "start"),
    ("start", 1.0, "start"),
    ("start", True, "start"),
    ("start", 2**63, "start"),
    ("end", -(2**63) - 1, "end"),
    ("end", HUGE, "end"),
    ("replacement", 5, "replacement"),
    ("replacement", [-1], "replacement[0]"),
    ("replacement", [1, True], "replacement[1]"),
    ("replacement", [2**31], "replacement[0]"),
    ("replacement", "\ud83d", "replacement"),
    ("replacement", {}, "replacement"),
    ("mode", 1, "mode"),
    ("mode", "x" * 33, "mode"),
    ("scope", "tenant", "scope"),
    ("scope", 1, "scope"),
    ("message", 0, ""),
    ("tool_call_id", "c", ""),
    ("match", "m", ""),
    ("match", "", "match"),
    ("match", 1, "match"),
    ("match", "\udc00", "match"),
    ("occurrence", 0, ""),
    ("source", {}, "source.session_id"),
    ("source", "s2", "source"),
    ("source", {"session_id": "a b", "match": "x"}, "source.session_id"),
    ("source", {"session_id": "s2"}, "source"),
    ("source", {"session_id": "s2", "start": 0}, "source.end"),
    ("source", {"session_id": "s2", "source": {}}, "source.source"),
    ("occurence", 0, "occurence"),
]
TARGETS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"start": 1}, ".end"),
    ({"end": 1}, ".start"),
    ({"start": 0, "match": "x"}, ".end"),
    ({"message": 0, "tool_call_id": "c"}, ""),
    ({"message": 0, "tool_call_id": "c", "match": "m"}, ""),
    ({"message": 1.0}, ".message"),
    ({"message": True}, ".message"),
    ({"message": "0"}, ".message"),
    ({"message": 2**63}, ".message"),
    ({"message": HUGE}, ".message"),
    ({"message": float("nan")}, ".message"),
    ({"tool_call_id": ""}, ".tool_call_id"),
    ({"tool_call_id": 1}, ".tool_call_id"),
    ({"tool_call_id": "x" * 257}, ".tool_call_id"),
    ({"occurrence": 0}, ".occurrence"),
    ({"message": 0, "occurrence": 0}, ".occurrence"),
    ({"match": "x", "occurrence": "1"}, ".occurrence"),
    ({"match": "x", "occurrence": 2**64}, ".occurrence"),
    ({"match": "x", "replacement": "y", "source": {"session_id": "s", "match": "z"}}, ""),
    ({"match": "x", "mode": None}, ".mode"),
]
EDIT_FIELDS: dict[str, list[Any]] = {
    "session_id": [None, "", "a b", 5, "..", "x" * 257],
    "expected_version": [-1, 1.0, True, "1", 2**31, HUGE, float("nan"), []],
    "idempotency_key": ["", 1, True, [], "x" * 257, "\ud83d"],
    "dry_run": [1, "true", 0.0, []],
    "cache_salt": ["", 1, "x" * 257, "\ud83d"],
    "expected_versoin": [1],
    "a\nb": [1],
}
MARK_FIELDS: dict[str, list[Any]] = {
    "verb": [None, "", "PIN", "share", 1, [], "\ud83d"],
    "of": [None, "", "thoughts", 1, []],
    "ttl_s": [0, -1, 1e300, HUGE, float("nan"), float("inf"), True, "5", []],
    "turns": [0, -1, 1.0, True, "1", 2**31, HUGE, float("nan")],
    "replacement": [5, {}, "\ud83d"],
    "mode": [1, None, "x" * 33, []],
    "cache_salt": ["", 1],
    "label": ["x"],
}
REVERT_FIELDS: dict[str, list[Any]] = {
    "version": [-1, 1.0, True, "1", 2**31, HUGE, float("nan"), []],
    "cache_salt": ["", 1, "\ud83d"],
    "to": [1],
}
CONTEXT_MANAGEMENT: list[tuple[Any, str]] = [
    (1, ""),
    ("x", ""),
    ([], ""),
    (True, ""),
    ({"edit": []}, ""),
    ({"edits": {}}, ".edits"),
    ({"edits": [{}] * 17}, ".edits"),
    ({"edits": [1]}, ".edits[0].type"),
    ({"edits": [{"type": "clear_everything"}]}, ".edits[0].type"),
    ({"edits": [{"type": "truncate_older_than", "m": 1}]}, ".edits[0]"),
    ({"edits": [{"type": "truncate_older_than", "n": -1}]}, ".edits[0].n"),
    ({"edits": [{"type": "truncate_older_than", "max_chars": 1.5}]}, ".edits[0].max_chars"),
    ({"edits": [{"type": "clear_thinking_20251015", "keep": 0}]}, ".edits[0].keep"),
    ({"edits": [{"type": "truncate_older_than", "n": float("nan")}]}, ""),
    ({"edits": [{"type": "\ud83d"}]}, ""),
]


def rows(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{str(value)[:20]!a}")
        for name, values in table.items()
        for value in values
    ]


async def refuse(connect: Connect, path: str, body: Any, param: str | None, code: str) -> None:
    client = connect(FakeEngine(sessions={"s1": FakeSession("0123456789")}))
    answer = await client.post(path, raw=json.dumps(body).encode())
    assert answer.status == 400, answer.body
    assert (answer.error["param"], answer.error["code"]) == (param, code), answer.error
    assert answer.error["type"] == "invalid_request_error"
    assert client.engine.seen == []
    assert client.engine.sessions["s1"] == FakeSession("0123456789")
    assert (await client.chat()).status == 200


@pytest.mark.parametrize("name, value", rows(NUMBERS))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_values_out_of_range(connect: Connect, path: str, name: str, value: Any) -> None:
    body = chat_body(prompt="x") | {name: value}
    param = name if name != "stream_options" or not isinstance(value, dict) else None
    await refuse(connect, path, body, param or "stream_options.include_usage", "invalid_value")


@pytest.mark.parametrize("name, value", rows(UNSUPPORTED))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unsupported_values(connect: Connect, path: str, name: str, value: Any) -> None:
    await refuse(connect, path, chat_body(prompt="x") | {name: value}, name, "unsupported_value")


@pytest.mark.parametrize("name, value", rows(CHAT_ONLY))
async def test_chat_values_out_of_range(connect: Connect, name: str, value: Any) -> None:
    await refuse(connect, CHAT, chat_body(**{name: value}), name, "invalid_value")


@pytest.mark.parametrize("name, value", rows(CHAT_UNSUPPORTED))
async def test_unsupported_chat_values(connect: Connect, name: str, value: Any) -> None:
    await refuse(connect, CHAT, chat_body(**{name: value}), name, "unsupported_value")


@pytest.mark.parametrize("messages, param", MESSAGES)
async def test_messages(connect: Connect, messages: Any, param: str) -> None:
    answer = await connect().post(CHAT, {"messages": messages})
    assert answer.status == 400 and answer.error["param"] == param


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt)[:20])
async def test_prompts(connect: Connect, prompt: Any) -> None:
    await refuse(connect, COMPLETIONS, {"prompt": prompt}, "prompt", "invalid_value")


async def test_a_missing_prompt(connect: Connect) -> None:
    await refuse(connect, COMPLETIONS, {}, "prompt", "invalid_value")


@pytest.mark.parametrize("name, value, where", DIRECTIVE_FIELDS)
async def test_directive_fields(connect: Connect, name: str, value: Any, where: str) -> None:
    directive = {"start": 0, "end": 1, name: value}
    body = {"session_id": "s1", "directives": [directive]}
    where = f"directives[0].{where}".rstrip(".")
    await refuse(connect, DIRECTIVES, body, where, "invalid_value")


@pytest.mark.parametrize("directive, where", TARGETS)
async def test_targets(connect: Connect, directive: dict[str, Any], where: str) -> None:
    fine = {"start": 0, "end": 1}
    body = {"session_id": "s1", "directives": [fine, directive]}
    await refuse(connect, DIRECTIVES, body, f"directives[1]{where}", "invalid_value")


@pytest.mark.parametrize("name, value", rows(EDIT_FIELDS))
async def test_fields_beside_the_directives(connect: Connect, name: str, value: Any) -> None:
    body = {"session_id": "s1", "directives": [{"start": 0, "end": 1}], name: value}
    param = name.replace("\n", "\\n")
    await refuse(connect, DIRECTIVES, body, param, "invalid_value")


@pytest.mark.parametrize("name, value", rows(MARK_FIELDS))
async def test_mark_fields(connect: Connect, name: str, value: Any) -> None:
    body = {"verb": "pin", "start": 0, "end": 1, name: value}
    await refuse(connect, "/v1/sessions/s1/marks", body, name, "invalid_value")


@pytest.mark.parametrize(
    "body, param, status",
    [
        ({"verb": "pin"}, None, 400),
        ({"verb": "pin", "start": 0}, "end", 400),
        ({"verb": "pin", "occurrence": 0}, "occurrence", 400),
        ({"verb": "scratch", "of": "reasoning", "start": 0, "end": 1}, "of", 400),
        ({"verb": "pin", "of": "reasoning"}, "of", 422),
        ({"verb": "pin", "start": 1, "end": 0}, "end", 422),
        ({"verb": "pin", "start": -1, "end": 0}, "start", 422),
        ({"verb": "decay", "start": 0, "end": 1}, "turns", 422),
        ({"verb": "decay", "start": 0, "end": 1, "turns": 1, "ttl_s": 1}, "ttl_s", 422),
        ({"verb": "pin", "start": 0, "end": 1, "mode": "none"}, "mode", 422),
        ({"verb": "pin", "start": 0, "end": 1, "replacement": "x"}, "replacement", 422),
    ],
)
async def test_marks_that_make_no_sense(
    connect: Connect, body: dict[str, Any], param: str | None, status: int
) -> None:
    client = connect(FakeEngine(sessions={"s1": FakeSession("0123456789")}))
    answer = await client.post("/v1/sessions/s1/marks", body)
    assert (answer.status, answer.error["param"]) == (status, param), answer.error
    assert client.engine.sessions["s1"].marks == []


@pytest.mark.parametrize("name, value", rows(REVERT_FIELDS))
async def test_revert_fields(connect: Connect, name: str, value: Any) -> None:
    await refuse(connect, "/v1/sessions/s1/revert", {name: value}, name, "invalid_value")


@pytest.mark.parametrize("value, where", CONTEXT_MANAGEMENT)
async def test_context_management(connect: Connect, value: Any, where: str) -> None:
    param = f"context_management{where}"
    await refuse(connect, CHAT, chat_body(context_management=value), param, "invalid_value")


async def test_millions_of_wrong_ids_are_refused_at_the_first(connect: Connect) -> None:
    wrong = [-1] * 1_000_000
    edit = {"session_id": "s1", "directives": [{"start": 0, "end": 1, "replacement": wrong}]}
    for path, body in [
        (DIRECTIVES, edit),
        ("/v1/cache/find", {"tokens": wrong}),
        (COMPLETIONS, {"prompt": wrong}),
    ]:
        answer = await connect().post(path, body)
        assert answer.status == 400 and "more" not in answer.error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"session_id": "s1", "session_id": "s2", "directives": [{"start": 0, "end": 1}]}',
        b'{"session_id": "s1", "directives": [{"start": 0, "start": 1, "end": 1}]}',
        b'{"session_id": "s1", "directives": [{"start": 0, "end": 1}], "dry_run": true,'
        b' "dry_\\u0072un": false}',
        b'{"x": {"' + b"k" * 10_000 + b'": 1, "' + b"k" * 10_000 + b'": 1}}',
        b'{"": 1, "": 2}',
        b'{"\\ud83d": 1, "\\ud83d": 2}',
    ],
)
async def test_a_key_that_stands_twice(connect: Connect, raw: bytes) -> None:
    client = connect(FakeEngine(sessions={"s1": FakeSession("0123")}))
    paths = [CHAT, COMPLETIONS, DIRECTIVES, "/v1/cache/find", "/v1/sessions:save"]
    for path in [*paths, "/v1/sessions/s1/marks", "/v1/sessions/s1/revert"]:
        answer = await client.post(path, raw=raw)
        assert answer.status == 400 and answer.error["code"] == "invalid_json"
        assert "twice" in answer.error["message"] and len(answer.body) < 500
    assert client.engine.seen == [] and client.engine.sessions["s1"].version == 1


async def test_equal_keys_in_different_objects_are_fine(connect: Connect) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]
    assert (await connect().post(CHAT, {"messages": messages})).status == 200


@pytest.mark.parametrize(
    "directives",
    [None, [], {}, [1], [{"start": 0, "end": 1}] * 1025, [{"start": 0, "end": 1}] * 10_000],
)
async def test_directive_lists(connect: Connect, directives: Any) -> None:
    body = {"session_id": "s1", "directives": directives}
    answer = await connect().post(DIRECTIVES, body)
    assert answer.status == 400 and answer.error["param"].startswith("directives")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"[1]",
        b"null",
        b'"text"',
        b"5",
        b"\xff\xfe{}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: ascii(raw[:12]),
)
@pytest.mark.parametrize(
    "path",
    [CHAT, COMPLETIONS, DIRECTIVES, "/v1/sessions/s1/marks", "/v1/sessions/s1/revert"],
)
async def test_bodies_that_are_no_json_object(connect: Connect, path: str, raw: bytes) -> None:
    client = connect()
    answer = await client.post(path, raw=raw)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert client.engine.seen == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_not_announced_as_json(connect: Connect, kind: str) -> None:
    raw = json.dumps(chat_body()).encode()
    answer = await connect().post(CHAT, raw=raw, headers={"content-type": kind})
    assert answer.status == 415 and answer.error["code"] == "unsupported_media_type"


async def test_a_charset_beside_the_type_is_fine(connect: Connect) -> None:
    headers = {"content-type": f"{JSON}; charset=utf-8"}
    assert (await connect().post(CHAT, chat_body(), headers=headers)).status == 200


async def test_every_error_is_counted_and_none_echoes_the_input(connect: Connect) -> None:
    answer = await connect().chat(temperature=-1, top_p=9, seed="secret-text")
    assert "2 more" in answer.error["message"]
    assert b"secret-text" not in answer.body

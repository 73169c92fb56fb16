"""Requests that are refused at the door: status, code and the field's name, and nothing else.

After each of them the engine must not have seen a thing and must serve the next request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from leyline.server import Worker, create_app

from .client import JSON, Client, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, DIRECTIVES = "/v1/chat/completions", "/v1/completions", "/v1/directives"
HUGE = 10**400

NUMBERS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 2**31, 2**64, 1.5, 1.0, True, "5", [], {}],
    "min_tokens": [-1, 2**31, 2**63, 1.0, True, "1"],
    "temperature": [-1, -1e-9, 2.1, 1e30, HUGE, True, "0.5", float("nan"), float("inf"), []],
    "top_p": [0, -0.1, 1.1, HUGE, True, "1", float("nan"), float("-inf")],
    "top_k": [-2, 0.01, 1.0, 2**31, 2**64, HUGE, True, "5", float("nan"), float("inf")],
    "min_p": [-0.1, 1.1, True, "0", float("nan"), HUGE],
    "seed": [-(2**63) - 1, 2**63, 2**64, 1e30, 1.0, True, "5", HUGE],
    "stop": [1, True, {}, [1], [None], "", [""], ["x"] * 17, "x" * 1025, ["\ud83d"], [["a"]],
             ["x"] * 100_000],
    "stop_token_ids": [5, [-1], [2**31], [2**64], [1.0], [True], ["5"], [0] * 257, {}],
    "stream": ["yes", 1, 0.0, []],
    "stream_options": [1, "x", [], {"include_usage": "x"}],
    "model": [1, True, [], "\ud83d", "x" * 257],
    "ignore_eos": [1, "true"],
    "include_stop_str_in_output": [1, "true"],
    "skip_special_tokens": [1, "true"],
    "return_token_ids": [1, "true"],
    "cache_salt": ["", 1, "x" * 257, "\udc00"],
    "n": [0, -1, 17, 10**6, 10**9, 2**64, True, "1", 1.5, 1.0, []],
    "presence_penalty": [2.1, -2.1, "0", False, float("nan"), HUGE],
    "frequency_penalty": [2.1, -2.1, True, float("inf")],
    "repetition_penalty": [0, -1, 101, True, float("nan"), HUGE],
    "logit_bias": [[1], "x", {"a": 1}, {"-1": 1}, {"05": 1}, {"\u0665": 1}, {"1.0": 1},
                   {str(2**31): 1}, {"9" * 5000: 1}, {"5": 101}, {"5": True}, {"5": "1"},
                   {"5": None}, {"5": float("nan")}, {"5": HUGE}, {"": 1},
                   {str(i): 0 for i in range(1025)}, {str(i): 0 for i in range(100_000)}],
    "prompt_logprobs": [-1, 21, 2**31, 2**64, True, "1", 1.0],
    "response_format": ["x", [], {}, {"type": "xml"}, {"type": 1}],
    "guided_regex": ["", 1, [], "x" * 70_000, "\ud83d"],
    "guided_choice": [[], "x", [1], [""], ["\ud83d"], {}, ["x"] * 1025],
    "guided_grammar": ["", 1, {}],
    "guided_json": ["{", [], 1, "5", {"type": 5}, {"properties": []}],
    "structured_outputs": [1, "x", []],
    "request_id": ["", "a b", "a\r\nb", "x" * 129, 5, "é", "\ud83d"],
}  # fmt: skip
UNSUPPORTED: dict[str, list[Any]] = {
    "truncate_prompt_tokens": [1, -1, 2**64, "x"],
    "use_beam_search": [True],
    "length_penalty": [2],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "logits_processors": [["x"]],
    "regex": ["x"],
    "ebnf": ["x"],
}
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]
CHAT_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"n": 2, "session_id": "s1"}, "n"),
]
NESTED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
]  # fmt: skip
CHAT_ONLY: dict[str, list[Any]] = {
    "max_completion_tokens": [0, -1, 2**31, True],
    "logprobs": [1, 0, 5, "true"],
    "top_logprobs": [-1, 21, True, 2**64, "5", 1.0],
    "session_id": ["", "a b", "a/b", "é", "x" * 257, 5, "a\n", "\ud83d", ".", "..", [], True],
    "prompt_cache_key": [5, True, [], {}, "\ud83d"],
    "edit_mode": ["", "AMORTIZE", "lobotomise", 1, True, [], {}, float("nan"), "\ud83d"],
    "tools": [{}, "x", 5],
    "tool_choice": ["any", "", 1, True, [], {}, {"type": "function"},
                    {"type": "function", "function": {"name": 1}},
                    {"type": "function", "function": {"name": "\ud83d"}}],
    "parallel_tool_calls": [1, "true"],
    "reasoning_effort": ["", "extreme", 1, True, "\ud83d"],
    "chat_template_kwargs": [1, [], "x", {"a b": 1}, {"messages": []}, {"tools": 1},
                             {"add_generation_prompt": True}, {"a": "\ud83d"}, {"x" * 300: 1},
                             {f"v{i}": 1 for i in range(65)}, {"a": float("nan")}],
    "add_generation_prompt": [1, "true"],
}  # fmt: skip
COMPLETIONS_ONLY: dict[str, list[Any]] = {
    "logprobs": [True, -1, 21, 100, 2**31, 2**64, "5", 1.0],
    "echo": [1, "true"],
    "best_of": [2, 0, 17, True, 10**9, "1"],
}
CHAT_UNSUPPORTED: dict[str, list[Any]] = {
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "modalities": [["text", "audio"]],
    "chat_template": ["{{ messages }}"],
    "echo": [True],
    "best_of": [2, True],
    "documents": [[{}]],
    "web_search_options": [{}],
    "tool_choice": [{"type": "allowed_tools"}],
}
COMPLETIONS_UNSUPPORTED: dict[str, list[Any]] = {
    "suffix": ["x"],
    "top_logprobs": [1],
    "prompt_embeds": ["x"],
    "add_special_tokens": [False],
}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}}
SCHEMAS: list[Any] = [
    {"type": 5}, {"type": [5]}, {"type": "array"}, {"type": {}}, {"properties": []},
    {"properties": {"a": 5}}, {"properties": {"a": {"type": 1}}},
    {"properties": {"a": {"items": "x"}}}, {"properties": {"a": {"pattern": {}}}},
    {"properties": {"a": {"enum": "x"}}}, {"properties": {"a": {"anyOf": {}}}},
    {"properties": {"a": {"anyOf": [1]}}}, {"properties": {"a": {"minLength": -1}}},
    {"properties": {"a": {"minLength": 2**64}}}, {"properties": {"a": {"maxItems": 1.0}}},
    {"properties": {"a": {"minimum": "0"}}}, {"properties": {"a": {"maximum": HUGE}}},
    {"required": "a"}, {"required": [1]}, {"additionalProperties": 5}, {"$defs": [1]},
    {"$ref": 1}, {"description": 1}, {"description": "\ud83d"}, {"x": "\ud83d"},
    {"default": float("nan")},
]  # fmt: skip
TOOLS: list[tuple[Any, str]] = [
    ([1], "tools[0]"),
    ([{}], "tools[0].type"),
    ([{"type": 1}], "tools[0].type"),
    ([{"type": ""}], "tools[0].type"),
    ([{"type": "\ud83d"}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([{"type": "function", "function": []}], "tools[0].function"),
    ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ([{"type": "function", "function": FUNCTION}] * 2, "tools"),
    ([{"type": "x"}] * 513, "tools"),
    *(
        (
            [{"type": "x"}, {"type": "function", "function": FUNCTION | wrong}],
            f"tools[1].function{at}",
        )
        for wrong, at in [
            ({"name": 1}, ".name"),
            ({"name": ""}, ".name"),
            ({"name": "a b"}, ".name"),
            ({"name": "x" * 129}, ".name"),
            ({"name": "\ud83d"}, ".name"),
            ({"description": 1}, ".description"),
            ({"description": "\ud83d"}, ".description"),
            ({"strict": 1}, ".strict"),
            ({"parameters": []}, ".parameters"),
            ({"parameters": "x"}, ".parameters"),
            *(({"parameters": schema}, ".parameters") for schema in SCHEMAS),
        ]
    ),
]
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
    *(
        ([{"role": "assistant", "tool_calls": [call]}], f"messages[0].tool_calls[0]{at}")
        for call, at in [
            ({}, ".function"),
            ({"function": {}}, ".function.name"),
            ({"function": {"name": ""}}, ".function.name"),
            ({"function": {"name": 1}}, ".function.name"),
            ({"function": {"name": "f"}, "id": "\ud83d"}, ".id"),
            ({"function": {"name": "f"}, "id": 1}, ".id"),
            ({"function": {"name": "f"}, "type": "custom"}, ".type"),
            ({"function": {"name": "f", "arguments": 1}}, ".function.arguments"),
            ({"function": {"name": "f", "arguments": []}}, ".function.arguments"),
            ({"function": {"name": "f", "arguments": "\ud83d"}}, ".function.arguments"),
            ({"function": {"name": "f", "arguments": {"a": "\ud83d"}}}, ".function.arguments"),
        ]
    ),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ([{"role": "user", "content": [{"type": []}]}], "messages[0].content"),
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


@pytest.fixture(scope="module")
def door() -> Iterator[Client]:
    """One server for all of them: none may change it."""
    engine = FakeEngine(sessions={"s1": FakeSession("0123456789")})
    worker = Worker(engine)
    worker.start()
    yield Client(create_app(worker), worker, engine)
    worker.stop()


def inside(param: str, field: str | None) -> bool:
    """Whether a field inside a list or an object of a field is named."""
    return field is not None and param.startswith((f"{field}[", f"{field}."))


async def refuse(door: Client, path: str, body: Any, param: str | None, code: str) -> None:
    door.engine.seen.clear()
    answer = await door.post(path, raw=json.dumps(body).encode())
    assert answer.status == 400, answer.body
    assert answer.error["code"] == code, answer.error
    assert answer.error["param"] == param or inside(answer.error["param"], param), answer.error
    assert answer.error["type"] == "invalid_request_error"
    assert door.engine.seen == []
    assert door.engine.sessions["s1"] == FakeSession("0123456789")
    assert (await door.chat()).status == 200


@pytest.mark.parametrize("name, value", rows(NUMBERS))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_values_out_of_range(door: Client, path: str, name: str, value: Any) -> None:
    body = chat_body(prompt="x") | {name: value}
    await refuse(door, path, body, name, "invalid_value")


@pytest.mark.parametrize("name, value", rows(UNSUPPORTED))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unsupported_values(door: Client, path: str, name: str, value: Any) -> None:
    await refuse(door, path, chat_body(prompt="x") | {name: value}, name, "unsupported_value")


@pytest.mark.parametrize("name, value", rows(CHAT_ONLY))
async def test_chat_values_out_of_range(door: Client, name: str, value: Any) -> None:
    await refuse(door, CHAT, chat_body(**{name: value}), name, "invalid_value")


@pytest.mark.parametrize("name, value", rows(CHAT_UNSUPPORTED))
async def test_unsupported_chat_values(door: Client, name: str, value: Any) -> None:
    await refuse(door, CHAT, chat_body(**{name: value}), name, "unsupported_value")


@pytest.mark.parametrize("name, value", rows(COMPLETIONS_ONLY))
async def test_completion_values_out_of_range(door: Client, name: str, value: Any) -> None:
    await refuse(door, COMPLETIONS, {"prompt": "x", name: value}, name, "invalid_value")


@pytest.mark.parametrize("name, value", rows(COMPLETIONS_UNSUPPORTED))
async def test_unsupported_completion_values(door: Client, name: str, value: Any) -> None:
    await refuse(door, COMPLETIONS, {"prompt": "x", name: value}, name, "unsupported_value")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields, param", TOGETHER + NESTED)
async def test_fields_that_exclude_each_other(
    door: Client, path: str, fields: dict[str, Any], param: str
) -> None:
    await refuse(door, path, chat_body(prompt="x") | fields, param, "invalid_value")


@pytest.mark.parametrize("fields, param", CHAT_TOGETHER)
async def test_chat_fields_that_exclude_each_other(
    door: Client, fields: dict[str, Any], param: str
) -> None:
    await refuse(door, CHAT, chat_body(**fields), param, "invalid_value")


@pytest.mark.parametrize("tools, param", TOOLS)
async def test_row_135_tools_with_wrong_types_at_every_place(
    door: Client, tools: Any, param: str
) -> None:
    await refuse(door, CHAT, chat_body(tools=tools), param, "invalid_value")


async def test_row_132_small_caps_before_any_copy(door: Client) -> None:
    many = {"prompt": ["x"] * 32, "n": 3}
    await refuse(door, COMPLETIONS, many, "n", "invalid_value")
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    param = "tools[0].function.parameters"
    await refuse(door, CHAT, chat_body(tools=tools), param, "invalid_value")


@pytest.mark.parametrize("messages, param", MESSAGES)
async def test_messages(door: Client, messages: Any, param: str) -> None:
    answer = await door.post(CHAT, {"messages": messages})
    assert answer.status == 400 and answer.error["param"] == param


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt)[:20])
async def test_prompts(door: Client, prompt: Any) -> None:
    await refuse(door, COMPLETIONS, {"prompt": prompt}, "prompt", "invalid_value")


async def test_a_missing_prompt(door: Client) -> None:
    await refuse(door, COMPLETIONS, {}, "prompt", "invalid_value")


@pytest.mark.parametrize("name, value, where", DIRECTIVE_FIELDS)
async def test_directive_fields(door: Client, name: str, value: Any, where: str) -> None:
    directive = {"start": 0, "end": 1, name: value}
    body = {"session_id": "s1", "directives": [directive]}
    where = f"directives[0].{where}".rstrip(".")
    await refuse(door, DIRECTIVES, body, where, "invalid_value")


@pytest.mark.parametrize("directive, where", TARGETS)
async def test_targets(door: Client, directive: dict[str, Any], where: str) -> None:
    fine = {"start": 0, "end": 1}
    body = {"session_id": "s1", "directives": [fine, directive]}
    await refuse(door, DIRECTIVES, body, f"directives[1]{where}", "invalid_value")


@pytest.mark.parametrize("name, value", rows(EDIT_FIELDS))
async def test_fields_beside_the_directives(door: Client, name: str, value: Any) -> None:
    body = {"session_id": "s1", "directives": [{"start": 0, "end": 1}], name: value}
    param = name.replace("\n", "\\n")
    await refuse(door, DIRECTIVES, body, param, "invalid_value")


@pytest.mark.parametrize("name, value", rows(MARK_FIELDS))
async def test_mark_fields(door: Client, name: str, value: Any) -> None:
    body = {"verb": "pin", "start": 0, "end": 1, name: value}
    await refuse(door, "/v1/sessions/s1/marks", body, name, "invalid_value")


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
async def test_revert_fields(door: Client, name: str, value: Any) -> None:
    await refuse(door, "/v1/sessions/s1/revert", {name: value}, name, "invalid_value")


@pytest.mark.parametrize("value, where", CONTEXT_MANAGEMENT)
async def test_context_management(door: Client, value: Any, where: str) -> None:
    param = f"context_management{where}"
    await refuse(door, CHAT, chat_body(context_management=value), param, "invalid_value")


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

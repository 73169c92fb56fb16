"""Requests to the Messages API that are refused: the shape, the field's name, and nothing else.

After each of them the engine must not have seen a thing and must serve the next request.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from leyline.server import ServerConfig
from leyline.server.messages_errors import anthropic_error

from .client import Answer, Client
from .conftest import Connect
from .fake_engine import FakeEngine
from .messages_scripts import PATH, body_of

pytestmark = pytest.mark.anyio

HALF = "\ud83d"
HUGE = 10**400
NAN = float("nan")
NESTED: Any = {}
for _ in range(100):
    NESTED = {"not": NESTED}

FIELDS: dict[str, list[Any]] = {
    "max_tokens": [None, 0, -1, 2**31, 2**64, 1.5, 1.0, True, "5", [], {}],
    "temperature": [-1, 2.1, HUGE, True, "0.5", NAN, float("inf"), []],
    "top_p": [0, 1.1, HUGE, True, "1", NAN],
    "top_k": [-2, 0.5, 2**31, 2**64, HUGE, True, "5"],
    "stop_sequences": [1, True, {}, [1], [None], "", [""], ["x"] * 17, [HALF], ["x" * 1025]],
    "stream": ["yes", 1, 0.0, []],
    "model": [1, True, [], HALF, "x" * 257],
    "system": [1, True, {}, ["x"], HALF, [{"type": "image"}], [{"type": "thinking"}]],
    "tools": [1, "x", {}, ["x"], [1], [{}], [{"name": "f"}], [{"type": 1, "name": "f"}]],
    "tool_choice": ["auto", 1, [], {}, {"type": "required"}, {"type": "tool"}, {"type": []}],
    "thinking": ["on", True, {}, {"type": "maybe"}, {"type": 1}, []],
    "output_config": [1, {"format": "json"}, {"format": {}}, {"effort": "huge"}, {"effort": 1}],
    "output_format": ["x", {}, {"type": "text"}, {"type": "json_schema"}],
    "session_id": ["", "a b", "é", "x" * 257, 5, HALF, ".."],
    "cache_salt": ["", 1, "x" * 257, HALF],
    "edit_mode": ["", "AMORTIZE", 1, True, []],
    "context_management": [HALF, {"edits": [{"type": HALF}]}, NAN],
    "container": ["container_1", {"skills": []}, 5],
    "mcp_servers": [[{"type": "url", "url": "http://x", "name": "x"}], {}, "x"],
    "thread": [{"type": "create"}, "x"],
    "compaction": [{}, {"type": "enabled"}],
}


TEXT = {"type": "text", "text": "x"}


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def said(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": list(blocks)}]


def use(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "c", "name": "f", "input": {}} | fields


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": "x"} | fields


MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ({}, "messages"),
    ([1], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "developer", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": HALF}], "messages[0].content[0].text"),
    (user("x"), "messages[0].content[0]"),
    (user({"text": "x"}), "messages[0].content[0]"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": None}), "messages[0].content[0].text"),
    (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (user({"type": ["text"], "text": "x"}), "messages[0].content[0]"),
    (user({"type": "<text>", "text": "x"}), "messages[0].content[0]"),
    (
        user({"type": "image", "source": {"type": "url", "url": "http://x"}}),
        "messages[0].content[0]",
    ),
    (user({"type": "document"}), "messages[0].content[0]"),
    (user({"type": "search_result"}), "messages[0].content[0]"),
    (user({"type": HALF}), "messages[0].content[0]"),
    (user(use()), "messages[0].content"),
    (user({"type": "thinking", "thinking": "x"}), "messages[0].content"),
    (user(result(tool_use_id="")), "messages[0].content[0].tool_use_id"),
    (user(result(tool_use_id=None)), "messages[0].content[0].tool_use_id"),
    (user(result(tool_use_id=HALF)), "messages[0].content[0].tool_use_id"),
    (user(result(content=5)), "messages[0].content[0].content"),
    (user(result(content=[{"type": "image"}])), "messages[0].content[0].content[0].type"),
    (
        user(result(content=[{"type": "text", "text": HALF}])),
        "messages[0].content[0].content[0].text",
    ),
    (user(result(is_error="yes")), "messages[0].content[0].is_error"),
    (said(result()), "messages[1].content"),
    (said({"type": "server_tool_use", "id": "x"}), "messages[1].content[0]"),
    (said({"type": "thinking"}), "messages[1].content[0].thinking"),
    (said(use(id="")), "messages[1].content[0].id"),
    (said(use(name=5)), "messages[1].content[0].name"),
    (said(use(name=HALF)), "messages[1].content[0].name"),
    (said(use(input="{}")), "messages[1].content[0].input"),
    (said(use(input=None)), "messages[1].content[0].input"),
    (said(use(input={"a": NAN})), "messages[1].content[0].input"),
    (said(use()), "messages[1]"),
    ([{"role": "system", "content": [result()]}], "messages[0].content"),
    ([{"role": "user", "content": "x"}] * 4097, "messages"),
    (user(*[{"type": "text", "text": "x"}] * 4097), "messages[0].content"),
]


@pytest.fixture
def client(connect: Connect) -> Client:
    return connect()


def refused(answer: Answer, status: int = 400, kind: str = "invalid_request_error") -> Any:
    body = answer.json
    assert answer.status == status, body
    assert set(body) - {"request_id"} == {"type", "error"} and body["type"] == "error"
    assert body["error"]["type"] == kind and body["error"]["message"]
    return body["error"]


async def still_serves(client: Client) -> None:
    assert client.engine.seen == [] and client.engine.sessions == {}
    assert (await client.post(PATH, body_of())).status == 200


@pytest.mark.parametrize("name", FIELDS)
async def test_fields(client: Client, name: str) -> None:
    for value in FIELDS[name]:
        error = refused(await client.post(PATH, body_of(**{name: value})))
        assert error["param"].split(".")[0].split("[")[0] == name, (value, error)
        assert HALF not in error["message"]
    await still_serves(client)


@pytest.mark.parametrize("messages, param", MESSAGES)
async def test_messages(client: Client, messages: Any, param: str) -> None:
    for path in (PATH, PATH + "/count_tokens"):
        error = refused(await client.post(path, body_of(messages=messages)))
        assert error["param"] == param
    await still_serves(client)


@pytest.mark.parametrize(
    "tools, param",
    [
        ([{"name": "a b", "input_schema": {}}], "tools[0].name"),
        ([{"name": "x" * 129, "input_schema": {}}], "tools[0].name"),
        ([{"name": HALF, "input_schema": {}}], "tools[0].name"),
        ([{"name": "f", "input_schema": {}, "description": 5}], "tools[0].description"),
        ([{"name": "f", "input_schema": None}], "tools[0].input_schema"),
        ([{"name": "f", "input_schema": {"type": "string"}}], "tools[0].input_schema"),
        ([{"name": "f", "input_schema": {"required": "x"}}], "tools[0].input_schema"),
        ([{"name": "f", "input_schema": {"title": HALF}}], "tools[0].input_schema"),
        ([{"name": "f", "input_schema": NESTED}], "tools[0].input_schema"),
        ([{"type": "bash_1"}, {"name": "f"}], "tools[1].input_schema"),
        ([{"type": ""}], "tools[0].type"),
        ([{"name": "f", "input_schema": {}}] * 2, "tools"),
        ([{"name": f"f{n}", "input_schema": {}} for n in range(513)], "tools"),
    ],
)
async def test_tools(client: Client, tools: Any, param: str) -> None:
    error = refused(await client.post(PATH, body_of(tools=tools)))
    assert error["param"] == param
    await still_serves(client)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "g"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
        {
            "tools": [
                {"type": "bash_20250124", "name": "bash"},
                {"name": "f", "input_schema": {}},
            ],
            "tool_choice": {"type": "tool", "name": "bash"},
        },
    ],
)
async def test_a_call_that_cannot_be_made(client: Client, fields: Any) -> None:
    error = refused(await client.post(PATH, body_of(**fields)))
    assert error["param"] == "tool_choice"
    await still_serves(client)


async def test_edits_that_are_unknown(client: Client) -> None:
    for edits in (
        [{"type": "compact_20260112"}],
        [{}],
        "x",
        [{"type": "clear_tool_uses_20250919", "keep": 3}],
    ):
        body = body_of(context_management={"edits": edits}, session_id="s1")
        for path in (PATH, PATH + "/count_tokens"):
            error = refused(await client.post(path, body))
            assert error["param"].startswith("context_management.edits")
    await still_serves(client)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
async def test_bodies_that_are_none(client: Client, raw: bytes) -> None:
    refused(await client.post(PATH, raw=raw))
    await still_serves(client)


async def test_what_all_routes_refuse_has_the_shape_of_this_one(connect: Connect) -> None:
    client = connect(config=ServerConfig(max_body_bytes=10_000))
    refused(await client.get(PATH), 405)
    refused(await client.post(PATH + "/batches", {}), 404, "not_found_error")
    refused(await client.post(PATH, body_of(model="claude")), 404, "not_found_error")
    refused(await client.post(PATH, body_of("x" * 20_000)), 413, "request_too_large")
    parts = [b'{"a": "' + b"x" * 9_000, b"x" * 9_000]
    refused(await client.post(PATH, raw=parts), 413, "request_too_large")
    refused(await client.post(PATH, body_of(), headers={"host": "evil"}), 403, "permission_error")
    refused(await client.post(PATH, body_of(), headers={"content-type": "text/plain"}), 415)
    await still_serves(client)


async def test_other_routes_keep_their_own_shape(client: Client) -> None:
    for path in ("/v1/chat/completions", "/v1/messagesx", "/v1/nothing"):
        answer = await client.post(path, {})
        assert answer.status >= 400 and set(answer.json) == {"error"}


async def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=10))
    for stream in (False, True):
        error = refused(await client.post(PATH, body_of("x" * 20, stream=stream)))
        assert error["message"].startswith("prompt is too long: ")
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "status, kind",
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_the_shape_of_an_error(status: int, kind: str) -> None:
    error = {"message": "no", "type": "x", "param": "p", "code": "c", "version": 3}
    assert anthropic_error(status, error, "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "no", "param": "p", "code": "c", "version": 3},
        "request_id": "req_1",
    }
    assert anthropic_error(status, {}) == {
        "type": "error",
        "error": {"type": kind, "message": "The request failed."},
    }


async def test_a_requests_id_is_told_where_these_clients_look(client: Client) -> None:
    headers = {"x-request-id": "req-7"}
    good = await client.post(PATH, body_of(), headers=headers)
    assert good.headers["request-id"] == "req-7" and good.status == 200
    bad = await client.post(PATH, {}, headers=headers)
    assert bad.headers["request-id"] == bad.json["request_id"] == "req-7"
    other = await client.post("/v1/completions", {}, headers=headers)
    assert "request-id" not in other.headers


async def test_who_has_no_key_is_told_so_in_this_shape(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=("secret",)))
    for path in (PATH, PATH + "/count_tokens", PATH + "/nothing"):
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            answer = await client.post(path, body_of(), headers=headers)
            refused(answer, 401, "authentication_error")
    assert client.engine.seen == []
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert (await client.post(PATH, body_of(), headers=headers)).status == 200


async def test_text_of_a_client_cannot_break_out_of_an_error(client: Client) -> None:
    answer = await client.post(PATH, body_of(model="a\nb\u2028" + "x" * 200))
    error = refused(answer, 404, "not_found_error")
    assert "\n" not in error["message"] and "\u2028" not in error["message"]


JUNK: list[Any] = [None, True, 0, -1, 2**70, 1.5, NAN, "", "x", HALF, [], {}, [1], {"type": "text"}]


def everything() -> dict[str, Any]:
    """A body in which every field stands that this API has."""
    blocks = [{"type": "thinking", "thinking": "t", "signature": "s"}, TEXT, use()]
    return body_of(
        messages=[*said(*blocks), *user(result(content=[TEXT], is_error=True), TEXT)],
        system=[TEXT],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "low"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stop_sequences=["STOP"],
        temperature=1.0,
        top_p=0.5,
        top_k=5,
        stream=False,
        metadata={"user_id": "u"},
        session_id="s1",
        cache_salt="salt",
        edit_mode="heal",
    )


def spoiled(random: Random, value: Any) -> Any:
    """A copy with junk at one place, anywhere in it."""
    if not value or not isinstance(value, dict | list) or random.random() < 0.1:
        return random.choice(JUNK)
    copy: Any = value.copy()
    place = random.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    if random.random() < 0.1:
        del copy[place]
    else:
        copy[place] = spoiled(random, copy[place])
    return copy


async def test_no_junk_anywhere_is_an_error_of_the_servers_own(client: Client) -> None:
    assert (await client.post(PATH, everything())).status == 200
    random, statuses = Random(5), set[int]()
    for _ in range(400):
        body = spoiled(random, everything())
        path = random.choice([PATH, PATH + "/count_tokens"])
        answer = await client.post(path, raw=json.dumps(body).encode())
        statuses.add(answer.status)
        if answer.status != 200:
            kinds = {400: "invalid_request_error", 404: "not_found_error"}
            refused(answer, answer.status, kinds[answer.status])
    assert statuses == {200, 400}

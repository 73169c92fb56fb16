"""Which session a chat request means, and which of them it can do without."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.errors import LeylineError, SessionBusyError
from leyline.server import ServerConfig
from leyline.server.session_names import (
    SESSION_HEADERS,
    SessionName,
    id_of,
    is_session_id,
    session_name,
)

from .client import Answer, Client, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

CHAT = "/v1/chat/completions"
HEADERS = {name: f"from-{name}" for name in SESSION_HEADERS}


@given(st.text())
def test_any_string_has_an_id_that_never_changes(key: str) -> None:
    name = id_of(key)
    assert is_session_id(name) and id_of(key) == name and id_of(name) == name
    assert (name == key) is (re.fullmatch(r"[\w.:@~+=-]{1,256}", key, re.ASCII) is not None) or (
        key in (".", "..")
    )


@given(st.lists(st.text(), unique=True, max_size=20))
def test_two_strings_have_two_ids(keys: list[str]) -> None:
    assert len({id_of(key) for key in keys}) == len(keys)


def test_an_id_is_the_same_in_every_process() -> None:
    digest = "c8687a08aa5d6ed2044328fa6a697ab8e96dc34291e8c2034ae8c38e6fcc6d65"
    assert id_of("a b") == f"key-{digest}"


def test_the_first_of_the_names_counts() -> None:
    assert session_name("body", "key", HEADERS) == SessionName("body", required=True)
    assert session_name(None, "key", HEADERS) == SessionName("key")
    headers = dict(HEADERS)
    for name in SESSION_HEADERS:
        assert session_name(None, None, headers) == SessionName(f"from-{name}")
        del headers[name]
    assert session_name(None, None, {}) == SessionName()


@pytest.mark.parametrize("key", ["", None])
def test_an_empty_key_is_none(key: str | None) -> None:
    assert session_name(None, key, {"x-session-id": ""}) == SessionName()
    assert session_name(None, key, {"session-id": "s"}) == SessionName("s")


async def chat(client: Client, headers: dict[str, str], **fields: Any) -> Answer:
    return await client.post(CHAT, chat_body(**fields), headers=headers)


@pytest.mark.anyio
async def test_headers_can_be_told_not_to_count(connect: Connect) -> None:
    client = connect(config=ServerConfig(session_headers=False))
    assert (await chat(client, HEADERS)).json.get("session") is None
    named = await chat(client, HEADERS | {"x-request-id": "r"}, session_id="a")
    assert named.json["session"]["id"] == "a" and named.headers["x-request-id"] == "r"
    assert (await chat(client, HEADERS, prompt_cache_key="b")).json["session"]["id"] == "b"


@pytest.mark.anyio
async def test_the_names_that_agents_send(connect: Connect) -> None:
    client = connect()
    for headers, fields in [
        ({}, {"session_id": "a"}),
        ({"X-Session-Id": "h"}, {"session_id": "a"}),
        ({"X-Session-Id": "h"}, {"prompt_cache_key": "a"}),
        ({"X-Session-Id": "a", "Session-Id": "h"}, {}),
        ({"Session-Id": "a", "X-Claude-Code-Session-Id": "h"}, {}),
        ({"X-Claude-Code-Session-Id": "a"}, {"prompt_cache_key": None}),
        ({"X-Session-Id": "a", "X-Session-Affinity": "h"}, {}),
        ({"X-Session-Affinity": "a"}, {}),
        ({"Session-Id": "a", "Thread-Id": "h"}, {}),
        ({"Thread-Id": "a"}, {}),
    ]:
        answer = await chat(client, headers, **fields)
        assert answer.json["session"]["id"] == "a"
    assert {name for name, _ in client.engine.turns} == {"a"}


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["two words", "é", "x" * 5000, "a/b", "..", "\n", " "])
async def test_a_key_that_is_no_id_names_a_session_all_the_same(connect: Connect, key: str) -> None:
    client = connect()
    for _ in range(2):
        answer = await client.chat(prompt_cache_key=key)
    assert answer.json["session"] == {"id": id_of(key), "version": 2}
    assert (await client.get(f"/v1/sessions/{id_of(key)}")).status == 200


@pytest.mark.anyio
async def test_a_malformed_session_id_is_refused_whatever_else_is_there(connect: Connect) -> None:
    client = connect()
    answer = await chat(client, HEADERS, session_id="a b", prompt_cache_key="fine")
    assert answer.status == 400 and answer.error["param"] == "session_id"
    assert client.engine.seen == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers, fields",
    [({}, {"prompt_cache_key": "s1"}), *(({name: "s1"}, {}) for name in SESSION_HEADERS)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_side_request_is_answered_without_the_busy_session(
    connect: Connect, headers: dict[str, str], fields: dict[str, Any], stream: bool
) -> None:
    client = connect(FakeEngine(gated=True, chunk=100))
    first = client.open("POST", CHAT, chat_body("turn", session_id="s1"))
    while not await client.open_requests():
        pass
    body = chat_body("title", stream=stream, **fields)
    second = client.open("POST", CHAT, body, headers=headers)
    while await client.open_requests() < 2:
        pass
    client.engine.allow(9)
    side = await second.finish()
    assert side.status == 200 and b"user: title" in side.body and b'"session"' not in side.body
    assert (await first.finish()).json["session"] == {"id": "s1", "version": 1}
    assert client.engine.turns == [("s1", None), ("s1", None), (None, None)]
    text = client.engine.sessions["s1"].text
    assert "turn" in text and "title" not in text


@pytest.mark.anyio
async def test_a_session_that_is_asked_for_by_name_is_not_done_without(connect: Connect) -> None:
    client = connect(FakeEngine(sessions={"s1": FakeSession("0123", busy=True)}))
    answer = await chat(client, HEADERS, session_id="s1", prompt_cache_key="other")
    assert answer.status == 409 and answer.error["code"] == "session_busy"


@pytest.mark.anyio
async def test_where_there_is_no_room_for_a_session_only_a_named_one_fails(
    connect: Connect,
) -> None:
    client = connect(FakeEngine(max_sessions=0))
    assert (await client.chat(session_id="s1")).status == 429
    answer = await client.chat(prompt_cache_key="s1")
    assert answer.status == 200 and "session" not in answer.json


@pytest.mark.anyio
async def test_other_refusals_stay_refusals(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=4))
    answer = await client.chat(prompt_cache_key="s1")
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert len(client.engine.turns) == 1


def test_a_refusal_without_a_session_is_not_tried_twice() -> None:
    from leyline.server.answer import in_session

    tried: list[str | None] = []

    def refuse(session_id: str | None) -> int:
        tried.append(session_id)
        raise SessionBusyError("no")

    for name, tries in [(SessionName(), 1), (SessionName("a", True), 1), (SessionName("a"), 2)]:
        tried.clear()
        with pytest.raises(LeylineError):
            in_session(name, refuse)()
        assert len(tried) == tries

from __future__ import annotations

from typing import Any

import pytest

from leyline.errors import CapacityError

from .client import Client
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

DIRECTIVES = "/v1/directives"


def with_session(connect: Connect, text: str = "0123456789") -> Client:
    return connect(FakeEngine(sessions={"s1": FakeSession(text)}))


def edit(*directives: dict[str, Any], session_id: str = "s1") -> dict[str, Any]:
    return {"session_id": session_id, "directives": list(directives)}


async def test_the_wire_form(connect: Connect) -> None:
    client = with_session(connect)
    directive = {"start": 2, "end": 6, "replacement": "ab", "mode": "amortize"}
    answer = await client.post(DIRECTIVES, edit(directive))
    assert answer.status == 200
    assert answer.json == {
        "object": "directive.result",
        "session_id": "s1",
        "version": 2,
        "context_length": {"before": 10, "after": 8},
        "receipts": [
            {
                "start": 2,
                "end": 6,
                "mode": "amortize",
                "mode_done": "amortize",
                "removed": 4,
                "inserted": 2,
                "kept": 4,
                "recomputed": 0,
                "moved_in_place": 4,
                "copied": 0,
                "freed": 0,
                "delta": -2,
                "reason": None,
            }
        ],
        "elapsed_ms": 1.25,
    }
    assert client.engine.sessions["s1"].text == "01ab6789"


@pytest.mark.parametrize(
    "replacement, text",
    [("xy", "01xy"), ([120, 121], "01xy"), ("", "01"), ([], "01"), ("<|im|>", "01<|im|>")],
)
async def test_replacements(connect: Connect, replacement: Any, text: str) -> None:
    client = with_session(connect)
    directive = {"start": 2, "end": 10, "replacement": replacement, "mode": "forget"}
    assert (await client.post(DIRECTIVES, edit(directive))).status == 200
    assert client.engine.sessions["s1"].text == text


async def test_without_replacement_and_mode_a_span_is_cut_out_and_the_tail_kept(
    connect: Connect,
) -> None:
    client = with_session(connect)
    answer = await client.post(DIRECTIVES, edit({"start": 0, "end": 5}, {"start": 8, "end": 9}))
    assert [receipt["mode"] for receipt in answer.json["receipts"]] == ["amortize", "amortize"]
    assert client.engine.sessions["s1"].text == "5679"


@pytest.mark.parametrize(
    "directives",
    [
        [{"start": 5, "end": 3}],
        [{"start": -1, "end": 3}],
        [{"start": 0, "end": 11}],
        [{"start": 2**62, "end": 2**62 + 1}],
        [{"start": 0, "end": 5}, {"start": 4, "end": 6}],
        [{"start": 0, "end": 1, "mode": "lobotomise"}],
        [{"start": 0, "end": 1, "mode": "AMORTIZE"}],
        [{"start": 0, "end": 1, "mode": "a\nb"}],
        [{"start": 0, "end": 1, "replacement": [0x110000]}],
        [{"start": 0, "end": 1}, {"start": 3, "end": 99}],
    ],
)
async def test_directives_that_do_not_fit_change_nothing(
    connect: Connect, directives: list[dict[str, Any]]
) -> None:
    client = with_session(connect)
    before = (await client.get("/v1/sessions/s1?tokens=true")).json
    answer = await client.post(DIRECTIVES, edit(*directives))
    assert answer.status == 422
    assert answer.error["code"] == "invalid_directive"
    assert answer.error["type"] == "invalid_request_error"
    assert (await client.get("/v1/sessions/s1?tokens=true")).json == before


async def test_an_unknown_session(connect: Connect) -> None:
    client = with_session(connect)
    for answer in (
        await client.post(DIRECTIVES, edit({"start": 0, "end": 1}, session_id="s2")),
        await client.get("/v1/sessions/s2"),
        await client.delete("/v1/sessions/s2"),
        await client.get("/v1/sessions/" + "x" * 5000),
    ):
        assert answer.status == 404 and answer.error["code"] == "session_not_found"
        assert answer.error["type"] == "not_found_error"


async def test_a_directive_that_fails_later_has_its_error_too(connect: Connect) -> None:
    client = with_session(connect)
    client.engine.failures[1] = CapacityError("no room for both copies")
    answer = await client.post(DIRECTIVES, edit({"start": 0, "end": 1}))
    assert answer.status == 503 and answer.error["code"] == "capacity_exceeded"
    assert client.engine.sessions["s1"].text == "0123456789"


async def test_a_session_as_it_is_shown(connect: Connect) -> None:
    client = with_session(connect, "ab")
    short = (await client.get("/v1/sessions/s1")).json
    assert short == {
        "object": "session",
        "id": "s1",
        "version": 1,
        "context_length": 2,
        "pieces": [{"start": 0, "end": 2, "exact": True}],
        "busy": False,
    }
    full = (await client.get("/v1/sessions/s1?tokens=true")).json
    assert full == short | {"token_ids": [97, 98], "text": "ab"}
    assert (await client.get("/v1/sessions/s1?tokens=false")).json == short


async def test_a_query_that_is_no_boolean(connect: Connect) -> None:
    answer = await with_session(connect).get("/v1/sessions/s1?tokens=perhaps")
    assert answer.status == 400 and answer.error["param"] == "tokens"


async def test_a_deleted_session_is_gone(connect: Connect) -> None:
    client = with_session(connect)
    answer = await client.delete("/v1/sessions/s1")
    assert answer.json == {"object": "session.deleted", "id": "s1", "deleted": True}
    assert (await client.get("/v1/sessions/s1")).status == 404


async def test_a_salt_names_another_session(connect: Connect) -> None:
    sessions = {"s1": FakeSession("plain"), "tenant s1": FakeSession("salted")}
    client = connect(FakeEngine(sessions=sessions))
    shown = await client.get("/v1/sessions/s1?tokens=true&cache_salt=tenant%20")
    assert shown.json["text"] == "salted"
    body = edit({"start": 0, "end": 1}) | {"cache_salt": "tenant "}
    assert (await client.post(DIRECTIVES, body)).json["context_length"]["before"] == 6
    assert sessions["s1"].text == "plain" and sessions["tenant s1"].text == "alted"
    assert (await client.delete("/v1/sessions/s1?cache_salt=tenant%20")).status == 200
    assert list(sessions) == ["s1"]

from __future__ import annotations

from typing import Any

import pytest

from leyline.marks import MessageSpan

from .client import Client
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

SESSION = "/v1/sessions/s1"
MARKS = f"{SESSION}/marks"


def with_session(connect: Connect, text: str = "0123456789") -> Client:
    return connect(FakeEngine(sessions={"s1": FakeSession(text)}))


async def test_a_session_as_it_is_shown(connect: Connect) -> None:
    client = with_session(connect, "ab")
    client.engine.sessions["s1"].messages = [MessageSpan("tool", "c1", 0, 2)]
    short = (await client.get(SESSION)).json
    assert short == {
        "object": "session",
        "id": "s1",
        "version": 1,
        "state": "exact",
        "context_length": 2,
        "busy": False,
        "pieces": [{"start": 0, "end": 2, "exact": True}],
        "versions": [],
        "marks": [],
        "messages": [{"role": "tool", "tool_call_id": "c1", "start": 0, "end": 2}],
    }
    full = (await client.get(f"{SESSION}?tokens=true")).json
    assert full == short | {"token_ids": [97, 98], "text": "ab"}
    assert (await client.get(f"{SESSION}?tokens=false")).json == short


async def test_a_query_that_is_no_boolean(connect: Connect) -> None:
    answer = await with_session(connect).get(f"{SESSION}?tokens=perhaps")
    assert answer.status == 400 and answer.error["param"] == "tokens"


async def test_a_deleted_session_is_gone(connect: Connect) -> None:
    client = with_session(connect)
    answer = await client.delete(SESSION)
    assert answer.json == {"object": "session.deleted", "id": "s1", "deleted": True}
    assert (await client.get(SESSION)).status == 404


def two_tenants() -> dict[str, FakeSession]:
    return {
        "s1": FakeSession("plain"),
        "s2": FakeSession("more"),
        "tenant s1": FakeSession("salted", salt="tenant "),
    }


async def test_a_salt_names_another_session(connect: Connect) -> None:
    sessions = two_tenants()
    client = connect(FakeEngine(sessions=sessions))
    shown = await client.get(f"{SESSION}?tokens=true&cache_salt=tenant%20")
    assert shown.json["text"] == "salted"
    answer = await client.edit({"start": 0, "end": 1}, cache_salt="tenant ")
    assert answer.json["context_length"]["before"] == 6
    assert sessions["s1"].text == "plain" and sessions["tenant s1"].text == "alted"
    reverted = await client.post(f"{SESSION}/revert", {"cache_salt": "tenant "})
    assert reverted.status == 200 and sessions["tenant s1"].text == "salted"
    assert (await client.post(f"{SESSION}/revert", {})).status == 404
    assert (await client.post(MARKS, PIN | {"cache_salt": "tenant "})).status == 200
    assert len(sessions["tenant s1"].marks) == 1 and sessions["s1"].marks == []
    assert (await client.delete(f"{MARKS}/m0")).status == 404
    assert (await client.delete(f"{MARKS}/m0?cache_salt=tenant%20")).status == 200
    assert (await client.delete(f"{SESSION}?cache_salt=tenant%20")).status == 200
    assert list(sessions) == ["s1", "s2"]


async def test_a_list_has_the_sessions_of_one_tenant(connect: Connect) -> None:
    client = connect(FakeEngine(sessions=two_tenants()))
    listed = (await client.get("/v1/sessions")).json
    assert listed["object"] == "list"
    assert [session["id"] for session in listed["data"]] == ["s1", "s2"]
    assert listed["data"][0] == {
        "object": "session",
        "id": "s1",
        "version": 1,
        "state": "exact",
        "context_length": 5,
        "busy": False,
    }
    theirs = (await client.get("/v1/sessions?cache_salt=tenant%20")).json["data"]
    assert [(session["id"], session["context_length"]) for session in theirs] == [("s1", 6)]
    assert (await client.get("/v1/sessions?cache_salt=nobody")).json["data"] == []


async def test_a_salt_in_a_link_is_bounded(connect: Connect) -> None:
    for path in ("/v1/sessions", SESSION, "/v1/cache/find"):
        answer = await with_session(connect).get(f"{path}?cache_salt={'x' * 257}")
        assert answer.status == 400 and answer.error["param"] == "cache_salt"


async def test_back_to_a_kept_version(connect: Connect) -> None:
    client = with_session(connect)
    await client.edit({"start": 0, "end": 5})
    await client.edit({"start": 0, "end": 2})
    shown = (await client.get(SESSION)).json["versions"]
    assert shown == [
        {"version": 1, "context_length": 10, "rows_kept": True},
        {"version": 2, "context_length": 5, "rows_kept": True},
    ]
    answer = await client.post(f"{SESSION}/revert", {"version": 1})
    assert answer.json == {
        "object": "session.reverted",
        "session_id": "s1",
        "version": 4,
        "restored": 1,
        "context_length": {"before": 3, "after": 10},
        "kept": 10,
        "recomputed": 0,
        "state": "exact",
    }
    assert (await client.post(f"{SESSION}/revert", {"version": None})).json["restored"] == 2
    missing = await client.post(f"{SESSION}/revert", {"version": 99})
    assert missing.status == 404 and missing.error["code"] == "version_not_found"


PIN: dict[str, Any] = {"verb": "pin", "start": 2, "end": 4}


async def test_a_mark_is_set_shown_and_taken_back(connect: Connect) -> None:
    client = with_session(connect)
    mark = (await client.post(MARKS, PIN | {"turns": 3})).json
    assert mark == {
        "object": "session.mark",
        "id": "m0",
        "verb": "pin",
        "of": "span",
        "start": 2,
        "end": 4,
        "seconds_left": None,
        "turns_left": 3,
        "replacement": [],
        "mode": "amortize",
    }
    assert (await client.get(SESSION)).json["marks"] == [mark]
    answer = await client.delete(f"{MARKS}/m0")
    assert answer.json == {"object": "session.mark.deleted", "id": "m0", "deleted": True}
    assert (await client.get(SESSION)).json["marks"] == []
    again = await client.delete(f"{MARKS}/m0")
    assert again.status == 404 and again.error["code"] == "mark_not_found"


async def test_a_pin_says_how_long_it_has_left(connect: Connect) -> None:
    client = with_session(connect)
    left = (await client.post(MARKS, PIN | {"ttl_s": 3600})).json["seconds_left"]
    assert 0 < left <= 3600
    over = (await client.post(MARKS, PIN | {"ttl_s": 1e-9})).json["seconds_left"]
    assert over == 0


@pytest.mark.parametrize(
    "body, shown",
    [
        ({"verb": "decay", "match": "45", "turns": 1, "replacement": "x"}, (4, 6, [120])),
        ({"verb": "decay", "match": "45", "turns": 1, "replacement": [120]}, (4, 6, [120])),
        ({"verb": "scratch", "of": "reasoning"}, (0, 0, [])),
        ({"verb": "scratch", "of": "tool_output", "mode": "forget"}, (0, 0, [])),
        ({"verb": "scratch", "start": 1, "end": 9}, (1, 9, [])),
    ],
)
async def test_every_verb(connect: Connect, body: dict[str, Any], shown: Any) -> None:
    answer = await with_session(connect).post(MARKS, body)
    assert answer.status == 200
    mark = answer.json
    assert (mark["start"], mark["end"], mark["replacement"]) == shown
    assert mark["verb"] == body["verb"] and mark["of"] == body.get("of", "span")
    assert mark["mode"] == body.get("mode", "amortize")


async def test_marks_beyond_the_quota(connect: Connect) -> None:
    client = with_session(connect)
    for status in (200, 200, 200, 429):
        answer = await client.post(MARKS, PIN)
        assert answer.status == status
    assert answer.error["code"] == "quota_exceeded" and answer.error["type"] == "rate_limit_error"


@pytest.mark.parametrize("name", ["save", "revert", "marks", ":save", "sessions:save", "..."])
async def test_no_session_name_is_taken_by_a_route(connect: Connect, name: str) -> None:
    engine = FakeEngine(sessions_file=True)
    client = connect(engine)
    assert (await client.chat("x", session_id=name)).json["session"]["id"] == name
    assert (await client.get(f"/v1/sessions/{name}")).json["id"] == name
    saved = await client.post("/v1/sessions:save", {})
    assert saved.json == {"object": "sessions.saved", "sessions": 1}
    assert (await client.post(f"/v1/sessions/{name}/marks", PIN)).status == 200
    assert (await client.post(f"/v1/sessions/{name}/revert", {})).status == 404
    assert (await client.delete(f"/v1/sessions/{name}/marks/m0")).status == 200
    assert (await client.delete(f"/v1/sessions/{name}")).json["id"] == name


async def test_saving_without_a_file(connect: Connect) -> None:
    answer = await connect().post("/v1/sessions:save", {})
    assert answer.status == 400 and answer.error["code"] == "invalid_option"


async def test_where_to_save_is_not_for_clients_to_say(connect: Connect) -> None:
    client = connect(FakeEngine(sessions_file=True))
    answer = await client.post("/v1/sessions:save", {"path": "/etc/passwd"})
    assert answer.status == 400 and answer.error["param"] == "path"


@pytest.mark.parametrize("path", ["/v1/sessions:save", f"{SESSION}/revert"])
async def test_a_web_page_cannot_change_a_thing(connect: Connect, path: str) -> None:
    """Without a JSON body a browser would send it to another origin unasked."""
    client = with_session(connect)
    client.engine.sessions["s1"].old[0] = "old"
    for raw, kind in ((b"", "text/plain"), (b"{}", "text/plain"), (b"", "")):
        answer = await client.post(path, raw=raw, headers={"content-type": kind})
        assert answer.status == 415
    assert client.engine.sessions["s1"].text == "0123456789"


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/revert", {}),
        ("POST", "/marks", PIN),
        ("DELETE", "/marks/m0", None),
    ],
)
async def test_an_unknown_session(connect: Connect, method: str, path: str, body: Any) -> None:
    for name in ("s2", "x" * 5000, "%F0%9F", "a%20b"):
        exchange = with_session(connect).open(method, f"/v1/sessions/{name}{path}", body)
        answer = await exchange.finish()
        assert answer.status == 404 and answer.error["code"] == "session_not_found"


@pytest.mark.parametrize(
    "path, allowed",
    [
        ("/v1/sessions", "GET"),
        ("/v1/sessions:save", "POST"),
        (SESSION, "DELETE, GET"),
        (f"{SESSION}/revert", "POST"),
        (MARKS, "POST"),
        (f"{MARKS}/m0", "DELETE"),
    ],
)
async def test_wrong_methods(connect: Connect, path: str, allowed: str) -> None:
    answer = await connect().open("PUT", path).finish()
    assert answer.status == 405 and answer.error["code"] == "method_not_allowed"
    assert answer.headers["allow"] in (allowed, allowed.split(", ")[-1])

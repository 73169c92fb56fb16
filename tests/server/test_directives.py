from __future__ import annotations

from typing import Any

import pytest

from leyline.errors import CapacityError
from leyline.marks import MessageSpan
from leyline.pointing import Change, Target

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
                "shared": 0,
            }
        ],
        "state": "spliced",
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


POINTED = "the old, the new, the end"
MESSAGES = [MessageSpan("user", None, 0, 7), MessageSpan("tool", "c1", 9, 16)]


@pytest.mark.parametrize(
    "target, text",
    [
        ({"start": 4, "end": 7}, "the X, the new, the end"),
        ({"match": "new"}, "the old, the X, the end"),
        ({"message": 0}, "X, the new, the end"),
        ({"message": -1}, "the old, X, the end"),
        ({"tool_call_id": "c1"}, "the old, X, the end"),
        ({"tool_call_id": "c1", "match": "the"}, "the old, X new, the end"),
        ({"message": 0, "match": "the"}, "X old, the new, the end"),
    ],
)
async def test_ways_to_point(connect: Connect, target: dict[str, Any], text: str) -> None:
    client = with_session(connect, POINTED)
    client.engine.sessions["s1"].messages = MESSAGES
    answer = await client.edit(target | {"replacement": "X"})
    assert answer.status == 200
    assert client.engine.sessions["s1"].text == text
    (receipt,) = answer.json["receipts"]
    assert text.startswith(POINTED[: receipt["start"]] + "X" + POINTED[receipt["end"] :])


async def test_every_field_of_a_target_reaches_the_engine(connect: Connect) -> None:
    client = with_session(connect)
    seen: list[Any] = []
    client.engine.planning = lambda: seen.append(None)

    def plan(session_id: str, changes: Any, **more: Any) -> Any:
        seen.extend([session_id, changes, more])
        raise CapacityError("seen enough")

    client.engine.plan_directives = plan  # type: ignore[method-assign]
    item = {"tool_call_id": "c", "match": "m", "occurrence": -2, "mode": "forget", "scope": "cache"}
    source = {"session_id": "s2", "message": 3, "match": "x"}
    await client.edit(item, {"start": 1, "end": 1, "source": source}, dry_run=True, cache_salt="t")
    assert seen == [
        "s1",
        [
            Change(Target(tool_call_id="c", match="m", occurrence=-2), "", "forget", "cache"),
            Change(Target(start=1, end=1), source=("s2", Target(message=3, match="x"))),
        ],
        {"salt": "t", "expected_version": None},
    ]


async def test_a_span_of_another_session_is_shared(connect: Connect) -> None:
    client = with_session(connect)
    client.engine.sessions["s2"] = FakeSession("one two three")
    source = {"session_id": "s2", "match": "two"}
    assert (await client.edit({"start": 4, "end": 5, "source": source})).status == 200
    assert client.engine.sessions["s1"].text == "0123two56789"
    source["session_id"] = "s3"
    answer = await client.edit({"start": 4, "end": 5, "source": source})
    assert answer.status == 404 and answer.error["code"] == "session_not_found"


async def test_a_text_that_stands_there_twice(connect: Connect) -> None:
    client = with_session(connect, POINTED)
    answer = await client.edit({"match": "the"})
    assert answer.status == 422 and answer.error["param"] == "match"
    assert client.engine.sessions["s1"].text == POINTED


async def test_a_forget_that_reaches_the_cache_says_what_went(connect: Connect) -> None:
    client = with_session(connect)
    plain = await client.edit({"start": 0, "end": 1, "mode": "forget"})
    assert "purged" not in plain.json
    answer = await client.edit({"start": 0, "end": 1, "mode": "forget", "scope": "cache"})
    assert answer.json["purged"] == {
        "rows": 5,
        "slots": 4,
        "sequences": 1,
        "versions": 2,
        "degraded": ["s2"],
        "still_held": ["s3"],
    }
    other = await client.edit({"start": 0, "end": 1, "scope": "cache"})
    assert other.status == 422 and other.error["param"] == "directives[0].scope"


async def test_a_stale_edit_is_refused_with_the_present_version(connect: Connect) -> None:
    client = with_session(connect)
    item = {"start": 0, "end": 1}
    for more in ({}, {"dry_run": True}):
        answer = await client.edit(item, expected_version=0, **more)
        assert answer.status == 412
        assert answer.error["code"] == "version_conflict" and answer.error["version"] == 1
        assert answer.error["type"] == "conflict_error"
    assert client.engine.sessions["s1"].text == "0123456789"
    assert (await client.edit(item, expected_version=1)).json["version"] == 2
    assert (await client.edit(item, expected_version=1)).error["version"] == 2
    assert (await client.edit(item, expected_version=None)).status == 200


async def test_a_busy_session(connect: Connect) -> None:
    client = with_session(connect)
    client.engine.sessions["s1"].busy = True
    answer = await client.edit({"start": 0, "end": 1})
    assert answer.status == 409 and answer.error["code"] == "session_busy"
    assert answer.error["type"] == "conflict_error"


@pytest.mark.parametrize("where", ["body", "header", "both"])
async def test_a_repeat_gets_the_first_receipt(connect: Connect, where: str) -> None:
    client = with_session(connect)
    body = edit({"start": 0, "end": 1}) | ({} if where == "header" else {"idempotency_key": "k"})
    headers = {} if where == "body" else {"Idempotency-Key": "k"}
    first = await client.post(DIRECTIVES, body, headers=headers)
    again = await client.post(DIRECTIVES, body, headers=headers)
    assert first.status == 200 and again.json == first.json
    assert client.engine.sessions["s1"].text == "123456789"
    other = body | edit({"start": 0, "end": 2})
    answer = await client.post(DIRECTIVES, other, headers=headers)
    assert answer.status == 422 and answer.error["code"] == "idempotency_mismatch"


async def test_without_a_key_a_repeat_is_another_edit(connect: Connect) -> None:
    client = with_session(connect)
    for _ in range(2):
        assert (await client.edit({"start": 0, "end": 1})).status == 200
    assert client.engine.sessions["s1"].text == "23456789"


async def test_a_repeat_while_the_first_is_under_way(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True, sessions={"s1": FakeSession("0123")}))
    body = edit({"start": 0, "end": 1}) | {"idempotency_key": "k"}
    first = client.open("POST", DIRECTIVES, body)
    while not await client.open_requests():
        pass
    second = await client.post(DIRECTIVES, body)
    assert second.status == 409 and second.error["code"] == "request_pending"
    client.engine.allow(9)
    assert (await first.finish()).status == 200
    assert (await client.post(DIRECTIVES, body)).status == 200
    assert client.engine.sessions["s1"].text == "123"


@pytest.mark.parametrize("key, header", [("a", "b"), (None, ""), (None, "x" * 257)])
async def test_keys_that_differ_or_are_none(connect: Connect, key: str | None, header: str) -> None:
    client = with_session(connect)
    body = edit({"start": 0, "end": 1}) | {"idempotency_key": key}
    answer = await client.post(DIRECTIVES, body, headers={"Idempotency-Key": header})
    assert answer.status == 400 and answer.error["param"] == "idempotency_key"
    assert client.engine.sessions["s1"].text == "0123456789"


async def test_a_dry_run_says_what_would_happen_and_does_nothing(connect: Connect) -> None:
    client = with_session(connect)
    item = {"start": 2, "end": 6, "replacement": "ab"}
    plan = (await client.edit(item, dry_run=True, idempotency_key="k")).json
    assert client.engine.sessions["s1"].text == "0123456789"
    done = (await client.edit(item, idempotency_key="k")).json
    assert plan == {
        "object": "directive.plan",
        "session_id": "s1",
        "version": 1,
        "context_length": {"before": 10, "after": 8},
        "receipts": done["receipts"],
        "estimated_ms": {"amortize": 1.235, "forget": 7.0},
        "cheaper": "amortize",
    }
    assert (await client.edit(item, dry_run=False)).json["object"] == "directive.result"


async def test_a_dry_run_before_anything_was_measured(connect: Connect) -> None:
    client = with_session(connect)
    client.engine.measured = False
    plan = (await client.edit({"start": 0, "end": 1}, dry_run=True)).json
    assert plan["estimated_ms"] == {"amortize": None, "forget": None} and plan["cheaper"] is None


async def test_a_dry_run_of_what_does_not_fit(connect: Connect) -> None:
    answer = await with_session(connect).edit({"start": 0, "end": 99}, dry_run=True)
    assert answer.status == 422 and answer.error["code"] == "invalid_directive"

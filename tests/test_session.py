"""Resident sessions: names, tenants, transcripts, and who has to go."""

from __future__ import annotations

import pytest

from leyline.context import Context
from leyline.errors import CapacityError, SessionNotFoundError
from leyline.session import Session, Sessions


def test_a_session_is_found_by_name_and_tenant() -> None:
    sessions = Sessions(4, 10.0)
    mine, theirs = sessions.create("s", b"", 0.0), sessions.create("s", b"x", 0.0)
    assert sessions.get("s") is mine and sessions.get("s", b"x") is theirs
    assert theirs.context == Context((), b"x") and len(sessions) == 2
    assert sessions.find("s", b"y") is None


def test_an_unknown_session_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SessionNotFoundError, match=r"no session 'ghost'.*creates it") as caught:
        Sessions(4, 10.0).get("ghost")
    assert (caught.value.param, caught.value.status) == ("session_id", 404)


def test_a_deleted_session_is_gone() -> None:
    sessions = Sessions(4, 10.0)
    sessions.delete(sessions.create("s", b"x", 0.0))
    assert len(sessions) == 0 and list(sessions) == []


@pytest.mark.parametrize(
    ("now", "busy", "gone"), [(10.0, False, False), (10.5, False, True), (99.0, True, False)]
)
def test_idle_sessions_expire(now: float, busy: bool, gone: bool) -> None:
    sessions = Sessions(4, 10.0)
    sessions.create("s", b"", 0.0).sequence_id = 7 if busy else None
    sessions.expire(now)
    assert (sessions.find("s") is None) is gone


def test_making_one_expires_the_others() -> None:
    sessions = Sessions(4, 10.0)
    sessions.create("old", b"", 0.0)
    sessions.create("new", b"", 11.0)
    assert [session.session_id for session in sessions] == ["new"]


def test_the_longest_unused_idle_session_makes_room() -> None:
    sessions = Sessions(3, 100.0)
    for name, last_used in (("busy", 0.0), ("stale", 1.0), ("fresh", 2.0)):
        sessions.create(name, b"", last_used)
    sessions.get("busy").sequence_id = 7
    sessions.create("next", b"", 3.0)
    assert [session.session_id for session in sessions] == ["busy", "fresh", "next"]


def test_busy_sessions_make_no_room() -> None:
    sessions = Sessions(1, 100.0)
    sessions.create("busy", b"", 0.0).sequence_id = 7
    with pytest.raises(CapacityError, match="All 1 sessions are busy"):
        sessions.create("next", b"", 1.0)
    assert sessions.get("busy").busy and len(sessions) == 1


def test_others_are_all_but_ones_own() -> None:
    sessions = Sessions(4, 100.0)
    for number, name in enumerate("abc"):
        session = sessions.create(name, b"", 0.0)
        session.context = Context.of([number])
        session.sequence_id = number or None
    assert sessions.others(1) == [Context.of([0]), Context.of([2])]
    assert len(sessions.others(9)) == 3


@pytest.mark.parametrize(
    ("transcript", "context", "rendered", "added"),
    [
        ("told", "", "told and more", " and more"),
        ("told", "edited", "edited and more", " and more"),
        ("told", "told", "told", ""),
        ("told", "edited", "something else", None),
        ("told", "edited", "tol", None),
        ("", "", "first words", None),
        ("a", "ab", "abc", "bc"),  # what the client was told comes first
    ],
)
def test_what_a_rendering_adds(
    transcript: str, context: str, rendered: str, added: str | None
) -> None:
    session = Session("s", Context(), transcript)
    assert session.appended(rendered, context) == added


def test_rows_are_known_as_far_as_the_contexts_agree_and_were_computed() -> None:
    session = Session("s", Context.of([1, 2, 3, 4]), computed=3)
    assert session.known(Context.of([1, 2, 3, 4, 5])) == 3
    assert session.known(Context.of([1, 2, 9])) == 2
    assert session.known(Context.of([1, 2, 3], b"other")) == 0

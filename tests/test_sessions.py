"""The registry: names, tenants, limits, and who has to go."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.context import Context
from leyline.errors import CapacityError, QuotaError, SessionNotFoundError
from leyline.marks import Mark
from leyline.session import Session, Transcript, Version
from leyline.sessions import MAX_GONE_NAMES, MAX_GONE_ROOTS, Sessions


def add(sessions: Sessions, name: str, length: int, now: float = 0.0, root: bytes = b"") -> Session:
    """A session of that many tokens."""
    session = sessions.create(name, root, now)
    session.context = Context.of(range(length), root)
    return session


def version(number: int, tokens: list[int], kept: bool = True) -> Version:
    return Version(number, Context.of(tokens), Transcript(), len(tokens), kept, ())


def pin(end: int, until: float | None = None, start: int = 0) -> Mark:
    return Mark(f"pin {start} {end}", "pin", start, end, until=until)


# -- names --------------------------------------------------------------------------------------


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
    assert caught.value.details == {"reason": "unknown"}


def test_a_deleted_session_is_gone() -> None:
    sessions = Sessions(4, 10.0)
    sessions.delete(sessions.create("s", b"x", 0.0))
    assert len(sessions) == 0 and list(sessions) == []


def test_a_new_session_keeps_as_many_versions_as_all() -> None:
    assert Sessions(4, 10.0, keep_versions=2).create("s", b"", 0.0).versions.maxlen == 2


def test_a_session_from_elsewhere_keeps_its_last_versions() -> None:
    session = Session("s", Context.of([1], b"x"))
    session.versions.extend(version(number, [number]) for number in range(4))
    sessions = Sessions(4, 10.0, keep_versions=2)
    sessions.admit(session, 0.0)
    assert sessions.get("s", b"x") is session
    assert [one.number for one in session.versions] == [2, 3]


# -- idle time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "busy", "gone"), [(10.0, False, False), (10.5, False, True), (99.0, True, False)]
)
def test_idle_sessions_expire(now: float, busy: bool, gone: bool) -> None:
    sessions = Sessions(4, 10.0)
    sessions.create("s", b"", 0.0).sequence_id = 7 if busy else None
    sessions.expire(now)
    assert (sessions.find("s") is None) is gone and sessions.num_expired == gone


def test_an_expired_session_is_an_error_that_says_so() -> None:
    sessions = Sessions(4, 10.0)
    sessions.create("s", b"x", 0.0)
    sessions.expire(11.0)
    with pytest.raises(SessionNotFoundError, match=r"'s' expired.* 10 seconds.*creates") as caught:
        sessions.get("s", b"x")
    assert caught.value.details == {"reason": "expired"}
    with pytest.raises(SessionNotFoundError, match="no session 's'"):
        sessions.get("s")  # nobody learns of another tenant's
    sessions.delete(sessions.create("s", b"x", 12.0))
    with pytest.raises(SessionNotFoundError, match="no session 's'"):
        sessions.get("s", b"x")


def test_making_one_expires_the_others() -> None:
    sessions = Sessions(4, 10.0)
    sessions.create("old", b"", 0.0)
    sessions.create("new", b"", 11.0)
    assert [session.session_id for session in sessions] == ["new"]


def test_pins_end_and_those_that_have_not_keep_their_session() -> None:
    sessions = Sessions(4, 10.0)
    session = add(sessions, "s", 9)
    session.marks = [pin(3, until=5.0), pin(4, until=20.0), pin(5), Mark("d", "decay", 1, 2)]
    sessions.expire(15.0)
    assert [mark.end for mark in session.marks] == [4, 5, 2]
    sessions.expire(20.0)
    assert sessions.find("s") is None


def test_names_of_sessions_that_went_are_not_remembered_for_ever() -> None:
    sessions = Sessions(4, 10.0)
    for number in range(MAX_GONE_NAMES + 1):
        sessions.create(f"s{number}", b"", 0.0)
        sessions.expire(11.0)
        sessions.create("s0", b"", 0.0)  # the last to go each time
        sessions.expire(11.0)
    said = {}
    for name in ("s0", "s1", "s2", f"s{MAX_GONE_NAMES}"):
        with pytest.raises(SessionNotFoundError) as caught:
            sessions.get(name)
        said[name] = caught.value.details["reason"]
    assert list(said.values()) == ["expired", "unknown", "expired", "expired"]


def test_nor_are_those_of_tenants_that_have_been_away_longest() -> None:
    sessions = Sessions(4, 10.0)
    for number in (*range(MAX_GONE_ROOTS), 0, MAX_GONE_ROOTS):
        sessions.create(f"s{number}", bytes([number]), 0.0)
        sessions.expire(11.0)
    for number, reason in ((0, "expired"), (1, "no session"), (2, "expired")):
        with pytest.raises(SessionNotFoundError, match=reason):
            sessions.get(f"s{number}", bytes([number]))


# -- number -------------------------------------------------------------------------------------


def test_the_longest_unused_idle_session_makes_room() -> None:
    sessions = Sessions(3, 100.0)
    for name, last_used in (("busy", 0.0), ("stale", 1.0), ("fresh", 2.0)):
        sessions.create(name, b"", last_used)
    sessions.get("busy").sequence_id = 7
    sessions.create("next", b"", 3.0)
    assert [session.session_id for session in sessions] == ["busy", "fresh", "next"]
    assert sessions.num_displaced == 1
    with pytest.raises(SessionNotFoundError, match="'stale' was displaced") as caught:
        sessions.get("stale")
    assert caught.value.details == {"reason": "displaced"}


def test_busy_sessions_make_no_room() -> None:
    sessions = Sessions(1, 100.0)
    sessions.create("busy", b"", 0.0).sequence_id = 7
    with pytest.raises(CapacityError, match="All 1 sessions are busy"):
        sessions.create("next", b"", 1.0)
    assert sessions.get("busy").busy and len(sessions) == 1
    assert (sessions.num_refused, sessions.num_displaced) == (1, 0)


# -- tokens -------------------------------------------------------------------------------------


def test_tokens_of_contexts_and_versions_count() -> None:
    sessions = Sessions(9, 100.0)
    add(sessions, "a", 5).versions.append(version(0, [1, 2, 3], kept=False))
    add(sessions, "b", 7)
    assert sessions.num_tokens == 15


@pytest.mark.parametrize(
    ("limit", "left"), [(20, "abc"), (19, "bc"), (14, "bc"), (13, "c"), (8, "c"), (1, "c")]
)
def test_idle_sessions_make_room_for_what_another_has_become(limit: int, left: str) -> None:
    sessions = Sessions(9, 100.0)
    for number, (name, length) in enumerate([("c", 8), ("a", 6), ("b", 6)]):
        add(sessions, name, length, float(number))
    sessions.max_tokens = limit
    sessions.fit(sessions.get("c"))
    assert sorted(session.session_id for session in sessions) == list(left)
    assert sessions.num_displaced == 3 - len(left)


def test_busy_sessions_stay_however_many_tokens_there_are() -> None:
    sessions = Sessions(9, 100.0)
    add(sessions, "busy", 9).sequence_id = 3
    add(sessions, "mine", 9)
    sessions.max_tokens = 10
    sessions.fit(sessions.get("mine"))
    assert len(sessions) == 2


def test_where_tokens_are_many_a_new_session_displaces_or_is_refused() -> None:
    sessions = Sessions(9, 100.0, max_tokens=10)
    add(sessions, "busy", 10).sequence_id = 3
    with pytest.raises(CapacityError, match=r"busy, and they hold 10 tokens or more.*again"):
        sessions.create("new", b"", 1.0)
    assert sessions.num_refused == 1
    sessions.get("busy").sequence_id = None
    sessions.create("new", b"", 1.0)
    assert [session.session_id for session in sessions] == ["new"]


# -- rows of versions ---------------------------------------------------------------------------


def test_others_are_all_but_ones_own_and_every_kept_version() -> None:
    sessions = Sessions(4, 100.0)
    for number, name in enumerate("abc"):
        session = sessions.create(name, b"", 0.0)
        session.context = Context.of([number])
        session.sequence_id = number or None
    sessions.get("b").versions.extend([version(0, [7]), version(1, [8], kept=False)])
    assert sessions.others(1) == [Context.of([0]), Context.of([2]), Context.of([7])]
    assert len(sessions.others(9)) == 4


@pytest.mark.parametrize(
    ("slots", "keep", "start", "after", "affords"),
    [
        (None, 4, 0, 10**6, True),
        (None, 0, 0, 1, False),
        (12, 4, 6, 8, True),
        (11, 4, 6, 8, False),
        (10, 4, 9, 8, True),  # nothing new
        (9, 4, 9, 8, False),
    ],
)
def test_whether_a_version_is_affordable(
    slots: int | None, keep: int, start: int, after: int, affords: bool
) -> None:
    sessions = Sessions(4, 100.0, session_slots=slots, keep_versions=keep)
    session = add(sessions, "s", 10)
    assert sessions.affords_version(session, start, after) is affords
    longer = session.context.append([1])
    assert sessions.affords_version(session, start, after, context=longer) is (
        affords and slots not in (12, 10)
    )


def test_asking_what_is_affordable_changes_nothing() -> None:
    sessions = Sessions(4, 100.0, session_slots=12)
    session = add(sessions, "s", 10)
    session.versions.append(version(0, [5, 6, 7]))
    assert sessions.affords_version(session, 8, 10)
    assert session.versions[0].kept


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.booleans()), max_size=4),
    st.lists(st.integers(0, 1), max_size=5),
    st.integers(0, 16),
)
def test_old_versions_lose_their_rows_until_the_rest_fits(
    contexts: list[tuple[list[int], bool]], present: list[int], slots: int
) -> None:
    sessions = Sessions(4, 100.0, session_slots=slots)
    session = sessions.create("s", b"", 0.0)
    session.context = Context.of(present)
    session.versions.extend(version(i, *one) for i, one in enumerate(contexts))
    before = list(session.versions)
    sessions.fit(session)

    def distinct_rows(oldest: int) -> int:
        kept = [tokens for tokens, kept in contexts[oldest:] if kept]
        return len({tuple(t[: end + 1]) for t in [*kept, present] for end in range(len(t))})

    first = next((i for i in range(len(before)) if distinct_rows(i) <= slots), len(before))
    expected = [one.kept and i >= first for i, one in enumerate(before)]
    assert [one.kept for one in session.versions] == expected
    assert [one.number for one in session.versions] == [one.number for one in before]
    assert session.versions.maxlen == 4


def test_without_a_quota_versions_keep_their_rows() -> None:
    sessions = Sessions(4, 100.0)
    session = add(sessions, "s", 10)
    session.versions.append(version(0, [9] * 99))
    sessions.fit(session)
    assert session.versions[0].kept


# -- pins ---------------------------------------------------------------------------------------


def test_pins_of_a_tenant_have_a_quota() -> None:
    sessions = Sessions(9, 100.0, pin_slots=10)
    one, two, other = add(sessions, "1", 9), add(sessions, "2", 9), add(sessions, "3", 9, 0.0, b"x")
    sessions.pin(one, pin(6))
    sessions.pin(one, pin(5))  # in front of the first: it costs nothing
    sessions.pin(other, pin(9))  # another tenant's
    with pytest.raises(
        QuotaError, match=r"This tenant would pin 11 rows, and may pin 10"
    ) as caught:
        sessions.pin(two, pin(5))
    assert (caught.value.status, caught.value.code) == (429, "quota_exceeded")
    assert caught.value.details == {"pinned": 6, "asked": 5, "limit": 10}
    assert two.marks == []
    sessions.pin(two, pin(4))
    with pytest.raises(QuotaError):
        sessions.pin(one, pin(7))


def test_all_tenants_together_pin_half_of_the_slots() -> None:
    sessions = Sessions(9, 100.0, pin_slots=10, num_slots=31)
    sessions.pin(add(sessions, "s", 9), pin(9))
    other = add(sessions, "s", 9, 0.0, b"x")
    with pytest.raises(QuotaError, match=r"All tenants together would pin 16 rows, and may pin 15"):
        sessions.pin(other, pin(7))
    sessions.pin(other, pin(6))


def test_pins_that_have_ended_make_room() -> None:
    sessions = Sessions(9, 100.0, pin_slots=10)
    session, other = add(sessions, "1", 9), add(sessions, "2", 9)
    sessions.pin(session, pin(8, until=5.0))
    with pytest.raises(QuotaError):
        sessions.pin(other, pin(8), now=4.0)
    sessions.pin(other, pin(8), now=5.0)


def test_what_is_pinned_is_the_front_of_a_context_up_to_its_last_pin() -> None:
    sessions = Sessions(9, 100.0)
    session = add(sessions, "s", 9)
    session.marks = [pin(4), pin(6, until=5.0), Mark("d", "decay", 0, 8)]
    add(sessions, "no pin", 9)
    assert list(sessions.pinned(4.0)) == [Context.of(range(6))]
    assert list(sessions.pinned(5.0)) == [Context.of(range(4))]
    session.marks = [pin(40)]  # an edit in a turn is ahead of the context
    assert list(sessions.pinned(0.0)) == [session.context]


@pytest.mark.parametrize(
    ("pin_slots", "num_slots"), list(product([None, 0, 3, 10, 99], [None, 0, 9, 40, 999]))
)
def test_an_edit_can_push_pins_no_further_than_the_quotas(
    pin_slots: int | None, num_slots: int | None
) -> None:
    sessions = Sessions(9, 100.0, pin_slots=pin_slots, num_slots=num_slots)
    for number, root in enumerate([b"", b"x", b"", b"x"]):
        add(sessions, str(number), 20, 0.0, root).marks = [pin(5 + number)]
    pinned = list(sessions.pinned(0.0))
    for root, asked in ((b"", 12), (b"x", 14)):
        of_root = sum(len(context) for context in pinned if context.root == root)
        assert of_root <= (asked if pin_slots is None else min(asked, pin_slots))
    total, asked = sum(map(len, pinned)), 26
    if pin_slots is not None:
        asked = min(12, pin_slots) + min(14, pin_slots)
    assert total == (asked if num_slots is None else min(asked, num_slots // 2))

"""One session: what the client believes, versions and undo, marks and the turns they count."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.context import Context
from leyline.directive import Directive, Mode, apply
from leyline.errors import MarkNotFoundError, QuotaError, VersionNotFoundError
from leyline.marks import Mark, MessageSpan
from leyline.session import MAX_MARKS, Session, Transcript, Version

TEXTS = st.text(alphabet="ab\n\ud800é", max_size=8)


def session_of(length: int, keep_versions: int = 4, **fields: object) -> Session:
    """A session whose context is the tokens 0, 1, 2 ..., all of them computed."""
    session = Session("s", Context.of(range(length)), computed=length)
    session.versions = deque(maxlen=keep_versions)
    for name, value in fields.items():
        setattr(session, name, value)
    return session


def edit(session: Session, *directives: Directive, kept: bool = True, heal: bool = False) -> None:
    """Carry a set out as the engine does."""
    after = apply(session.context, directives).after
    session.commit(session.context, after, directives, kept=kept, heal=heal)
    session.context, session.computed = after, len(after)


# -- transcripts --------------------------------------------------------------------------------


@given(TEXTS, TEXTS)
def test_a_transcript_leads_what_starts_with_its_text(text: str, rendered: str) -> None:
    transcript = Transcript.of(text)
    for candidate in (rendered, text + rendered):
        assert transcript.leads(candidate) == (bool(text) and candidate.startswith(text))


def test_a_transcript_holds_no_text_and_one_letter_matters() -> None:
    transcript = Transcript.of("the secret")
    assert "secret" not in repr(transcript) and len(transcript.digest) == 32
    assert transcript.leads("the secret is out")
    assert not transcript.leads("the secreT is out") and not transcript.leads("the secre")


def test_no_text_has_one_transcript() -> None:
    assert Transcript.of("") == Transcript() and not Transcript().leads("anything")


# -- what a rendering goes on from --------------------------------------------------------------


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
    messages = [MessageSpan("user", None, 0, 2)]
    session = session_of(4, transcript=Transcript.of(transcript), messages=messages)
    found = session.appended(rendered, context)
    assert found == (None if added is None else (session.context, added, messages))
    assert found is None or found[2] is not messages


def test_a_turn_asked_for_again_goes_on_from_before_it() -> None:
    before = (Context.of([0, 1]), Transcript.of("q1 a1 "), (MessageSpan("user", None, 0, 1),))
    session = session_of(6, transcript=Transcript.of("q1 a1 q2 a2 "), checkpoint=before)
    assert session.appended("q1 a1 q3", "") == (before[0], "q3", list(before[2]))
    assert session.appended("q1 a1 q2 a2 q3", "") == (session.context, "q3", [])
    assert session.appended("q0 a1 q3", "") is None


def test_rows_are_known_as_far_as_the_contexts_agree_and_were_computed() -> None:
    session = Session("s", Context.of([1, 2, 3, 4]), computed=3)
    assert session.known(Context.of([1, 2, 3, 4, 5])) == 3
    assert session.known(Context.of([1, 2, 9])) == 2
    assert session.known(Context.of([1, 2, 3], b"other")) == 0


# -- edits --------------------------------------------------------------------------------------


def test_an_edit_makes_a_version_and_everything_follows() -> None:
    mark, message = Mark("m", "pin", 6, 8), MessageSpan("user", None, 2, 4)
    session = session_of(10, marks=[mark], messages=[message], transcript=Transcript.of("t"))
    session.checkpoint = (Context(), Transcript(), [])
    before = session.context
    edit(session, Directive(2, 4, (7,)), kept=True)
    assert session.version == 1 and session.checkpoint is None
    assert session.marks == [Mark("m", "pin", 5, 7)]
    assert session.messages == [MessageSpan("user", None, 2, 3)]
    assert list(session.versions) == [
        Version(0, before, Transcript.of("t"), 10, True, (message,), (mark,))
    ]


def test_a_commit_leaves_the_context_to_its_caller() -> None:
    session = session_of(4)
    before = session.context
    session.commit(before, Context.of([9]), [], kept=False, heal=False)
    assert session.context is before and not session.versions[0].kept


def test_rows_of_a_version_are_those_that_are_known_unless_the_caller_knows_more() -> None:
    session = session_of(4, computed=3)
    longer = session.context.append([5, 6])
    session.commit(longer, longer, [], kept=True, heal=False)
    session.commit(longer, longer, [], kept=True, heal=False, computed=6)
    assert [version.computed for version in session.versions] == [3, 6]


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_only_the_last_few_versions_are_kept(keep: int) -> None:
    session = session_of(10, keep_versions=keep)
    for _ in range(6):
        edit(session, Directive(3, 4, (7,)))
    assert [one.number for one in session.versions] == list(range(6))[6 - keep :]
    assert session.version == 6


# -- state --------------------------------------------------------------------------------------


def test_what_the_context_is() -> None:
    session = session_of(10)
    states = [session.state]
    for heal, mode in ((False, Mode.AMORTIZE), (True, Mode.AMORTIZE), (False, Mode.AMORTIZE)):
        edit(session, Directive(2, 3, mode=mode), heal=heal)
        states.append(session.state)
    assert states == ["exact", "spliced", "healing", "healing"]
    edit(session, Directive(2, 3, mode=Mode.FORGET))
    assert session.state == "exact" and not session.healing


def test_an_edit_with_nothing_to_heal_heals_nothing() -> None:
    session = session_of(4)
    edit(session, Directive(2, 3, (9,), Mode.FORGET), heal=True)
    assert not session.healing


# -- undo ---------------------------------------------------------------------------------------


def test_going_back_is_an_edit_that_can_be_undone() -> None:
    session = session_of(10, transcript=Transcript.of("old"))
    session.messages = [MessageSpan("user", None, 2, 4)]
    old = session.context
    edit(session, Directive(2, 4), kept=False)
    new, session.transcript = session.context, Transcript.of("new")
    session.checkpoint = (Context(), Transcript(), [])
    assert session.revert(0).number == 0
    assert (session.context, session.transcript, session.version) == (old, Transcript.of("old"), 2)
    assert session.messages == [MessageSpan("user", None, 2, 4)]
    assert session.computed == 10 and session.checkpoint is None
    assert session.versions[-1].context is new and session.versions[-1].kept
    session.revert(1)
    assert (session.context, session.transcript, session.version) == (new, Transcript.of("new"), 3)
    assert session.messages == [MessageSpan("user", None, 2, 2)]


def test_a_version_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    session = session_of(10, keep_versions=2)
    for _ in range(3):
        edit(session, Directive(3, 4))
    before = session.snapshot(session.context, 0, kept=True), list(session.versions)
    with pytest.raises(VersionNotFoundError, match=r"no version 0 .* keeps: 1, 2\.") as caught:
        session.revert(0)
    assert caught.value.details == {"versions": [1, 2], "version": 3}
    assert (session.snapshot(session.context, 0, kept=True), list(session.versions)) == before
    with pytest.raises(VersionNotFoundError, match="keeps: none"):
        session_of(3).revert(0)


def test_marks_of_then_and_now_survive_going_back() -> None:
    session = session_of(20)
    session.marks = [
        Mark("stays", "decay", 10, 12, turns_left=5),
        Mark("ended", "pin", 13, 14, turns_left=1),
        Mark("edited away", "pin", 4, 5),
        Mark("next", "scratch", 0, 0, turns_left=9, of="reasoning"),
    ]
    edit(session, Directive(4, 5))
    session.end_turn(0.0)
    session.mark(Mark("since", "pin", 1, 2))
    session.revert(0)
    assert session.marks == [
        Mark("stays", "decay", 10, 12, turns_left=4),
        Mark("next", "scratch", 0, 0, turns_left=8, of="reasoning"),
    ]


def test_going_back_takes_a_healing_up_again_only_where_there_was_one() -> None:
    session = session_of(10)
    edit(session, Directive(2, 3), heal=True)
    edit(session, Directive(5, 6))
    session.context, session.healing = session.context.exact_from(0), False  # healed
    session.revert(1)
    assert session.state == "healing"
    session.revert(0)
    assert session.state == "exact" and not session.healing


def test_going_back_counts_no_rows_that_the_context_has_no_room_for() -> None:
    session = session_of(4)
    session.commit(session.context, session.context, [], kept=True, heal=False, computed=99)
    session.revert(0)
    assert session.computed == 4


def test_versions_that_hold_something_are_dropped() -> None:
    session = session_of(10)
    for _ in range(3):
        edit(session, Directive(3, 4))
    session.checkpoint = (Context.of(range(10)), Transcript(), [])
    assert session.drop_versions(lambda context: 4 in context.tokens) == 2
    assert [version.number for version in session.versions] == [2]
    assert session.checkpoint is None and session.versions.maxlen == 4
    session.checkpoint = (Context.of([1]), Transcript(), [])
    assert session.drop_versions(lambda context: 4 in context.tokens) == 0
    assert session.checkpoint is not None


# -- turns --------------------------------------------------------------------------------------


def test_a_turn_counts_every_mark_and_hands_out_what_is_due() -> None:
    session = session_of(30)
    session.marks = [
        Mark("pin 1", "pin", 1, 2, turns_left=1),
        Mark("pin 2", "pin", 1, 2, turns_left=2),
        Mark("timed", "pin", 1, 2, until=5.0),
        Mark("later", "pin", 1, 2, until=6.0),
        Mark("decay 1", "decay", 10, 20, turns_left=1, replacement=(7,), mode=Mode.FORGET),
        Mark("decay 2", "decay", 10, 20, turns_left=2),
        Mark("never", "decay", 3, 4),
        Mark("scratch", "scratch", 15, 25),
        Mark("nothing came", "scratch", 0, 0, turns_left=1, of="tool_output", replacement=(1,)),
    ]
    assert session.end_turn(5.0) == (
        Directive(10, 20, (7,), Mode.FORGET),
        Directive(20, 25),
    )
    assert [(mark.mark_id, mark.turns_left) for mark in session.marks] == [
        ("pin 2", 1),
        ("later", None),
        ("decay 2", 1),
        ("never", None),
    ]
    assert session.end_turn(6.0) == (Directive(10, 20),)
    assert [mark.mark_id for mark in session.marks] == ["never"]
    assert session.end_turn(7.0) == ()


def test_marks_are_taken_off_by_name() -> None:
    session = session_of(9)
    session.mark(Mark("a", "decay", 1, 2, turns_left=1))
    session.mark(Mark("b", "decay", 1, 2, turns_left=1))
    assert session.unmark("b").mark_id == "b"
    with pytest.raises(MarkNotFoundError, match="no mark 'b'"):
        session.unmark("b")
    assert [mark.mark_id for mark in session.marks] == ["a"]


def test_a_session_has_only_so_many_marks() -> None:
    session = session_of(9)
    for number in range(MAX_MARKS):
        session.mark(Mark(str(number), "decay", 1, 2, turns_left=1))
    with pytest.raises(QuotaError, match=f"has {MAX_MARKS} marks"):
        session.mark(Mark("more", "decay", 1, 2, turns_left=1))
    assert len(session.marks) == MAX_MARKS

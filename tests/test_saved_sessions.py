"""Sessions in a file: what comes back, what is refused, and what a crash leaves behind."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.context import Context
from leyline.directive import Directive, Mode, apply
from leyline.errors import ConfigError
from leyline.marks import Mark, MessageSpan
from leyline.saved_sessions import restore, save
from leyline.session import Session, Transcript
from leyline.sessions import Sessions

NUM_TOKENS = 50
MODEL = "small"
ROOT = b"r" * 32


def registry(**options: Any) -> Sessions:
    return Sessions(options.pop("max_sessions", 9), 100.0, **options)


def some_session(sessions: Sessions, name: str = "s", root: bytes = ROOT) -> Session:
    """A session with everything in it."""
    session = sessions.create(name, root, 0.0)
    session.context, session.computed = Context.of(range(20), root), 15
    session.transcript = Transcript.of("what was told")
    session.messages = [MessageSpan("user", None, 2, 4), MessageSpan("tool", "call \ud800", 5, 9)]
    session.marks = [
        Mark("p", "pin", 10, 12, until=130.0),
        Mark("d", "decay", 12, 14, turns_left=2, replacement=(1, 2), mode=Mode.FORGET),
        Mark("s", "scratch", 0, 0, turns_left=1, of="reasoning"),
    ]
    directives = [Directive(3, 4, (7, 7))]
    after = apply(session.context, directives).after
    session.commit(session.context, after, directives, kept=True, heal=True)
    session.context, session.computed = after, 21
    return session


def contents(session: Session, now: float) -> dict[str, Any]:
    """All that is to come back of a session."""

    def of(state: Any) -> dict[str, Any]:
        marks = [
            (m.mark_id, m.verb, m.start, m.end, m.turns_left, m.replacement, m.mode, m.of)
            for m in state.marks
        ]
        left = [None if m.until is None else round(m.until - now, 6) for m in state.marks]
        return {
            "context": state.context,
            "transcript": state.transcript,
            "computed": state.computed,
            "healing": state.healing,
            "messages": list(state.messages),
            "marks": marks,
            "left": left,
        }

    versions = [(one.number, of(one)) for one in session.versions]
    return {
        "id": session.session_id,
        "version": session.version,
        "now": of(session),
        "was": versions,
    }


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[int, int]:
    start, end = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
    return start, end


IDS = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=4).map(tuple)


@st.composite
def marks(draw: st.DrawFn, length: int) -> Mark:
    verb: Any = draw(st.sampled_from(["pin", "decay", "scratch"]))
    until = draw(st.none() | st.floats(100.5, 1e6)) if verb == "pin" else None
    return Mark(
        draw(st.text(max_size=3)),
        verb,
        *draw(spans(length)),
        until=until,
        turns_left=draw(st.none() | st.integers(0, 9)),
        replacement=draw(IDS),
        mode=draw(st.sampled_from(Mode)),
        of=draw(st.sampled_from(["span", "reasoning", "tool_output"])),
    )


@st.composite
def histories(draw: st.DrawFn) -> Session:
    """A session that has seen some edits, in all modes."""
    name = draw(st.text(alphabet="ab\ud800é", max_size=3))
    root = draw(st.sampled_from([b"", ROOT]))
    tokens = draw(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=12))
    session = Session(name, Context.of(tokens, root))
    session.transcript = Transcript.of(draw(st.text(max_size=5)))
    for _ in range(draw(st.integers(0, 6))):
        length = len(session.context)
        session.computed = draw(st.integers(0, length))
        if draw(st.booleans()):
            session.marks.append(draw(marks(length)))
        if draw(st.booleans()):
            call = draw(st.none() | st.text(max_size=2))
            session.messages.append(
                MessageSpan(draw(st.text(max_size=2)), call, *draw(spans(length)))
            )
        start, end = draw(spans(length))
        mode = draw(st.sampled_from([Mode.AMORTIZE, Mode.FORGET]))
        directives = [Directive(start, end, (*draw(IDS), 1), mode)]
        after = apply(session.context, directives).after
        session.commit(session.context, after, directives, kept=draw(st.booleans()), heal=True)
        session.context = after
    session.computed = draw(st.integers(0, len(session.context)))
    return session


@given(st.lists(histories(), max_size=3, unique_by=lambda one: (one.context.root, one.session_id)))
def test_sessions_come_back_as_they_were(given_sessions: list[Session]) -> None:
    sessions = registry()
    for session in given_sessions:
        sessions.admit(session, 100.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sessions.json"
        assert save(path, sessions, MODEL, NUM_TOKENS, 100.0) == len(given_sessions)
        again = registry()
        assert restore(path, again, MODEL, NUM_TOKENS, 7.0) == len(given_sessions)
    for session in given_sessions:
        back = again.get(session.session_id, session.context.root)
        assert contents(back, 7.0) == contents(session, 100.0)
        assert not back.busy and back.last_used == 7.0 and back.versions.maxlen == 4
        assert not any(version.kept for version in back.versions)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "context", one.context.append([1])),
        lambda one: setattr(one, "context", one.context.exact_from(0)),
        lambda one: setattr(one, "computed", one.computed - 1),
        lambda one: setattr(one, "healing", not one.healing),
        lambda one: one.marks.pop(),
        lambda one: one.messages.pop(),
        lambda one: one.versions.pop(),
    ],
)
def test_the_comparison_notices_what_changed(change: Callable[[Session], Any]) -> None:
    session, other = some_session(registry()), some_session(registry())
    assert contents(session, 0.0) == contents(other, 0.0)
    change(other)
    assert contents(session, 0.0) != contents(other, 0.0)


def test_pins_keep_the_time_they_have_left_and_ended_ones_go(tmp_path: Path) -> None:
    sessions, again = registry(), registry()
    some_session(sessions).marks.append(Mark("over", "pin", 1, 2, until=100.0))
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 100.0)
    restore(tmp_path / "f", again, MODEL, NUM_TOKENS, 5.0)
    restored = {mark.mark_id: mark.until for mark in again.get("s", ROOT).marks}
    assert restored == {"p": 35.0, "d": None, "s": None}


def test_the_clock_is_the_engines(tmp_path: Path) -> None:
    sessions = registry()
    some_session(sessions).marks = [Mark("over", "pin", 1, 2, until=-1e9)]
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS)
    restore(tmp_path / "f", sessions_again := registry(), MODEL, NUM_TOKENS, 0.0)
    assert sessions_again.get("s", ROOT).marks == []


def test_no_text_is_in_the_file_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    sessions = registry()
    some_session(sessions)
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    assert "told" not in (tmp_path / "f").read_text("ascii")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["f"]


# -- in the middle of a turn --------------------------------------------------------------------


def saved_and_restored(tmp_path: Path, sessions: Sessions) -> Sessions:
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    again = registry()
    restore(tmp_path / "f", again, MODEL, NUM_TOKENS, 0.0)
    return again


def test_a_session_in_a_turn_is_saved_as_before_it(tmp_path: Path) -> None:
    sessions = registry()
    session = some_session(sessions)
    session.sequence_id = 7
    back = saved_and_restored(tmp_path, sessions).get("s", ROOT)
    assert contents(back, 0.0) == contents(session, 0.0) and not back.busy


def test_what_does_not_fit_is_left_out_so_that_the_rest_comes_back(tmp_path: Path) -> None:
    sessions = registry()
    session = some_session(sessions)
    session.context = session.context.prefix(9)
    back = saved_and_restored(tmp_path, sessions).get("s", ROOT)
    assert back.context == session.context and back.computed == 9
    assert [mark.mark_id for mark in back.marks] == ["s"]
    assert [message.end for message in back.messages] == [5]


def test_a_session_without_a_context_is_not_saved(tmp_path: Path) -> None:
    sessions = registry()
    sessions.create("new", b"", 0.0)
    assert save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0) == 0
    assert restore(tmp_path / "f", registry(), MODEL, NUM_TOKENS, 0.0) == 0


# -- limits -------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    sessions = registry()
    assert restore(tmp_path / "none", sessions, MODEL, NUM_TOKENS, 0.0) == 0 and len(sessions) == 0


def test_where_fewer_fit_the_last_used_come_back(tmp_path: Path) -> None:
    sessions = registry()
    for name, last_used in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        some_session(sessions, name).last_used = last_used
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    again = registry(max_sessions=2, keep_versions=0)
    assert restore(tmp_path / "f", again, MODEL, NUM_TOKENS, 0.0) == 2
    assert [session.session_id for session in again] == ["b", "c"]
    assert not again.get("b", ROOT).versions
    again = registry(max_tokens=45)  # each holds 21 and, as a version, 20
    assert restore(tmp_path / "f", again, MODEL, NUM_TOKENS, 0.0) == 1
    assert [session.session_id for session in again] == ["c"]


def test_a_resident_session_is_not_replaced(tmp_path: Path) -> None:
    sessions = registry()
    some_session(sessions)
    some_session(sessions, root=b"")
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    mine = sessions.get("s", ROOT)
    sessions.delete(sessions.get("s"))
    assert restore(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0) == 1
    assert sessions.get("s", ROOT) is mine and sessions.find("s") is not None


# -- files that cannot be had -------------------------------------------------------------------


def refused(path: Path, sessions: Sessions | None = None) -> str:
    """What is said of a file that is not restored; no session may have come of it."""
    sessions = sessions or registry()
    with pytest.raises(ConfigError) as caught:
        restore(path, sessions, MODEL, NUM_TOKENS, 0.0)
    assert len(sessions) == 0 and caught.value.param == "sessions_file"
    assert str(path) in caught.value.message and "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be written .*; name another"):
        save(tmp_path, registry(), MODEL, NUM_TOKENS, 0.0)


@pytest.mark.parametrize("folder", ["none", "file"])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"sessions file .* cannot be written \(N.* director"):
        save(tmp_path / folder / "f", registry(), MODEL, NUM_TOKENS, 0.0)


@pytest.mark.parametrize("crash", [OSError(28, "No space left"), KeyboardInterrupt(), OSError()])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_crash_while_saving_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: BaseException, where: str
) -> None:
    sessions = registry()
    some_session(sessions)
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    before = (tmp_path / "f").read_bytes()

    def fail(*_: object) -> None:
        raise crash

    some_session(sessions, "more")
    monkeypatch.setattr(os, where, fail)
    with pytest.raises((ConfigError, KeyboardInterrupt)):
        save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    monkeypatch.undo()
    assert (tmp_path / "f").read_bytes() == before and os.listdir(tmp_path) == ["f"]
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    assert restore(tmp_path / "f", registry(), MODEL, NUM_TOKENS, 0.0) == 2


# -- files that are not right -------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good file."""
    sessions = registry()
    some_session(sessions)
    save(tmp_path / "f", sessions, MODEL, NUM_TOKENS, 0.0)
    return tmp_path / "f"


def test_another_model_is_refused(saved: Path) -> None:
    for model, num_tokens in (("large", NUM_TOKENS), (MODEL, NUM_TOKENS + 1)):
        with pytest.raises(ConfigError, match=r"belongs to the model 'small' with 50 .*move it"):
            restore(saved, registry(), model, num_tokens, 0.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10**5, "7", '{"format": 1}', "9" * 9999])
def test_what_is_no_sessions_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    refused(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"\xff\xfe\xfd")
    assert "not the JSON" in refused(tmp_path / "f")


def test_a_torn_file_is_refused_wherever_it_ends(saved: Path) -> None:
    whole = saved.read_bytes()
    for end in range(0, len(whole), 7):
        saved.write_bytes(whole[:end])
        refused(saved)
    saved.write_bytes(whole)
    assert restore(saved, registry(), MODEL, NUM_TOKENS, 0.0) == 1


STATE = ("sessions", 0, "state")
MARK = (*STATE, "marks", 1)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("format",), 2, "no sessions file of format 1"),
        (("more",), 1, "it must be an object of format"),
        (("sessions",), {}, "sessions must be a list"),
        (("sessions", 0), 7, r"sessions\[0\] must be an object of session_id"),
        (("sessions", 0, "session_id"), 7, "session_id must be a text"),
        (("sessions", 0, "root"), "00", "root must be 32 bytes in hexadecimal"),
        (("sessions", 0, "root"), "G" * 64, "root must be 32 bytes"),
        (("sessions", 0, "versions"), None, "versions must be a list"),
        (("sessions", 0, "versions", 0, "version"), 1, "versions must be in the order"),
        ((*STATE, "version"), -1, "version must be an integer from 0"),
        ((*STATE, "version"), True, "version must be an integer"),
        ((*STATE, "version"), 2**60, "version must be an integer"),
        ((*STATE, "computed"), 22, "computed must be an integer from 0 to 21"),
        ((*STATE, "healing"), 1, "healing must be true or false"),
        ((*STATE, "transcript"), ["", 1, 2], "transcript must be a list of 2"),
        ((*STATE, "transcript", 1), "ab", "transcript.1. must be 32 bytes"),
        ((*STATE, "pieces", 0), [None], "must be a list of 2"),
        ((*STATE, "pieces", 0, 1), "12", "must be a list of token ids from 0 to 49"),
        ((*STATE, "pieces", 0, 1, 0), NUM_TOKENS, "must be a list of token ids"),
        ((*STATE, "pieces", 0, 1, 0), 1.0, "must be a list of token ids"),
        ((*STATE, "pieces", 1, 0), "", "must be 32 bytes"),
        ((*STATE, "messages", 0, 3), 22, "must be an integer from 0 to 21"),
        ((*STATE, "messages", 0, 2), 6, "must be an integer from 0 to 5"),
        ((*STATE, "messages", 0, 1), 6, "must be a text"),
        ((*MARK, "verb"), "keep", "verb must be one of pin, decay, scratch"),
        ((*MARK, "verb"), ["pin"], "verb must be one of"),
        ((*MARK, "mode"), "none", "mode must be one of"),
        ((*MARK, "of"), "x", "of must be one of span"),
        ((*MARK, "span"), [4, 3], "span.0. must be an integer from 0 to 3"),
        ((*MARK, "seconds_left"), float("nan"), "seconds_left must be a number"),
        ((*MARK, "seconds_left"), -1, "seconds_left must be a number"),
        ((*MARK, "seconds_left"), 10**400, "seconds_left must be a number"),
        ((*MARK, "seconds_left"), True, "seconds_left must be a number"),
        ((*MARK, "turns_left"), -1, "turns_left must be an integer"),
        ((*MARK, "replacement"), [-1], "replacement must be a list of token ids"),
    ],
)
def test_a_damaged_field_is_named(
    saved: Path, where: tuple[Any, ...], value: object, said: str
) -> None:
    document = json.loads(saved.read_text())
    place = document
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    saved.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=said):
        restore(saved, registry(), MODEL, NUM_TOKENS, 0.0)
    refused(saved)


def test_two_sessions_of_one_name_are_refused(saved: Path) -> None:
    document = json.loads(saved.read_text())
    document["sessions"] *= 2
    saved.write_text(json.dumps(document))
    assert "two sessions of one name" in refused(saved)


def test_pieces_are_made_canonical(saved: Path) -> None:
    document = json.loads(saved.read_text())
    state = document["sessions"][0]["state"]
    origin = Context.of([3], ROOT).digest().hex()  # what is carried over from there is exact here
    state["pieces"] = [[None, [3]], [None, []], [origin, [4]], [None, list(range(19))]]
    saved.write_text(json.dumps(document))
    sessions = registry()
    restore(saved, sessions, MODEL, NUM_TOKENS, 0.0)
    assert sessions.get("s", ROOT).context == Context.of([3, 4, *range(19)], ROOT)

"""Sessions in a file, so that a restart does not lose what was said in them.

What is saved is what cannot be computed again: token ids, where each piece's rows come from,
versions, marks and where messages stand. Rows are not saved: the next turn of a restored session
computes them, and says that it did. Carried rows cannot be computed at all, so a session that had
some goes on in the exact form, and its next turn says that, too.

The file is JSON in ASCII. It is replaced as a whole or not at all. It holds conversations, so only
its owner may read it. Nothing of a file that is not right to the last field is restored.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from leyline.context import Piece, canonical
from leyline.directive import Mode
from leyline.errors import ConfigError
from leyline.marks import Mark, MessageSpan, Of, Verb
from leyline.saved_fields import LARGEST, Damage, Field
from leyline.session import Session, Transcript, Version
from leyline.sessions import Sessions

FORMAT = 1


def save(
    path: str | Path,
    sessions: Sessions,
    model_name: str,
    num_tokens: int,
    now: float | None = None,
) -> int:
    """Write all sessions to a file in place of what was there; returns how many.

    A session in the middle of a turn is saved as it was before the turn, or after the last edit
    that committed in it; one that has no context yet is not saved.

    Args:
        path: The file; its folder must exist.
        sessions: What to save.
        model_name: Whose token ids they are.
        num_tokens: Ids are below it.
        now: Seconds on the engine's clock, by default its present time; pins are saved by the
            time they have left.

    Raises:
        ConfigError: If the file cannot be written; what was there before is still there.
    """
    now = time.monotonic() if now is None else now
    # The longest unused come first: if fewer fit the next time, they are those that go.
    ordered = sorted(sessions, key=lambda session: session.last_used)
    documents = [_session_fields(session, now) for session in ordered if len(session.context)]
    document = {
        "format": FORMAT,
        "model": model_name,
        "num_tokens": num_tokens,
        "sessions": documents,
    }
    try:
        _replace(Path(path), json.dumps(document, separators=(",", ":")))
    except OSError as error:
        raise _unusable(path, f"cannot be written ({_cause(error)})", "name another") from error
    return len(documents)


def restore(
    path: str | Path, sessions: Sessions, model_name: str, num_tokens: int, now: float
) -> int:
    """Bring saved sessions back, idle and as if just used; returns how many there are.

    A session of a name that is resident already is left out, as are those that went because there
    are more than may be resident. A file that does not exist is an empty one.

    Args:
        path: The file.
        sessions: Where they go; its limits apply.
        model_name: The model that is served now.
        num_tokens: Ids must be below it.
        now: Seconds on the engine's clock.

    Raises:
        ConfigError: If the file cannot be read, is damaged, or belongs to another model; no
            session has been restored.
        CapacityError: If resident sessions leave no room and are all busy.
    """
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _unusable(path, f"cannot be read ({_cause(error)})", "name another") from error
    try:
        saved = _document(text, model_name, num_tokens, now)
    except Damage as error:
        raise _unusable(path, str(error), "move it away, or name another") from error
    new = [one for one in saved if sessions.find(one.session_id, one.context.root) is None]
    for one in new:
        sessions.admit(one, now)
        sessions.fit(one)
    return sum(sessions.find(one.session_id, one.context.root) is not None for one in new)


def _replace(path: Path, text: str) -> None:
    """Put a text in a file's place, all of it or none."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _settle_folder(path.parent)


def _settle_folder(folder: Path) -> None:
    """Have a folder remember a new name even if the power goes; where folders can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _session_fields(session: Session, now: float) -> dict[str, Any]:
    """A session as JSON values."""
    present = session.snapshot(session.context, session.computed, kept=False)
    return {
        "session_id": session.session_id,
        "root": session.context.root.hex(),
        "state": _state_fields(present, now),
        "versions": [_state_fields(version, now) for version in session.versions],
    }


def _state_fields(state: Version, now: float) -> dict[str, Any]:
    """A session's present state, or one of its versions, as JSON values.

    What does not fit its context is left out: nobody could restore the file that it is in.
    """
    length = len(state.context)
    return {
        "version": state.number,
        "pieces": [
            [None if piece.origin is None else piece.origin.hex(), list(piece.tokens)]
            for piece in state.context.pieces
        ],
        "transcript": [state.transcript.length, state.transcript.digest.hex()],
        "computed": min(state.computed, length),
        "healing": state.healing,
        "messages": [
            [message.role, message.tool_call_id, message.start, message.end]
            for message in state.messages
            if message.end <= length
        ],
        "marks": [
            _mark_fields(mark, now)
            for mark in state.marks
            if mark.end <= length and not mark.ended(now)
        ],
    }


def _mark_fields(mark: Mark, now: float) -> dict[str, Any]:
    """A mark as JSON values; a clock of another process means nothing, so time left is saved."""
    return {
        "mark_id": mark.mark_id,
        "verb": mark.verb,
        "span": [mark.start, mark.end],
        "seconds_left": None if mark.until is None else min(max(0.0, mark.until - now), LARGEST),
        "turns_left": mark.turns_left,
        "replacement": list(mark.replacement),
        "mode": mark.mode.value,
        "of": mark.of,
    }


def _document(text: bytes, model_name: str, num_tokens: int, now: float) -> list[Session]:
    """All sessions of a file, or an exception that says what is wrong with it."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise Damage("is damaged: it is not the JSON of a sessions file") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Damage(f"is no sessions file of format {FORMAT}")
    _, model, size, sessions = Field(document, "").fields(
        "format", "model", "num_tokens", "sessions"
    )
    if (model.value, size.value) != (model_name, num_tokens):
        raise Damage(
            f"belongs to the model {model.value!r} with {size.value!r} token ids, and this is "
            f"{model_name!r} with {num_tokens}"
        )
    found = [_session(one, num_tokens, now) for one in sessions.items()]
    if len({(one.context.root, one.session_id) for one in found}) < len(found):
        sessions.wrong("without two sessions of one name")
    return found


def _session(field: Field, num_tokens: int, now: float) -> Session:
    """One session."""
    name, root, state, versions = field.fields("session_id", "root", "state", "versions")
    reader = _Reader(root.digest(empty=True), num_tokens, now)
    present = reader.version(state)
    earlier = [reader.version(one) for one in versions.items()]
    numbers = [version.number for version in (*earlier, present)]
    if any(left >= right for left, right in pairwise(numbers)):
        versions.wrong("in the order of their numbers, below the present one")
    return Session(
        name.text(),
        present.context,
        present.transcript,
        present.number,
        present.computed,
        last_used=now,
        healing=present.healing,
        versions=deque(earlier),
        marks=list(present.marks),
        messages=list(present.messages),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads what a session and its versions have in common.

    Attributes:
        root: The tenant's root.
        num_tokens: Ids must be below it.
        now: Seconds on the engine's clock.
    """

    root: bytes
    num_tokens: int
    now: float

    def version(self, field: Field) -> Version:
        """One state, as a version whose rows are not there."""
        number, pieces, transcript, computed, healing, messages, marks = field.fields(
            "version", "pieces", "transcript", "computed", "healing", "messages", "marks"
        )
        context = canonical([self._piece(piece) for piece in pieces.items()], self.root)
        length, digest = transcript.items(2)
        return Version(
            number.integer(0),
            context,
            Transcript(length.integer(0), digest.digest(empty=True)),
            computed.integer(0, len(context)),
            kept=False,
            messages=tuple(_message(one, len(context)) for one in messages.items()),
            marks=tuple(self._mark(one, len(context)) for one in marks.items()),
            healing=healing.flag(),
        )

    def _piece(self, field: Field) -> Piece:
        """A run of tokens and where its rows come from."""
        origin, ids = field.items(2)
        return Piece(ids.ids(self.num_tokens), None if origin.value is None else origin.digest())

    def _mark(self, field: Field, length: int) -> Mark:
        """A mark of a context of this length."""
        name, verb, span, seconds, turns, ids, mode, of = field.fields(
            "mark_id",
            "verb",
            "span",
            "seconds_left",
            "turns_left",
            "replacement",
            "mode",
            "of",
        )
        return Mark(
            name.text(),
            verb.one_of(get_args(Verb)),
            *span.span(length),
            until=None if seconds.value is None else self.now + seconds.seconds(),
            turns_left=None if turns.value is None else turns.integer(0),
            replacement=ids.ids(self.num_tokens),
            mode=Mode(mode.one_of([known.value for known in Mode])),
            of=of.one_of(get_args(Of)),
        )


def _message(field: Field, length: int) -> MessageSpan:
    """Where a message stands in a context of this length."""
    role, call, start, end = field.items(4)
    last = end.integer(0, length)
    call_id = None if call.value is None else call.text()
    return MessageSpan(role.text(), call_id, start.integer(0, last), last)


def _unusable(path: str | Path, what: str, remedy: str) -> ConfigError:
    """The refusal of a file, in one line."""
    return ConfigError(f"The sessions file {str(path)!r} {what}; {remedy}.", param="sessions_file")


def _cause(error: OSError) -> str:
    """Why the system refused."""
    return error.strerror or type(error).__name__

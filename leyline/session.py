"""One resident conversation: what the client believes, and what the model attends to.

A session's *context* is the pieces that the next turn goes on from. Its *transcript* is the text
that the client believes in: the rendering it last sent and the reply it got. A request whose
rendering extends either goes on from the context; what is new is appended. Anything else is an
edit by the client.

A session owns no slot. Its rows live in the tree like everybody's, and may be evicted. It records
no text either, only what it takes to recognise one, so that a purge has nothing to forget here
but tokens.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

from leyline.context import Context
from leyline.directive import Directive
from leyline.errors import MarkNotFoundError, QuotaError, VersionNotFoundError
from leyline.events import EditResult, SessionState
from leyline.idempotency import Answers
from leyline.marks import Mark, MessageSpan, due, follow_marks, follow_messages

KEEP_VERSIONS = 4
MAX_MARKS = 256


@dataclass(frozen=True, slots=True)
class Transcript:
    """A text that can be recognised but not read.

    Attributes:
        length: Its length in characters.
        digest: SHA-256 of its UTF-8 bytes: 32 bytes, or none for no text.
        asked: The part of it that the client sent, in front of the reply; None if that is not
            known, as in a session that was saved.
    """

    length: int = 0
    digest: bytes = b""
    asked: Transcript | None = field(default=None, compare=False)

    @classmethod
    def of(cls, text: str, asked: str | None = None) -> Transcript:
        """The transcript of a text; a lone surrogate in it is no error."""
        sent = None if asked is None else cls.of(asked)
        return cls(len(text), _digest(text), sent) if text else cls(asked=sent)

    def leads(self, rendered: str) -> bool:
        """Whether a text starts with this one; no text starts with nothing."""
        if not 0 < self.length <= len(rendered):
            return False
        return _digest(rendered[: self.length]) == self.digest


@dataclass(frozen=True, slots=True)
class Version:
    """What a session was before an edit, and can be again.

    Attributes:
        number: Its version then.
        context: What the model attended to.
        transcript: What the client believed in.
        computed: Leading positions whose rows had been computed.
        kept: Whether its rows are kept: no edit takes them in place.
        messages: Where its messages stood, and
        marks: its marks.
        healing: Whether it was on its way to the exact form.
    """

    number: int
    context: Context
    transcript: Transcript
    computed: int
    kept: bool
    messages: tuple[MessageSpan, ...]
    marks: tuple[Mark, ...] = ()
    healing: bool = False


Checkpoint = tuple[Context, Transcript, Sequence[MessageSpan]]


@dataclass(slots=True, eq=False)
class Session:
    """One conversation.

    Attributes:
        session_id: The client's name for it.
        context: What the model attends to.
        transcript: The text the client believes in.
        version: Number of edits committed so far.
        computed: Leading positions whose rows have been computed at some time.
        sequence_id: The turn or edit under way, or None.
        last_used: Seconds on the engine's clock.
        healing: Whether the exact form of the context is to take its place.
        heal_id: The sequence that computes it, or None while nobody does.
        versions: What it can go back to, oldest first; the deque's bound is how many it keeps.
        marks: Promises about spans of the context.
        messages: Where the content of each message stands in the context.
        checkpoint: Context, transcript and messages before the last turn, for a client that asks
            for that turn again; None once the context was edited.
        answers: What its requests with an idempotency key got.
        gone: Contexts that it can no longer go back to, until somebody has seen to their rows.
    """

    session_id: str
    context: Context
    transcript: Transcript = field(default_factory=Transcript)
    version: int = 0
    computed: int = 0
    sequence_id: int | None = None
    last_used: float = 0.0
    healing: bool = False
    heal_id: int | None = None
    versions: deque[Version] = field(default_factory=lambda: deque[Version](maxlen=KEEP_VERSIONS))
    marks: list[Mark] = field(default_factory=lambda: list[Mark]())
    messages: list[MessageSpan] = field(default_factory=lambda: list[MessageSpan]())
    checkpoint: Checkpoint | None = None
    answers: Answers[EditResult] = field(default_factory=lambda: Answers[EditResult]())
    gone: tuple[Context, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether a turn or an edit is under way."""
        return self.sequence_id is not None

    @property
    def state(self) -> SessionState:
        """What the context is: all exact, or with carried rows that are being healed or stay."""
        if not _grafted(self.context):
            return "exact"
        return "healing" if self.healing else "spliced"

    def known(self, context: Context) -> int:
        """Leading positions of a context whose rows this session has had at some time."""
        return min(self.computed, context.common_prefix(self.context))

    def appended(
        self, rendered: str, context_text: str
    ) -> tuple[Context, str, list[MessageSpan]] | None:
        """What a rendering goes on from and adds to it, or None if it is something else.

        Args:
            rendered: The client's full history, rendered.
            context_text: The text of the context's tokens, special tokens included.

        Returns:
            The context that the rendering extends, the text behind it, and where the messages of
            that context stand.
        """
        if self.transcript.leads(rendered):
            return self.context, rendered[self.transcript.length :], list(self.messages)
        if context_text and rendered.startswith(context_text):
            return self.context, rendered[len(context_text) :], list(self.messages)
        if self.checkpoint is not None and self.checkpoint[1].leads(rendered):
            context, transcript, messages = self.checkpoint
            return context, rendered[transcript.length :], list(messages)
        return None

    def commit(
        self,
        before: Context,
        after: Context,
        directives: Sequence[Directive],
        *,
        kept: bool,
        heal: bool,
        computed: int | None = None,
    ) -> None:
        """Note an edit: one version more, and everything that stands in the context follows.

        The caller sets the context, at once: everything else is about the new one already.

        Args:
            before: The context that was edited.
            after: The context it became.
            directives: The set, sorted, in the coordinates of `before`.
            kept: Whether the rows of `before` were left alone.
            heal: Whether the exact form is to be computed. A heal that is under way goes on with
                the new context, until nothing in it is carried over.
            computed: Leading positions of `before` with rows, where the session's own context
                does not tell.
        """
        rows = self.known(before) if computed is None else computed
        self._push(self.snapshot(before, rows, kept=kept))
        self.healing = (self.healing or heal) and _grafted(after)
        self.marks = follow_marks(self.marks, directives)
        self.messages = follow_messages(self.messages, directives)

    def heal(self, exact: Context) -> None:
        """Go on from the exact form of the context, whose rows are there now.

        So does a client that asks for the last turn again. It is no edit: the text is the same.
        """
        self.gone = (*self.gone, self.context)
        self.context, self.healing = exact, False
        if self.checkpoint is not None:
            context, transcript, messages = self.checkpoint
            self.checkpoint = (context.exact_from(0), transcript, messages)

    def revert(self, number: int) -> Version:
        """Go back to a version, which is an edit like any other: the present one can come back.

        Context, transcript, messages and healing are as they were then. A mark stays if it was
        there then and still is, at its place of then and with the time and turns it has left
        now: what was marked since is dropped, and what ended since does not come back.

        Raises:
            VersionNotFoundError: If that version is not there; nothing has changed.
        """
        version = self._version(number)
        self._push(self.snapshot(self.context, self.computed, kept=True))
        self.context, self.transcript = version.context, version.transcript
        self.computed = min(version.computed, len(version.context))
        self.healing = version.healing and _grafted(version.context)
        self.messages = list(version.messages)
        now = {mark.mark_id: mark for mark in self.marks}
        self.marks = [
            replace(mark, turns_left=now[mark.mark_id].turns_left)
            for mark in version.marks
            if mark.mark_id in now
        ]
        return version

    def end_turn(self, now: float) -> tuple[Directive, ...]:
        """Count a turn: ended pins go, and decays and scratches that are due.

        Every mark counts, also one that was made during the turn. A scratch whose span is still
        empty, because the turn had nothing of its kind, goes without a trace.

        Returns:
            What the due ones do to the context, as one set, sorted and without overlaps. It has
            not been done; the marks that are left follow when it commits.
        """
        marks = [mark.after_turn() for mark in self.marks if not mark.ended(now)]
        self.marks = [mark for mark in marks if mark.turns_left != 0]
        return due(mark for mark in marks if mark.turns_left == 0 and mark.verb != "pin")

    def mark(self, mark: Mark) -> None:
        """Add a decay or a scratch; a pin goes through `Sessions.pin`, which knows its quota.

        Raises:
            QuotaError: If the session has as many marks as it may.
        """
        if len(self.marks) >= MAX_MARKS:
            raise QuotaError(
                f"Session {self.session_id!r} has {MAX_MARKS} marks, which is as many as it may "
                "have; take one off first.",
                details={"limit": MAX_MARKS},
            )
        self.marks.append(mark)

    def unmark(self, mark_id: str) -> Mark:
        """Take a mark off before it has done its work.

        Raises:
            MarkNotFoundError: If there is no mark of that name.
        """
        for mark in self.marks:
            if mark.mark_id == mark_id:
                self.marks.remove(mark)
                return mark
        raise MarkNotFoundError(
            f"Session {self.session_id!r} has no mark {mark_id!r}; it may have done its work.",
            param="mark_id",
        )

    def drop_versions(self, where: Callable[[Context], bool]) -> int:
        """Drop each version of which `where` is true, and the checkpoint; returns how many."""
        versions = [version for version in self.versions if not where(version.context)]
        dropped = len(self.versions) - len(versions)
        self.versions = deque(versions, maxlen=self.versions.maxlen)
        if self.checkpoint is not None and where(self.checkpoint[0]):
            self.checkpoint = None
        return dropped

    def drop_marks(self, where: Callable[[Mark], bool]) -> None:
        """Drop each mark of which `where` is true, also from what the session can go back to."""
        self.marks = [mark for mark in self.marks if not where(mark)]
        versions = (
            replace(version, marks=tuple(mark for mark in version.marks if not where(mark)))
            for version in self.versions
        )
        self.versions = deque(versions, maxlen=self.versions.maxlen)

    def copy(self) -> Session:
        """The same state in a session of its own: an edit of the one never shows in the other."""
        return replace(self, versions=deque(self.versions, maxlen=self.versions.maxlen))

    def restore(self, state: Session) -> None:
        """Be what a copy remembers."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(state, entry.name))

    def snapshot(self, context: Context, computed: int, *, kept: bool) -> Version:
        """The present state as a version, with the context that it is about."""
        return Version(
            self.version,
            context,
            self.transcript,
            computed,
            kept,
            tuple(self.messages),
            tuple(self.marks),
            self.healing,
        )

    def _push(self, version: Version) -> None:
        """Make the present state a version and count one more."""
        if len(self.versions) == self.versions.maxlen:
            self.gone = (*self.gone, self.versions[0].context if self.versions else version.context)
        self.versions.append(version)
        self.version += 1
        self.checkpoint = None

    def _version(self, number: int) -> Version:
        """The version of that number."""
        for version in self.versions:
            if version.number == number:
                return version
        numbers = [version.number for version in self.versions]
        there = ", ".join(map(str, numbers)) or "none"
        raise VersionNotFoundError(
            f"Session {self.session_id!r} has no version {number} to go back to; those it keeps: "
            f"{there}.",
            param="version",
            details={"versions": numbers, "version": self.version},
        )


def _grafted(context: Context) -> bool:
    """Whether any row of a context is carried over."""
    return context.first_graft() < len(context)


def _digest(text: str) -> bytes:
    """SHA-256 of a text: 32 bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

"""From the changes that a caller asks for to a checked set of directives.

Callers point at messages, tool calls and texts; directives have positions. Positions are those of
the session's context as all edits that wait already leave it, so a set is compiled against what
the context is going to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from leyline.context import Context, Tokens
from leyline.directive import MAX_DIRECTIVES, Directive, Mode, apply
from leyline.door import Door
from leyline.errors import DirectiveError, LeylineError, VersionConflictError
from leyline.job import Job
from leyline.marks import MessageSpan, follow_messages
from leyline.pointing import Change
from leyline.session import Session
from leyline.sessions import Sessions
from leyline.spelling import Spelling
from leyline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Draft:
    """A set that fits, ready to be queued.

    Attributes:
        directives: In order of position.
        keep: Whether the context before stays a version with its rows.
        reach: Texts that are to be forgotten in the whole cache.
        version: The session's version once every edit before this one has committed.
    """

    directives: tuple[Directive, ...]
    keep: bool
    reach: tuple[bytes, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Coming:
    """What a session's context is going to be.

    Attributes:
        context: With every edit that waits carried out.
        messages: Where the messages stand in it.
        to_come: Tokens that may still be generated behind it.
        version: What the session's version will be.
    """

    context: Context
    messages: tuple[MessageSpan, ...]
    to_come: int
    version: int


def coming(session: Session, job: Job | None) -> Coming:
    """What a session's context will be when the edits that wait have been carried out."""
    if job is None:
        return Coming(session.context, tuple(session.messages), 0, session.version)
    context, messages = job.work.view.whole(), list(job.messages)
    for request in job.work.edits:
        context = apply(context, request.directives).after.append(request.append)
        if not request.own:  # the turn's messages are where its own edit leaves them already
            messages = follow_messages(messages, request.directives)
    to_come = max(0, job.work.max_tokens - len(job.work.generated))
    version = session.version + len(job.work.edits) + job.owes_version
    return Coming(context, tuple(messages), to_come, version)


class Editor:
    """Compiles changes for one engine.

    Args:
        door: Checks what fits.
        tokenizer: Texts to ids.
        sessions: Where the sources of shared spans are.
    """

    def __init__(self, door: Door, tokenizer: Tokenizer, sessions: Sessions) -> None:
        self._door = door
        self._tokenizer = tokenizer
        self._sessions = sessions

    def draft(
        self,
        session: Session,
        job: Job | None,
        changes: tuple[Change | Directive, ...],
        expected_version: int | None,
    ) -> Draft:
        """Compile a set of changes; nothing has happened yet.

        Raises:
            VersionConflictError: If the session has another version than expected.
            DirectiveError: If the set does not fit the context.
            ContextLengthError: If the context would outgrow the window.
        """
        now = coming(session, job)
        if expected_version is not None and expected_version != now.version:
            raise _conflict(session, expected_version, now.version)
        spelling = Spelling(now.context.tokens, self._tokenizer)
        compiled = [
            self._compiled(index, change, now, spelling, session.context.root)
            for index, change in enumerate(changes)
        ]
        reach = tuple(
            self._reach(change, directive, now.context.tokens)
            for change, directive in zip(changes, compiled, strict=True)
            if isinstance(change, Change) and change.scope == "cache"
        )
        root = session.context.root
        directives = self._door.directives(compiled, len(now.context), now.to_come, root)
        after = len(now.context) + sum(directive.delta for directive in directives)
        keep = not reach and self._sessions.affords_version(
            session, directives[0].start, after, context=now.context
        )
        return Draft(directives, keep, reach, now.version)

    def _compiled(
        self,
        index: int,
        change: Change | Directive,
        now: Coming,
        spelling: Spelling,
        root: bytes,
    ) -> Directive:
        """One change as a directive; what is wrong with it is told with its place in the set."""
        if not isinstance(change, Change):
            return change
        source = partial(self._source, root=root)
        try:
            return change.compile(spelling, now.messages, self._tokenizer, source)
        except LeylineError as error:
            error.param = f"directives[{index}].{error.param}" if error.param else "directives"
            raise

    def _reach(self, change: Change, directive: Directive, tokens: Tokens) -> bytes:
        """The text that a change wants forgotten in the whole cache.

        Raises:
            DirectiveError: If the change is none that forgets, or there is no text.
        """
        if change.target.match is not None:
            text = change.target.match.encode("utf-8")
        else:
            text = self._door.spelled(tokens[directive.start : directive.end])
        if directive.mode is not Mode.FORGET or not text.strip():
            raise DirectiveError(
                "scope cache removes what was computed with a text in view; it goes with mode "
                "forget and a span that is not empty.",
                param="scope",
            )
        return text.strip()

    def _source(self, session_id: str, root: bytes) -> tuple[Context, Sequence[MessageSpan]]:
        """Context and messages of a session whose rows are to be shared."""
        session = self._sessions.get(session_id, root)
        return session.context, session.messages


def listed(changes: Sequence[Change | Directive]) -> tuple[Change | Directive, ...]:
    """The changes of one call; too many are refused before any is looked for in the text.

    Raises:
        DirectiveError: If this is no list of changes, or too long a one.
    """
    if not isinstance(changes, list | tuple) or any(
        not isinstance(change, Change | Directive) for change in changes[: MAX_DIRECTIVES + 1]
    ):
        raise DirectiveError("Give a list of Change or Directive values.", param="directives")
    if len(changes) > MAX_DIRECTIVES:
        raise DirectiveError(
            f"{len(changes)} directives in one call; at most {MAX_DIRECTIVES} are allowed.",
            param="directives",
        )
    return tuple(changes)


def _conflict(session: Session, expected: int, version: int) -> VersionConflictError:
    """The refusal of an edit that was made for another version."""
    return VersionConflictError(
        f"The session has version {version}, not {expected}: it was edited since. Look at it "
        "again and send the edit that fits it now.",
        param="expected_version",
        details={"version": version},
    )

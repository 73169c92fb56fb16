"""From a client's history to the context that its next turn starts from.

A client sends its whole history every time. If that extends what the session knows, the turn goes
on from the session's context and what is new is appended. If it does not, the client has edited
its history: the new text is aligned with the context, and the difference becomes directives in
the request's mode. FORGET is ordinary exact prefix caching; AMORTIZE and HEAL carry the rows
behind each difference along, as an edit that the turn's own sequence begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from leyline.context import Context, Tokens
from leyline.directive import Directive, Mode, apply
from leyline.errors import InvalidRequestError
from leyline.marks import MessageSpan, follow_messages
from leyline.merging import merged
from leyline.rendering import PLAIN, Rendering
from leyline.rewriting import message_spans, rewrite
from leyline.session import Session, Transcript
from leyline.template import content_text
from leyline.tokenizer import Tokenizer
from leyline.trimming import RESULT_ROLES

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn starts from.

    Attributes:
        rendered: The client's history as text.
        context: The context that its sequence is queued with.
        after: What it is when the client's edit is carried out and the new text is appended: the
            prompt.
        messages: Where the content of each message stands in `after`.
        directives: The client's edit of its history, if there is one, in positions of the
            session's context.
        carried: Whether the sequence carries that edit out, keeping rows behind it; else
            `context` is `after` already.
        append: Tokens behind a carried edit.
        again_from: Where the last turn began, if the client asks for that turn once more.
        first_difference: The first position that the edit changes; None without one.
    """

    rendered: str
    context: Context
    after: Context
    messages: list[MessageSpan]
    directives: tuple[Directive, ...] = ()
    carried: bool = False
    append: Tokens = ()
    again_from: int | None = None
    first_difference: int | None = None

    def unrelated(self, length: int) -> bool:
        """Whether the history is more likely another one than an edit of the session's.

        A shortened history keeps most of what it still has, a longer one most of what there was;
        another one neither.

        Args:
            length: Tokens of the session's context.
        """
        removed = sum(directive.end - directive.start for directive in self.directives)
        return 2 * (length - removed) < min(length, len(self.after))


@dataclass(frozen=True, slots=True)
class Turns:
    """Makes turns of histories, for one engine.

    Attributes:
        tokenizer: Text to ids and back.
        min_run: Tokens in a row that are worth keeping between two edits.
        protect_first: Tokens at the head that no edit may touch.
    """

    tokenizer: Tokenizer
    min_run: int
    protect_first: int

    def fresh(self, messages: Messages, root: bytes, rendering: Rendering = PLAIN) -> Turn:
        """A history that nothing is known about; the template writes its own BOS."""
        rendered = self.tokenizer.render(messages)
        context = Context.of(self.tokenizer.encode(rendered), root)
        return Turn(rendered, context, context, self._located(messages, rendered, context, 0))

    def following(
        self,
        session: Session,
        messages: Messages,
        mode: Mode,
        rendering: Rendering = PLAIN,
    ) -> Turn:
        """The next turn of a session, whether the client edited its history or not."""
        rendered = self.tokenizer.render(messages)
        text = self.tokenizer.decode(session.context.tokens, skip_special=False)
        known = session.appended(rendered, text)
        if known is None:
            return self._rewritten(session, messages, rendered, text, mode)
        base, added, spans = known
        context = base.append(self.tokenizer.encode(added))
        new = self._located(messages[len(spans) :], added, context, len(base))
        again = None if base is session.context else len(base)
        return Turn(rendered, context, context, [*spans, *new], again_from=again)

    def _rewritten(
        self, session: Session, messages: Messages, rendered: str, text: str, mode: Mode
    ) -> Turn:
        """A history that goes on from nothing that the session has: the client edited it, or its
        template writes the last reply otherwise than it was told.
        """
        told = self._told(session, messages)
        if told is None or told == text:
            return self._edited(session, messages, rendered, mode)
        turn = self._edited(session, messages, merged(told, text, rendered), mode)
        # What is said in a message that was edited in the context is not what the client says.
        known = follow_messages(session.messages, turn.directives)
        return replace(turn, rendered=rendered, messages=[*known, *turn.messages[len(known) :]])

    def _told(self, session: Session, messages: Messages) -> str | None:
        """The text that the client was told last, if its history has all of it, unedited."""
        replies = [at for at, one in enumerate(messages) if one.get("role") == "assistant"]
        if not replies:
            return None
        last = replies[-1]
        content = content_text(
            messages[last].get("content"), separator=self.tokenizer.part_separator
        )
        try:
            told = self.tokenizer.render(messages[:last]) + (content or "")
        except InvalidRequestError:  # some templates refuse an empty conversation
            return None
        stops = (
            self.tokenizer.decode([one], skip_special=False) for one in self.tokenizer.stop_ids
        )
        texts = (told + end for end in ("", *stops))
        return next((one for one in texts if Transcript.of(one) == session.transcript), None)

    def _edited(self, session: Session, messages: Messages, rendered: str, mode: Mode) -> Turn:
        """The client changed something that the session has."""
        before = session.context
        change = rewrite(before.tokens, rendered, self.tokenizer, mode, self.min_run)
        first = change.first_difference
        # A text that only goes on behind what the context spells is no edit to be carried out.
        edits = bool(change.directives) and mode is not Mode.FORGET
        carried = edits and first >= self.protect_first
        if carried:
            after = apply(before, change.directives).after.append(change.append)
        else:
            after = before.prefix(first).append(change.new_tokens[first:])
        return Turn(
            rendered,
            before if carried else after,
            after,
            self._located(messages, rendered, after, 0),
            change.directives,
            carried,
            change.append if carried else (),
            first_difference=first,
        )

    def _located(
        self, messages: Messages, text: str, context: Context, start: int
    ) -> list[MessageSpan]:
        """Where the messages of `text` stand, whose tokens are the context's from `start` on."""
        return message_spans(messages, text, context.tokens[start:], self.tokenizer, start)


def tool_outputs(messages: Sequence[MessageSpan]) -> list[MessageSpan]:
    """The tool results that came with the last turn: those that no reply has followed yet.

    A client that edits its history may leave messages out, so that counting them tells nothing.
    """
    unanswered = takewhile(lambda span: span.role != "assistant", reversed(messages))
    new = [span for span in unanswered if span.role in RESULT_ROLES and span.start < span.end]
    return new[::-1]

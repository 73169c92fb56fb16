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
from leyline.rendering import PLAIN, Rendering, rendered
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
        continues: Whether the reply goes on with the last message, and is none of its own.
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
    continues: bool = False

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

    def fresh(
        self,
        messages: Messages,
        root: bytes,
        rendering: Rendering = PLAIN,
        *,
        located: bool = True,
        prompt: Sequence[int] | None = None,
    ) -> Turn:
        """A history that nothing is known about; the template writes its own BOS.

        Its messages need not be located if no session will ask where they stand; then `prompt`,
        what they are as tokens, is all that is needed, if it is known.
        """
        if prompt is not None and not located:
            context = Context.of(prompt, root)
            return Turn("", context, context, [], continues=rendering.continues_reply)
        text = rendered(self.tokenizer, messages, rendering)
        context = Context.of(self.tokenizer.encode(text), root)
        spans = self._located(messages, text, context, 0, rendering) if located else []
        return Turn(text, context, context, spans, continues=rendering.continues_reply)

    def following(
        self,
        session: Session,
        messages: Messages,
        mode: Mode,
        rendering: Rendering = PLAIN,
    ) -> Turn:
        """The next turn of a session, whether the client edited its history or not."""
        asked = rendered(self.tokenizer, messages, rendering)
        text = self.tokenizer.decode(session.context.tokens, skip_special=False)
        known = session.appended(asked, text)
        if known is None:
            return self._rewritten(session, messages, asked, text, mode, rendering)
        base, added, spans = known
        context = base.append(self.tokenizer.encode(added))
        new = self._located(messages[len(spans) :], added, context, len(base), rendering)
        again = None if base is session.context else len(base)
        return Turn(
            asked,
            context,
            context,
            [*spans, *new],
            again_from=again,
            continues=rendering.continues_reply,
        )

    def _rewritten(
        self,
        session: Session,
        messages: Messages,
        asked: str,
        text: str,
        mode: Mode,
        rendering: Rendering,
    ) -> Turn:
        """A history that goes on from nothing that the session has: the client edited it, or its
        template writes the last reply otherwise than it was told.
        """
        told = self._told(session, messages, rendering)
        if told is None or told == text:
            return self._edited(session, messages, asked, mode, rendering)
        turn = self._edited(session, messages, merged(told, text, asked), mode, rendering)
        # What is said in a message that was edited in the context is not what the client says.
        known = follow_messages(session.messages, turn.directives)
        return replace(turn, rendered=asked, messages=[*known, *turn.messages[len(known) :]])

    def _told(self, session: Session, messages: Messages, rendering: Rendering) -> str | None:
        """The text that the client was told last, if its history has all of it in front of the
        last reply, unedited.

        What was told of that reply is known from the message, or from the context where calls and
        reasoning in it were told apart: it spells them as the model wrote them. Where neither is
        what was told, the reply was edited in the context, and what is left of it stands for it.
        """
        replies = [at for at, one in enumerate(messages) if one.get("role") == "assistant"]
        if not replies:
            return None
        last = replies[-1]
        opening = replace(rendering, opens_reply=True, continues_reply=False)
        try:
            before = rendered(self.tokenizer, messages[:last], opening)
        except InvalidRequestError:  # some templates refuse an empty conversation
            return None
        content = content_text(
            messages[last].get("content"), separator=self.tokenizer.part_separator
        )
        stops = (
            self.tokenizer.decode([one], skip_special=False) for one in self.tokenizer.stop_ids
        )
        ends = ("", *stops)
        spelled, behind = self._spelled_reply(session)
        texts = (before + reply + end for reply in (content or "", spelled) for end in ends)
        told = next((one for one in texts if Transcript.of(one) == session.transcript), None)
        if told is None and Transcript.of(before) == session.transcript.asked:
            return before + spelled + behind
        return told

    def _spelled_reply(self, session: Session) -> tuple[str, str]:
        """The last reply as the context spells it, and what ends it there."""
        spans, tokens = session.messages, session.context.tokens
        if not spans or spans[-1].role != "assistant":
            return "", ""
        start, end = spans[-1].start, spans[-1].end
        parts = (tokens[start:end], tokens[end:])
        spelled, behind = (self.tokenizer.decode(one, skip_special=False) for one in parts)
        return spelled, behind

    def _edited(
        self, session: Session, messages: Messages, asked: str, mode: Mode, rendering: Rendering
    ) -> Turn:
        """The client changed something that the session has."""
        before = session.context
        change = rewrite(before.tokens, asked, self.tokenizer, mode, self.min_run)
        first = change.first_difference
        # A text that only goes on behind what the context spells is no edit to be carried out.
        edits = bool(change.directives) and mode is not Mode.FORGET
        carried = edits and first >= self.protect_first
        if carried:
            after = apply(before, change.directives).after.append(change.append)
        else:
            after = before.prefix(first).append(change.new_tokens[first:])
        return Turn(
            asked,
            before if carried else after,
            after,
            self._located(messages, asked, after, 0, rendering),
            change.directives,
            carried,
            change.append if carried else (),
            first_difference=first,
            continues=rendering.continues_reply,
        )

    def _located(
        self,
        messages: Messages,
        text: str,
        context: Context,
        start: int,
        rendering: Rendering,
    ) -> list[MessageSpan]:
        """Where the messages of `text` stand, whose tokens are the context's from `start` on."""
        tokens = context.tokens[start:]
        return message_spans(messages, text, tokens, self.tokenizer, start, rendering)


def tool_outputs(messages: Sequence[MessageSpan]) -> list[MessageSpan]:
    """The tool results that came with the last turn: those that no reply has followed yet.

    A client that edits its history may leave messages out, so that counting them tells nothing.
    """
    unanswered = takewhile(lambda span: span.role != "assistant", reversed(messages))
    new = [span for span in unanswered if span.role in RESULT_ROLES and span.start < span.end]
    return new[::-1]

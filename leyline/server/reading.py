"""What the events of one choice say, once the reply's markup is read."""

from __future__ import annotations

from leyline.events import Completion, Delta
from leyline.server.ask import EndReason, Over, Said
from leyline.server.parsers.pieces import CallHead, Content, Parser, Piece, Reasoning


class Plain:
    """The parser of a reply without markup: all of it is content."""

    def push(self, text: str) -> list[Piece]:
        """Whatever comes is content."""
        return [Content(text)] if text else []

    def flush(self) -> list[Piece]:
        """Nothing was held back."""
        return []


class Reading:
    """Reads one choice as it comes.

    Args:
        index: Which choice.
        parser: A fresh one, for this reply.
    """

    def __init__(self, index: int, parser: Parser) -> None:
        self._index = index
        self._parser = parser
        self._calls = 0
        self._waiting = 0
        self._reasoning_tokens = 0

    def said(self, delta: Delta) -> Said:
        """A piece of the reply."""
        pieces = self._noted(self._parser.push(delta.text), len(delta.token_ids))
        return Said(self._index, pieces, delta.token_ids, delta.logprobs)

    def ended(self, completion: Completion) -> list[Said | Over]:
        """The end of the reply, behind what was held back of it."""
        rest = self._noted(self._parser.flush(), 0)
        over = Over(self._index, self._reason(completion), completion, self._reasoning_tokens)
        return [Said(self._index, rest), over] if rest else [over]

    def _reason(self, completion: Completion) -> EndReason:
        stopped = completion.finish_reason == "stop"
        return "tool_calls" if stopped and self._calls else completion.finish_reason

    def _noted(self, pieces: list[Piece], num_tokens: int) -> tuple[Piece, ...]:
        """Count calls and reasoning tokens.

        Tokens whose text is held back are counted with the pieces that come next, and tokens that
        give pieces of two kinds with the first of them.
        """
        self._calls += sum(isinstance(piece, CallHead) for piece in pieces)
        self._waiting += num_tokens
        if pieces:
            self._reasoning_tokens += isinstance(pieces[0], Reasoning) * self._waiting
            self._waiting = 0
        return tuple(pieces)


def plain(index: int) -> Reading:
    """The reading of a reply without markup."""
    return Reading(index, Plain())

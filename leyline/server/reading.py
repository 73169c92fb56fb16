"""What the events of one choice say, once the reply's markup is read."""

from __future__ import annotations

from typing import Protocol

from leyline.events import Completion, Delta
from leyline.server.ask import EndReason, Over, Said
from leyline.server.parsers.pieces import Content, Piece


class Reader(Protocol):
    """Reads a reply and keeps account of it; see `parsers.choosing.ReplyParser`."""

    reasoning_tokens: int

    @property
    def complete(self) -> frozenset[int]:
        """The calls that were closed, by their indices."""
        ...

    def push(self, text: str, num_tokens: int = 0) -> list[Piece]:
        """Read more text, which came in so many tokens."""
        ...

    def flush(self) -> list[Piece]:
        """The reply is over."""
        ...


class Plain:
    """The reader of a reply without markup: all of it is content."""

    reasoning_tokens = 0
    complete: frozenset[int] = frozenset()

    def push(self, text: str, num_tokens: int = 0) -> list[Piece]:
        """Whatever comes is content."""
        return [Content(text)] if text else []

    def flush(self) -> list[Piece]:
        """Nothing was held back."""
        return []


class Reading:
    """Reads one choice as it comes.

    Args:
        index: Which choice.
        reader: A fresh one, for this reply.
    """

    def __init__(self, index: int, reader: Reader) -> None:
        self._index = index
        self._reader = reader

    def said(self, delta: Delta) -> Said:
        """A piece of the reply."""
        pieces = self._reader.push(delta.text, len(delta.token_ids))
        return self._told(pieces, delta)

    def ended(self, completion: Completion) -> list[Said | Over]:
        """The end of the reply, behind what was held back of it."""
        rest = self._told(self._reader.flush())
        stopped = completion.finish_reason == "stop"
        called = stopped and bool(self._reader.complete)
        reason: EndReason = "tool_calls" if called else completion.finish_reason
        over = Over(self._index, reason, completion, self._reader.reasoning_tokens)
        return [rest, over] if rest.pieces else [over]

    def _told(self, pieces: list[Piece], delta: Delta | None = None) -> Said:
        tokens, logprobs = ((), ()) if delta is None else (delta.token_ids, delta.logprobs)
        return Said(self._index, tuple(pieces), tokens, logprobs)


def plain(index: int) -> Reading:
    """The reading of a reply without markup."""
    return Reading(index, Plain())

"""The context that a set of edits leads to, in one pass.

The edits are carried out one by one from right to left, and each leaves a canonical context, whose
tail the next one carries over as grafts. Almost always that tail stays as it is but for its first
pieces, and only these are built. A later label can change in two ways: a graft meets the very
context that it was computed under, and is exact there; or it continues the graft in front of it.
Where either may be, the context is built in full, and the rest of the edits start from it.

Every graft whose origin is not known to be another one is asked at every edit. Of the origins
that the pass makes itself, which are digests of heads of the context before it, it knows the
length of the head; those of rows in the middle of a graft are no digests of a context at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from leyline.context import Context, Piece, Tokens, canonical, continues


class Change(NamedTuple):
    """Tokens `[start, end)` become exact `tokens`, or the grafts `brought` in their place."""

    start: int
    end: int
    tokens: Tokens
    brought: tuple[Piece, ...] = ()


def edited(context: Context, changes: Iterable[Change]) -> Context:
    """The context after these changes, sorted by position: one by one from right to left.

    Raises:
        ValueError: If they are not sorted, or overlap.
    """
    waiting = list(changes)
    while waiting:
        tail = _Tail(context)
        tail.carry_out(waiting.pop())
        while waiting and not tail.unsettled():
            tail.carry_out(waiting.pop())
        context = tail.whole()
    return context


class _Tail:
    """What stands behind the part of a context that no change has reached yet.

    Attributes:
        head: Tokens of the context in front of all changes so far.
        new: Exact tokens behind them.
        grafts: All that follows, the first piece last.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.head = len(context)
        self.new: Tokens = ()
        self.grafts: list[Piece] = []
        self._labelled: list[bytes] = []
        self._foreign: list[bool] = []  # Whether nobody knows that the origin is another one.
        self._deepest: int | None = None  # The first of these.
        self._lengths: dict[bytes, int] = {}  # Of heads, by digest; -1 if it is none's.
        self._joined = False

    def carry_out(self, change: Change) -> None:
        """Put one more change in front of the tail."""
        start, end, new, brought = change
        if end > self.head:
            raise ValueError("changes overlap or are not in order")
        if not brought and end - start == len(new) and self._same(start, new):
            return
        for piece in reversed(self._carried(end)):
            self._push(piece)
        for piece in reversed(brought):
            self._push(piece)
        self.head, self.new = start, () if brought else new

    def unsettled(self) -> bool:
        """Whether a graft may be exact here, or part of the piece before it."""
        if not self.grafts:
            return False
        first = self.grafts[-1]
        return self._joined or self._continued(first) or self._restored(first) or self._met()

    def whole(self) -> Context:
        """The context."""
        if self.head == len(self.context) and not self.new and not self.grafts:
            return self.context
        head = self.context.prefix(self.head).pieces
        return canonical([*head, Piece(self.new), *reversed(self.grafts)], self.context.root)

    def _carried(self, start: int) -> list[Piece]:
        """The context from `start` on up to the tail as grafts, the exact tokens included."""
        context, head = self.context, self.head
        pieces = list(context.tail(start, head))
        first = context.index(start)
        for index, piece in enumerate(pieces, first):
            assert piece.origin is not None, "a tail is of grafts"
            position = max(context.starts[index], start)
            if context.pieces[index].exact:
                self._lengths[piece.origin] = position
            elif position > context.starts[index]:
                self._lengths[piece.origin] = -1
        if self.new and pieces and context.pieces[first + len(pieces) - 1].exact:
            pieces[-1] = Piece(pieces[-1].tokens + self.new, pieces[-1].origin)
        elif self.new:
            pieces.append(Piece(self.new, context.digest(head)))
            self._lengths[context.digest(head)] = head
        return pieces

    def _push(self, piece: Piece) -> None:
        """One more graft in front."""
        assert piece.origin is not None, "a tail is of grafts"
        if self.grafts and self._may_continue(self.grafts[-1]):
            self._joined = self._joined or continues(piece, self.grafts[-1])
        if piece.origin not in self._lengths and self._deepest is None:
            self._deepest = len(self.grafts)
        self._foreign.append(piece.origin not in self._lengths)
        self._labelled.append(piece.labelled())
        self.grafts.append(piece)

    def _may_continue(self, piece: Piece) -> bool:
        """Whether an origin can be that of a row in the middle of a graft: no digest is."""
        return piece.origin is not None and self._lengths.get(piece.origin, -1) < 0

    def _continued(self, first: Piece) -> bool:
        """Whether the first graft goes on with the one in which the head ends."""
        if self.new or not self.head or not self._may_continue(first):
            return False
        index = self.context.index(self.head - 1)
        size = self.head - self.context.starts[index]
        return self.context.pieces[index].continued(size) == first.origin

    def _restored(self, first: Piece) -> bool:
        """Whether the head, the new tokens and the first graft may be as they were before.

        Only then can anything behind them stand behind a head of the context again.
        """
        context, at = self.context, self.head + len(self.new)
        index = context.index(at)
        there = index < len(context.pieces) and context.starts[index] == at
        alike = there and context.pieces[index].origin == first.origin
        known = first.origin is not None and self._lengths.get(first.origin) == at
        return (alike or known) and self._same(self.head, self.new)

    def _same(self, start: int, new: Tokens) -> bool:
        """Whether exact tokens at a position are what is there."""
        end = start + len(new)
        return self.context.tokens[start:end] == new and self.context.first_graft(start) >= end

    def _met(self) -> bool:
        """Whether a graft of unknown origin stands behind the context that it is the digest of."""
        if self._deepest is None:
            return False
        state = self.context.hashed(self.head, self.new)
        for index in range(len(self.grafts) - 1, self._deepest - 1, -1):
            if self._foreign[index] and state.digest() == self.grafts[index].origin:
                return True
            state.update(self._labelled[index])
        return False

"""How long work takes on this machine, learned from the batches that have run.

A batch that computes `n` tokens is taken to last `a + b * n`; a `Move` of `n` rows `c * n`. The
three numbers are fitted to recent batches, old ones fading out, so that they follow the machine
as it is now. Attention over a longer context costs more than over a shorter one; a fit over what
the engine really ran averages that, so an estimate is good for the kind of work it has been doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leyline.batch import Batch
from leyline.directive import Receipt

FADING = 0.98


@dataclass(slots=True)
class Line:
    """A line through points that fade: least squares, never falling below 0."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, FADING * getattr(self, name) + value)

    def fitted(self) -> tuple[float, float]:
        """Height at 0 and slope; a line through 0 where the points do not tell them apart."""
        spread = self.weight * self.xx - self.x * self.x
        if spread > 1e-6 * self.weight * self.xx:
            slope = (self.weight * self.xy - self.x * self.y) / spread
            height = (self.y - slope * self.x) / self.weight
            if slope > 0 and height >= 0:
                return height, slope
        return 0.0, self.xy / self.xx


class Rates:
    """Milliseconds for tokens computed and rows moved; None as long as nothing was measured.

    Args:
        max_batch_tokens: Tokens that one batch computes at most.

    Attributes:
        num_batches: Batches that computed or carried anything.
        num_tokens: Tokens that they computed.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self.num_batches = 0
        self.num_tokens = 0
        self._extends = Line()
        self._moves = Line()

    def note(self, batch: Batch, elapsed_ms: float) -> None:
        """Count a batch that has run, and learn from it if it was of one kind.

        One that computes and moves tells nothing about either; to score a prompt takes a time of
        its own.
        """
        self.num_batches += bool(batch)
        self.num_tokens += batch.num_tokens
        num_rows = sum(move.num_rows for move in batch.moves)
        if any(op.targets for op in batch.extends):
            return
        if batch.extends and not num_rows:
            self._extends.add(batch.num_tokens, elapsed_ms)
        elif num_rows and not batch.extends:
            self._moves.add(num_rows, elapsed_ms)

    @property
    def knows_moves(self) -> bool:
        """Whether a move was measured."""
        return self._moves.weight > 0

    def extend_ms(self, num_tokens: int) -> float | None:
        """Time to compute so many rows."""
        if not self._extends.weight:
            return None
        height, slope = self._extends.fitted()
        return -(-num_tokens // self._max_batch_tokens) * height + num_tokens * slope

    def move_ms(self, num_rows: int) -> float | None:
        """Time to carry and turn so many rows."""
        if not num_rows:
            return 0.0
        if not self.knows_moves:
            return None
        height, slope = self._moves.fitted()
        return height + num_rows * slope

    def edit_ms(self, receipts: Iterable[Receipt]) -> float | None:
        """Time for an edit: what it computes, and what it carries."""
        receipts = list(receipts)
        computed = sum(one.inserted - one.shared + one.recomputed for one in receipts)
        extend, move = self.extend_ms(computed), self.move_ms(num_moved(receipts))
        return None if extend is None or move is None else extend + move


def num_moved(receipts: Iterable[Receipt]) -> int:
    """Rows that an edit carries."""
    return sum(one.moved_in_place + one.copied + one.shared for one in receipts)

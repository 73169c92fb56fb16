"""What one forward pass needs to know about the sequences in it.

A step is ragged: the new tokens of all its sequences lie in one row of T, and each `Span` says
which of those rows belong to one sequence and where the rows it may read are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One sequence's part of a step.

    Attributes:
        query_start: First row of the step that is this sequence's.
        query_end: One past its last row.
        keys: Slots of positions `[0, start + query_end - query_start)` in order: a slice where
            they are neighbours (read as a view), else [keys] int64 (gathered). The rows of the
            step itself are among them, and already written when attention reads.
        start: Position of the first query; the others follow one by one.
    """

    query_start: int
    query_end: int
    keys: slice | Tensor
    start: int

    @property
    def num_queries(self) -> int:
        """Rows of the step that are this span's."""
        return self.query_end - self.query_start

    @property
    def num_keys(self) -> int:
        """Rows its last query reads."""
        return self.start + self.num_queries


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A ragged batch, as the model sees it.

    Attributes:
        positions: Position of every row [T] int64.
        write_slots: Slot that every row's cache entry goes to [T] int64, all distinct.
        spans: The sequences, covering the rows in order without gap.
    """

    positions: Tensor
    write_slots: Tensor
    spans: tuple[Span, ...]

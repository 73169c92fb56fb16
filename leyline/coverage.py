"""Which positions have their rows: sorted, disjoint, half-open intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Coverage:
    """An immutable set of positions, kept as intervals that neither touch nor overlap.

    Attributes:
        intervals: `(start, end)` pairs, half-open, in ascending order.
    """

    intervals: tuple[Interval, ...] = ()

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Coverage:
        """The union of any intervals; empty ones are ignored."""
        covered = cls()
        for start, end in intervals:
            covered = covered.add(start, end)
        return covered

    def __len__(self) -> int:
        return sum(end - start for start, end in self.intervals)

    def __iter__(self) -> Iterator[Interval]:
        return iter(self.intervals)

    def add(self, start: int, end: int) -> Coverage:
        """With `[start, end)`; neighbours that touch become one interval."""
        if start >= end:
            return self
        first = bisect_left(self.intervals, start, key=lambda interval: interval[1])
        last = bisect_right(self.intervals, end, key=lambda interval: interval[0])
        joined = self.intervals[first:last]
        if joined:
            start, end = min(start, joined[0][0]), max(end, joined[-1][1])
        return Coverage((*self.intervals[:first], (start, end), *self.intervals[last:]))

    def prefix(self, length: int) -> Coverage:
        """Without the positions at or after `length`."""
        return Coverage(
            tuple((start, min(end, length)) for start, end in self.intervals if start < length)
        )

    @property
    def reach(self) -> int:
        """End of the covered run that starts at position 0."""
        return self.intervals[0][1] if self.intervals and self.intervals[0][0] == 0 else 0

    def covers(self, start: int, end: int) -> bool:
        """Whether every position of `[start, end)` is in the set."""
        return start >= end or any(a <= start and end <= b for a, b in self.intervals)

    def first_gap(self, length: int) -> Interval | None:
        """The first run of missing positions below `length`, or None if there is none."""
        start = self.reach
        if start >= length:
            return None
        after = [first for first, _ in self.intervals if first > start]
        return start, min([length, *after[:1]])

    def missing(self, length: int) -> int:
        """How many positions below `length` are not in the set."""
        return length - len(self.prefix(length))

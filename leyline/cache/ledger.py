"""Who owns each slot: one count an owner, and nothing beside it.

A slot holds one token's row in every layer. Its count is the number of its owners, which are the
nodes of the radix tree and the running sequences. Free means count 0; every other figure is
derived from the counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from leyline.batch import Slots

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


class Ledger:
    """Counts the owners of `num_slots` slots.

    Args:
        num_slots: Size of the cache in tokens.
        on_free: Called with the slots whose last owner let go, before anybody can have them.
    """

    def __init__(self, num_slots: int, on_free: Callable[[Slots], None] | None = None) -> None:
        self.counts: npt.NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self.on_free = on_free

    @property
    def num_slots(self) -> int:
        """All slots, free or owned."""
        return len(self.counts)

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return self.num_slots - int(np.count_nonzero(self.counts))

    @property
    def free_slots(self) -> Slots:
        """Slots without an owner, in ascending order; rows that were evicted still lie there."""
        return np.flatnonzero(self.counts == 0).astype(np.int64)

    def copy(self) -> Ledger:
        """The same counts in a ledger of its own, which calls no `on_free`."""
        twin = Ledger(0)
        twin.counts = np.array(self.counts)
        return twin

    def alloc(self, num: int, after: int = -1) -> Slots | None:
        """Take `num` free slots, each with one owner; all of them or None.

        They are neighbours in ascending order where that can be had, so that a sequence's rows
        can be read as a slice: best right behind slot `after`, else inside the largest free run.
        """
        if num == 0:
            return NO_SLOTS
        slots = self._behind(after, num)
        if slots is None:
            slots = self._anywhere(num)
        if slots is not None:
            self.counts[slots] += 1
        return slots

    def retain(self, slots: Slots) -> None:
        """Add an owner to slots that have one already."""
        assert (self.counts[slots] > 0).all(), "a free slot was retained"
        np.add.at(self.counts, slots, 1)

    def release(self, slots: Slots) -> Slots:
        """Remove an owner from each slot; returns those that became free."""
        np.subtract.at(self.counts, slots, 1)
        assert (self.counts[slots] >= 0).all(), "a free slot was released"
        freed = slots[self.counts[slots] == 0]
        if self.on_free is not None and len(freed):
            self.on_free(freed)
        return freed

    def _behind(self, after: int, num: int) -> Slots | None:
        """The `num` slots behind `after`, if all of them are free."""
        start = after + 1
        if after < 0 or start + num > self.num_slots or self.counts[start : start + num].any():
            return None
        return np.arange(start, start + num, dtype=np.int64)

    def _anywhere(self, num: int) -> Slots | None:
        """A part of the largest free run, else the lowest free slots."""
        free = self.free_slots
        if len(free) < num:
            return None
        breaks = np.flatnonzero(np.diff(free) != 1) + 1
        edges = np.concatenate(([0], breaks, [len(free)]))
        largest = int(np.argmax(np.diff(edges)))
        run = free[edges[largest] : edges[largest + 1]]
        if len(run) < num:
            return free[:num]
        # Half way into a roomy run, so that the sequence before it can go on growing in place.
        offset = len(run) // 2 if len(run) >= 4 * num and run[0] > 0 else 0
        return run[offset : offset + num]

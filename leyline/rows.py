"""Rows of sequences: free slots for new ones, those in the tree, and all of them counted afresh."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from leyline.batch import Slots
from leyline.cache.prefix import PrefixCache
from leyline.coverage import Coverage
from leyline.sequence import Sequence


def take(prefix: PrefixCache, num: int, after: int = -1) -> Slots | None:
    """Free slots, evicting idle rows if there are not enough; None if that would not help."""
    slots = prefix.ledger.alloc(num, after)
    if slots is None and num <= prefix.ledger.num_free + prefix.evictable():
        prefix.reclaim(num)
        slots = prefix.ledger.alloc(num, after)
    return slots


def fetch_rows(sequence: Sequence, prefix: PrefixCache) -> bool:
    """Give a sequence what the tree holds of its context; it becomes an owner of those rows.

    Whoever samples computes its last row itself, so that one is never a graft, unless an edit of
    the turn's own comes first: that may need it. Whoever is to score its prompt computes all rows
    whose scores it lacks.

    Returns:
        Whether a graft was lost. It cannot be computed from the edited tokens, so that the context
        is exact from there on.
    """
    view = sequence.view
    limit = len(view.context) - (sequence.samples and not sequence.own_edit)
    limit = min(limit, len(sequence.scores)) if sequence.scoring else limit
    context = view.context.exact_from(limit)
    slots = prefix.acquire(context, limit)
    lost = context.first_graft(len(slots)) < len(context)
    if lost:
        prefix.ledger.release(slots)
        context = context.exact_from(context.first_graft(len(slots)))
        slots = prefix.acquire(context, limit)
    view.context = context
    view.coverage = Coverage.of([(0, len(slots))])
    view.table = np.array(slots)
    return lost


def file_rows(sequence: Sequence, prefix: PrefixCache) -> None:
    """File the rows that a sequence has; it stays their owner."""
    reach = sequence.view.coverage.reach
    prefix.publish(sequence.view.whole().prefix(reach), sequence.view.table[:reach])


def count_afresh(prefix: PrefixCache, running: Iterable[Sequence]) -> None:
    """Have every slot owned by exactly those who say so: nodes of the tree, and these sequences.

    Whatever was taken and is in nobody's books becomes free.
    """
    counts = np.zeros_like(prefix.ledger.counts)
    for slots in (
        *(node.slots for node in prefix.tree.nodes()),
        *(sequence.owned() for sequence in running),
    ):
        np.add.at(counts, slots, 1)
    stray = np.flatnonzero((counts == 0) & (prefix.ledger.counts > 0))
    counts[stray] = 1
    prefix.ledger.counts[:] = counts
    prefix.ledger.release(stray)

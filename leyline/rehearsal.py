"""What an edit would do, found out by doing it to a copy of the books.

A dry run is a real run without tensors: the same rows are looked up, the same slots are taken, the
same receipts are written, by the same functions. Only nothing is computed, and nothing of the
original changes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from leyline.batch import Edited
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.rows import fetch_rows, file_rows, take
from leyline.sequence import Sequence, Splice
from leyline.splice import begin, degrade, plan_move, settle


def rehearse(
    sequence: Sequence,
    prefix: PrefixCache,
    others: Iterable[Context],
    leaving: Iterable[Sequence] = (),
    after: Callable[[Edited], Iterable[Context]] | None = None,
    max_tokens: int = sys.maxsize,
) -> list[Edited]:
    """Carry out all edits that wait for a sequence, one after the other, on copies.

    The receipts are those of a real run that finds the cache as it is now. A real run that finds
    no room may wait for some, or take it from somebody else; a rehearsal does not.

    Args:
        sequence: One that runs, waits, or is not queued at all.
        prefix: The rows, and who owns them.
        others: Contexts whose rows it must not give up.
        leaving: Running sequences that file their rows and let go of them before it goes on.
        after: For an edit that has been carried out, what `others` are from then on.
        max_tokens: Tokens computed in a step at most: room is made for so many at a time.

    Returns:
        An event for each edit, in order.
    """
    prefix, told = prefix.copy(), list[Edited]()
    for other in leaving:
        file_rows(other, prefix)
        prefix.ledger.release(other.owned())
    double = _double(sequence)
    if not double.running:
        fetch_rows(double, prefix)
        double.running = True
    elif sequence.splice is not None:
        prefix.ledger.release(sequence.splice.held)
    while double.edits:
        others = list(others)
        told.append(_carry_out(double, prefix, others, max_tokens))
        others = others if after is None else after(told[-1])
    return told


def _double(sequence: Sequence) -> Sequence:
    """A sequence to rehearse with, in front of its next edit."""
    view = sequence.view
    return replace(
        sequence,
        view=replace(view, appended=list(view.appended), table=np.array(view.table)),
        generated=list(sequence.generated),
        edits=deque(sequence.edits),
        splice=None,
    )


def _carry_out(
    sequence: Sequence, prefix: PrefixCache, others: list[Context], max_tokens: int
) -> Edited:
    """One edit from its beginning to its commit."""
    splice = sequence.splice = begin(sequence, sequence.edits[0], prefix)
    there = _insert(splice, prefix, max_tokens)
    move = plan_move(splice, sequence, prefix, others) if there else None
    if move is None:
        prefix.ledger.release(splice.held)
        splice = sequence.splice = degrade(sequence, splice)
        move = plan_move(splice, sequence, prefix, others)
    assert move is not None, "a splice that keeps nothing needs no room"
    return settle(splice, move, sequence, prefix)


def _insert(splice: Splice, prefix: PrefixCache, max_tokens: int) -> bool:
    """Put all replacements into slots of their own, as if computed; False without room."""
    while new := splice.next_insert():
        done = splice.progress(new)
        slots = take(prefix, len(new.tokens[done : done + max_tokens]))
        if slots is None:
            return False
        splice.private = np.concatenate((splice.private, slots))
        splice.view.place(new.dst + done, slots)
        splice.cover(new.start + done, len(slots))
    return True

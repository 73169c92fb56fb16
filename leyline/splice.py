"""How an edit travels from its directives to its receipt.

`begin` compiles it against the rows that exist and borrows those that come from elsewhere,
`plan_move` decides which rows stay in their slots, `settle` is the commit: it swaps the sequence's
view and says what was done. All three are called by the scheduler; none of them touches another
sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from leyline.batch import Edited, Move, Slots
from leyline.cache.ledger import NO_SLOTS
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.coverage import Coverage
from leyline.directive import Directive, Edit, Run, apply
from leyline.receipts import EVICTED, NO_ROOM, Placed, receipts
from leyline.rows import file_rows, take
from leyline.sequence import EditRequest, Sequence, Splice, target_view


def begin(sequence: Sequence, request: EditRequest, prefix: PrefixCache) -> Splice:
    """Compile a request against the rows that there are right now, and borrow shared ones.

    The sequence owns the slots in the splice's `borrowed` from now on. A directive whose shared
    rows are not all there becomes an ordinary one: its tokens are computed.
    """
    whole, resident = sequence.view.whole(), sequence.view.coverage.reach
    if request.keep or any(directive.source for directive in request.directives):
        file_rows(sequence, prefix)  # what is to stay, or to be shared, must be found in the tree
    directives = [_at_hand(directive, prefix) for directive in request.directives]
    edit = apply(whole, directives).lose(resident)
    reason = EVICTED if resident < sequence.computed else None
    splice = _splice(sequence, request, edit, reason)
    for share in edit.shares:
        start, end = share.source.start, share.source.start + share.length
        slots = prefix.acquire(share.source.context, end)
        prefix.ledger.release(slots[:start])
        splice.borrowed = np.concatenate((splice.borrowed, slots[start:]))
        splice.view.place(share.dst, slots[start:])
        splice.view.coverage = splice.view.coverage.add(share.dst, share.end)
    return splice


def degrade(sequence: Sequence, splice: Splice) -> Splice:
    """The same request as an honest re-prefill; the caller releases what the splice holds."""
    again = _splice(sequence, splice.request, splice.edit.exact(), NO_ROOM)
    return replace(again, keep=splice.keep)


def _splice(sequence: Sequence, request: EditRequest, edit: Edit, reason: str | None) -> Splice:
    """A splice at its start, before any insert is computed."""
    view = target_view(edit, sequence.view, request.append)
    return Splice(request, edit, view, keep=request.keep, reason=reason)


def _at_hand(directive: Directive, prefix: PrefixCache) -> Directive:
    """The directive, without its source if not all of the rows are there."""
    source = directive.source
    if source is None:
        return directive
    shared = source.context.prefix(source.start + len(directive.replacement))
    there = prefix.resident(shared) == len(shared)
    return directive if there else replace(directive, source=None)


def turned(edit: Edit) -> tuple[Run, ...]:
    """Runs of rows whose position changes, computed and shared replacements included."""
    new = (Run(i.start, i.dst, len(i.tokens)) for i in edit.inserts)
    shared = (share.run for share in edit.shares)
    return tuple(run for run in (*edit.kept, *new, *shared) if run.delta)


def plan_move(
    splice: Splice, sequence: Sequence, prefix: PrefixCache, others: Iterable[Context]
) -> Move | None:
    """The `Move` that ends a splice, or None if rows must be copied and there is no room.

    Rows stay in their slots where the sequence's own old branch is all that holds them, unless
    the old rows are to be kept; that is given up here if there is no room for it.
    """
    others = list(others)
    if splice.keep:
        move = _move(splice, sequence, prefix, [*others, sequence.view.whole()])
        if move is not None:
            return move
        splice.keep = False
    return _move(splice, sequence, prefix, others)


def _move(
    splice: Splice, sequence: Sequence, prefix: PrefixCache, others: Iterable[Context]
) -> Move | None:
    """The move, given whose rows must be left alone."""
    runs = turned(splice.edit)
    positions, targets = _positions((r.src, r.length) for r in runs), _targets(runs)
    sources = splice.view.table[targets]
    old = sequence.view.whole()
    splice.bound = max(prefix.exclusive(old, others, owners=1), splice.edit.head)
    # A row may be computed at, or come from, any position: its owners decide.
    alone = prefix.ledger.counts[sources] == 1
    branch = prefix.tree.match(old)[splice.bound :]
    in_place = alone | (np.isin(sources, branch) & (prefix.ledger.counts[sources] == 2))
    copies = take(prefix, int(np.count_nonzero(~in_place)))
    if copies is None:
        return None
    slots = np.array(sources)
    slots[~in_place] = copies
    return Move(sequence.sequence_id, sources, slots, targets - positions)


def settle(splice: Splice, move: Move, sequence: Sequence, prefix: PrefixCache) -> Edited:
    """Commit: the sequence works on the new view, its old branch is given up where it was alone.

    Returns:
        The event, with a receipt for each directive.
    """
    old, new = sequence.view, splice.view
    placed, before = _place(splice, move), splice.edit.before
    kept = splice.keep and prefix.resident(before) >= old.coverage.reach
    prefix.give_up(before, splice.bound)
    copies = move.dst_slots[move.dst_slots != move.src_slots]
    freed = prefix.ledger.release(_surplus([old.owned(), splice.held, copies], new.owned()))
    sequence.view, sequence.splice = new, None
    sequence.computed = new.coverage.reach
    sequence.owed = min(sequence.owed, len(new) - _end(new.coverage))
    sequence.edits.popleft()
    prefix.ledger.release(sequence.uncover_last())
    if splice.request.own:
        sequence.count_own(splice.edit)
    return Edited(
        sequence.sequence_id,
        splice.request.request_id,
        receipts(splice, placed, old, freed),
        splice.edit,
        kept,
    )


def _place(splice: Splice, move: Move) -> Placed:
    """Put the moved rows into the new table; returns positions by what happened to them."""
    targets = _targets(turned(splice.edit))
    splice.view.table[targets] = move.dst_slots
    stayed = move.src_slots == move.dst_slots
    kept = np.arange(len(targets)) < sum(run.length for run in splice.edit.kept if run.delta)
    return Placed(_coverage(targets[kept & stayed]), _coverage(targets[kept & ~stayed]))


def _surplus(held: list[Slots], wanted: Slots) -> Slots:
    """Slots that are held more often than they are wanted, as often as that is so."""
    slots = np.concatenate(held)
    length = int(slots.max(initial=-1)) + 1
    extra = np.bincount(slots, minlength=length) - np.bincount(wanted, minlength=length)
    return np.repeat(np.arange(length, dtype=np.int64), extra)


def _end(coverage: Coverage) -> int:
    """One past the last covered position."""
    return coverage.intervals[-1][1] if coverage.intervals else 0


def _positions(runs: Iterable[tuple[int, int]]) -> Slots:
    """All positions of these `(start, length)` runs, in order."""
    parts = [np.arange(start, start + length, dtype=np.int64) for start, length in runs]
    return np.concatenate(parts) if parts else NO_SLOTS


def _targets(runs: Iterable[Run]) -> Slots:
    """New positions of the rows of these runs."""
    return _positions((run.dst, run.length) for run in runs)


def _coverage(positions: Slots) -> Coverage:
    """Any positions as intervals."""
    ordered = np.sort(positions)
    edges = np.flatnonzero(np.diff(ordered) != 1) + 1
    runs = np.split(ordered, edges) if len(ordered) else []
    return Coverage.of((int(run[0]), int(run[-1]) + 1) for run in runs)

"""How an edit travels from its directives to its receipt.

`begin` compiles it against the rows that exist, `plan_move` decides which rows stay in their
slots, `settle` is the commit: it swaps the sequence's view and says what was done. All three are
called by the scheduler; none of them touches another sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from leyline.batch import Edited, Move, Slots
from leyline.cache.ledger import NO_SLOTS
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.coverage import Coverage
from leyline.directive import Directive, Edit, Mode, Receipt, Run, apply
from leyline.sequence import EditRequest, Sequence, Splice, target_view

EVICTED = "rows behind the edit had been evicted and are computed again"
NO_ROOM = "there was no room to carry the rows behind the edit"
FORGOTTEN = "an edit in mode forget before it computes everything behind it again"
DEGRADED = (EVICTED, NO_ROOM)


def begin(sequence: Sequence, request: EditRequest) -> Splice:
    """Compile a request against the rows that the sequence has right now."""
    view = sequence.view
    resident = view.coverage.reach
    edit = apply(view.whole(), request.directives).lose(resident)
    reason = EVICTED if resident < sequence.computed else None
    return _splice(sequence, request, edit, reason)


def degrade(sequence: Sequence, splice: Splice) -> Splice:
    """The same request as an honest re-prefill; its private slots are the caller's to release."""
    request = EditRequest(splice.request_id, splice.directives)
    return _splice(sequence, request, splice.edit.exact(), NO_ROOM)


def _splice(sequence: Sequence, request: EditRequest, edit: Edit, reason: str | None) -> Splice:
    """A splice at its start, before any insert is computed."""
    view = target_view(edit, sequence.view)
    return Splice(request.request_id, request.directives, edit, view, reason=reason)


def turned(edit: Edit) -> tuple[Run, ...]:
    """Runs of rows whose position changes, replacements computed at an old position included."""
    new = (Run(i.start, i.dst, len(i.tokens)) for i in edit.inserts)
    return tuple(run for run in (*edit.kept, *new) if run.delta)


def plan_move(
    splice: Splice, sequence: Sequence, prefix: PrefixCache, others: Iterable[Context]
) -> Move | None:
    """The `Move` that ends a splice, or None if rows must be copied and there is no room.

    Rows stay in their slots where the sequence's own old branch is all that holds them.
    """
    runs = turned(splice.edit)
    positions, targets = _sources(runs), _targets(runs)
    sources = splice.view.table[targets]
    # An insert may stand at any old position, but its slots are private: count 1 decides.
    alone = prefix.ledger.counts[sources] == 1
    old = sequence.view.whole()
    branch = prefix.tree.match(old)[prefix.exclusive(old, others, owners=1) :]
    in_place = alone | (np.isin(sources, branch) & (prefix.ledger.counts[sources] == 2))
    copies = take(prefix, int(np.count_nonzero(~in_place)))
    if copies is None:
        return None
    slots = np.array(sources)
    slots[~in_place] = copies
    return Move(sequence.sequence_id, sources, slots, targets - positions)


def take(prefix: PrefixCache, num: int, after: int = -1) -> Slots | None:
    """Free slots, evicting idle rows if there are not enough; None if that does not help."""
    slots = prefix.ledger.alloc(num, after)
    if slots is None:
        prefix.reclaim(num)
        slots = prefix.ledger.alloc(num, after)
    return slots


def settle(
    splice: Splice, move: Move, sequence: Sequence, prefix: PrefixCache, others: Iterable[Context]
) -> Edited:
    """Commit: the sequence works on the new view, its old branch is given up where it was alone.

    Returns:
        The event, with a receipt for each directive.
    """
    old, new = sequence.view, splice.view
    how = _place(splice, move)
    before = old.whole()
    bound = prefix.exclusive(before, others, owners=1)
    prefix.give_up(before, max(bound, splice.edit.head))
    kept = new.owned()
    gone = np.setdiff1d(np.concatenate((old.owned(), splice.private)), kept)
    freed = prefix.ledger.release(gone)
    sequence.view, sequence.splice = new, None
    sequence.computed = new.coverage.reach
    spans = [old.table[d.start : min(d.end, old.coverage.reach)] for d in splice.directives]
    receipts = _receipts(splice, how, [int(np.isin(span, freed).sum()) for span in spans])
    return Edited(
        sequence.sequence_id, splice.request_id, receipts, len(before), len(splice.edit.after)
    )


def _place(splice: Splice, move: Move) -> dict[str, Coverage]:
    """Put the moved rows into the new table; returns positions by what happened to them."""
    position = _targets(turned(splice.edit))
    splice.view.table[position] = move.dst_slots
    stayed = move.src_slots == move.dst_slots
    inserts = Coverage.of((new.dst, new.end) for new in splice.edit.inserts)
    kept = Coverage.of((run.dst, run.dst + run.length) for run in splice.edit.kept)
    fresh = _members(position, inserts)
    return {
        "kept": kept,
        "moved_in_place": _coverage(position[stayed & ~fresh]),
        "copied": _coverage(position[~stayed]),
    }


def _receipts(splice: Splice, how: dict[str, Coverage], freed: list[int]) -> tuple[Receipt, ...]:
    """One receipt a directive, for the span it removed and the rows up to the next directive."""
    length = len(splice.edit.before)
    forgotten = False
    receipts: list[Receipt] = []
    for (directive, behind, delta), num_freed in zip(
        _regions(splice.directives, length), freed, strict=True
    ):
        start, end = behind
        counts = {name: _count(where, start + delta, end + delta) for name, where in how.items()}
        reason = FORGOTTEN if forgotten and directive.mode is not Mode.FORGET else splice.reason
        receipts.append(_receipt(directive, end - start, delta, counts, num_freed, reason))
        forgotten = forgotten or directive.mode is Mode.FORGET
    return tuple(receipts)


def _receipt(
    directive: Directive,
    behind: int,
    delta: int,
    counts: dict[str, int],
    freed: int,
    reason: str | None,
) -> Receipt:
    """A receipt from its counts; a reason stands only where less was kept than asked."""
    lost = directive.mode is not Mode.FORGET and reason is not None and counts["kept"] < behind
    return Receipt(
        start=directive.start,
        end=directive.end,
        mode=directive.mode,
        mode_done=Mode.FORGET if lost and not counts["kept"] else directive.mode,
        removed=directive.end - directive.start,
        inserted=len(directive.replacement),
        recomputed=behind - counts["kept"],
        freed=freed,
        delta=delta,
        reason=reason if lost else None,
        **counts,
    )


def _regions(
    directives: tuple[Directive, ...], length: int
) -> Iterator[tuple[Directive, tuple[int, int], int]]:
    """Each directive with the old positions behind it, up to the next one, and their shift."""
    delta = 0
    ends = [*(directive.start for directive in directives[1:]), length]
    for directive, end in zip(directives, ends, strict=True):
        delta += directive.delta
        yield directive, (directive.end, end), delta


def _expand(starts: Iterable[tuple[int, int]]) -> Slots:
    """All positions of these `(start, length)` runs, in order."""
    parts = [np.arange(start, start + length, dtype=np.int64) for start, length in starts]
    return np.concatenate(parts) if parts else NO_SLOTS


def _sources(runs: Iterable[Run]) -> Slots:
    """Old positions of the rows of these runs."""
    return _expand((run.src, run.length) for run in runs)


def _targets(runs: Iterable[Run]) -> Slots:
    """New positions of the rows of these runs."""
    return _expand((run.dst, run.length) for run in runs)


def _members(positions: Slots, coverage: Coverage) -> npt.NDArray[np.bool_]:
    """Which of the positions are covered."""
    inside = np.zeros(len(positions), dtype=np.bool_)
    for start, end in coverage:
        inside |= (positions >= start) & (positions < end)
    return inside


def _coverage(positions: Slots) -> Coverage:
    """Sorted positions as intervals."""
    ordered = np.sort(positions)
    edges = np.flatnonzero(np.diff(ordered) != 1) + 1
    runs = np.split(ordered, edges) if len(ordered) else []
    return Coverage.of((int(run[0]), int(run[-1]) + 1) for run in runs)


def _count(coverage: Coverage, start: int, end: int) -> int:
    """Covered positions in `[start, end)`."""
    return len(coverage.prefix(end)) - len(coverage.prefix(start))

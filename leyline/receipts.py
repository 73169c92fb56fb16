"""What an edit has done, counted for whoever asked for it.

A receipt is about one directive: the span that it removed, the tokens that it put in, and the rows
behind it up to the next directive of the set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from leyline.batch import Slots
from leyline.coverage import Coverage
from leyline.directive import Directive, Mode, Receipt
from leyline.sequence import Splice, View

EVICTED = "rows behind the edit had been evicted and are computed again"
NO_ROOM = "there was no room to carry the rows behind the edit"
SHARE_LOST = "rows of the shared span had been evicted and are computed again"
FORGOTTEN = "an edit in mode forget before it computes everything behind it again"
DEGRADED = (EVICTED, NO_ROOM, SHARE_LOST)


@dataclass(frozen=True, slots=True)
class Placed:
    """Positions of the new view to which kept rows were turned: in their slots, or into others."""

    stayed: Coverage
    copied: Coverage


@dataclass(frozen=True, slots=True)
class Region:
    """A directive, and the old positions `[start, end)` behind it, which move by `delta`."""

    directive: Directive
    start: int
    end: int
    delta: int

    def behind(self, where: Coverage) -> int:
        """How many of the rows behind the directive stand in `where` afterwards."""
        return _count(where, self.start + self.delta, self.end + self.delta)

    def inside(self, where: Coverage) -> int:
        """How many of the rows of its replacement do."""
        end = self.start + self.delta
        return _count(where, end - len(self.directive.replacement), end)


def receipts(splice: Splice, placed: Placed, old: View, freed: Slots) -> tuple[Receipt, ...]:
    """One receipt a directive.

    Args:
        splice: The edit that has just been carried out.
        placed: What became of the rows that were turned.
        old: The view before it.
        freed: Slots that became free with it.
    """
    reach, forgotten = old.coverage.reach, False
    told: list[Receipt] = []
    for region in _regions(splice.request.directives, len(old)):
        directive = region.directive
        span = old.table[directive.start : min(directive.end, reach)]
        overruled = forgotten and directive.mode is not Mode.FORGET
        reason = FORGOTTEN if overruled else splice.reason
        told.append(_receipt(splice, region, placed, int(np.isin(span, freed).sum()), reason))
        forgotten = forgotten or directive.mode is Mode.FORGET
    return tuple(told)


def _receipt(
    splice: Splice, region: Region, placed: Placed, freed: int, reason: str | None
) -> Receipt:
    """A receipt from its counts; a reason stands only where less was kept or brought than asked."""
    directive, edit, length = region.directive, splice.edit, region.end - region.start
    kept = region.behind(Coverage.of((r.dst, r.dst + r.length) for r in edit.kept))
    shared = region.inside(Coverage.of((share.dst, share.end) for share in edit.shares))
    lost = directive.mode is not Mode.FORGET and reason is not None and kept < length
    if not lost and directive.source is not None and shared < len(directive.replacement):
        lost, reason = True, SHARE_LOST if reason in (None, EVICTED) else reason
    return Receipt(
        start=directive.start,
        end=directive.end,
        mode=directive.mode,
        mode_done=Mode.FORGET if lost and not (kept or shared) else directive.mode,
        removed=directive.end - directive.start,
        inserted=len(directive.replacement),
        kept=kept,
        recomputed=length - kept,
        moved_in_place=region.behind(placed.stayed),
        copied=region.behind(placed.copied),
        freed=freed,
        delta=region.delta,
        reason=reason if lost else None,
        shared=shared,
    )


def _regions(directives: tuple[Directive, ...], length: int) -> Iterator[Region]:
    """The region of each directive, up to the next one."""
    delta = 0
    starts = [*(directive.start for directive in directives), length]
    for directive, end in zip(directives, starts[1:], strict=True):
        delta += directive.delta
        yield Region(directive, directive.end, end, delta)


def _count(coverage: Coverage, start: int, end: int) -> int:
    """Covered positions in `[start, end)`."""
    return len(coverage.prefix(end)) - len(coverage.prefix(start))

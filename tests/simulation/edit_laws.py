"""The laws of edits: what they keep, what they say about it, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from leyline.batch import Edited
from leyline.directive import Directive, Mode, Receipt
from leyline.receipts import DEGRADED, FORGOTTEN
from tests.simulation.cast import Twin
from tests.simulation.laws import labelled, learn, ledger
from tests.simulation.symbols import Row, Symbol, computed, edited, require

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass
class Before:
    """What an edit found: the rows that its sequence had."""

    births: list[int]
    rows: list[tuple[int, int, int]]
    slots: list[int]
    filed: list[int]
    length: int
    resident: int

    def __init__(self, world: World, twin: Twin) -> None:
        view = twin.work.view
        self.resident, self.length = view.coverage.reach, len(view)
        self.slots = view.table[: self.resident].tolist()
        rows = [world.machine.read(slot) for slot in self.slots]
        self.births = [row.birth for row in rows]
        self.rows = [row[:3] for row in rows]
        self.filed = world.prefix.tree.match(view.whole()).tolist()


def lost_from(world: World, twin: Twin, want: list[Symbol], have: list[Symbol]) -> int:
    """From where on a context is the exact form of what it should be; its length if nowhere."""
    require("degrade", [t for t, _ in want] == [t for t, _ in have], "the text has changed")
    pairs = enumerate(zip(want, have, strict=True))
    hole = next((index for index, (left, right) in pairs if left != right), len(want))
    exact = computed(twin.root, have[:hole], [token for token, _ in have[hole:]])
    require("degrade", have[hole:] == exact, "exact rows were replaced by grafted ones")
    return hole


def counts_as_loss(twin: Twin, hole: int) -> bool:
    """Whether a graft was lost; the last row of a sequence that samples is always computed."""
    return hole < len(twin.symbols) - twin.work.samples


def degrade_at_admission(world: World, twin: Twin) -> None:
    """A sequence whose grafts were evicted falls back to the exact form and says so."""
    twin.known = twin.work.view.context
    have = labelled(world, twin.work.view.whole())
    hole = lost_from(world, twin, twin.symbols, have)
    twin.symbols = have
    if counts_as_loss(twin, hole):
        world.num_losses += 1
        require("degrade", twin.work.degraded, "a graft was lost at admission and nobody said so")
        # Rows brought behind a gap are in nobody's reach until it is closed.
        filed = hole < max(twin.promised, twin.work.computed)
        lost = world.roomy and filed
        require("degrade", not lost, "a graft was lost although there is room")


def degrade(
    world: World, twin: Twin, event: Edited, before: Before, rows: list[Row | None]
) -> None:
    """An edit did what it says: as asked, or less and with a reason."""
    view, request = twin.work.view, twin.requests[event.request_id]
    directives = request.directives
    require("degrade", len(event.receipts) == len(directives), "a directive without a receipt")
    asked = zip(directives, event.receipts, strict=True)
    brought = [brought_by(world, directive, receipt) for directive, receipt in asked]
    want = edited(twin.root, twin.symbols, before.resident, directives, brought)
    lengths = (event.length_before, event.length_after)
    require("degrade", lengths == (len(twin.symbols), len(want)), f"lengths {lengths}")
    learn(world, event.edit.after, want)
    want += computed(twin.root, want, request.append)
    learn(world, view.context, want)
    have = labelled(world, view.whole())
    hole = lost_from(world, twin, want, have)
    twin.symbols, twin.known = have, view.context
    regions = list(regions_of(directives, before.length))
    for receipt, region in zip(event.receipts, regions, strict=True):
        receipt_is_true(world, twin, receipt, region, before, rows)
    lost = [
        r
        for r, region in zip(event.receipts, regions, strict=True)
        if lost_in(twin, region, hole, before.resident)
    ]
    if lost:
        world.num_losses += 1
        require("degrade", not world.roomy, "rows were lost although there is room")
        require("degrade", all(r.reason for r in lost), f"less was kept and nobody said so: {lost}")
        require("degrade", twin.work.degraded, "the sequence does not say that it degraded")
    if any(receipt.reason in DEGRADED for receipt in event.receipts):
        require("degrade", twin.work.degraded, "only a receipt says that less was kept")


def brought_by(world: World, directive: Directive, receipt: Receipt) -> list[Symbol] | None:
    """The symbols that a directive brought from its source; all of them or none."""
    source, num = directive.source, len(directive.replacement)
    if source is None:
        require("degrade", receipt.shared == 0, "rows were shared that nobody asked for")
        return None
    require("degrade", receipt.shared in (0, num), "a share was torn")
    require("degrade", receipt.shared or receipt.reason or not num, "a share was lost in silence")
    symbols = labelled(world, source.context)[source.start : source.start + num]
    return symbols if receipt.shared or not num else None


def kept(world: World, twin: Twin, event: Edited, before: Before) -> None:
    """A context that is kept has every row that it had, in the tree where it was."""
    asked = twin.requests[event.request_id].keep
    require("kept", asked or not event.kept, "a context was kept that nobody wanted")
    if not event.kept:
        require("kept", not (asked and world.roomy), "there was room to keep the context")
        return
    found = world.prefix.tree.match(event.edit.before).tolist()
    filed = before.filed[: before.resident]
    require("kept", found[: len(filed)] == filed, "a kept context has other slots")
    rows = [world.machine.read(slot)[:3] for slot in found[: before.resident]]
    require("kept", rows == before.rows, "a kept context has other rows")


def usage(twin: Twin, event: Edited) -> None:
    """A turn that began with an edit counts the rows that it found, and none that it computed."""
    work, edit = twin.work, event.edit
    reach = work.view.coverage.reach
    found = [run.dst + i for run in edit.kept for i in range(run.length)]
    found += [share.dst + i for share in edit.shares for i in range(share.length)]
    grafts = [range(a, b) for a, b, piece in work.view.context.spans() if not piece.exact]
    there = [position for position in found if position < reach]
    spliced = sum(position in graft for graft in grafts for position in there)
    true = (len(work.view), len(there), spliced)
    said = (work.prompt_len, work.cached, work.spliced)
    require("usage", said == true, f"usage is {said}, not {true}")


class Region(NamedTuple):
    """The rows behind a directive, up to the next one: `[start, end)` before, moved by `delta`."""

    directive: Directive
    start: int
    end: int
    delta: int
    forgotten: bool


def regions_of(directives: Sequence[Directive], length: int) -> Iterable[Region]:
    """One region a directive, in order of position."""
    delta, forgotten = 0, False
    ends = [directive.start for directive in directives[1:]] + [length]
    for directive, end in zip(directives, ends, strict=True):
        delta += len(directive.replacement) - (directive.end - directive.start)
        forgotten = forgotten or directive.mode is Mode.FORGET
        yield Region(directive, directive.end, end, delta, forgotten)


def lost_in(twin: Twin, region: Region, hole: int, resident: int) -> bool:
    """Whether rows that existed, and that a directive should have kept, stand behind the hole."""
    end = min(min(region.end, resident) + region.delta, len(twin.symbols) - twin.work.samples)
    return not region.forgotten and max(hole, region.start + region.delta) < end


def receipt_is_true(
    world: World,
    twin: Twin,
    receipt: Receipt,
    region: Region,
    before: Before,
    rows: list[Row | None],
) -> None:
    """A receipt's counts are those of the rows themselves, told apart by their births."""
    asked, table = region.directive, twin.work.view.table.tolist()
    kept = moved = copied = 0
    for old in range(region.start, min(region.end, before.resident)):
        slot = table[old + region.delta] if old + region.delta < len(table) else -1
        row = rows[slot] if slot >= 0 else None
        if row is not None and row.birth == before.births[old]:
            kept += 1
            moved += bool(region.delta) and slot == before.slots[old]
            copied += slot != before.slots[old]
    size = region.end - region.start
    span = before.slots[asked.start : asked.end]
    free = sum(world.ledger.counts[slot] == 0 for slot in span)
    lost = receipt.reason is not None and asked.mode is not Mode.FORGET
    true = Receipt(
        start=asked.start,
        end=asked.end,
        mode=asked.mode,
        mode_done=Mode.FORGET if lost and not (kept or receipt.shared) else asked.mode,
        removed=asked.end - asked.start,
        inserted=len(asked.replacement),
        kept=kept,
        recomputed=size - kept,
        moved_in_place=moved,
        copied=copied,
        freed=receipt.freed,
        delta=region.delta,
        reason=receipt.reason,
        shared=receipt.shared,
    )
    require("degrade", receipt == true, f"{receipt} is not {true}")
    require("degrade", receipt.freed <= free, f"{receipt.freed} slots freed, {free} are free")
    short = size > 0 or (asked.source is not None and asked.replacement)
    forgotten = bool(region.forgotten and asked.mode is not Mode.FORGET and short)
    said = receipt.reason == FORGOTTEN
    require("degrade", said == forgotten, f"a reason that is none: {receipt}")


def counter(world: World) -> None:
    """Every loss is counted; the counter has a reason."""
    require("degrade", world.scheduler.num_degraded >= world.num_losses, "a loss was not counted")


def atomic(world: World, twin: Twin, deed: Callable[[], object]) -> None:
    """Taking something back changes nothing but what it had asked for."""
    work = twin.work
    splice = work.splice
    private = splice.private if splice else np.empty(0, dtype=np.int64)
    borrowed = splice.borrowed if splice else np.empty(0, dtype=np.int64)
    shares = world.ledger.counts[np.unique(borrowed)]
    view, coverage, reach = work.view, work.view.coverage, work.view.coverage.reach
    running = work.sequence_id in world.scheduler.running
    state = (view.context, list(view.appended), view.table[:reach].tolist())
    deed()
    ledger(world)
    same = work.view is view and view.coverage is coverage
    after = (view.context, list(view.appended), view.table[:reach].tolist())
    require("atomic", same and state == after, "the old view has changed")
    if work.splice is not splice or world.scheduler.find(work.sequence_id) is None:
        require("atomic", not world.ledger.counts[private].any(), "private slots stayed")
        fewer = world.ledger.counts[np.unique(borrowed)] < shares
        require("atomic", fewer.all(), "borrowed slots stayed")
    if running and world.scheduler.find(work.sequence_id) is None:
        filed = world.prefix.resident(view.whole())
        require("atomic", filed >= reach, "rows of a cancelled sequence were thrown away")

"""An edit on its way from its directives to its receipt."""

from __future__ import annotations

import numpy as np
import pytest

from leyline.batch import Edited, Move, Slots
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.coverage import Coverage
from leyline.directive import Directive, Edit, Mode, Run, apply
from leyline.policy import evict
from leyline.sequence import EditRequest, Sequence, View
from leyline.splice import (
    EVICTED,
    FORGOTTEN,
    NO_ROOM,
    begin,
    degrade,
    plan_move,
    settle,
    take,
    turned,
)

TEXT = Context.of([1, 2, 3, 4, 5, 6])


def held(num_slots: int = 16, *, filed: bool = True) -> tuple[PrefixCache, Sequence]:
    """A sequence that has the rows of `TEXT`, filed in the tree or not."""
    prefix = PrefixCache(Ledger(num_slots), evict)
    slots = prefix.ledger.alloc(len(TEXT))
    assert slots is not None
    if filed:
        prefix.publish(TEXT, slots)
    view = View(TEXT, [], Coverage.of([(0, len(TEXT))]), slots)
    return prefix, Sequence(1, view, running=True, computed=len(TEXT))


def carry_out(prefix: PrefixCache, work: Sequence, *directives: Directive) -> tuple[Move, Edited]:
    """Begin, compute every insert, move and settle."""
    splice = work.splice = begin(work, EditRequest(9, directives))
    while new := splice.next_insert():
        slots = take(prefix, len(new.tokens))
        assert slots is not None
        splice.view.place(new.dst, slots)
        splice.private = np.concatenate((splice.private, slots))
        splice.view.coverage = splice.view.coverage.add(new.dst, new.end)
    move = plan_move(splice, work, prefix, ())
    assert move is not None
    return move, settle(splice, move, work, prefix, ())


def owned_by_tree(prefix: PrefixCache) -> Slots:
    return np.sort(np.concatenate([node.slots for node in prefix.tree.nodes()]))


def test_rows_of_ones_own_branch_turn_in_place() -> None:
    prefix, work = held()
    old = np.array(work.view.table)
    move, event = carry_out(prefix, work, Directive(1, 3, (9,)))
    assert move.src_slots.tolist() == move.dst_slots.tolist() == old[3:].tolist()
    assert move.delta.tolist() == [-1, -1, -1]
    (receipt,) = event.receipts
    assert (receipt.kept, receipt.moved_in_place, receipt.copied, receipt.freed) == (3, 3, 0, 2)
    assert (event.length_before, event.length_after, event.request_id) == (6, 5, 9)
    assert work.view.owned().tolist()[::2] == [old[0], old[3], old[5]] and work.computed == 5
    assert owned_by_tree(prefix).tolist() == [old[0]] and prefix.ledger.num_free == 16 - 5


def test_rows_that_are_not_filed_turn_in_place_too() -> None:
    prefix, work = held(filed=False)
    move, event = carry_out(prefix, work, Directive(1, 2))
    assert move.src_slots.tolist() == move.dst_slots.tolist()
    assert event.receipts[0].moved_in_place == 4 and prefix.ledger.num_free == 16 - 5


def test_rows_that_somebody_else_holds_are_copied() -> None:
    prefix, work = held()
    other = prefix.acquire(TEXT)
    move, event = carry_out(prefix, work, Directive(1, 3))
    assert not set(move.dst_slots) & set(move.src_slots)
    assert (event.receipts[0].copied, event.receipts[0].freed) == (3, 0)
    assert (prefix.ledger.counts[other] >= 2).all() and prefix.resident(TEXT) == 6


def test_a_tail_is_copied_as_far_as_others_hold_it() -> None:
    prefix, work = held()
    prefix.acquire(TEXT, 4)
    _, event = carry_out(prefix, work, Directive(1, 2))
    assert (event.receipts[0].copied, event.receipts[0].moved_in_place) == (2, 2)
    assert prefix.resident(TEXT) == 4


def test_a_same_length_replacement_moves_nothing_and_is_a_graft_all_the_same() -> None:
    prefix, work = held()
    move, event = carry_out(prefix, work, Directive(1, 2, (9,)))
    assert move.num_rows == 0 and event.receipts[0].kept == 4
    assert work.grafted and prefix.resident(work.view.context) == prefix.resident(TEXT) == 1


def test_a_replacement_computed_at_another_position_moves_as_well() -> None:
    prefix, work = held()
    move, event = carry_out(prefix, work, Directive(0, 1), Directive(3, 4, (9, 9, 9)))
    assert move.delta.tolist() == [-1, -1, 1, 1, -1, -1, -1]
    assert [receipt.moved_in_place for receipt in event.receipts] == [2, 2]
    assert [receipt.delta for receipt in event.receipts] == [-1, 1]


def test_without_room_for_copies_there_is_no_move() -> None:
    prefix, work = held(8)
    prefix.acquire(TEXT)
    splice = begin(work, EditRequest(9, (Directive(0, 1),)))
    assert plan_move(splice, work, prefix, ()) is None
    again = degrade(work, splice)
    assert again.reason == NO_ROOM and again.edit.kept == () and again.edit.after.pieces[0].exact
    assert again.request_id == 9 and len(again.private) == 0


def test_idle_rows_are_evicted_for_those_who_ask() -> None:
    prefix, work = held(8)
    prefix.ledger.release(work.view.table)
    slots = take(prefix, 5)
    assert slots is not None and len(slots) == 5 and prefix.resident(TEXT) == 3
    assert take(prefix, 9) is None


def test_turned_rows_are_those_whose_position_changes() -> None:
    edit = apply(TEXT, [Directive(1, 2, (9,)), Directive(3, 4)])
    assert [run.delta for run in turned(edit)] == [-1]
    assert turned(apply(TEXT, [Directive(1, 2, (9,))])) == ()


def test_missing_rows_are_evicted_only_if_they_existed() -> None:
    _, work = held()
    work.view.coverage = Coverage.of([(0, 4)])
    assert begin(work, EditRequest(9, (Directive(1, 2),))).reason == EVICTED
    work.computed = 4
    splice = begin(work, EditRequest(9, (Directive(1, 2),)))
    assert splice.reason is None and splice.edit.kept[-1] == Run(2, 1, 2)


def test_an_edit_without_rows_keeps_nothing() -> None:
    _, work = held()
    work.view.coverage = Coverage()
    edit = begin(work, EditRequest(9, (Directive(1, 2),))).edit
    assert edit == Edit(TEXT, Context.of([1, 3, 4, 5, 6]), (), ())


# -- receipts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
def test_a_receipt_says_what_was_done(mode: Mode) -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, Directive(1, 3, (9,), mode))
    (receipt,) = event.receipts
    assert (receipt.start, receipt.end, receipt.mode, receipt.mode_done) == (1, 3, mode, mode)
    assert (receipt.removed, receipt.inserted, receipt.delta) == (2, 1, -1)
    kept = 3 if mode is Mode.AMORTIZE else 0
    assert (receipt.kept, receipt.recomputed, receipt.reason) == (kept, 3 - kept, None)


def test_an_amortize_behind_a_forget_says_that_it_was_overruled() -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, Directive(0, 1, (), Mode.FORGET), Directive(3, 4))
    left, right = event.receipts
    assert (left.mode_done, left.reason) == (Mode.FORGET, None)
    assert (right.mode_done, right.kept, right.reason) == (Mode.FORGET, 0, FORGOTTEN)


def test_an_amortize_with_nothing_behind_it_was_done_as_asked() -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, Directive(2, 6, (9,)))
    (receipt,) = event.receipts
    assert (receipt.mode_done, receipt.kept, receipt.reason) == (Mode.AMORTIZE, 0, None)
    assert receipt.freed == 4


def test_each_receipt_counts_up_to_the_next_directive() -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, Directive(1, 2), Directive(4, 4, (9, 9)))
    assert [(r.kept, r.delta, r.freed) for r in event.receipts] == [(2, -1, 1), (2, 1, 0)]

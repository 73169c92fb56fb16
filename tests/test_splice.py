"""An edit on its way from its directives to its receipt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leyline.batch import Edited, Move, Slots
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.coverage import Coverage
from leyline.directive import Directive, Edit, Mode, Run, Source, apply
from leyline.policy import evict
from leyline.receipts import EVICTED, FORGOTTEN, NO_ROOM, SHARE_LOST
from leyline.rows import take
from leyline.sampling import SamplingParams
from leyline.sequence import EditRequest, Sequence, View
from leyline.splice import begin, degrade, plan_move, settle, turned

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


def carry_out(
    prefix: PrefixCache, work: Sequence, *directives: Directive, **request: Any
) -> tuple[Move, Edited]:
    """Begin, compute every insert, move and settle."""
    work.edits.append(EditRequest(9, directives, **request))
    splice = work.splice = begin(work, work.edits[0], prefix)
    while new := splice.next_insert():
        slots = take(prefix, len(new.tokens))
        assert slots is not None
        splice.view.place(new.dst, slots)
        splice.private = np.concatenate((splice.private, slots))
        splice.view.coverage = splice.view.coverage.add(new.dst, new.end)
    move = plan_move(splice, work, prefix, ())
    assert move is not None
    return move, settle(splice, move, work, prefix)


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
    splice = begin(work, EditRequest(9, (Directive(0, 1),)), prefix)
    assert plan_move(splice, work, prefix, ()) is None
    again = degrade(work, splice)
    assert again.reason == NO_ROOM and again.edit.kept == () and again.edit.after.pieces[0].exact
    assert again.request.request_id == 9 and len(again.private) == 0


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
    prefix, work = held()
    work.view.coverage = Coverage.of([(0, 4)])
    assert begin(work, EditRequest(9, (Directive(1, 2),)), prefix).reason == EVICTED
    work.computed = 4
    splice = begin(work, EditRequest(9, (Directive(1, 2),)), prefix)
    assert splice.reason is None and splice.edit.kept[-1] == Run(2, 1, 2)


def test_an_edit_without_rows_keeps_nothing() -> None:
    prefix, work = held()
    work.view.coverage = Coverage()
    edit = begin(work, EditRequest(9, (Directive(1, 2),)), prefix).edit
    assert edit == Edit(TEXT, Context.of([1, 3, 4, 5, 6]), (), ())


# -- receipts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
def test_a_receipt_says_what_was_done(mode: Mode) -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, Directive(1, 3, (9,), mode))
    (receipt,) = event.receipts
    assert (receipt.start, receipt.end, receipt.mode, receipt.mode_done) == (1, 3, mode, mode)
    assert (receipt.removed, receipt.inserted, receipt.delta) == (2, 1, -1)
    kept = 0 if mode is Mode.FORGET else 3
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


# -- shared rows ----------------------------------------------------------------------------------

OTHER = Context.of([7, 8, 9, 10])


def file_other(prefix: PrefixCache, context: Context = OTHER) -> Slots:
    """Leave another context's rows in the tree."""
    slots = take(prefix, len(context))
    assert slots is not None
    prefix.publish(context, slots)
    prefix.ledger.release(slots)
    return slots


def share(start: int, end: int, first: int, *tokens: int) -> Directive:
    return Directive(start, end, tokens, source=Source(OTHER, first))


def test_shared_rows_are_copied_and_turned() -> None:
    prefix, work = held()
    other = file_other(prefix)
    move, event = carry_out(prefix, work, share(3, 4, 1, 8, 9))
    assert move.src_slots[-2:].tolist() == other[1:3].tolist()
    assert move.delta.tolist() == [1, 1, 2, 2]
    assert not set(move.dst_slots[-2:].tolist()) & set(other.tolist())
    (receipt,) = event.receipts
    assert (receipt.inserted, receipt.shared, receipt.kept, receipt.reason) == (2, 2, 2, None)
    assert (receipt.moved_in_place, receipt.copied) == (2, 0)
    assert work.view.whole().tokens == (1, 2, 3, 8, 9, 5, 6) and work.view.missing == 0
    assert prefix.ledger.counts[other].tolist() == [1, 1, 1, 1]


def test_shared_rows_that_stand_where_they_stood_stay_in_their_slots() -> None:
    prefix, work = held()
    other = file_other(prefix)
    move, event = carry_out(prefix, work, share(1, 3, 1, 8, 9))
    assert move.num_rows == 0 and event.receipts[0].shared == 2
    assert work.view.table[1:3].tolist() == other[1:3].tolist()
    assert prefix.ledger.counts[other].tolist() == [1, 2, 2, 1]
    prefix.ledger.release(work.view.owned())
    assert prefix.ledger.counts[other].tolist() == [1, 1, 1, 1]


def test_one_span_may_be_shared_twice() -> None:
    prefix, work = held()
    other = file_other(prefix)
    move, event = carry_out(prefix, work, share(1, 1, 1, 8), share(3, 3, 1, 8))
    assert [receipt.shared for receipt in event.receipts] == [1, 1]
    assert work.view.table[1] == other[1] != work.view.table[4]
    assert move.src_slots[-1] == other[1] and prefix.ledger.counts[other[1]] == 2


def test_a_context_may_share_with_itself() -> None:
    """Its own rows then have an owner more, and stay; those behind them are copied."""
    prefix, work = held()
    old = np.array(work.view.table)
    itself = Directive(2, 2, (3, 4), source=Source(TEXT, 2))
    _, event = carry_out(prefix, work, itself)
    assert work.view.whole().tokens == (1, 2, 3, 4, 3, 4, 5, 6)
    assert work.view.table[:4].tolist() == old[:4].tolist()
    (receipt,) = event.receipts
    assert (receipt.shared, receipt.kept, receipt.copied, receipt.moved_in_place) == (2, 4, 2, 2)
    assert (prefix.ledger.counts[work.view.owned()] <= 2).all()


def test_a_span_put_back_with_its_own_rows_changes_nothing() -> None:
    prefix, work = held()
    counts, old = np.array(prefix.ledger.counts), np.array(work.view.table)
    move, _ = carry_out(prefix, work, Directive(2, 4, (3, 4), source=Source(TEXT, 2)))
    assert move.num_rows == 0 and work.view.whole() == TEXT
    assert work.view.table.tolist() == old.tolist()
    prefix.ledger.retain(old[4:])  # what the old branch gave up
    assert prefix.ledger.counts.tolist() == counts.tolist()


def test_shared_rows_that_are_gone_are_computed_and_said_to_be() -> None:
    prefix, work = held()
    file_other(prefix, OTHER.prefix(2))
    before = np.array(prefix.ledger.counts)
    splice = begin(work, EditRequest(9, (share(3, 4, 1, 8, 9),)), prefix)
    assert len(splice.borrowed) == 0 and prefix.ledger.counts.tolist() == before.tolist()
    move, event = carry_out(prefix, work, share(3, 4, 1, 8, 9))
    (receipt,) = event.receipts
    assert (receipt.shared, receipt.inserted, receipt.kept) == (0, 2, 2)
    assert (receipt.mode_done, receipt.reason) == (Mode.AMORTIZE, SHARE_LOST)
    assert work.view.missing == 0 and move.num_rows == 2


def test_a_lost_share_with_nothing_behind_it_is_a_plain_computation() -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, share(3, 6, 1, 8, 9))
    (receipt,) = event.receipts
    assert (receipt.mode_done, receipt.reason) == (Mode.FORGET, SHARE_LOST)


def test_each_receipt_says_why_its_own_rows_are_not_there() -> None:
    prefix, work = held()
    file_other(prefix)
    work.view.coverage = Coverage.of([(0, 4)])
    lost = Directive(2, 2, (5,), source=Source(Context.of([5]), 0))
    _, event = carry_out(prefix, work, Directive(0, 1), lost, share(5, 6, 1, 8))
    assert [receipt.reason for receipt in event.receipts] == [None, EVICTED, None]
    assert [receipt.shared for receipt in event.receipts] == [0, 0, 1]
    assert work.view.coverage == Coverage.of([(0, 4), (5, 6)])


def test_a_forget_in_front_is_why_shared_rows_are_computed() -> None:
    prefix, work = held()
    file_other(prefix)
    _, event = carry_out(prefix, work, Directive(1, 2, (), Mode.FORGET), share(6, 6, 1, 8))
    assert (event.receipts[1].shared, event.receipts[1].reason) == (0, FORGOTTEN)


def test_without_room_for_copies_shared_rows_are_computed() -> None:
    prefix, work = held(10)
    file_other(prefix)
    prefix.acquire(OTHER)
    splice = work.splice = begin(work, EditRequest(9, (share(6, 6, 1, 8),)), prefix)
    assert plan_move(splice, work, prefix, ()) is None
    prefix.ledger.release(splice.held)
    work.edits.append(splice.request)
    again = work.splice = degrade(work, splice)
    move = plan_move(again, work, prefix, ())
    assert move is not None
    (receipt,) = settle(again, move, work, prefix).receipts
    assert (receipt.shared, receipt.mode_done, receipt.reason) == (0, Mode.FORGET, NO_ROOM)


def test_a_share_behind_the_last_row_leaves_a_gap_that_is_owed() -> None:
    prefix, work = held()
    file_other(prefix)
    work.view.coverage, work.computed, work.owed = Coverage.of([(0, 5)]), 5, 1
    _, event = carry_out(prefix, work, share(6, 6, 1, 8, 9))
    assert work.view.coverage.first_gap(8) == (5, 6) and work.owed == 0
    assert event.receipts[0].reason is None and not work.idle


# -- kept versions --------------------------------------------------------------------------------


@pytest.mark.parametrize("filed", [True, False])
def test_a_context_that_is_kept_keeps_every_row(filed: bool) -> None:
    prefix, work = held(filed=filed)
    old = np.array(work.view.table)
    move, event = carry_out(prefix, work, Directive(1, 3, (9,)), keep=True)
    assert event.kept and event.receipts[0].copied == 3
    assert not set(move.dst_slots.tolist()) & set(old.tolist())
    assert prefix.tree.match(TEXT).tolist() == old.tolist()
    assert prefix.ledger.counts[old].tolist() == [2, 1, 1, 1, 1, 1]


def test_a_context_is_kept_no_longer_if_there_is_no_room_for_it() -> None:
    prefix, work = held(8)
    _, event = carry_out(prefix, work, Directive(1, 3), keep=True)
    (receipt,) = event.receipts
    assert not event.kept and (receipt.moved_in_place, receipt.copied, receipt.reason) == (
        3,
        0,
        None,
    )
    assert prefix.resident(TEXT) == 1


def test_a_reprefill_keeps_the_context_for_nothing() -> None:
    prefix, work = held(8)
    splice = begin(work, EditRequest(9, (Directive(1, 3),), keep=True), prefix)
    again = work.splice = degrade(work, splice)
    work.edits.append(again.request)
    move = plan_move(again, work, prefix, ())
    assert move is not None and settle(again, move, work, prefix).kept
    assert prefix.resident(TEXT) == 6


def test_an_edit_without_the_wish_keeps_nothing() -> None:
    prefix, work = held()
    assert not carry_out(prefix, work, Directive(1, 3))[1].kept


# -- a turn's own edit ----------------------------------------------------------------------------


def test_what_follows_an_edit_is_an_ordinary_gap() -> None:
    prefix, work = held()
    _, event = carry_out(prefix, work, Directive(1, 3), append=(7, 7))
    assert work.view.whole().tokens == (1, 4, 5, 6, 7, 7) and work.view.missing == 2
    assert event.length_after == 4 and work.cached is None


def test_a_turn_counts_what_its_own_edit_found() -> None:
    prefix, work = held()
    file_other(prefix)
    work.sampling = SamplingParams()
    directives = Directive(1, 2, (9, 9)), share(4, 4, 1, 8)
    _, event = carry_out(prefix, work, *directives, own=True, append=(7,))
    assert len(event.edit.inserts) == 1
    assert (work.prompt_len, work.cached, work.spliced) == (9, 6, 5)
    assert work.view.coverage == Coverage.of([(0, 8)])


def test_a_turn_that_only_cuts_computes_its_last_row_itself() -> None:
    prefix, work = held()
    work.sampling, work.max_tokens = SamplingParams(), 1
    carry_out(prefix, work, Directive(1, 2), own=True)
    assert (work.prompt_len, work.cached, work.spliced, work.computed) == (5, 4, 3, 4)


def test_planned_slots_that_were_not_computed_can_be_taken_back() -> None:
    prefix, work = held()
    splice = begin(work, EditRequest(9, (Directive(1, 2, (9, 9, 9)),)), prefix)
    slots = take(prefix, 3)
    assert slots is not None
    splice.private = slots
    splice.cover(1, 1)
    splice.take_back()
    assert splice.private.tolist() == splice.held.tolist() == slots[:1].tolist()


def test_a_view_owns_the_slots_of_covered_positions_only() -> None:
    slots = np.arange(10, 16)
    view = View(TEXT, [], Coverage.of([(0, 2), (4, 6)]), slots)
    assert view.owned().tolist() == view.owned_from(0).tolist() == [10, 11, 14, 15]
    assert view.owned_from(1).tolist() == [11, 14, 15] and view.owned_from(3).tolist() == [14, 15]

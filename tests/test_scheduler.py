"""The scheduler step by step: what is planned, what lands, and what is given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leyline.batch import Batch, Broken, Edited, Ended, Sampled, Slots
from leyline.context import Context
from leyline.directive import Directive, Mode, Source
from leyline.policy import DEFAULT, PATIENCE
from leyline.receipts import EVICTED, NO_ROOM, SHARE_LOST
from leyline.scheduler import nobody
from leyline.sequence import Sequence, View
from tests.bench import Bench, edits

# -- turns ----------------------------------------------------------------------------------------


def test_a_turn_is_prefilled_and_decoded_to_its_limit() -> None:
    bench = Bench()
    work = bench.turn(Context.of([1, 2, 1]), max_tokens=2)
    assert bench.step() == [Sampled(1, 0)]
    assert bench.step(2) == [Sampled(1, 2), Ended(1, "length")]
    assert work.generated == [0, 2] and not bench.scheduler.has_work
    assert bench.prefix.resident(Context.of([1, 2, 1, 0, 2])) == 4  # the last one was never run


def test_a_stop_token_ends_a_turn() -> None:
    bench = Bench()
    bench.turn(Context.of([1, 2]))
    assert bench.step(3) == [Sampled(1, 3), Ended(1, "stop")]


def test_a_long_prompt_is_computed_in_chunks_and_samples_once() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.turn(Context.of([1] * 10), max_tokens=1)
    sizes = []
    while bench.scheduler.has_work:
        batch = bench.plan()
        sizes.append((batch.num_tokens, batch.extends[0].sample))
        bench.land(batch)
    assert sizes == [(4, False), (4, False), (2, True)]


def test_decodes_come_first_and_all_share_one_budget() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.turn(Context.of([1, 2]))
    bench.step()
    bench.turn(Context.of([2] * 9))
    bench.turn(Context.of([0] * 2))
    batch = bench.plan()
    assert [(op.sequence_id, len(op.tokens)) for op in batch.extends] == [(1, 1), (2, 3)]
    bench.land(batch)
    batch = bench.plan()
    assert [(op.sequence_id, len(op.tokens)) for op in batch.extends] == [(1, 1), (2, 3)]


def test_a_budget_of_one_serves_the_decode_and_nobody_else() -> None:
    bench = Bench(max_batch_tokens=1)
    bench.turn(Context.of([1]))
    bench.turn(Context.of([2]))
    for _ in range(2):
        batch = bench.plan()
        assert [op.sequence_id for op in batch.extends] == [1]
        bench.land(batch)


def test_at_most_so_many_run_at_once() -> None:
    bench = Bench(max_sequences=1)
    bench.turn(Context.of([1]), 1)
    bench.turn(Context.of([2]), 1)
    bench.step()
    assert list(bench.scheduler.running) == [] and len(bench.scheduler.waiting) == 1
    assert bench.drain() == [Sampled(2, 0), Ended(2, "length")]


def test_a_cached_prompt_still_computes_its_last_row() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1)
    work = bench.turn(context)
    (op,) = bench.plan().extends
    assert (op.start, op.tokens, op.sample) == (2, (1,), True)
    assert work.cached == 2 and work.prompt_len == 3 and bench.ledger.counts[op.table[2]] == 1


def test_nobody_keeps_anything_by_default() -> None:
    assert nobody(1) == ()


# -- edits ----------------------------------------------------------------------------------------


def test_the_edit_of_an_idle_session_turns_its_tail_in_place() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    bench.edit(context, Directive(1, 3, (0,)), computed=5)
    assert [op.tokens for op in bench.plan().extends] == [(0,)]
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    work = bench.edit(context, Directive(1, 3, (0,)), computed=5)
    (event,) = edits(bench.drain())
    (receipt,) = event.receipts
    assert (receipt.kept, receipt.moved_in_place, receipt.copied, receipt.freed) == (2, 2, 0, 2)
    assert (receipt.delta, receipt.reason, work.degraded) == (-1, None, False)
    assert bench.prefix.resident(work.view.whole()) == 4 and bench.prefix.resident(context) == 1


def test_rows_that_another_session_needs_are_copied() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    bench.keep = (context,)
    work = bench.edit(context, Directive(1, 3, (0,)), computed=5)
    (receipt,) = edits(bench.drain())[0].receipts
    assert (receipt.moved_in_place, receipt.copied, receipt.freed) == (0, 2, 0)
    assert bench.prefix.resident(context) == 5 and bench.prefix.resident(work.view.whole()) == 4


def test_an_edit_lands_between_two_tokens_of_a_turn() -> None:
    bench = Bench()
    work = bench.turn(Context.of([1, 2, 1, 2]), max_tokens=3)
    bench.step(1)
    bench.ask(work, Directive(0, 1))
    events = bench.drain(2)
    assert [type(event) for event in events] == [Edited, Sampled, Sampled, Ended]
    assert work.view.whole().tokens == (2, 1, 2, 1, 2, 2)


def test_edits_move_in_the_step_in_which_others_decode() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    bench.turn(Context.of([2, 2]), max_tokens=9)
    bench.step()
    bench.edit(context, Directive(1, 2), computed=5)
    batch = bench.plan()
    assert len(batch.moves) == len(batch.extends) == 1


def test_cutting_the_end_of_a_turn_makes_its_last_row_exact() -> None:
    """The last row is computed anew, so its label must not say that it was carried.

    Found by the simulation: the row was published as part of the graft (provenance).
    """
    bench = Bench()
    work = bench.turn(Context.of([1, 2, 1, 2]), max_tokens=3)
    bench.step(1)
    bench.ask(work, Directive(0, 1), Directive(4, 5))
    bench.step()
    assert work.view.whole().tokens == (2, 1, 2)
    assert [piece.exact for piece in work.view.context.pieces] == [False, True]
    assert work.view.missing == 1 and work.computed == 2
    bench.ask(work, Directive(0, 1))
    assert all(event.receipts[0].reason is None for event in edits(bench.drain()))
    assert not work.degraded and bench.scheduler.num_degraded == 0


def test_a_turn_that_ends_in_a_graft_computes_its_last_row_without_degrading() -> None:
    bench = Bench()
    edited = bench.edit(bench.file(1, 2, 1, 2), Directive(0, 1), computed=4)
    bench.drain()
    work = bench.turn(edited.view.whole())
    bench.plan()
    assert (work.cached, work.spliced, work.degraded) == (2, 2, False)


# -- degrading ------------------------------------------------------------------------------------


def test_a_tail_that_was_evicted_is_said_to_be() -> None:
    """The receipt always said so; usage and the counter did not (simulation, degrade)."""
    bench = Bench(8)
    context = bench.file(1, 2, 1, 2, 0, 1)
    bench.prefix.reclaim(5)
    work = bench.edit(context, Directive(1, 2), computed=6)
    (receipt,) = edits(bench.drain())[0].receipts
    assert (receipt.kept, receipt.recomputed, receipt.reason) == (1, 3, EVICTED)
    assert receipt.mode_done is Mode.AMORTIZE
    assert work.degraded and bench.scheduler.num_degraded == 1


def test_a_splice_without_room_becomes_a_reprefill_and_is_said_to() -> None:
    bench = Bench(6)
    context = bench.file(1, 2, 1, 2, 0, 1)
    work = bench.edit(context, Directive(1, 2, (0,)), computed=6)
    (receipt,) = edits(bench.drain())[0].receipts
    assert (receipt.kept, receipt.mode_done, receipt.reason) == (0, Mode.FORGET, NO_ROOM)
    assert work.degraded and bench.scheduler.num_degraded == 1
    assert work.view.context == Context.of([1, 0, 1, 2, 0, 1])


def test_a_splice_that_cannot_copy_degrades_too() -> None:
    bench = Bench(6)
    context = bench.file(1, 2, 1, 2, 0, 1)
    bench.keep = (context,)
    work = bench.edit(context, Directive(1, 2), computed=6)
    bench.drain()
    assert work.degraded and bench.scheduler.num_degraded == 1


def test_a_splice_waits_for_its_patience_before_it_degrades() -> None:
    bench = Bench(10)
    bench.scheduler.policy = replace(DEFAULT, degrade=lambda _, waited: waited > 2)
    context = bench.file(1, 2, 1, 2, 0)
    bench.keep = (context,)
    bench.turn(Context.of([2, 2, 2]), max_tokens=3)
    work = bench.edit(context, Directive(0, 1), computed=5)
    for _ in range(2):
        assert not edits(bench.step()) and work.splice is not None and not work.splice.reason
    bench.step()
    assert work.splice is not None and work.splice.reason == NO_ROOM
    assert edits(bench.step()) and work.degraded
    assert not DEFAULT.degrade(2, PATIENCE - 1) and DEFAULT.degrade(2, PATIENCE)
    assert DEFAULT.degrade(1, 0)


def test_rows_that_a_preempted_turn_lost_no_longer_count_as_cached() -> None:
    bench = Bench()
    edited = bench.edit(bench.file(1, 2, 1, 2), Directive(1, 2), computed=4)
    bench.drain()
    work = bench.turn(edited.view.whole().append([2]), max_tokens=4)
    bench.step(1)
    assert (work.cached, work.spliced) == (3, 2)
    bench.scheduler._preempt(work)
    bench.prefix.reclaim(bench.ledger.num_slots - 2)
    bench.plan()
    assert work.degraded and (work.cached, work.spliced) == (2, 1) and work.prompt_len == 4


def test_a_lost_graft_is_computed_exactly_and_is_said_to_be() -> None:
    bench = Bench()
    edited = bench.edit(bench.file(1, 2, 1, 2), Directive(1, 2), computed=4)
    bench.drain()
    context = edited.view.whole()
    bench.prefix.reclaim(bench.ledger.num_slots - 2)
    work = bench.turn(context.append([2]))
    bench.plan()
    assert work.degraded and bench.scheduler.num_degraded == 1
    assert (work.cached, work.spliced) == (2, 1)
    assert [len(piece.tokens) for piece in work.view.context.pieces] == [1, 1, 2]


# -- taking back ----------------------------------------------------------------------------------


def test_a_cancelled_edit_leaves_the_turn_as_it_was() -> None:
    bench = Bench(max_batch_tokens=2)
    work = bench.turn(Context.of([1, 2]), max_tokens=2)
    bench.step(1)
    request = bench.ask(work, Directive(0, 1, (0, 0, 0, 0)))
    later = bench.ask(work, Directive(0, 1, (2,)))
    bench.step()
    assert work.splice is not None and len(work.splice.private) == 2
    assert bench.scheduler.cancel_edit(99, later) == []
    assert bench.scheduler.cancel_edit(work.sequence_id, request) == [request, later]
    assert work.splice is None and not work.edits
    assert bench.scheduler.cancel_edit(work.sequence_id, later) == []
    assert bench.drain(2) == [Sampled(1, 2), Ended(1, "length")]
    assert work.view.whole().tokens == (1, 2, 1, 2)


def test_a_finished_sequence_files_its_rows() -> None:
    bench = Bench(max_batch_tokens=2)
    bench.turn(context := Context.of([1, 2, 1, 2]))
    bench.step()
    assert bench.scheduler.finish(1) is not None and bench.scheduler.finish(1) is None
    assert bench.prefix.resident(context) == 2 and not bench.scheduler.has_work


def test_a_waiting_sequence_is_finished_without_a_trace() -> None:
    bench = Bench()
    work = bench.turn(Context.of([1]))
    assert bench.scheduler.find(1) is work and bench.scheduler.finish(1) is work
    assert not bench.scheduler.has_work and bench.ledger.num_free == 32


def test_a_batch_that_fails_ends_its_sequences_and_no_other() -> None:
    bench = Bench(max_batch_tokens=3)
    bench.turn(Context.of([1, 2]), max_tokens=3)
    bench.step()
    bench.turn(Context.of([2, 2, 2, 2, 2]))
    bench.turn(Context.of([0, 1]))
    assert bench.scheduler.fail(bench.plan()) == [1, 2]
    assert [sequence.sequence_id for sequence in bench.scheduler.waiting] == [3]
    assert bench.ledger.num_free == 32 - 2  # what the first had published


def test_a_failed_insert_gives_its_private_slots_back_once() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1)
    bench.edit(context, Directive(1, 2, (0, 0)), computed=3)
    assert bench.scheduler.fail(bench.plan()) == [2]
    assert bench.ledger.num_free == 32 - 3 and bench.prefix.resident(context) == 3


def test_a_failed_move_takes_only_the_rows_it_may_have_turned() -> None:
    """The head was never touched; it may hold grafts, which nobody could compute again."""
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    bench.edit(context, Directive(3, 4), computed=5)
    batch = bench.plan()
    assert batch.moves and bench.scheduler.fail(batch) == [2]
    assert bench.prefix.resident(context) == 3
    assert bench.ledger.num_free == 32 - 3


def test_a_failed_copy_gives_its_slots_back_and_keeps_the_old_rows() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    bench.keep = (context,)
    bench.edit(context, Directive(3, 4), computed=5)
    bench.scheduler.fail(bench.plan())
    assert bench.prefix.resident(context) == 5 and bench.ledger.num_free == 32 - 5


# -- pressure -------------------------------------------------------------------------------------


def test_a_later_arrival_is_preempted_and_goes_on_where_it_was() -> None:
    bench = Bench(8)
    first = bench.turn(Context.of([1, 1, 1]), max_tokens=5)
    second = bench.turn(Context.of([2, 2, 2]), max_tokens=4)
    events = bench.drain(1)
    assert bench.scheduler.num_preempted > 0
    assert first.generated == [1] * 5 and second.generated == [1] * 4
    assert sum(isinstance(event, Ended) for event in events) == 2
    assert second.view.whole().tokens == (2, 2, 2, 1, 1, 1, 1)


def test_the_one_that_loses_nothing_is_preempted_first() -> None:
    plain, grafted = (Sequence(n, View(Context.of([1, 2]))) for n in (1, 2))
    grafted.view.context = Context((), b"").append([1]).append([2])
    assert DEFAULT.victim([plain, grafted]) is grafted
    grafted.view.context = Context(Context.of([5, 1, 2]).tail(1))
    assert grafted.grafted and DEFAULT.victim([plain, grafted]) is plain


def test_who_does_not_fit_waits_unless_nobody_runs() -> None:
    bench = Bench(6)
    bench.turn(Context.of([1, 1, 1]), max_tokens=2)
    bench.step()
    bench.turn(Context.of([2, 2, 2, 2]))
    bench.step()
    assert not bench.scheduler.running.get(2)
    assert [e for e in bench.drain(3) if isinstance(e, Ended)] == [Ended(2, "stop")]


def test_what_can_never_fit_plans_nothing_and_breaks_nothing() -> None:
    bench = Bench(4)
    bench.turn(Context.of([1] * 6))
    assert not bench.plan() and bench.scheduler.has_work
    assert bench.scheduler.finish(1) is not None and bench.ledger.num_free == 4


def test_an_edit_on_a_preempted_sequence_starts_again() -> None:
    bench = Bench(9)
    bench.turn(Context.of([1, 1]), max_tokens=7)
    bench.step(1)
    work = bench.turn(Context.of([2, 2, 2]), max_tokens=4)
    bench.step(1)
    bench.ask(work, Directive(0, 1, (0,)))
    events = bench.drain(1)
    assert len(edits(events)) == 1 and work.view.whole().tokens[:3] == (0, 2, 2)


@pytest.mark.parametrize("after", range(8))
def test_a_caller_may_hang_up_at_any_point(after: int) -> None:
    bench = Bench(max_batch_tokens=2)
    work = bench.turn(Context.of([1, 2, 1, 2]), max_tokens=5)
    bench.ask(work, Directive(0, 1, (0, 2, 0)))
    for _ in range(after):
        bench.step()
    bench.scheduler.finish(work.sequence_id)
    owned = sum(len(node.slots) for node in bench.prefix.tree.nodes())
    assert bench.ledger.num_free + owned == 32 == 32 - np.count_nonzero(bench.ledger.counts > 1)


# -- the background -------------------------------------------------------------------------------


def ids(batch: Batch) -> list[int]:
    return [op.sequence_id for op in (*batch.moves, *batch.extends)]


def test_the_background_waits_until_nobody_else_runs_or_waits() -> None:
    bench = Bench(max_batch_tokens=2, max_sequences=1)
    heal = bench.add(Context.of([1] * 6), background=True)
    first = bench.turn(Context.of([2, 2]), max_tokens=2)
    second = bench.turn(Context.of([0, 0]), max_tokens=1)
    assert list(bench.scheduler.waiting) == [first, second, heal]
    planned: list[int] = []
    while bench.scheduler.has_work:
        planned += ids(batch := bench.plan())
        bench.land(batch)
    assert planned == [2, 2, 3, 1, 1, 1]


def test_the_background_yields_within_a_step_and_loses_nothing() -> None:
    bench = Bench(max_batch_tokens=2)
    heals = [bench.add(Context.of([token] * 6), background=True) for token in (1, 2)]
    bench.step()
    turn = bench.turn(Context.of([2, 2, 2]), max_tokens=2)
    assert ids(bench.plan()) == [turn.sequence_id] and heals[0].computed == 2
    assert list(bench.scheduler.waiting) == heals and not any(heal.running for heal in heals)
    assert bench.scheduler.num_preempted == 0
    bench = Bench(max_batch_tokens=2)
    heal = bench.add(Context.of([1] * 6), background=True)
    bench.step()
    turn = bench.turn(Context.of([2, 2, 2]), max_tokens=2)
    bench.step()
    assert bench.prefix.resident(heal.view.context) == 2 and heal.computed == 2
    assert bench.drain()[-1] == Ended(heal.sequence_id, "edited")
    assert heal.cached == 0 and bench.machine.births == 6 + 4


def test_a_turn_that_makes_room_goes_back_in_front_of_the_background() -> None:
    bench = Bench()
    turn = bench.turn(Context.of([1, 1]))
    bench.step()
    heal = bench.add(Context.of([2]), background=True)
    bench.scheduler._preempt(turn)
    assert list(bench.scheduler.waiting) == [turn, heal]
    assert bench.scheduler.foreground and not Bench().scheduler.foreground


# -- a turn's own edit ----------------------------------------------------------------------------


def own_turn(bench: Bench, context: Context, *directives: Directive) -> Sequence:
    return bench.turn(
        context,
        requests=[(directives, {"own": True, "append": (2, 2)})],
        computed=bench.prefix.resident(context),
    )


def test_a_turn_may_begin_with_an_edit_of_its_own() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    work = own_turn(bench, context, Directive(1, 2, (0,)))
    events = bench.drain(3)
    assert [type(event) for event in events] == [Edited, Sampled, Ended]
    (receipt,) = edits(events)[0].receipts
    assert (receipt.kept, receipt.recomputed, receipt.reason) == (3, 0, None)
    assert (work.prompt_len, work.cached, work.spliced, work.degraded) == (7, 4, 3, False)
    assert work.view.whole().tokens == (1, 0, 1, 2, 0, 2, 2, 3)


def test_without_its_own_edit_a_turn_computes_its_last_row_again() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1)
    work = own_turn(bench, context, Directive(1, 1, (0, 0)))
    bench.plan()
    assert work.view.missing == 0
    assert bench.scheduler.cancel_edit(work.sequence_id, work.edits[0].request_id) == [2]
    assert work.view.missing == 1 and bench.drain(3)[-1] == Ended(2, "stop")


def test_a_version_is_kept_and_can_be_gone_back_to() -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    slots = bench.prefix.tree.match(context).tolist()
    rows = bench.rows(context)
    work = bench.edit(context, Directive(1, 3), computed=5, keep=True)
    (event,) = edits(bench.drain())
    assert event.kept and event.edit.after == work.view.whole()
    assert bench.prefix.tree.match(context).tolist() == slots and bench.rows(context) == rows


# -- shared rows ----------------------------------------------------------------------------------


def shared(context: Context, first: int, last: int, at: int) -> Directive:
    return Directive(at, at, context.tokens[first:last], source=Source(context, first))


def test_a_document_is_brought_behind_a_reply_whose_last_row_is_missing() -> None:
    bench = Bench()
    other = bench.file(1, 2, 1, 2, 0)
    context = bench.file(2, 2, 2).append([1])
    work = bench.edit(context, shared(other, 1, 4, 4), computed=3, owed=1)
    (receipt,) = edits(bench.drain())[0].receipts
    assert (receipt.shared, receipt.reason, work.degraded) == (3, None, False)
    assert bench.prefix.resident(work.view.whole()) == 7
    assert bench.rows(work.view.whole())[4:] == [
        row._replace(position=row.position + 3) for row in bench.rows(other)[1:4]
    ]


def test_a_turn_samples_from_shared_rows_at_its_end() -> None:
    bench = Bench()
    other = bench.file(1, 2, 1, 2, 0)
    work = bench.turn(Context.of([2, 2]), max_tokens=2)
    bench.step()
    bench.ask(work, shared(other, 0, 3, 3))
    bench.drain()
    assert work.view.whole().tokens == (2, 2, 0, 1, 2, 1, 0) and not work.degraded
    assert [piece.exact for piece in work.view.whole().pieces] == [True, False, True]


def test_rows_that_are_gone_by_then_are_computed_and_said_to_be() -> None:
    bench = Bench()
    other = bench.file(1, 2, 1, 2, 0)
    context = bench.file(2, 2, 2)
    bench.prefix.reclaim(bench.ledger.num_slots - 5)
    work = bench.edit(context, shared(other, 1, 4, 1), computed=3)
    (receipt,) = edits(bench.drain())[0].receipts
    assert (receipt.shared, receipt.reason) == (0, SHARE_LOST)
    assert work.degraded and bench.scheduler.num_degraded == 1


@pytest.mark.parametrize("how", ["cancel", "finish", "preempt", "degrade", "fail"])
def test_borrowed_slots_are_given_back_however_an_edit_ends(how: str) -> None:
    bench = Bench(max_batch_tokens=1)
    other = bench.file(1, 2, 1, 2, 0)
    work = bench.turn(Context.of([2, 2, 2]))
    for _ in range(4):
        bench.step()
    request = bench.ask(work, shared(other, 0, 2, 1), Directive(2, 2, (0, 0)))
    batch = bench.plan()
    assert work.splice is not None and len(work.splice.borrowed) == 2
    if how == "fail":
        bench.scheduler.fail(batch)
    else:
        bench.land(batch)
        bench.check()
    if how == "cancel":
        bench.scheduler.cancel_edit(work.sequence_id, request)
    if how == "finish":
        bench.scheduler.finish(work.sequence_id)
    if how == "preempt":
        bench.scheduler._preempt(work)
    if how == "degrade":
        bench.scheduler._wait(work, work.splice)
    bench.check()
    assert (bench.ledger.counts[bench.prefix.tree.match(other)] == 1).all()
    bench.drain()


# -- rows in doubt --------------------------------------------------------------------------------


def test_rows_in_doubt_are_computed_again_and_never_filed() -> None:
    bench = Bench()
    works = [bench.turn(Context.of([token] * 3)) for token in (1, 2, 0)]
    bench.step()
    queued = bench.turn(Context.of([1, 1]), max_tokens=1)
    bench.prefix.clear()
    doubted = bench.scheduler.displace(lambda context: context if 1 in context.tokens else None)
    assert doubted == [queued.sequence_id, works[0].sequence_id]
    assert list(bench.scheduler.waiting) == [works[0], queued] and not works[0].degraded
    assert bench.prefix.resident(Context.of([1] * 3)) == 0 and bench.scheduler.num_preempted == 1
    bench.check()
    bench.drain()
    assert works[0].view.whole().tokens == (1, 1, 1, 0, 0, 0, 0)


def test_those_in_doubt_wait_in_order_of_arrival() -> None:
    bench = Bench()
    works = [bench.turn(Context.of([token] * 3)) for token in (1, 2, 0)]
    heal = bench.add(Context.of([1] * 5), background=True)
    bench.step()
    assert bench.scheduler.displace(lambda context: context) == [4, 3, 2, 1]
    assert list(bench.scheduler.waiting) == [*works, heal]


def test_who_goes_on_from_another_context_has_degraded() -> None:
    bench = Bench()
    edited = bench.edit(bench.file(1, 2, 1, 2), Directive(0, 1), computed=4)
    bench.drain()
    running = bench.turn(edited.view.whole().append([2]))
    bench.step()
    waiting = bench.edit(edited.view.whole(), Directive(0, 1), computed=3)
    bench.scheduler.displace(lambda context: context.exact_from(0))
    assert running.degraded and waiting.degraded and bench.scheduler.num_degraded == 2
    assert running.view.context == Context.of([2, 1, 2, 2, 0])
    bench.drain()


def test_an_edit_whose_rows_are_in_doubt_begins_anew() -> None:
    bench = Bench(max_batch_tokens=1)
    other = bench.file(1, 1, 1)
    context = bench.file(2, 0, 2)
    work = bench.edit(context, Directive(0, 0, (2, 2)), shared(other, 0, 2, 1), computed=3)
    bench.step()
    assert work.splice is not None and len(work.splice.held) == 3
    assert bench.scheduler.displace(lambda c: c if 1 in c.tokens else None) == [work.sequence_id]
    assert work.splice is None and work.running and work.edits
    bench.check()
    bench.drain()
    assert work.view.whole().tokens == (2, 2, 2, 1, 1, 0, 2)


# -- steps that break -----------------------------------------------------------------------------


def broken_policy(*_: object) -> Any:
    raise RuntimeError("no taste")


@pytest.mark.parametrize("name", ["admit", "victim", "evict", "degrade"])
def test_a_policy_that_raises_costs_one_sequence_at_a_time(name: str) -> None:
    bench = Bench(8, max_batch_tokens=4)
    bench.keep = (bench.file(1, 1, 1, 1),)
    edit = bench.edit(bench.keep[0], Directive(0, 1, (0, 0)), computed=4)
    turns = [bench.turn(Context.of([token] * 3), max_tokens=3) for token in (1, 2)]
    works = [edit, edit, *turns]
    policy = replace(DEFAULT, admit=lambda *_: True)
    bench.scheduler.policy = replace(policy, **{name: broken_policy})
    bench.prefix.evict = bench.scheduler.policy.evict
    num_ended = 0
    for _ in range(100):
        if not bench.scheduler.has_work:
            break
        try:
            batch = bench.plan()
        except RuntimeError:
            (number,) = bench.scheduler.abandon()
            assert works[number - 1] not in bench.scheduler.unfinished()
            num_ended += 1
        else:
            bench.land(batch)
        bench.check()
    assert not bench.scheduler.has_work and num_ended
    assert bench.scheduler.abandon() == []


def test_a_plan_that_raises_takes_back_what_it_had_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_batch_tokens=4)
    context = bench.file(1, 2, 1)
    work = bench.edit(context, Directive(1, 2, (0, 0, 0)), computed=3)
    late = bench.turn(Context.of([2, 2]))
    with monkeypatch.context() as patch:
        patch.setattr(bench.scheduler, "_fits", lambda s: s is work or broken_policy())
        with pytest.raises(RuntimeError):
            bench.plan()
    assert work.splice is not None and len(work.splice.private) == 3
    assert bench.scheduler.abandon() == [late.sequence_id]
    assert len(work.splice.private) == 0 and bench.ledger.num_free == 32 - 3
    assert edits(bench.drain()) and work.view.whole().tokens == (1, 0, 0, 0, 1)


def test_a_result_that_cannot_land_ends_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    context = bench.file(1, 2, 1, 2, 0)
    edited = bench.edit(context, Directive(1, 2), computed=5)
    other = bench.turn(Context.of([2, 2]), max_tokens=2)
    batch = bench.plan()
    with monkeypatch.context() as patch:
        patch.setattr("leyline.scheduler.settle", broken_policy)
        events = bench.land(batch)
    assert [type(event) for event in events] == [Broken, Sampled]
    assert isinstance(events[0], Broken) and str(events[0].error) == "no taste"
    assert bench.scheduler.find(edited.sequence_id) is None
    assert bench.prefix.resident(context) == 1  # the others have been turned
    bench.check()
    assert bench.drain()[-1] == Ended(other.sequence_id, "length")


def test_an_end_that_cannot_land_is_an_end_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    work = bench.add(Context.of([1, 2]))
    batch = bench.plan()

    def late(slots: Slots) -> Slots:
        patch.undo()
        bench.ledger.release(slots)
        return broken_policy()

    with monkeypatch.context() as patch:
        patch.setattr(bench.ledger, "release", late)
        (event,) = bench.land(batch)
    assert isinstance(event, Broken) and bench.scheduler.find(work.sequence_id) is None
    bench.check()


def test_who_is_forsaken_files_nothing_and_owns_nothing() -> None:
    bench = Bench(max_batch_tokens=2)
    work = bench.turn(Context.of([1, 2, 1, 2]))
    other = bench.turn(Context.of([2, 2]), max_tokens=1)
    bench.step()
    bench.scheduler.forsake(work.sequence_id)
    bench.scheduler.forsake(99)
    bench.check()
    assert bench.prefix.resident(work.view.context) == 0
    assert bench.drain()[-1] == Ended(other.sequence_id, "length")


def test_what_a_running_edit_is_to_keep_is_left_alone_by_others() -> None:
    bench = Bench(max_batch_tokens=1)
    context = bench.file(1, 2, 1)
    work = bench.edit(context, Directive(1, 1, (0, 0)), computed=3, keep=True)
    other = bench.turn(Context.of([2]))
    bench.step()
    assert bench.scheduler.others(other) == [context]
    assert bench.scheduler.others(work) == [other.view.context]


@pytest.mark.parametrize("needed", [False, True])
def test_carried_rows_that_nobody_goes_on_from_leave_the_tree(needed: bool) -> None:
    bench = Bench()
    edited = bench.edit(bench.file(1, 2, 1, 2, 0), Directive(1, 3, (0,)), computed=5)
    bench.drain()
    spliced = edited.view.whole()
    bench.keep = (spliced,) if needed else ()
    assert bench.prefix.resident(spliced) == len(spliced) == 4
    bench.scheduler.forget_grafts(spliced)
    assert bench.prefix.resident(spliced) == (4 if needed else 2)

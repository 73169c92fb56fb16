"""The scheduler step by step: what is planned, what lands, and what is given back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from leyline.batch import Batch, Edited, Ended, Event, Sampled, SamplingParams, StepOutput
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.directive import Directive, Mode
from leyline.policy import DEFAULT, PATIENCE
from leyline.scheduler import Scheduler, nobody
from leyline.sequence import EditRequest, Sequence, View
from leyline.splice import EVICTED, NO_ROOM
from tests.simulation import Machine


class Bench:
    """A scheduler with symbolic rows, driven by hand; token 3 ends a turn."""

    def __init__(
        self, num_slots: int = 32, *, max_batch_tokens: int = 512, max_sequences: int = 64
    ) -> None:
        self.machine = Machine(num_slots, Random(0))
        self.ledger = Ledger(num_slots, self.machine.free)
        self.prefix = PrefixCache(self.ledger, DEFAULT.evict)
        self.keep: tuple[Context, ...] = ()
        self.scheduler = Scheduler(
            self.prefix,
            keepers=lambda _: self.keep,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
        )
        self.num = 0

    def turn(self, context: Context, max_tokens: int = 4) -> Sequence:
        """Queue a sequence that samples."""
        self.num += 1
        stop = frozenset({3})
        work = Sequence(self.num, View(context), SamplingParams(), max_tokens, stop_ids=stop)
        self.scheduler.add(work)
        return work

    def edit(self, context: Context, *directives: Directive, computed: int = 0) -> Sequence:
        """Queue the edit of an idle session."""
        self.num += 1
        work = Sequence(self.num, View(context), computed=computed)
        work.edits.append(EditRequest(self.num, directives))
        self.scheduler.add(work)
        return work

    def ask(self, work: Sequence, *directives: Directive) -> int:
        """Queue an edit of an unfinished sequence; returns its request's id."""
        self.num += 1
        self.scheduler.edit(work.sequence_id, EditRequest(self.num, directives))
        return self.num

    def plan(self) -> Batch:
        return self.scheduler.plan()

    def step(self, token: int = 0) -> list[Event]:
        """One step in which whoever samples gets this token."""
        return self.land(self.plan(), token)

    def land(self, batch: Batch, token: int = 0) -> list[Event]:
        output = self.machine.run(batch, {op.sequence_id: b"" for op in batch.extends})
        return self.scheduler.commit(batch, StepOutput(dict.fromkeys(output.tokens, token)))

    def drain(self, token: int = 0) -> list[Event]:
        """All events until nothing is left to do."""
        events: list[Event] = []
        for _ in range(200):
            if not self.scheduler.has_work:
                return events
            events += self.step(token)
        raise AssertionError("it does not come to an end")

    def file(self, *tokens: int) -> Context:
        """Compute an exact context and leave it in the tree."""
        context = Context.of(tokens)
        self.num += 1
        self.scheduler.add(Sequence(self.num, View(context)))
        self.drain()
        return context


def edits(events: list[Event]) -> list[Edited]:
    return [event for event in events if isinstance(event, Edited)]


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

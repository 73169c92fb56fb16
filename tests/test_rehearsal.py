"""A dry run answers what the real run will answer, and changes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import leyline.rehearsal
from leyline.batch import Edited
from leyline.context import Context
from leyline.directive import Directive, Mode, Receipt, Source
from leyline.rehearsal import rehearse
from leyline.sequence import EditRequest, Sequence, View
from tests.bench import Bench, edits
from tests.simulation import VOCABULARY

NUM_CASES = 400


def state(bench: Bench, work: Sequence) -> tuple[Any, ...]:
    """Everything that a rehearsal could have changed."""
    view, splice = work.view, work.splice
    nodes = [
        (node.start, node.tokens, node.origin, node.starts, node.slots.tolist(), node.last_used)
        for node in bench.prefix.tree.nodes()
    ]
    return (
        sorted(nodes, key=repr),
        bench.ledger.counts.tolist(),
        bench.prefix.clock,
        (view.context, list(view.appended), view.coverage, view.table.tolist()),
        (list(work.edits), list(work.generated), work.computed, work.owed, work.running),
        (work.cached, work.spliced, work.prompt_len, work.degraded),
        splice and (splice.edit, splice.held.tolist(), splice.view.table.tolist(), splice.keep),
    )


def rehearsed(bench: Bench, work: Sequence) -> list[Edited]:
    """Rehearse what waits for a sequence, and see that nothing has changed."""
    before = state(bench, work)
    planned = rehearse(work, bench.prefix, bench.scheduler.others(work))
    assert state(bench, work) == before
    return planned


class Case:
    """One cache, one sequence and one or two sets of edits, all drawn at random."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.bench = Bench(random.choice([14, 18, 24, 60]), max_batch_tokens=random.choice([2, 50]))
        self.source = self.bench.file(*self.tokens(1, 6))
        context = self.bench.file(*self.tokens(3, 8))
        if random.random() < 0.3:
            context = context.append(self.tokens(1, 1))
        if random.random() < 0.3:
            self.bench.prefix.reclaim(self.bench.ledger.num_free + random.randint(1, 6))
        if random.random() < 0.4:
            self.bench.keep = (context.prefix(random.randint(1, len(context))), self.source)
        computed = random.randint(self.bench.prefix.resident(context), len(context))
        self.work = Sequence(99, View(context), computed=computed, owed=len(context) - computed)
        length = len(context)
        for number in range(random.choice([1, 1, 2])):
            request = self.request(number, length)
            length += sum(directive.delta for directive in request.directives)
            self.work.edits.append(request)

    def tokens(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(
            self.random.randrange(VOCABULARY) for _ in range(self.random.randint(low, high))
        )

    def request(self, number: int, length: int) -> EditRequest:
        points = sorted(self.random.randint(0, length) for _ in range(self.random.choice([2, 4])))
        directives = [self.directive(*span) for span in zip(points[::2], points[1::2], strict=True)]
        if sum(directive.delta for directive in directives) <= -length:
            directives = [Directive(length, length, (1,))]
        keep = self.random.random() < 0.4
        return EditRequest(number, tuple(directives), append=self.tokens(0, 1), keep=keep)

    def directive(self, start: int, end: int) -> Directive:
        mode = self.random.choice(list(Mode))
        if mode is Mode.FORGET or self.random.random() < 0.6:
            return Directive(start, end, self.tokens(0, 3), mode)
        first = self.random.randint(0, len(self.source))
        shared = self.source.tokens[first : first + self.random.randint(0, 3)]
        return Directive(start, end, shared, mode, Source(self.source, first))

    def real(self) -> list[Edited]:
        """The same work, done."""
        self.bench.scheduler.add(self.work)
        return edits(self.bench.drain())


def counts(events: list[Edited]) -> list[tuple[Any, ...]]:
    return [(e.request_id, e.receipts, e.edit, e.kept, e.length_after) for e in events]


def difference(seed: int) -> tuple[Any, Any]:
    """What a dry run and a real run of one case say."""
    case = Case(seed)
    planned = counts(rehearsed(case.bench, case.work))
    return planned, counts(case.real())


def test_a_plan_is_what_the_real_run_answers() -> None:
    seen: set[str | None] = set()
    kept: set[bool] = set()
    shared = 0
    for seed in range(NUM_CASES):
        planned, done = difference(seed)
        assert planned == done, seed
        receipts = [receipt for answer in done for receipt in answer[1]]
        seen |= {receipt.reason for receipt in receipts}
        kept |= {answer[3] for answer in done}
        shared += sum(receipt.shared > 0 for receipt in receipts)
    assert len(seen) == 5 and kept == {True, False} and shared > 20


@pytest.mark.parametrize("twist", ["move", "insert"])
def test_another_plan_is_noticed(twist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if twist == "move":
        plan = leyline.rehearsal.plan_move
        monkeypatch.setattr(leyline.rehearsal, "plan_move", lambda s, q, p, o: plan(s, q, p, ()))
    else:
        monkeypatch.setattr(leyline.rehearsal, "_insert", lambda *_: False)
    assert any(planned != done for planned, done in map(difference, range(NUM_CASES)))


def test_a_running_turn_is_rehearsed_from_what_it_has() -> None:
    bench = Bench()
    work = bench.turn(Context.of([1, 2, 1, 2]), max_tokens=4)
    bench.step(1)
    bench.step(2)
    request = EditRequest(7, (Directive(1, 2, (0, 0)),))
    double = replace(work, edits=deque([request]))
    (planned,) = rehearsed(bench, double)
    assert work.view.appended == [1, 2] and not work.edits
    bench.scheduler.edit(work.sequence_id, request)
    assert edits(bench.drain())[0].receipts == planned.receipts
    assert planned.receipts[0] == Receipt(
        1, 2, Mode.AMORTIZE, Mode.AMORTIZE, 1, 2, 3, 1, 3, 0, 1, 1, None
    )


def test_an_edit_that_is_half_done_is_rehearsed_from_its_beginning() -> None:
    bench = Bench(max_batch_tokens=1)
    source = bench.file(2, 2, 2)
    work = bench.turn(Context.of([1, 2, 1]))
    for _ in range(4):
        bench.step()
    shared = Directive(2, 2, (2,), source=Source(source, 0))
    bench.ask(work, Directive(0, 1, (0, 0)), shared)
    bench.step()
    assert work.splice is not None and len(work.splice.held) == 2
    planned = rehearsed(bench, work)
    assert counts(planned) == counts(edits(bench.drain()))


def test_a_waiting_turn_is_rehearsed_as_if_it_started_now() -> None:
    bench = Bench(max_sequences=1)
    context = bench.file(1, 2, 1, 2)
    bench.turn(Context.of([2, 2]), max_tokens=2)
    bench.step()
    work = bench.turn(
        context, requests=[((Directive(1, 2),), {"own": True, "append": (1,)})], computed=4
    )
    planned = rehearsed(bench, work)
    assert counts(planned) == counts(edits(bench.drain()))
    assert planned[0].receipts[0].kept == 2


def test_the_cache_is_not_touched_by_a_plan_that_needs_room() -> None:
    bench = Bench(8)
    context = bench.file(1, 2, 1)
    other = bench.file(2, 2, 2, 2)
    work = Sequence(9, View(context), computed=3)
    work.edits.append(EditRequest(1, (Directive(1, 1, (0, 0, 0)),)))
    slots = np.array(bench.prefix.tree.match(other))
    (planned,) = rehearsed(bench, work)
    assert planned.receipts[0].reason is None
    assert bench.prefix.tree.match(other).tolist() == slots.tolist()


@pytest.mark.parametrize("stopped", [True, False])
def test_the_background_has_made_way_by_then(stopped: bool) -> None:
    bench = Bench(max_batch_tokens=4)
    context = bench.file(1, 2, 1, 2, 0)
    heal = bench.add(context.append([1] * 6), background=True)
    bench.step()
    work = Sequence(9, View(context), computed=5)
    work.edits.append(EditRequest(1, (Directive(1, 2),)))
    before = state(bench, heal)
    planned = bench.scheduler.rehearse(work, heal.sequence_id if stopped else None)
    assert state(bench, heal) == before and heal.running
    if stopped:
        bench.scheduler.finish(heal.sequence_id)
    bench.scheduler.add(work)
    assert counts(planned) == counts(edits(bench.drain()))
    assert planned[0].receipts[0].copied == 3

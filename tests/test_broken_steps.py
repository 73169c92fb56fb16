"""Random traces in which anything may raise at any point of a plan or a commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from leyline.batch import Batch, Broken, Event, StepOutput
from leyline.context import Context
from leyline.policy import Policy
from leyline.rows import count_afresh
from tests import simulation
from tests.bench import Bench
from tests.simulation import Trace, Violation

NUM_TRACES = 250


class Fault(Exception):
    """What an allocation, a policy or a tree may raise."""


class Faulty(Trace):
    """A trace whose books break now and then, before or after they did what they were asked."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.roomy = False  # a fault may lose rows wherever there is room for them
        self.fuse: int | None = None
        self.seen: Counter[str] = Counter()
        for name in ("alloc", "retain", "release"):
            self.watch(self.ledger, name)
        for name in ("acquire", "publish", "reclaim", "give_up", "exclusive"):
            self.watch(self.prefix, name)
        for name in ("insert", "truncate", "match"):
            self.watch(self.prefix.tree, name)
        policy = self.scheduler.policy
        self.scheduler.policy = Policy(
            admit=self.watched(policy.admit),
            victim=self.watched(policy.victim),
            evict=policy.evict,
            degrade=self.watched(policy.degrade),
        )
        self.prefix.evict = self.watched(self.prefix.evict)

    def watch(self, owner: object, name: str) -> None:
        setattr(owner, name, self.watched(getattr(owner, name)))

    def watched(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which burns the fuse; half of the faults come after the work."""

        def burning(*args: Any, **options: Any) -> Any:
            late = self.random.random() < 0.5
            if not late:
                self.burn()
            result = work(*args, **options)
            if late:
                self.burn()
            return result

        return burning

    def burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Fault

    def light(self) -> None:
        """One step in four breaks, if it makes enough calls."""
        self.fuse = self.random.randrange(25) if self.random.random() < 0.25 else None

    def step(self) -> None:
        self.light()
        try:
            batch = self.scheduler.plan()
        except Fault:
            self.abandoned()
            return
        finally:
            self.fuse = None
        self.check_plan(batch)
        self.land(batch)
        self.check()

    def abandoned(self) -> None:
        """At most the one sequence that the plan was about has ended."""
        ended = self.scheduler.abandon()
        self.seen["plans"] += 1
        assert len(ended) <= 1
        for twin in list(self.live.values()):
            if twin.work.view.context is not twin.known:
                simulation.degrade_at_admission(self, twin)
        for number in ended:
            self.end(self.live[number], "failed")
        self.check()

    def check(self) -> None:
        for law in (simulation.ledger, simulation.provenance, simulation.last_row):
            law(self)

    def land(self, batch: Batch) -> None:
        scheduler: Any = self.scheduler
        commit = scheduler.commit

        def breaking(*args: Any) -> list[Event]:
            self.light()
            events = commit(*args)
            self.fuse = None
            return events

        scheduler.commit = breaking
        try:
            super().land(batch)
        finally:
            scheduler.commit = commit

    def refuse(self, output: StepOutput) -> StepOutput:
        """It has faults of its own, and putting things in order afterwards is no place for one."""
        return output

    def follow(self, event: Event, *args: Any) -> None:
        if not isinstance(event, Broken):
            super().follow(event, *args)
            return
        assert isinstance(event.error, Fault)
        self.seen["commits"] += 1
        twin = self.live[event.sequence_id]
        del twin.work.view.appended[len(twin.symbols) - len(twin.work.view.context) :]
        self.end(twin, "failed")


def hunt(num_traces: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num_traces):
        trace = Faulty(seed)
        try:
            trace.run()
        except Exception as error:
            raise AssertionError(f"seed {seed} breaks a law") from error
        seen += trace.seen
    return seen


def test_whatever_raises_breaks_no_law() -> None:
    seen = hunt(NUM_TRACES)
    assert seen["plans"] > 200 and seen["commits"] > 50, seen


def test_books_that_are_not_put_in_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyline.roster.count_afresh", lambda *_: None)
    with pytest.raises(AssertionError) as caught:
        hunt(NUM_TRACES)
    assert isinstance(caught.value.__cause__, Violation | AssertionError)


def test_rows_that_may_be_half_turned_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyline.scheduler.Scheduler._distrust", lambda *_: None)
    with pytest.raises(AssertionError) as caught:
        hunt(NUM_TRACES)
    assert "provenance" in str(caught.value.__cause__)


def test_order_is_no_change_to_books_that_are_in_order() -> None:
    bench = Bench()
    bench.file(1, 2, 1)
    bench.turn(Context.of([1, 2, 0]))
    bench.step()
    before = bench.ledger.counts.tolist()
    count_afresh(bench.prefix, bench.scheduler.running.values())
    assert bench.ledger.counts.tolist() == before and set(before) == {0, 1, 2}

"""A scheduler with symbolic rows, driven by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

from leyline.batch import Batch, Broken, Edited, Event
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.directive import Directive
from leyline.policy import DEFAULT, Policy
from leyline.sampling import SamplingParams
from leyline.scheduler import Scheduler
from leyline.sequence import EditRequest, Sequence, View
from tests import simulation
from tests.simulation import Machine, Row

STEPS = 400


class Bench:
    """Queues work, steps, and looks at rows; token 3 ends a turn."""

    def __init__(
        self,
        num_slots: int = 32,
        *,
        policy: Policy = DEFAULT,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
    ) -> None:
        self.num_slots = num_slots
        self.machine = Machine(num_slots, Random(0))
        self.ledger = Ledger(num_slots, self.machine.free)
        self.prefix = PrefixCache(self.ledger, policy.evict)
        self.keep: tuple[Context, ...] = ()
        self.scheduler = Scheduler(
            self.prefix,
            policy,
            keepers=lambda _: self.keep,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
        )
        self.num = 0

    # What callers do.

    def turn(self, context: Context, max_tokens: int = 4, **options: Any) -> Sequence:
        """Queue a sequence that samples."""
        options = {"sampling": SamplingParams(), "stop_ids": frozenset({3}), **options}
        return self.add(context, max_tokens=max_tokens, **options)

    def edit(self, context: Context, *directives: Directive, **options: Any) -> Sequence:
        """Queue the edit of an idle session; options of the sequence and of the request."""
        request = {name: options.pop(name) for name in ("keep", "append") if name in options}
        return self.add(context, requests=[(directives, request)], **options)

    def add(
        self,
        context: Context,
        *,
        requests: Iterable[tuple[tuple[Directive, ...], dict[str, Any]]] = (),
        **options: Any,
    ) -> Sequence:
        """Queue a sequence with its first edits."""
        self.num += 1
        work = Sequence(self.num, View(context), **options)
        for directives, request in requests:
            work.edits.append(EditRequest(self.num, directives, **request))
        self.scheduler.add(work)
        return work

    def ask(self, work: Sequence, *directives: Directive, **request: Any) -> int:
        """Queue an edit of an unfinished sequence; returns its request's id."""
        self.num += 1
        self.scheduler.edit(work.sequence_id, EditRequest(self.num, directives, **request))
        return self.num

    # What the engine does.

    def plan(self) -> Batch:
        return self.scheduler.plan()

    def step(self, token: int = 0) -> list[Event]:
        """One step in which whoever samples gets this token."""
        return self.land(self.plan(), token)

    def land(self, batch: Batch, token: int = 0) -> list[Event]:
        roots = {s.sequence_id: s.view.context.root for s in self.scheduler.running.values()}
        output = self.machine.run(batch, roots)
        output = replace(output, tokens=dict.fromkeys(output.tokens, token))
        return self.scheduler.commit(batch, output)

    def drain(self, token: int = 0) -> list[Event]:
        """All events until nothing is left to do, with the books checked after every step."""
        events: list[Event] = []
        for _ in range(STEPS):
            if not self.scheduler.has_work:
                return events
            events += self.step(token)
            self.check()
            for event in events:
                if isinstance(event, Broken):
                    raise event.error
        raise AssertionError("it does not come to an end")

    def file(self, *tokens: int) -> Context:
        """Compute an exact context and leave it in the tree."""
        context = Context.of(tokens)
        self.add(context)
        self.drain()
        return context

    # What there is to see.

    def check(self) -> None:
        """Every slot is owned by exactly those who say so, and holds a row if it is owned."""
        simulation.ledger(self)  # type: ignore[arg-type]

    def rows(self, context: Context) -> list[Row]:
        """The rows in the tree of a context's longest resident prefix."""
        return [self.machine.read(slot) for slot in self.prefix.tree.match(context).tolist()]


def edits(events: list[Event]) -> list[Edited]:
    """The edits that committed."""
    return [event for event in events if isinstance(event, Edited)]

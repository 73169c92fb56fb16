"""One random life of a scheduler: callers act, the engine steps, and every law is checked."""

from __future__ import annotations

from dataclasses import replace

from leyline.batch import Batch, Broken, Edited, Ended, Event, Sampled, StepOutput
from leyline.directive import Mode
from leyline.errors import LeylineError
from leyline.job import Job
from leyline.policy import PATIENCE
from leyline.turn import tool_outputs
from tests.simulation import promises
from tests.simulation.callers import Callers
from tests.simulation.cast import Said, Talk, Twin, reach, rewritten
from tests.simulation.edit_laws import Before, counter, degrade, degrade_at_admission, kept, usage
from tests.simulation.laws import (
    background,
    drained,
    gap,
    last_row,
    ledger,
    one_op,
    provenance,
    read,
    terminal,
    write,
)
from tests.simulation.symbols import (
    Letters,
    Row,
    computed,
    replaced,
    require,
    spelled,
)

NUM_STEPS = 30
CALM_STEPS = 110
DRAIN_STEPS = 2000
LETTERS: object = Letters()


class Trace(Callers):
    """One random life of a scheduler; see `World` for the arguments.

    It does for its sessions what `leyline.loop` does for an engine's.
    """

    def run(self) -> Trace:
        """Act and step for a while, then let everything come to its end."""
        for _ in range(CALM_STEPS if self.calm else NUM_STEPS):
            deeds = self.num_deeds()
            for _ in range(deeds):
                self.act()
            if deeds or self.scheduler.has_work:
                self.step()
        for _ in range(DRAIN_STEPS):
            if not self.scheduler.has_work:
                break
            self.step()
        drained(self)
        return self

    def num_deeds(self) -> int:
        """How much callers ask for before the next step; dry runs are mostly left to come true."""
        foreseen = any(twin.forecast for twin in self.live.values())
        if foreseen and self.random.random() < 0.8:
            return 0
        if self.calm and self.scheduler.foreground:
            return self.random.random() < 0.2
        return self.random.choice([0, 0, 1, 1, 2] if not self.calm else [0, 1])

    def step(self) -> None:
        """Plan, run and commit once, with every law checked."""
        self.stop_orphans()
        batch = self.scheduler.plan()
        self.log("plan", batch)
        self.check_plan(batch)
        if batch and self.faulty and self.random.random() < 0.15:
            self.fail(batch)
        else:
            self.land(batch)
            last_row(self)
            gap(self)
        for law in (ledger, provenance, counter, promises.left_alone):
            law(self)

    def check_plan(self, batch: Batch) -> None:
        """The laws that a plan can break."""
        self.empty_plans = 0 if batch or not self.scheduler.has_work else self.empty_plans + 1
        require("gap", self.empty_plans < 2 * PATIENCE, "nothing happens although there is work")
        one_op(self, batch)
        background(self, batch)
        for twin in self.live.values():
            if twin.work.view.context is not twin.known:
                degrade_at_admission(self, twin)
            if self.roomy and twin.work.cached is not None and not twin.num_edits:
                short = twin.work.cached < min(twin.promised, twin.work.prompt_len - 1)
                require("degrade", not short, "a session's rows were given up by others")
        last_row(self)
        write(self, batch)
        read(self, batch)

    def fail(self, batch: Batch) -> None:
        """The executor breaks down: the batch's sequences end, all others go on."""
        self.machine.break_down(batch)
        ids = [op.sequence_id for op in (*batch.moves, *batch.extends)]
        require("terminal", sorted(self.scheduler.fail(batch)) == sorted(ids), "who failed")
        self.lossy = True
        for sequence_id in ids:
            self.end(self.live[sequence_id], "failed")

    def land(self, batch: Batch) -> None:
        """Run a batch, commit it, and follow what it says."""
        moved = [self.live[move.sequence_id] for move in batch.moves]
        before = {twin.work.sequence_id: Before(self, twin) for twin in moved}
        roots = {op.sequence_id: self.live[op.sequence_id].root for op in batch.extends}
        output = self.refuse(self.machine.run(batch, roots))
        rows = list(self.machine.rows)
        events = self.scheduler.commit(batch, output)
        hushed: set[int] = set()
        for event in events:
            if event.sequence_id not in hushed:
                self.follow(event, before, rows, output)
            if isinstance(event, Sampled) and self.stop_string(event.sequence_id):
                hushed.add(event.sequence_id)
        if events and isinstance(events[-1], Edited):
            self.reach_of(events[-1])

    def refuse(self, output: StepOutput) -> StepOutput:
        """Now and then a token cannot be chosen for the form that its client asked for."""
        if not (self.faulty and output.tokens and self.random.random() < 0.05):
            return output
        number = self.random.choice(sorted(output.tokens))
        tokens = {other: token for other, token in output.tokens.items() if other != number}
        return replace(output, tokens=tokens, refused={number: LeylineError("no form")})

    def follow(
        self,
        event: Event,
        before: dict[int, Before],
        rows: list[Row | None],
        output: StepOutput,
    ) -> None:
        """Do to the twin what the event says, and see whether the event is true."""
        self.log(event)
        require("terminal", event.sequence_id in self.live, f"an event after the end: {event}")
        twin = self.live[event.sequence_id]
        if isinstance(event, Broken):
            if event.error is not output.refused.get(event.sequence_id):
                raise event.error
            self.lossy = True
            self.end(twin, "refused by its form")
            return
        if isinstance(event, Edited):
            degrade(self, twin, event, before[event.sequence_id], rows)
            kept(self, twin, event, before[event.sequence_id])
            promises.foreseen(self, twin, event)
            self.edited(twin, event)
        elif isinstance(event, Ended):
            terminal(twin, event)
            self.end(twin, event.reason)
        else:
            require("terminal", output.tokens[event.sequence_id] == event.token, "another token")
            self.sampled(twin, event)

    def sampled(self, twin: Twin, event: Sampled) -> None:
        """A token more."""
        twin.symbols += computed(twin.root, twin.symbols, [event.token])
        tags = self.new_tags([event.token])
        twin.tags += tags
        twin.reply |= frozenset(tags)
        twin.num_sampled += 1
        if twin.job is not None:
            list(twin.job.push(event))

    def edited(self, twin: Twin, event: Edited) -> None:
        """An edit has committed: its session follows."""
        request = twin.requests[event.request_id]
        if request.own:
            usage(twin, event)
        tags = twin.tags
        new = self.new_tags(t for d in request.directives for t in d.replacement)
        appended = self.new_tags(request.append)
        twin.tags = replaced(tags, request.directives, new) + appended
        twin.told = [rewritten(span, tags, request.directives, new) for span in twin.told]
        twin.told = [reach(span, twin.tags) for span in twin.told]
        twin.reply = reach(twin.reply, twin.tags)
        promises.doomed(twin)
        if request.own and twin.job is not None and twin.job.turn is not None:
            spans = tool_outputs(twin.job.turn.messages)
            twin.told = [frozenset(twin.tags[span.start : span.end]) for span in spans]
        self.reach.learn(event.edit)
        if twin.talk is not None and twin.job is not None:
            self.commit(twin, twin.talk, twin.job, event, tags)
        self.answer(twin, event.request_id, "edited")
        twin.num_edits += 1
        self.tally["marks fired"] += bool(twin.doomed)
        self.tally["edits during a turn"] += not request.own and bool(twin.job and twin.job.reply)

    def commit(self, twin: Twin, talk: Talk, job: Job, event: Edited, tags: list[int]) -> None:
        """Tell a session of an edit."""
        self.enters(tags, talk, job)
        own = twin.requests[event.request_id].own
        start = len(tags) if own or job.reply is None else job.reply_start
        job.commit(event)
        talk.remember(talk.session.version - 1, tags[:start])
        talk.tags = twin.tags[: len(talk.context)]
        promises.marks(self, talk)

    def stop_string(self, number: int) -> bool:
        """Now and then a reply ends with a text that its client has named."""
        twin = self.live.get(number)
        reply = twin.job.reply if twin and twin.job else None
        if twin is None or not isinstance(reply, Said) or self.random.random() < 0.95:
            return False
        reply.stop(self.random.choice([0, 1, 2]))
        self.scheduler.finish(number)
        self.end(twin, "stop")
        return True

    def reach_of(self, event: Edited) -> None:
        """Some edits that forget want their span forgotten in the whole cache."""
        forgets = [receipt for receipt in event.receipts if receipt.mode is Mode.FORGET]
        if forgets and self.random.random() < 0.3:
            tokens = event.edit.before.tokens[forgets[0].start : forgets[0].end]
            self.forget(event.edit.before.root, spelled(tokens))

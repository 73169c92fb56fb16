"""The mind under random traces, with symbolic rows.

A slot holds a `Row`: a token, the position it is turned to, the digest of what it was computed
under, and the serial number of its computation. The executor is a page of code: an `Extend` folds
the rows that it is given and really sees, a `Move` adds `delta` to a position. Beside every
context that Leyline keeps, a trace keeps a `Twin`, a plain list of symbols `(token, seen)` on
which edits are list slices. After every commit the laws of design.md section 5 are checked, each
by the function of its name.

`python -m tests.simulation SEED` replays one trace and prints what happens in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import numpy as np

from leyline.batch import (
    Batch,
    Broken,
    Edited,
    Ended,
    Event,
    Extend,
    Move,
    SamplingParams,
    StepOutput,
)
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.cache.radix import Node
from leyline.context import Context
from leyline.directive import Directive, Mode, Receipt, Source
from leyline.policy import DEFAULT, PATIENCE, Policy
from leyline.receipts import DEGRADED, FORGOTTEN
from leyline.scheduler import Scheduler
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work

VOCABULARY = 4
STOP = 3
TENANTS = (b"", b"another tenant")
NUM_STEPS = 30
DRAIN_STEPS = 2000

Symbol = tuple[int, int]  # token, digest of what its row was computed under


class Row(NamedTuple):
    """What a slot holds."""

    token: int
    position: int
    seen: int
    birth: int


class Violation(AssertionError):
    """A law was broken."""


def require(law: str, holds: object, what: str) -> None:
    """Raise a `Violation` of the law unless it holds."""
    if not holds:
        raise Violation(f"{law}: {what}")


# -- symbols --------------------------------------------------------------------------------------


def root_state(root: bytes) -> int:
    """Digest of an empty context."""
    return hash(tuple(root))


def advance(state: int, token: int, seen: int) -> int:
    """Digest of a context with one more row; integers hash alike in every process."""
    return hash((state, token, seen))


def fold(root: bytes, symbols: Iterable[Symbol]) -> int:
    """Digest of a whole context."""
    state = root_state(root)
    for token, seen in symbols:
        state = advance(state, token, seen)
    return state


def computed(root: bytes, head: Sequence[Symbol], tokens: Iterable[int]) -> list[Symbol]:
    """The symbols of tokens computed behind a head."""
    state, symbols = fold(root, head), []
    for token in tokens:
        symbols.append((token, state))
        state = advance(state, token, state)
    return symbols


def edited(
    root: bytes,
    symbols: list[Symbol],
    resident: int,
    directives: Sequence[Directive],
    brought: Sequence[list[Symbol] | None] = (),
) -> list[Symbol]:
    """What a set of directives means: list slices, from right to left.

    Tokens at or behind `resident` have no row; whatever has none is computed in its place.
    `brought` holds the symbols of each directive whose rows come from elsewhere.
    """
    rows = [(token, seen, index < resident) for index, (token, seen) in enumerate(symbols)]
    shares = [*brought] or [None] * len(directives)
    for directive, share in reversed([*zip(directives, shares, strict=True)]):
        head, tail = rows[: directive.start], rows[directive.end :]
        tokens = list(directive.replacement)
        if directive.mode is Mode.FORGET:
            tokens, tail = [*tokens, *(row[0] for row in tail)], []
        known = share is not None or all(row[2] for row in head)
        new = computed(root, [row[:2] for row in head], tokens) if share is None else share
        rows = [*head, *((*symbol, known) for symbol in new), *tail]
    after: list[Symbol] = []
    state = root_state(root)
    for token, seen, known in rows:
        after.append((token, seen if known else state))
        state = advance(state, *after[-1])
    return after


@dataclass
class Twin:
    """What a sequence's context must be, and what its requests may still expect."""

    work: Work
    symbols: list[Symbol]
    talk: Talk | None
    requests: dict[int, EditRequest] = field(default_factory=dict)
    known: Context = field(default_factory=Context)
    promised: int = 0
    num_edits: int = 0
    num_sampled: int = 0
    heals: Talk | None = None

    @property
    def root(self) -> bytes:
        """The tenant's root."""
        return self.work.view.context.root


@dataclass
class Talk:
    """A session: a context that others must leave alone, and its symbols."""

    context: Context
    symbols: list[Symbol]
    computed: int = 0
    sequence_id: int | None = None
    versions: list[Context] = field(default_factory=list)


# -- the executor ---------------------------------------------------------------------------------


class Machine:
    """Runs batches on symbolic rows; a free slot holds None."""

    def __init__(self, num_slots: int, random: Random) -> None:
        self.rows: list[Row | None] = [None] * num_slots
        self.random = random
        self.births = 0

    def free(self, slots: np.ndarray) -> None:
        """Poison slots that were let go."""
        for slot in slots.tolist():
            self.rows[slot] = None

    def run(self, batch: Batch, roots: dict[int, bytes]) -> StepOutput:
        """All moves, then all extends."""
        for move in batch.moves:
            self.move(move)
        for extend in batch.extends:
            self.extend(extend, roots[extend.sequence_id])
        sampled = (op.sequence_id for op in batch.extends if op.sample)
        return StepOutput({number: self.random.randrange(VOCABULARY) for number in sampled})

    def move(self, op: Move) -> None:
        """Carry and turn."""
        rows = [self.read(slot) for slot in op.src_slots.tolist()]
        for row, slot, delta in zip(rows, op.dst_slots.tolist(), op.delta.tolist(), strict=True):
            self.rows[slot] = row._replace(position=row.position + delta)

    def extend(self, op: Extend, root: bytes) -> None:
        """Compute rows one behind the other, each from all that stand in the table before it."""
        slots = op.table.tolist()
        state = root_state(root)
        for slot in slots[: op.start]:
            row = self.read(slot)
            state = advance(state, row.token, row.seen)
        for index, token in enumerate(op.tokens):
            self.births += 1
            self.rows[slots[op.start + index]] = Row(token, op.start + index, state, self.births)
            state = advance(state, token, state)

    def read(self, slot: int) -> Row:
        """A row that must be there."""
        row = self.rows[slot]
        if row is None:
            raise Violation(f"read: slot {slot} is read and holds nothing")
        return row

    def break_down(self, batch: Batch) -> None:
        """Fail half way: every slot that the batch may write holds rubbish."""
        rubbish = Row(-1, -1, -1, -1)
        for op in batch.moves:
            for slot, delta in zip(op.dst_slots.tolist(), op.delta.tolist(), strict=True):
                if delta or slot not in op.src_slots:
                    self.rows[slot] = rubbish
        for op in batch.extends:
            for slot in op.written_slots.tolist():
                self.rows[slot] = rubbish


# -- a trace --------------------------------------------------------------------------------------


def random_policy(random: Random) -> Policy:
    """Four decisions of no taste at all."""
    patience = random.randrange(6)
    keys = [
        DEFAULT.evict,
        lambda node: (node.origin is not None, random.random()),
        lambda node: random.random(),
    ]
    return Policy(
        admit=lambda needed, available, num_running: (
            num_running == 0 or (needed <= available and random.random() < 0.8)
        ),
        victim=random.choice([DEFAULT.victim, lambda candidates: random.choice(candidates)]),
        evict=random.choice(keys),
        degrade=lambda num_running, waited: num_running == 1 or waited > patience,
    )


class Trace:
    """One random life of a scheduler.

    Args:
        seed: Decides everything.
        log: Called with a line for all that happens.
    """

    def __init__(self, seed: int, log: object = None) -> None:
        self.random = random = Random(seed)
        self.log = print if log else lambda *_: None
        self.roomy = random.random() < 0.15
        self.num_slots = 3000 if self.roomy else random.choice([12, 16, 24, 40, 64])
        self.max_len = min(self.num_slots, random.choice([12, 16, 30]))
        self.faulty = not self.roomy and random.random() < 0.3
        self.machine = Machine(self.num_slots, random)
        self.ledger = Ledger(self.num_slots, self.machine.free)
        policy = random_policy(random) if random.random() < 0.8 else DEFAULT
        self.prefix = PrefixCache(self.ledger, policy.evict)
        self.scheduler = Scheduler(
            self.prefix,
            policy,
            max_batch_tokens=random.choice([1, 4, 9, 50]),
            max_sequences=random.choice([1, 2, 4, 8]),
            keepers=self.keepers,
        )
        self.talks: list[Talk] = []
        self.live: dict[int, Twin] = {}
        self.ended: dict[int, str] = {}
        self.answers: dict[int, str] = {}
        self.origins: dict[bytes, int] = {}
        self.asked: list[tuple[Directive, ...]] = []
        self.num_ids = 0
        self.num_losses = 0
        self.num_swaps = 0
        self.empty_plans = 0

    def keepers(self, sequence_id: int) -> list[Context]:
        """Contexts of the sessions that this sequence does not serve, and all kept versions."""
        kept = [version for talk in self.talks for version in talk.versions]
        return kept + [talk.context for talk in self.talks if talk.sequence_id != sequence_id]

    def run(self) -> Trace:
        """Act and step for a while, then let everything come to its end."""
        for _ in range(NUM_STEPS):
            for _ in range(self.random.choice([0, 0, 1, 1, 2])):
                self.act()
            self.step()
        for _ in range(DRAIN_STEPS):
            if not self.scheduler.has_work:
                break
            self.step()
        drained(self)
        return self

    def new_id(self) -> int:
        """The next sequence or request."""
        self.num_ids += 1
        return self.num_ids

    # What callers do.

    def act(self) -> None:
        """One random thing that a caller does."""
        deeds = [
            (self.prompt, 3),
            (self.turn, 5),
            (self.rewrite, 2),
            (self.heal, 1),
            (self.revert, 1),
            (self.doubt, 0.2),
            (self.edit_idle, 6),
            (self.edit_busy, 4),
            (self.fork, 2.5),
            (self.cancel, 1),
            (self.cancel_edit, 1),
            (self.forget_talk, 0.3),
            (self.clear, 0.1),
        ]
        self.random.choices([deed for deed, _ in deeds], [weight for _, weight in deeds])[0]()

    def tokens(self, low: int, high: int) -> tuple[int, ...]:
        """Random tokens, at least `low` and at most `high` of them."""
        return tuple(
            self.random.randrange(VOCABULARY)
            for _ in range(self.random.randint(low, max(low, high)))
        )

    def prompt(self) -> None:
        """A request without a session, or the first of one; often with tokens seen before."""
        root = self.random.choice(TENANTS)
        tokens = self.tokens(1, self.max_len // 2)
        if self.talks and self.random.random() < 0.6:
            known = self.random.choice(self.talks).context.tokens
            tokens = known[: self.random.randint(1, max(1, len(known)))] or tokens
        talk = None
        if self.random.random() < 0.6 and len(self.talks) < 6:
            talk = Talk(Context.of((), root), [])
            self.talks.append(talk)
        self.start(Context.of(tokens, root), computed(root, [], tokens), talk)

    def turn(self) -> None:
        """The next turn of a session."""
        talk = self.idle_talk()
        if talk is not None:
            tokens = self.tokens(self.random.choice([0, 1, 1, 1]), 4)
            symbols = talk.symbols + computed(talk.context.root, talk.symbols, tokens)
            self.start(talk.context.append(tokens), symbols, talk)

    def start(self, context: Context, symbols: list[Symbol], talk: Talk | None) -> None:
        """Queue a sequence that samples, if there is room for it."""
        room = self.max_len - len(context)
        if room > 0 and len(context):
            work = Work(
                self.new_id(),
                View(context),
                SamplingParams(),
                self.random.randint(1, min(room, 8)),
                frozenset({STOP}) if self.random.random() < 0.3 else frozenset(),
            )
            promised = talk.computed if talk else 0
            self.add(Twin(work, symbols, talk, known=context, promised=promised))

    def rewrite(self) -> None:
        """The next turn of a session whose client has edited its history."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        work = Work(self.new_id(), View(talk.context), SamplingParams(), computed=talk.computed)
        twin = Twin(work, list(talk.symbols), talk, known=talk.context)
        work.edits.extend(self.requests(twin, 1, own=True))
        room = self.max_len - coming(work)
        if work.edits and room > 0:
            work.max_tokens = self.random.randint(1, min(room, 8))
            self.add(twin)
        else:
            self.ended[work.sequence_id] = "refused"
            self.answers |= dict.fromkeys(twin.requests, "refused")

    def heal(self) -> None:
        """The exact form of a spliced session, computed in the background."""
        talk = self.idle_talk()
        if talk is not None and talk.context.first_graft() < len(talk.context):
            exact = talk.context.exact_from(0)
            work = Work(self.new_id(), View(exact), background=True)
            symbols = computed(exact.root, [], exact.tokens)
            self.add(Twin(work, symbols, None, known=exact, heals=talk))

    def revert(self) -> None:
        """A session goes back to a version, as far as its rows are still there."""
        talk = self.idle_talk()
        if talk is not None and talk.versions:
            context = talk.versions.pop()
            there = self.prefix.resident(context)
            talk.context = context.exact_from(context.first_graft(there))
            talk.symbols = labelled(self, talk.context)
            talk.computed = min(there, len(talk.context))

    def doubt(self) -> None:
        """Rows that know a token must not be used any more; the tree forgets all of them."""
        if self.roomy:
            return
        token = self.random.randrange(VOCABULARY)
        self.log("doubt", token)
        doubted = {n for n, twin in self.live.items() if token in twin.work.view.whole().tokens}
        held = {n for n, twin in self.live.items() if twin.work.running}
        ids = self.scheduler.displace(
            lambda context: context.exact_from(0) if token in context.tokens else None
        )
        self.prefix.clear()
        require("purge", doubted <= set(ids), "rows in doubt are still in use")
        for number in doubted & held:
            require("purge", not self.live[number].work.running, f"sequence {number} runs on")

    def add(self, twin: Twin) -> None:
        """Hand a sequence to the scheduler."""
        self.log("add", twin.work.sequence_id, len(twin.symbols), [*twin.work.edits])
        self.live[twin.work.sequence_id] = twin
        if twin.talk is not None:
            twin.talk.sequence_id = twin.work.sequence_id
        self.scheduler.add(twin.work)

    def edit_idle(self) -> None:
        """One or two sets of directives for an idle session."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        work = Work(self.new_id(), View(talk.context), computed=talk.computed)
        work.owed = self.random.choice([0, len(talk.context) - talk.computed])
        twin = Twin(work, list(talk.symbols), talk, known=talk.context)
        for request in self.requests(twin, self.random.choice([1, 1, 2])):
            work.edits.append(request)
        if work.edits:
            self.add(twin)
        else:
            self.ended[work.sequence_id] = "refused"

    def edit_busy(self) -> None:
        """A set of directives for a sequence that waits or runs."""
        if self.live:
            twin = self.random.choice([*self.live.values()])
            for request in self.requests(twin, 1):
                self.log("edit", twin.work.sequence_id, request)
                self.scheduler.edit(twin.work.sequence_id, request)

    def requests(self, twin: Twin, num: int, *, own: bool = False) -> Iterable[EditRequest]:
        """Sets of directives that fit the context as the edits before them leave it."""
        for _ in range(num):
            work = twin.work
            length = coming(work)
            room = self.max_len - length - max(0, work.max_tokens - len(work.generated))
            directives = self.directives(twin, length)
            append = self.tokens(0, 2) if own or self.random.random() < 0.1 else ()
            grown = sum(directive.delta for directive in directives)
            if -length < grown <= room - len(append):
                keep = self.random.random() < 0.2
                request = EditRequest(self.new_id(), directives, append, own, keep)
                twin.requests[request.request_id] = request
                yield request

    def directives(self, twin: Twin, length: int) -> tuple[Directive, ...]:
        """A random set: spans that may touch or be empty, in mixed modes; or one seen before."""
        if self.asked and self.random.random() < 0.3:
            again = self.random.choice(self.asked)
            roots = {d.source.context.root for d in again if d.source is not None}
            if again[-1].end <= length and roots <= {twin.root}:
                return again
        points = sorted(
            self.random.randint(0, length) for _ in range(2 * self.random.choice([1, 1, 2, 3]))
        )
        spans = zip(points[::2], points[1::2], strict=True)
        directives = tuple(self.directive(twin, start, end) for start, end in spans)
        self.asked.append(directives)
        return directives

    def directive(self, twin: Twin, start: int, end: int) -> Directive:
        """Mostly computed, sometimes brought from a session of the same tenant."""
        mode = self.random.choice([Mode.AMORTIZE, Mode.AMORTIZE, Mode.HEAL, Mode.FORGET])
        known = [talk.context for talk in self.talks if talk.context.root == twin.root]
        if mode is Mode.FORGET or not known or self.random.random() < 0.75:
            return Directive(start, end, self.replacement(twin, start, end), mode)
        context = self.random.choice(known)
        first = self.random.randint(0, len(context))
        shared = context.tokens[first : first + self.random.randint(0, 4)]
        return Directive(start, end, shared, mode, Source(context, first))

    def replacement(self, twin: Twin, start: int, end: int) -> tuple[int, ...]:
        """Some tokens, none, as many as were there, or the very same."""
        kind = self.random.randrange(6)
        same = twin.work.view.tokens(start, end)
        if kind == 0 and len(same) == end - start:
            return same
        return self.tokens(end - start, end - start) if kind == 1 else self.tokens(0, 3)

    def fork(self) -> None:
        """A second session with the history of another."""
        talk = self.idle_talk()
        if talk is not None and len(self.talks) < 6:
            self.talks.append(replace(talk, symbols=list(talk.symbols), versions=[]))

    def cancel(self) -> None:
        """A caller hangs up."""
        if self.live:
            twin = self.random.choice([*self.live.values()])
            self.log("cancel", twin.work.sequence_id)
            atomic(self, twin, lambda: self.scheduler.finish(twin.work.sequence_id))
            self.end(twin, "cancelled")

    def cancel_edit(self) -> None:
        """A caller takes back an edit that was asked for, and with it those behind it."""
        works = ((twin, twin.work) for twin in self.live.values())
        busy = [twin for twin, work in works if work.edits and not work.own_edit]
        if not busy:
            return
        twin = self.random.choice(busy)
        waiting = [edit.request_id for edit in twin.work.edits]
        at = self.random.randrange(len(waiting))
        number, request = twin.work.sequence_id, waiting[at]
        self.log("cancel edit", number, request)
        atomic(self, twin, lambda: self.scheduler.cancel_edit(number, request))
        left = [edit.request_id for edit in twin.work.edits]
        require("atomic", left == waiting[:at], "an edit stayed that counted on a cancelled one")
        for dropped in waiting[at:]:
            self.answer(twin, dropped, "cancelled")

    def forget_talk(self) -> None:
        """A session is deleted."""
        talk = self.idle_talk()
        if talk is not None:
            self.talks.remove(talk)

    def clear(self) -> None:
        """Every row that nobody runs on is forgotten."""
        if not self.roomy:
            self.log("clear")
            self.prefix.clear()

    def idle_talk(self) -> Talk | None:
        """A session that is not busy."""
        idle = [talk for talk in self.talks if talk.sequence_id is None]
        return self.random.choice(idle) if idle else None

    # What the engine does.

    def step(self) -> None:
        """Plan, run and commit once, with every law checked."""
        batch = self.scheduler.plan()
        self.log("plan", batch)
        self.check_plan(batch)
        if batch and self.faulty and self.random.random() < 0.15:
            self.fail(batch)
        else:
            self.land(batch)
            last_row(self)
            gap(self)
        for law in (ledger, provenance, counter):
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
        for sequence_id in ids:
            self.end(self.live[sequence_id], "failed")

    def land(self, batch: Batch) -> None:
        """Run a batch, commit it, and follow what it says."""
        moved = [self.live[move.sequence_id] for move in batch.moves]
        before = {twin.work.sequence_id: Before(self, twin) for twin in moved}
        roots = {op.sequence_id: self.live[op.sequence_id].root for op in batch.extends}
        output = self.machine.run(batch, roots)
        rows = list(self.machine.rows)
        for event in self.scheduler.commit(batch, output):
            self.follow(event, before, rows, output)

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
            raise event.error
        if isinstance(event, Edited):
            degrade(self, twin, event, before[event.sequence_id], rows)
            kept(self, twin, event, before[event.sequence_id])
            if twin.requests[event.request_id].own:
                usage(twin, event)
            self.answer(twin, event.request_id, "edited")
            twin.num_edits += 1
        elif isinstance(event, Ended):
            terminal(twin, event)
            self.end(twin, event.reason)
        else:
            require("terminal", output.tokens[event.sequence_id] == event.token, "another token")
            twin.symbols += computed(twin.root, twin.symbols, [event.token])
            twin.num_sampled += 1

    def answer(self, twin: Twin, request_id: int, how: str) -> None:
        """An edit request gets its one answer."""
        require("terminal", request_id in twin.requests, f"request {request_id}: {how}, unasked")
        del twin.requests[request_id]
        require("terminal", request_id not in self.answers, f"request {request_id} answered twice")
        self.answers[request_id] = how

    def end(self, twin: Twin, how: str) -> None:
        """A sequence gets its one end; its session goes on from what it has."""
        number, talk = twin.work.sequence_id, twin.talk
        require("terminal", number not in self.ended, f"sequence {number} ended twice")
        for request_id in sorted(twin.requests):
            self.answer(twin, request_id, how)
        self.ended[number] = how
        del self.live[number]
        if twin.heals is not None and how == "edited":
            self.swap(twin, twin.heals)
        if talk is not None:
            talk.sequence_id = None
            if how in ("stop", "length", "edited") or twin.num_edits:
                self.hand_over(twin, talk)

    def swap(self, twin: Twin, talk: Talk) -> None:
        """A session is healed, unless it has gone on or was edited since."""
        if talk.sequence_id is None and talk.context.tokens == twin.work.view.whole().tokens:
            self.hand_over(twin, talk)
            self.num_swaps += 1

    def hand_over(self, twin: Twin, talk: Talk) -> None:
        """The session goes on from the sequence's context, or a little less (a stop string)."""
        context = twin.work.view.whole()
        length = len(context) - self.random.choice([0, 0, 0, 1, 2])
        if not 0 < length < len(context):
            length = len(context)
        talk.context, talk.symbols = context.prefix(length), twin.symbols[:length]
        talk.computed = min(twin.work.view.coverage.reach, length)


@dataclass
class Before:
    """What an edit found: the rows that its sequence had."""

    births: list[int]
    rows: list[tuple[int, int, int]]
    slots: list[int]
    filed: list[int]
    length: int
    resident: int

    def __init__(self, trace: Trace, twin: Twin) -> None:
        view = twin.work.view
        self.resident, self.length = view.coverage.reach, len(view)
        self.slots = view.table[: self.resident].tolist()
        rows = [trace.machine.read(slot) for slot in self.slots]
        self.births = [row.birth for row in rows]
        self.rows = [row[:3] for row in rows]
        self.filed = trace.prefix.tree.match(view.whole()).tolist()


def coming(work: Work) -> int:
    """How long a sequence's context is once its waiting edits are done."""
    grown = sum(d.delta for edit in work.edits for d in edit.directives)
    return len(work.view) + grown + sum(len(edit.append) for edit in work.edits)


# -- the laws -------------------------------------------------------------------------------------


def gap(trace: Trace) -> None:
    """A running sequence misses something, or waits to edit; else it is finished."""
    for work in trace.scheduler.running.values():
        unfinished = work.view.missing > work.owed or work.edits or work.splice
        require("gap", unfinished, f"sequence {work.sequence_id} runs and misses nothing")


def one_op(trace: Trace, batch: Batch) -> None:
    """At most one op a sequence, only for those that run, within the budget."""
    ids = [op.sequence_id for op in (*batch.moves, *batch.extends)]
    require("one op", len(ids) == len(set(ids)), f"two ops of one sequence: {ids}")
    require("one op", set(ids) <= trace.scheduler.running.keys(), f"an op of nobody: {ids}")
    require("one op", batch.num_tokens <= trace.scheduler.max_batch_tokens, "over budget")
    require("one op", len(trace.scheduler.running) <= trace.scheduler.max_sequences, "too many")


def background(trace: Trace, batch: Batch) -> None:
    """Whoever is in the background has an op only while nobody else runs or waits."""
    ids = {op.sequence_id for op in (*batch.moves, *batch.extends)}
    behind = {n for n in ids if trace.live[n].work.background}
    others = [n for n, twin in trace.live.items() if not twin.work.background]
    require("background", not (behind and others), f"{behind} did not wait for {others}")


def holders(trace: Trace) -> dict[int, list[object]]:
    """Who owns each slot, counted afresh: tree nodes, and running sequences."""
    found: dict[int, list[object]] = {}
    for node in walk(trace.prefix):
        for slot in node.slots.tolist():
            found.setdefault(slot, []).append(node)
    for work in trace.scheduler.running.values():
        private = work.splice.held.tolist() if work.splice else []
        for slot in [*work.view.owned().tolist(), *private]:
            found.setdefault(slot, []).append(work)
    return found


def walk(prefix: PrefixCache) -> Iterable[Node]:
    """Every node of the tree but the roots."""
    stack = [child for root in prefix.tree.roots.values() for child in root.children.values()]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node


def write(trace: Trace, batch: Batch) -> None:
    """No slot is written twice in a batch, and none that anybody else holds or needs."""
    if not batch:
        return
    owners = holders(trace)
    written: list[int] = []
    for op in batch.extends:
        work = trace.scheduler.running[op.sequence_id]
        private = set(work.splice.private.tolist()) if work.splice else set()
        for slot in op.written_slots.tolist():
            written.append(slot)
            mine = owners.get(slot, []) == ([work] if slot in private else [])
            require("write", mine, f"sequence {op.sequence_id} writes {slot}, held by others")
    for op in batch.moves:
        written += op.dst_slots.tolist()
        write_of_move(trace, op, owners)
    require("write", len(written) == len(set(written)), "two ops write one slot")
    counts = trace.ledger.counts[written]
    require("write", (counts > 0).all(), "a free slot is written")


def write_of_move(trace: Trace, op: Move, owners: dict[int, list[object]]) -> None:
    """Copies go to slots of nobody; rows turn in place only where nobody else looks."""
    work = trace.scheduler.running[op.sequence_id]
    places = list(zip(op.src_slots.tolist(), op.dst_slots.tolist(), strict=True))
    for src, dst in places:
        others = [owner for owner in owners.get(dst, []) if owner is not work]
        if src != dst:
            require("write", not owners.get(dst), f"a copy goes to {dst}, which is held")
        require("write", len(others) <= 1, f"{dst} turns in place and is held by others")
        foreign = [owner for owner in others if not isinstance(owner, Node)]
        require("write", not foreign, f"{dst} turns in place under another sequence")
    stays = [src for src, dst in places if src == dst]
    require("write", not set(stays) & needed(trace, op) if stays else True, "a session's row turns")
    copied = {src for src, dst in places if src != dst}
    require("write", not copied & {dst for _, dst in places}, "a move reads what it writes")


def needed(trace: Trace, op: Move) -> set[int]:
    """Slots through which the contexts of other sessions and of waiting sequences run."""
    contexts = trace.keepers(op.sequence_id)
    contexts += [work.view.context for work in trace.scheduler.waiting]
    return {slot for context in contexts for slot in trace.prefix.tree.match(context).tolist()}


def read(trace: Trace, batch: Batch) -> None:
    """An extend reads the rows of `[0, start)` of its own context, and not past its end."""
    for op in batch.extends:
        twin = trace.live[op.sequence_id]
        require("read", len(op.table) == op.end and op.tokens, "a table of another length")
        rows = [trace.machine.read(slot) for slot in op.table[: op.start].tolist()]
        splice = twin.work.splice
        new = splice.next_insert() if splice else None
        head = new.start if new else op.start
        tokens = new.tokens if new else [token for token, _ in twin.symbols[head:]]
        want = twin.symbols[:head] + computed(twin.root, twin.symbols[:head], tokens)
        have = [(row.token, row.seen) for row in rows]
        require("read", have == want[: op.start], f"sequence {op.sequence_id} reads other rows")
        places = [row.position for row in rows]
        require("read", places == list(range(op.start)), f"rows stand at {places}")
        ahead = [token for token, _ in want[op.start : op.end]]
        require("read", [*op.tokens] == ahead, "other tokens are computed")


def last_row(trace: Trace) -> None:
    """Whoever samples next computes the last token's row itself: it is never covered.

    A turn that begins with an edit of its own samples only behind that.
    """
    for work in trace.scheduler.running.values():
        last = len(work.view) - 1
        if work.samples and not work.own_edit:
            require("last row", work.view.coverage.reach <= last, "its last row is covered")


def ledger(trace: Trace) -> None:
    """Owners counted afresh equal the stored count; free slots hold nothing."""
    owners = holders(trace)
    counts = np.zeros(trace.num_slots, dtype=np.int64)
    for slot, found in owners.items():
        counts[slot] = len(found)
    require("ledger", np.array_equal(counts, trace.ledger.counts), "a count is not its owners")
    held = {slot for slot, row in enumerate(trace.machine.rows) if row is not None}
    require("ledger", held == owners.keys(), f"free and held: {held ^ owners.keys()}")


def labelled(trace: Trace, context: Context) -> list[Symbol]:
    """What a context's labels say about its rows, by the origins that the trace has learned."""
    symbols: list[Symbol] = []
    state = root_state(context.root)
    for piece in context.pieces:
        chain = None if piece.origin is None else origin(trace, piece.origin)
        for token in piece.tokens:
            seen = state if chain is None else chain
            symbols.append((token, seen))
            state = advance(state, token, seen)
            chain = None if chain is None else advance(chain, token, chain)
    return symbols


def origin(trace: Trace, digest: bytes) -> int:
    """What an origin stands for."""
    require("provenance", digest in trace.origins, "an origin that no edit made")
    return trace.origins[digest]


def learn(trace: Trace, context: Context, symbols: list[Symbol]) -> None:
    """Note what the origins of an edited context stand for; one never stands for two things."""
    for start, _, piece in context.spans():
        if piece.origin is not None:
            known = trace.origins.setdefault(piece.origin, symbols[start][1])
            require("provenance", known == symbols[start][1], "one origin for two contexts")


def provenance(trace: Trace) -> None:
    """Every row under a tree path and of every running sequence is what the path says."""
    for root in trace.prefix.tree.roots.items():
        state = root_state(root[0])
        for child in root[1].children.values():
            provenance_below(trace, child, 0, state, None)
    for work in trace.scheduler.running.values():
        symbols = trace.live[work.sequence_id].symbols
        require("provenance", len(symbols) == len(work.view), "a context of another length")
        for start, end in work.view.coverage:
            provenance_of(trace, work.view.table[start:end].tolist(), start, symbols[start:end])


def provenance_below(
    trace: Trace, node: Node, start: int, state: int, graft: tuple[bytes, int] | None
) -> None:
    """One node of the tree and all below it, given what was computed above it."""
    chain = None
    if node.origin is not None:
        if not node.starts:
            require("provenance", graft and graft[0] == node.origin, "a graft continues nothing")
        chain = origin(trace, node.origin) if node.starts or not graft else graft[1]
    symbols: list[Symbol] = []
    for token in node.tokens:
        seen = state if chain is None else chain
        symbols.append((token, seen))
        state = advance(state, token, seen)
        chain = None if chain is None else advance(chain, token, chain)
    provenance_of(trace, node.slots.tolist(), start, symbols)
    below = None if node.origin is None or chain is None else (node.origin, chain)
    for edge, child in node.children.items():
        require("provenance", child.edge == edge and child.parent is node, "a crooked tree")
        provenance_below(trace, child, start + len(symbols), state, below)


def provenance_of(trace: Trace, slots: list[int], start: int, symbols: list[Symbol]) -> None:
    """The rows in these slots are these symbols, standing from `start` on."""
    require("provenance", len(slots) == len(symbols), "rows without tokens")
    rows = trace.machine.rows
    for position, (slot, symbol) in enumerate(zip(slots, symbols, strict=True), start):
        row = rows[slot]
        if row is None or row[:3] != (symbol[0], position, symbol[1]):
            raise Violation(f"provenance: {row} in slot {slot}, not {symbol} at {position}")


def lost_from(trace: Trace, twin: Twin, want: list[Symbol], have: list[Symbol]) -> int:
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


def degrade_at_admission(trace: Trace, twin: Twin) -> None:
    """A sequence whose grafts were evicted falls back to the exact form and says so."""
    twin.known = twin.work.view.context
    have = labelled(trace, twin.work.view.whole())
    hole = lost_from(trace, twin, twin.symbols, have)
    twin.symbols = have
    if counts_as_loss(twin, hole):
        trace.num_losses += 1
        require("degrade", twin.work.degraded, "a graft was lost at admission and nobody said so")
        # Rows brought behind a gap are in nobody's reach until it is closed.
        filed = hole < max(twin.promised, twin.work.computed)
        require("degrade", not (trace.roomy and filed), "a graft was lost although there is room")


def degrade(
    trace: Trace, twin: Twin, event: Edited, before: Before, rows: list[Row | None]
) -> None:
    """An edit did what it says: as asked, or less and with a reason."""
    view, request = twin.work.view, twin.requests[event.request_id]
    directives = request.directives
    require("degrade", len(event.receipts) == len(directives), "a directive without a receipt")
    asked = zip(directives, event.receipts, strict=True)
    brought = [brought_by(trace, directive, receipt) for directive, receipt in asked]
    want = edited(twin.root, twin.symbols, before.resident, directives, brought)
    lengths = (event.length_before, event.length_after)
    require("degrade", lengths == (len(twin.symbols), len(want)), f"lengths {lengths}")
    want += computed(twin.root, want, request.append)
    learn(trace, view.context, want)
    have = labelled(trace, view.whole())
    hole = lost_from(trace, twin, want, have)
    twin.symbols, twin.known = have, view.context
    regions = list(regions_of(directives, before.length))
    for receipt, region in zip(event.receipts, regions, strict=True):
        receipt_is_true(trace, twin, receipt, region, before, rows)
    lost = [
        r
        for r, region in zip(event.receipts, regions, strict=True)
        if lost_in(twin, region, hole, before.resident)
    ]
    if lost:
        trace.num_losses += 1
        require("degrade", not trace.roomy, "rows were lost although there is room")
        require("degrade", all(r.reason for r in lost), f"less was kept and nobody said so: {lost}")
        require("degrade", twin.work.degraded, "the sequence does not say that it degraded")
    if any(receipt.reason in DEGRADED for receipt in event.receipts):
        require("degrade", twin.work.degraded, "only a receipt says that less was kept")


def brought_by(trace: Trace, directive: Directive, receipt: Receipt) -> list[Symbol] | None:
    """The symbols that a directive brought from its source; all of them or none."""
    source, num = directive.source, len(directive.replacement)
    if source is None:
        require("degrade", receipt.shared == 0, "rows were shared that nobody asked for")
        return None
    require("degrade", receipt.shared in (0, num), "a share was torn")
    require("degrade", receipt.shared or receipt.reason or not num, "a share was lost in silence")
    symbols = labelled(trace, source.context)[source.start : source.start + num]
    return symbols if receipt.shared or not num else None


def kept(trace: Trace, twin: Twin, event: Edited, before: Before) -> None:
    """A context that is kept has every row that it had, in the tree where it was."""
    asked = twin.requests[event.request_id].keep
    require("kept", asked or not event.kept, "a context was kept that nobody wanted")
    if not event.kept:
        require("kept", not (asked and trace.roomy), "there was room to keep the context")
        return
    found = trace.prefix.tree.match(event.edit.before).tolist()
    filed = before.filed[: before.resident]
    require("kept", found[: len(filed)] == filed, "a kept context has other slots")
    rows = [trace.machine.read(slot)[:3] for slot in found[: before.resident]]
    require("kept", rows == before.rows, "a kept context has other rows")
    if twin.talk is not None:
        twin.talk.versions = [*twin.talk.versions[-2:], event.edit.before]


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
    trace: Trace,
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
    free = sum(trace.ledger.counts[slot] == 0 for slot in span)
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


def counter(trace: Trace) -> None:
    """Every loss is counted; the counter has a reason."""
    require("degrade", trace.scheduler.num_degraded >= trace.num_losses, "a loss was not counted")


def atomic(trace: Trace, twin: Twin, deed: Callable[[], object]) -> None:
    """Taking something back changes nothing but what it had asked for."""
    work = twin.work
    splice = work.splice
    private = splice.private if splice else np.empty(0, dtype=np.int64)
    borrowed = splice.borrowed if splice else np.empty(0, dtype=np.int64)
    shares = trace.ledger.counts[np.unique(borrowed)]
    view, coverage, reach = work.view, work.view.coverage, work.view.coverage.reach
    running = work.sequence_id in trace.scheduler.running
    state = (view.context, list(view.appended), view.table[:reach].tolist())
    deed()
    ledger(trace)
    same = work.view is view and view.coverage is coverage
    after = (view.context, list(view.appended), view.table[:reach].tolist())
    require("atomic", same and state == after, "the old view has changed")
    if work.splice is not splice or trace.scheduler.find(work.sequence_id) is None:
        require("atomic", not trace.ledger.counts[private].any(), "private slots stayed")
        fewer = trace.ledger.counts[np.unique(borrowed)] < shares
        require("atomic", fewer.all(), "borrowed slots stayed")
    if running and trace.scheduler.find(work.sequence_id) is None:
        filed = trace.prefix.resident(view.whole())
        require("atomic", filed >= reach, "rows of a cancelled sequence were thrown away")


def terminal(twin: Twin, event: Ended) -> None:
    """A sequence ends for the reason it gives."""
    work = twin.work
    generated = work.generated
    require("terminal", twin.num_sampled == len(generated) <= work.max_tokens, "tokens miscounted")
    stopped = bool(generated) and generated[-1] in work.stop_ids
    true: dict[str, bool] = {
        "stop": stopped,
        "length": not stopped and len(generated) == work.max_tokens,
        "edited": not work.samples and not twin.requests and work.view.missing <= work.owed,
    }
    require("terminal", true[event.reason], f"it did not end by {event.reason}")


def drained(trace: Trace) -> None:
    """At the end everything has ended, and every slot is free or in the tree."""
    require("terminal", not trace.scheduler.has_work, "it does not come to an end")
    require("terminal", not trace.live, f"never ended: {[*trace.live]}")
    require("terminal", len(trace.ended) + len(trace.answers) == trace.num_ids, "an id without end")
    prefix = trace.prefix
    owned = {slot for node in walk(prefix) for slot in node.slots.tolist()}
    require("ledger", trace.ledger.num_free + len(owned) == trace.num_slots, "a slot has leaked")
    require("ledger", prefix.evictable() == len(owned), "a row of nobody cannot be evicted")
    require("ledger", prefix.reclaim(trace.num_slots) == len(owned), "eviction frees less")
    require("ledger", trace.ledger.num_free == trace.num_slots, "a slot is stuck")


def replay(seed: int) -> str:
    """How to see a seed fail again."""
    return f"replay it with `python -m tests.simulation {seed}`"


def main() -> None:
    """Replay the seeds given on the command line."""
    for seed in sys.argv[1:]:
        Trace(int(seed), log=True).run()


if __name__ == "__main__":
    main()

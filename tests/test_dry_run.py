"""A plan is what a real run then does, in every count, and planning changes nothing.

The engines here compute nothing: what an edit does to rows is a matter of the books alone, so
tokens are made up instead of sampled, and thousands of steps take seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from leyline import Directive, Engine, LeylineError, Mode, SamplingParams
from leyline.batch import Batch, Edited, StepOutput
from leyline.directive import Receipt, Source
from leyline.errors import VersionConflictError
from leyline.events import EditPlan, EditResult, EngineEvent
from leyline.executor import Executor
from leyline.job import Job
from leyline.pointing import Change, MarkRequest, Target
from leyline.receipts import FORGOTTEN, NO_ROOM
from leyline.rehearsal import rehearse
from leyline.rows import take
from leyline.scheduler import Scheduler
from leyline.sequence import EditRequest
from tests.engine_state import assert_at_rest, state_digest
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]
MODES = [Mode.AMORTIZE, Mode.FORGET, Mode.HEAL]
WORDS = ["the", "rain", "in", "land", "is", "over", "and", "all", "well", "there"]
NUM_CASES = 100  # with each engine


class Dreaming(Executor):
    """An executor that makes tokens up; the same one at the same place."""

    def run(self, batch: Batch) -> StepOutput:
        return StepOutput(
            {
                op.sequence_id: made_up(op.sequence_id, op.draw.step)
                for op in batch.extends
                if op.draw
            }
        )


def made_up(sequence_id: int, step: int) -> int:
    return 3 + hashlib.sha256(f"{sequence_id} {step}".encode()).digest()[0] % 200


def dreaming_engine(folder: Path, **options: Any) -> Engine:
    engine = tiny_engine(folder, max_model_len=400, session_share=1.0, pin_share=0.3, **options)
    parts = engine.parts
    executor = Dreaming(parts.executor.model, parts.cache, parts.num_tokens)
    engine._parts = dataclasses.replace(parts, executor=executor)
    return engine


# Tight caches hold little more than one of the sessions; the step is small against the inserts.
OPTIONS: list[dict[str, Any]] = [
    {"kv_cache_tokens": 4000, "keep_versions": 4},
    {"kv_cache_tokens": 4000, "keep_versions": 0, "max_num_batched_tokens": 512},
    {"kv_cache_tokens": 64, "keep_versions": 4, "max_num_batched_tokens": 4},
    {"kv_cache_tokens": 62, "keep_versions": 0, "max_num_batched_tokens": 6},
    {"kv_cache_tokens": 70, "keep_versions": 2, "max_num_batched_tokens": 512},
]


class Case:
    """An engine in some state: conversations that share rows, edited and half evicted."""

    def __init__(self, engine: Engine, seed: int, *, busy: bool = False) -> None:
        self.engine, self.random, self.busy = engine, Random(seed), busy
        self.tight = engine.parts.scheduler.prefix.ledger.num_slots < 1000
        self.empty()
        told = self.words(6, 8) if self.tight else self.words(4, 12)
        self.chat("s", told)
        if self.random.random() < 0.6:
            self.chat("fork", told)
        self.chat("other", self.words(2, 10))
        for _ in range(self.random.choice([0, 0, 1, 2])):
            self.tries("submit", self.changes(1, plain=True), self.name())
            self.drain()
        if self.random.random() < 0.3:
            prefix = engine.parts.scheduler.prefix
            prefix.reclaim(prefix.ledger.num_free + self.random.randint(1, 30))
        if self.random.random() < 0.3:
            self.pin()
        if busy:
            self.run_something(told)
        elif self.random.random() < 0.4:
            self.heal_something()

    def empty(self) -> None:
        """Leave nothing of the case before this one."""
        for session in self.engine.session_ids():
            self.engine.delete_session(session)
        self.drain()
        self.engine.parts.scheduler.prefix.clear()

    def words(self, low: int, high: int) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(low, high)))

    def name(self) -> str:
        return self.random.choice(self.engine.session_ids())

    def length(self) -> int:
        """Tokens of the context that an edit of "s" is aimed at."""
        plan = self.engine.plan_directives("s", [Directive(1, 2, (9,))])
        return plan.length_before

    def chat(self, session: str, content: str, max_tokens: int = 4) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        messages = [{"role": "user", "content": content}]
        request = self.engine.submit_chat(messages, params, session_id=session)
        if max_tokens < 10:
            self.drain(request)
        return request

    def pin(self) -> None:
        try:
            self.engine.mark("s", MarkRequest("pin", Target(0, self.random.randint(1, 20))))
        except LeylineError:
            self.random.random()

    def run_something(self, told: str) -> None:
        """A turn of "s", edits that wait for it, and in a roomy cache somebody else's turn."""
        if not self.tight and self.random.random() < 0.5:
            self.chat("fork" if "fork" in self.engine.session_ids() else "new", "hello", 60)
        if self.random.random() < 0.7:
            self.chat("s", told, 11 if self.tight else 40)
        for _ in range(self.random.choice([0, 1, 1, 4, 9])):
            self.engine.step()
        for _ in range(self.random.choice([0, 0, 1, 2])):
            self.tries("submit", self.changes(self.length(), plain=True))

    def heal_something(self) -> None:
        """A healing that is under way, perhaps that of "s"."""
        session, waited = self.name(), self.random.randint(0, 3)
        directive = Directive(2, 3, (9, 9, 9)[: self.random.randint(0, 3)], Mode.HEAL)
        self.engine.submit_directives(session, [directive])
        while self.engine.has_work and (self.engine.session_info(session).busy or waited):
            waited -= not self.engine.session_info(session).busy
            self.engine.step()

    def changes(self, length: int, *, plain: bool = False) -> list[Change | Directive]:
        """A set that fits a context of this length (1: whichever session it goes to)."""
        if length == 1:
            length = min(info.context_length for info in self.engine.sessions_info())
        num = min(2 * self.random.randint(1, 3), (length - 1) // 2 * 2)
        points = sorted(self.random.sample(range(1, length), num))
        spans = list(zip(points[::2], points[1::2], strict=True))
        spans = [(start, min(end, start + 12)) for start, end in spans]
        changes = [self.change(start, end, plain) for start, end in spans]
        if not plain and self.random.random() < 0.1:
            changes.append(Directive(length, length, (9, 9)))
        return changes

    def change(self, start: int, end: int, plain: bool) -> Change | Directive:
        draw, mode = self.random.random(), self.random.choice(MODES)
        context = self.engine.sessions.get("s").context
        new = tuple(self.random.randint(3, 200) for _ in range(self.random.randint(0, 9)))
        if plain or draw < 0.4:
            return Directive(start, end, new, mode)
        if draw < 0.6 and mode is not Mode.FORGET:
            return self.share(start, end, mode)
        spelled = self.engine.tokenizer.decode(context.tokens[start : end - 1])
        if draw < 0.7 and spelled.strip():
            return Change(Target(start, end), new, "forget", "cache")
        return Change(Target(start, end), self.words(0, 3), mode)

    def share(self, start: int, end: int, mode: Mode) -> Change | Directive:
        session = self.name()
        context = self.engine.sessions.get(session).context
        first = self.random.randrange(max(1, len(context)))
        last = min(len(context), first + self.random.randint(1, 8))
        if self.random.random() < 0.5:
            return Change(Target(start, end), mode=mode, source=(session, Target(first, last)))
        return Directive(start, end, context.tokens[first:last], mode, Source(context, first))

    def drain(self, request: int = 0) -> EngineEvent | None:
        """Step until nothing is left to do; the last that was said of a request."""
        said: list[EngineEvent] = []
        while self.engine.has_work:
            said += self.engine.step()
        assert_at_rest(self.engine)
        mine = [event for event in said if event.request_id == request]
        return mine[-1] if mine else None

    def tries(self, what: str, changes: list[Change | Directive], name: str = "s") -> Any:
        """Plan or submit a set; None if it does not fit."""
        try:
            return getattr(self.engine, f"{what}_directives")(name, changes)
        except LeylineError:
            return None

    def planned(self, changes: list[Change | Directive]) -> EditPlan:
        """Plan, twice, and see that nothing has changed."""
        before = state_digest(self.engine)
        plan = self.engine.plan_directives("s", changes)
        assert state_digest(self.engine) == before
        assert counts(self.engine.plan_directives("s", changes)) == counts(plan)
        return plan

    def done(self, changes: list[Change | Directive], version: int | None = None) -> EditResult:
        """The same set, carried out."""
        request = self.engine.submit_directives("s", changes, expected_version=version)
        result = self.drain(request)
        assert isinstance(result, EditResult), result
        return result


def counts(told: EditPlan | EditResult) -> tuple[Any, ...]:
    return (told.session_id, told.receipts, told.length_before, told.length_after)


@pytest.fixture(scope="module", params=range(len(OPTIONS)))
def engine(tiny_folder: Folder, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with dreaming_engine(tiny_folder("v3"), **OPTIONS[request.param]) as engine:
        yield engine


KINDS = ("copied", "moved_in_place", "shared", "freed", "kept", "recomputed")


def what_happened(receipt: Receipt) -> list[str]:
    return [name for name in KINDS if getattr(receipt, name)] + [receipt.reason or "as asked"]


def check_variety(engine: Engine, seen: Counter[str]) -> None:
    """A test that has seen everything once is worth more than one that has seen one thing often."""
    keeps, tight = engine.config.keep_versions, engine.config.kv_cache_tokens != 4000
    expected = {"shared", "freed", "kept", "as asked", FORGOTTEN}
    expected |= {NO_ROOM, "copied", "moved_in_place"} if tight else set()
    expected |= {"copied"} if keeps else {"moved_in_place"}
    missing = {name for name in expected if seen[name] < 4}
    assert not missing, (missing, seen)


def difference(engine: Engine, seed: int, *, busy: bool = False, between: Any = None) -> Any:
    """What a plan and the real run say of one case; None if the set does not fit."""
    case = Case(engine, seed, busy=busy)
    changes = case.changes(case.length())
    plan = case.tries("plan", changes)
    if plan is None:
        assert case.tries("submit", changes) is None, seed
        return None
    case.planned(changes)
    if between is not None:
        between(case)
    result = case.done(changes)
    return plan, result


@pytest.mark.parametrize("busy", [False, True])
def test_a_plan_is_what_a_real_run_then_does(engine: Engine, busy: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_CASES):
        told = difference(engine, seed, busy=busy)
        if told is not None:
            plan, result = told
            assert counts(result) == counts(plan), seed
            assert result.version == plan.version + 1, seed
            seen.update(name for one in plan.receipts for name in what_happened(one))
    check_variety(engine, seen)


def evict_some(case: Case) -> None:
    prefix = case.engine.parts.scheduler.prefix
    prefix.reclaim(prefix.ledger.num_free + 12)


def hold_the_rows(case: Case) -> None:
    """A fork that comes after the plan runs on the same rows."""
    tokens = case.engine.sessions.get("s").context.tokens
    case.engine.submit_prompt(tokens, SamplingParams(temperature=0.0, max_tokens=1))
    case.drain()


def edit_first(case: Case) -> None:
    case.drain(case.engine.submit_directives("s", [Directive(1, 2, (9,))]))


@pytest.mark.parametrize("between", [evict_some, hold_the_rows, edit_first])
def test_a_plan_for_another_state_disagrees(
    tiny_folder: Folder, between: Callable[[Case], None]
) -> None:
    with dreaming_engine(tiny_folder("v3"), **OPTIONS[1]) as engine:
        told = [difference(engine, seed, between=between) for seed in range(20)]
        told = [pair for pair in told if pair is not None]
        assert sum(counts(result) != counts(plan) for plan, result in told) > 3


def forgets_what_commits_before(patch: pytest.MonkeyPatch) -> None:
    """The versions that earlier edits of the same session will make are not thought of."""
    patch.setattr("leyline.job.Job.commit", when_real(Job.commit))


def when_real(commit: Callable[[Job, Edited], None]) -> Callable[[Job, Edited], None]:
    """Only the commits of real edits."""
    return lambda job, event: commit(job, event) if event.request_id in job.waiting else None


def thinks_the_background_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Scheduler,
        "rehearse",
        lambda self, work, *_: rehearse(work, self.prefix, self.others(work)),
    )


def thinks_that_nothing_is_kept(patch: pytest.MonkeyPatch) -> None:
    def request(number: int, directives: tuple[Directive, ...], keep: bool) -> EditRequest:
        return EditRequest(number, directives, keep=False)

    patch.setattr("leyline.session_desk.EditRequest", request)


@pytest.mark.parametrize(
    ("bug", "option", "busy"),
    [
        (forgets_what_commits_before, 2, True),
        (thinks_the_background_stays, 1, True),
        (thinks_that_nothing_is_kept, 0, False),
    ],
)
def test_a_wrong_plan_is_noticed(
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    option: int,
    busy: bool,
) -> None:
    bug(monkeypatch)
    with dreaming_engine(tiny_folder("v3"), **OPTIONS[option]) as engine:
        told = (difference(engine, seed, busy=busy) for seed in range(4 * NUM_CASES))
        assert any(pair is not None and counts(pair[0]) != counts(pair[1]) for pair in told)


def test_room_is_made_a_step_at_a_time_in_a_plan_too(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is evicted depends on how much is asked for at once."""
    asked: dict[str, list[int]] = {"leyline.rehearsal": [], "leyline.scheduler": []}
    for module, sizes in asked.items():

        def taken(prefix: Any, num: int, *after: int, sizes: list[int] = sizes) -> Any:
            sizes.append(num)
            return take(prefix, num, *after)

        monkeypatch.setattr(f"{module}.take", taken)
    with dreaming_engine(tiny_folder("v3"), max_num_batched_tokens=6) as engine:
        case = Case(engine, 0)
        for sizes in asked.values():
            sizes.clear()
        edit: list[Change | Directive] = [Directive(5, 6, (9,) * 20), Directive(9, 9, (8,) * 3)]
        engine.plan_directives("s", edit)
        case.done(edit)
    assert asked["leyline.rehearsal"] == [6, 6, 6, 2, 3]
    assert asked["leyline.scheduler"][:5] == asked["leyline.rehearsal"]


def test_a_plan_refuses_what_a_real_run_would(tiny_folder: Folder) -> None:
    with dreaming_engine(tiny_folder("v3")) as engine:
        case = Case(engine, 0)
        digest = state_digest(engine)
        wrong: list[tuple[Any, dict[str, Any]]] = [
            ([Directive(2, 10**6)], {}),
            ([], {}),
            ([Directive(1, 2)], {"expected_version": 77}),
            ([Change(Target(match="nowhere at all"), "x")], {}),
            ([Directive(1, 2, (9,) * 500)], {}),
            ([Change(Target(1, 2), source=("nobody", Target(1, 2)))], {}),
        ]
        for changes, more in wrong:
            errors = []
            for ask in (engine.plan_directives, engine.submit_directives):
                with pytest.raises(LeylineError) as caught:
                    ask("s", changes, **more)
                errors.append((type(caught.value), str(caught.value), caught.value.details))
            assert errors[0] == errors[1]
            assert state_digest(engine) == digest
        with pytest.raises(VersionConflictError) as conflict:
            engine.plan_directives("s", [Directive(1, 2)], expected_version=77)
        assert conflict.value.details == {"version": engine.sessions.get("s").version}
        case.drain()

"""An engine and the hand-edited reference, driven side by side.

A `Lockstep` submits turns and edits to a real engine, watches what its steps do from outside (the
logits that were sampled from, the versions of its sessions), does the same by hand in
`transformers`, and compares. Free slots hold NaN, so a row that is read after it was let go, or
before it was written, shows.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leyline import Directive, Engine, Mode, SamplingParams
from leyline.batch import Batch, Extend, StepOutput
from leyline.cache.ledger import NO_SLOTS
from leyline.events import Completion, EditResult, EngineEvent, Failure
from leyline.executor import Executor
from leyline.sequence import Sequence as Work
from leyline.sequence import Splice
from leyline.splice import NO_ROOM
from tests.hand_cache import Edit, HandCache

# Both sides compute in float32, in other orders of summation; measured 1e-6 to 4e-6 of the RMS.
TOLERANCE = 1e-4
STEP_LIMIT = 2000


@dataclass(frozen=True)
class Sample:
    """One sampled token: whose, behind how many tokens, from which logits [V]."""

    sequence_id: int
    length: int
    logits: Tensor
    token: int


class RecordingExecutor(Executor):
    """An executor that keeps what it sampled from, and how many rows it moved."""

    samples: list[Sample]
    moved: int

    @classmethod
    def of(cls, executor: Executor) -> RecordingExecutor:
        recording = cls(executor.model, executor.cache, executor.num_tokens)
        recording.samples, recording.moved = [], 0
        return recording

    def run(self, batch: Batch) -> StepOutput:
        self.moved = sum(op.num_rows for op in batch.moves)
        return super().run(batch)

    def _sample(self, extends: tuple[Extend, ...], hidden: Tensor) -> StepOutput:
        output = super()._sample(extends, hidden)
        ends = np.cumsum([len(op.tokens) for op in extends])
        for op, end in zip(extends, ends.tolist(), strict=True):
            if op.sequence_id in output.tokens:
                logits = self.model.logits(hidden[end - 1 : end])[0]
                token = output.tokens[op.sequence_id]
                self.samples.append(Sample(op.sequence_id, op.end, logits, token))
        return output


def tiny_engine(folder: Path, **options: Any) -> Engine:
    """An engine in float32 that records its samples and poisons every free slot."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_tokens": 4096,
        "max_num_batched_tokens": 24,
        "protect_first": 0,
        "num_threads": 1,
        "progress": False,
    }
    engine = Engine(model=str(folder), **{**defaults, **options})
    record(engine)
    poison(engine)
    return engine


def record(engine: Engine) -> RecordingExecutor:
    """Put a recording executor into an engine."""
    recording = RecordingExecutor.of(engine.parts.executor)
    engine._parts = dataclasses.replace(engine.parts, executor=recording)
    return recording


def poison(engine: Engine) -> None:
    """Fill free slots with NaN, now and whenever one becomes free."""
    cache, ledger = engine.parts.cache, engine.parts.scheduler.prefix.ledger
    ledger.on_free = lambda slots: cache.fill(torch.from_numpy(slots), float("nan"))
    ledger.on_free(np.flatnonzero(ledger.counts == 0))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """RMS of the difference over the RMS of the reference; NaN counts as infinite."""
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    return float(error.nan_to_num(float("inf")))


def chat_text(role: str, content: str) -> str:
    """One message as the tiny template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


@dataclass
class Track:
    """A session as its client and the reference know it.

    Attributes:
        hand: The reference.
        messages: What the client sent and got.
        believed: The text the client believes in, up to where its next message begins.
        waiting: Edits that have not committed.
        version: Edits that have.
        samples: Samples that are not compared yet.
        rows: Rows that the engine's next edit finds.
        no_room: Whether that edit has to become a re-prefill.
        error: Largest relative error so far, and
        compared: number of comparisons.
    """

    hand: HandCache
    messages: list[dict[str, str]] = field(default_factory=list)
    believed: str = ""
    waiting: deque[list[Edit]] = field(default_factory=deque)
    version: int = 0
    samples: list[Sample] = field(default_factory=list)
    rows: int = 0
    no_room: bool = False
    error: float = 0.0
    compared: int = 0

    def catch_up(self, rows: int) -> None:
        """Compute by hand up to as many rows as the engine has, and compare what it sampled."""
        if rows < self.hand.num_rows:
            self.hand.forget_rows(rows)
        first = self.hand.num_rows
        if rows > first:
            logits = self.hand.compute(rows)
            for sample in self.samples:
                theirs = logits[sample.length - 1 - first]
                self.error = max(self.error, relative_error(sample.logits, theirs))
                self.compared += 1
            self.samples = []
        assert not self.samples, "a sample was not compared"

    def admitted(self, rows: int) -> None:
        """The engine starts or resumes the session's work from as many rows as it finds."""
        if self.samples:
            self.catch_up(self.samples[-1].length)
        self.hand.forget_rows(min(rows, self.hand.num_rows))
        self.rows = rows

    def edit(self) -> None:
        """Carry out the next edit by hand, from the rows that the engine had for it."""
        self.catch_up(self.rows)
        edits = self.waiting.popleft()
        self.hand.edit(edits)
        if self.no_room:
            self.hand.forget_rows(min(start for start, *_ in edits))
        self.no_room = False


class Lockstep:
    """Drives one engine and a reference of each of its sessions.

    Args:
        engine: Its sessions belong to the lockstep.
        oracle: The model in `transformers`.
        tight: Whether the cache is so small that rows are evicted and edits may be degraded.

    Attributes:
        tracks: The sessions by name.
        events: What the engine said, by request.
        num_rows_held: Rows of sessions that were found unchanged by somebody else's move.
    """

    def __init__(self, engine: Engine, oracle: Any, *, tight: bool = False) -> None:
        self.engine = engine
        self.oracle = oracle
        self.tight = tight
        self.tracks: dict[str, Track] = {}
        self.events: dict[int, list[EngineEvent]] = {}
        self.num_rows_held = 0
        self._watch_admissions()

    @property
    def error(self) -> float:
        """Largest relative error of any logits so far."""
        return max(track.error for track in self.tracks.values())

    @property
    def recording(self) -> RecordingExecutor:
        executor = self.engine.parts.executor
        assert isinstance(executor, RecordingExecutor)
        return executor

    # -- what a client does ---------------------------------------------------------------------

    def turn(self, name: str, content: str, params: SamplingParams) -> int:
        """Submit the next turn of a session: the client's own history and one message more."""
        track = self.tracks.setdefault(name, Track(HandCache(self.oracle)))
        track.messages.append({"role": "user", "content": content})
        added = chat_text("user", content) + "<|im_start|>assistant\n"
        if track.believed and not track.believed.endswith("<|im_end|>"):
            added = "<|im_end|>\n" + added
        elif track.believed:
            added = "\n" + added
        track.hand.tokens += self.engine.tokenizer.encode(added)
        track.believed += added
        return self.engine.submit_chat(track.messages, params, session_id=name)

    def edit(self, name: str, edits: list[Edit]) -> int:
        """Submit a set of directives."""
        request = self.engine.submit_directives(
            name, [Directive(start, end, tuple(new), Mode(mode)) for start, end, new, mode in edits]
        )
        self.tracks[name].waiting.append(edits)
        return request

    def length(self, name: str) -> int:
        """Tokens that the session's context has when its waiting edits are done."""
        waiting = (edit for edits in self.tracks[name].waiting for edit in edits)
        now = len(self.engine.session_info(name).token_ids)
        return now + sum(len(new) - (end - start) for start, end, new, _ in waiting)

    # -- steps ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until nothing is left to do, and compare everything."""
        for _ in range(STEP_LIMIT):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to an end"
        for name, track in self.tracks.items():
            session = self.engine.sessions.get(name)
            assert session.context.tokens == tuple(track.hand.tokens)
            track.catch_up(max(session.computed, track.hand.num_rows))

    def step(self) -> list[EngineEvent]:
        """One step of the engine, followed by hand."""
        owners = {s.sequence_id: self.tracks[s.session_id] for s in self.engine.sessions if s.busy}
        for name, track in self.tracks.items():
            track.rows = self._rows(name, track.rows)
        before = {name: self._snapshot(name) for name in self.tracks}
        events = self.engine.step()
        edited = {name for name, track in self.tracks.items() if self._follow_edit(name, track)}
        if self.recording.moved and not self.tight:
            self._same_rows({n: rows for n, rows in before.items() if n not in edited})
        for sample in self._taken():
            if sample.sequence_id in owners:
                track = owners[sample.sequence_id]
                track.samples.append(sample)
                track.hand.tokens.append(sample.token)
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)
            if isinstance(event, Completion) and event.session_id is not None:
                self._answered(self.tracks[event.session_id], event)
            assert not isinstance(event, Failure), event
        return events

    def _taken(self) -> list[Sample]:
        taken, self.recording.samples = self.recording.samples, []
        return taken

    def _follow_edit(self, name: str, track: Track) -> bool:
        """Carry out by hand the edit that the engine committed in its last step, if it did."""
        version = self.engine.sessions.get(name).version
        if version == track.version:
            return False
        track.version += 1
        assert version == track.version, "two edits of a session committed in one step"
        track.edit()
        work = self._work(name)
        if work is not None and work.samples and track.hand.num_rows == len(track.hand.tokens):
            track.hand.forget_rows(track.hand.num_rows - 1)
        return True

    def _answered(self, track: Track, event: Completion) -> None:
        """The client adds the answer to its history."""
        track.messages.append({"role": "assistant", "content": event.text})
        track.believed += event.text + ("<|im_end|>" if event.finish_reason == "stop" else "")
        usage = event.usage
        assert self.tight or not usage.degraded
        assert usage.spliced_tokens <= usage.cached_tokens < usage.prompt_tokens

    # -- looking inside -------------------------------------------------------------------------

    def _work(self, name: str) -> Work | None:
        job = self.engine._job(self.engine.sessions.get(name))
        return job.work if job else None

    def _watch_admissions(self) -> None:
        """Be told whenever the engine starts or resumes something, or finds no room to move it."""
        scheduler = self.engine.parts.scheduler
        admit, wait = scheduler._admit, scheduler._wait

        def admitted(sequence: Work) -> None:
            admit(sequence)
            if (track := self._track(sequence)) is not None:
                track.admitted(sequence.view.coverage.reach)

        def waited(sequence: Work, splice: Splice) -> None:
            wait(sequence, splice)
            if (track := self._track(sequence)) is not None and sequence.splice is not None:
                track.no_room = sequence.splice.reason == NO_ROOM

        scheduler._admit, scheduler._wait = admitted, waited

    def _track(self, work: Work) -> Track | None:
        names = (s.session_id for s in self.engine.sessions if s.sequence_id == work.sequence_id)
        return self.tracks.get(next(names, ""))

    def _rows(self, name: str, known: int) -> int:
        """Rows that an edit of the session would find if it began now."""
        work = self._work(name)
        if work is None or work.splice is not None or not work.running:
            return known
        return work.view.coverage.reach

    def _slots(self, name: str) -> np.ndarray:
        """Slots of the rows that a session has."""
        work = self._work(name)
        if work is not None and work.running:
            return work.view.table[: work.view.coverage.reach]
        tree = self.engine.parts.scheduler.prefix.tree
        session = self.engine.sessions.find(name)
        return NO_SLOTS if session is None else tree.match(session.context)

    def _snapshot(self, name: str) -> tuple[Tensor, Tensor]:
        """Copies of a session's rows, ckv [L, n, C] and kpe [L, n, R]."""
        cache, slots = self.engine.parts.cache, torch.from_numpy(self._slots(name).copy())
        return cache.ckv[:, slots], cache.kpe[:, slots]

    def _same_rows(self, before: dict[str, tuple[Tensor, Tensor]]) -> None:
        """The rows of these sessions are there as they were, bit by bit."""
        for name, rows in before.items():
            for old, new in zip(rows, self._snapshot(name), strict=True):
                assert new.shape[1] >= old.shape[1], "rows of another session are gone"
                assert torch.equal(new[:, : old.shape[1]], old), "rows of another session changed"
            self.num_rows_held += rows[0].shape[1]


def results(events: dict[int, list[EngineEvent]]) -> Iterator[EditResult]:
    """The results of all edits."""
    for listed in events.values():
        yield from (event for event in listed if isinstance(event, EditResult))


def terminals(events: Sequence[EngineEvent]) -> list[EngineEvent]:
    """Those events that end a request."""
    return [event for event in events if isinstance(event, Completion | EditResult | Failure)]

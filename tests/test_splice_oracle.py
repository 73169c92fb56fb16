"""Splices against the reference: `transformers`' cache, edited by hand (see `tests.hand_cache`).

A trace is one or two sessions that share their beginning, and a few rounds of turns and random
edits, on idle sessions and in the middle of a generation, one at a time or queued. Every token
that the engine samples is compared by its logits.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leyline import Engine, Mode, SamplingParams
from leyline.cache.latent import LatentCache
from leyline.events import Completion
from leyline.kernels.move import move
from leyline.splice import EVICTED
from tests.hand_cache import Edit, HandCache
from tests.lockstep import TOLERANCE, Lockstep, Sample, relative_error, results, tiny_engine
from tests.tiny_models import FAMILIES, load_oracle

TRACES = 12
BATCHES = 6  # times the families: 216 traces, two to three edits each
NUM_TOKENS = 266
TIGHT = 230  # slots: one long session, or two short ones
LETTERS = "the weather in an other land, and then 0123456789\n"

Folder = Callable[[str], Path]


@functools.cache
def oracle_of(folder: Path) -> Any:
    return load_oracle(folder)


def random_edits(rng: random.Random, length: int) -> list[Edit]:
    """One to four directives whose spans do not overlap and leave something of the context."""
    cuts = sorted(rng.randint(0, length) for _ in range(2 * rng.randint(1, 4)))
    if rng.random() < 0.2:
        cuts[0] = 0
    if rng.random() < 0.2:
        cuts[-1] = length
    spans = list(zip(cuts[::2], cuts[1::2], strict=True))
    edits: list[Edit] = [
        (*span, random_tokens(rng, span[1] - span[0]), random_mode(rng)) for span in spans
    ]
    removed = sum(end - start - len(new) for start, end, new, _ in edits)
    return edits if removed < length - 4 else random_edits(rng, length)


def random_tokens(rng: random.Random, removed: int) -> list[int]:
    """A replacement: empty, shorter, as long, or longer."""
    kind = rng.random()
    num = 0 if kind < 0.25 else removed if kind < 0.45 else rng.randint(1, 9)
    return [rng.randrange(3, NUM_TOKENS) for _ in range(min(num, 30))]


def random_mode(rng: random.Random) -> str:
    return "forget" if rng.random() < 0.2 else "amortize"


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 40)))


def params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.randint(1, 7),
        seed=rng.randrange(1000),
        ignore_eos=rng.random() < 0.5,
    )


class Trace:
    """One random trace over a lockstep; `names` are its sessions."""

    def __init__(self, lockstep: Lockstep, rng: random.Random, names: list[str]) -> None:
        self.lockstep = lockstep
        self.rng = rng
        self.names = names

    def run(self) -> None:
        first = random_text(self.rng)
        for name in self.names:
            self.lockstep.turn(name, first, params(self.rng))
            if self.rng.random() < 0.5:
                self.lockstep.run()
        self.lockstep.run()
        for _ in range(self.rng.randint(1, 3)):
            if self.lockstep.tight:
                self.crowd()
            self.rng.choice((self.edit_idle, self.edit_running, self.turn))()
        self.edit_idle()
        for name in self.names:
            self.lockstep.turn(name, random_text(self.rng), params(self.rng))
        self.lockstep.run()

    def crowd(self) -> None:
        """Somebody else's prompt, which takes most of a tight cache."""
        ids = [self.rng.randrange(3, NUM_TOKENS) for _ in range(TIGHT // 2)]
        self.lockstep.engine.submit_prompt(ids, params(self.rng))

    def turn(self) -> None:
        self.lockstep.turn(self.rng.choice(self.names), random_text(self.rng), params(self.rng))
        self.lockstep.run()

    def edit_idle(self) -> None:
        """One or two sets at once on an idle session."""
        self.edit(self.rng.choice(self.names), self.rng.randint(1, 2))
        self.lockstep.run()

    def edit_running(self) -> None:
        """Edits while a turn waits, is prefilled or generates."""
        name = self.rng.choice(self.names)
        self.lockstep.turn(name, random_text(self.rng), params(self.rng))
        for _ in range(self.rng.randint(0, 5)):
            if self.lockstep.engine.has_work:
                self.lockstep.step()
        self.edit(name, self.rng.randint(1, 2))
        self.lockstep.run()

    def edit(self, name: str, num: int) -> None:
        for _ in range(num):
            self.lockstep.edit(name, random_edits(self.rng, self.lockstep.length(name)))


def run_traces(
    engine: Engine, oracle: Any, seed: int, num: int, *, tight: bool = False
) -> Lockstep:
    """Some traces, one after the other, on one engine."""
    lockstep = Lockstep(engine, oracle, tight=tight)
    for index in range(num):
        rng = random.Random(f"{seed}-{index}")
        names = [f"{index}{letter}" for letter in "ab"[: rng.randint(1, 2)]]
        Trace(lockstep, rng, names).run()
    return lockstep


@pytest.mark.parametrize("seed", range(BATCHES))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_after_random_edits_are_those_of_the_hand_edited_cache(
    tiny_folder: Folder, family: str, seed: int
) -> None:
    folder = tiny_folder(family)
    keep_versions = seed % 2 * 4
    with tiny_engine(folder, keep_versions=keep_versions) as engine:
        lockstep = run_traces(engine, oracle_of(folder), seed, TRACES)
        assert lockstep.error < TOLERANCE
        assert lockstep.num_rows_held > 0
        receipts = [r for result in results(lockstep.events) for r in result.receipts]
        assert (sum(receipt.moved_in_place for receipt in receipts) > 0) == (not keep_versions)
        assert sum(receipt.copied for receipt in receipts) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_after_random_edits_in_a_tight_cache(tiny_folder: Folder, family: str) -> None:
    folder = tiny_folder(family)
    with tiny_engine(folder, kv_cache_tokens=TIGHT, keep_versions=0) as engine:
        lockstep = run_traces(engine, oracle_of(folder), 0, TRACES, tight=True)
        assert lockstep.error < TOLERANCE
        assert engine.parts.scheduler.num_preempted + engine.parts.scheduler.num_degraded > 0


def test_a_session_goes_on_rightly_when_its_rows_were_evicted(tiny_folder: Folder) -> None:
    folder, rng = tiny_folder("v2_yarn"), random.Random(7)
    with tiny_engine(folder, kv_cache_tokens=TIGHT, keep_versions=0) as engine:
        lockstep = conversation(engine, oracle_of(folder), rng, tight=True)
        edits: list[Edit] = [(6, 9, [50], "amortize")]
        for _ in range(2):
            lockstep.edit("s", edits)
            lockstep.run()
            engine.generate([5] * (TIGHT - 1), temperature=0, max_tokens=1)
        first, second = (result.receipts[0] for result in results(lockstep.events))
        assert (first.mode_done, first.reason) == (Mode.AMORTIZE, None)
        assert (second.mode_done, second.reason) == (Mode.FORGET, EVICTED)
        lockstep.turn("s", "and then?", params(rng))
        lockstep.run()
        assert lockstep.error < TOLERANCE


def test_a_turn_that_finds_its_graft_evicted_says_so_and_is_exact(tiny_folder: Folder) -> None:
    folder, rng = tiny_folder("glm"), random.Random(8)
    with tiny_engine(folder, kv_cache_tokens=TIGHT, keep_versions=0) as engine:
        lockstep = conversation(engine, oracle_of(folder), rng, tight=True)
        lockstep.edit("s", [(6, 9, [50], "amortize")])
        lockstep.run()
        engine.generate([5] * (TIGHT - 1), temperature=0, max_tokens=1)
        assert error_to_fresh_prefill(lockstep, rng) < TOLERANCE
        ends = [ended[-1] for ended in lockstep.events.values()]
        usage = [end.usage for end in ends if isinstance(end, Completion)]
        assert [one.degraded for one in usage] == [False, True]
        assert usage[-1].spliced_tokens == 0
        assert len(engine.session_info("s").pieces) == 1


Turn = Callable[[LatentCache, Tensor, Tensor, Tensor, Tensor], None]


def the_other_way(
    cache: LatentCache, src: Tensor, dst: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    move(cache.ckv, cache.kpe, src, dst, -delta, inv_freq)


def one_percent_too_far(
    cache: LatentCache, src: Tensor, dst: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    move(cache.ckv, cache.kpe, src, dst, delta, 1.01 * inv_freq)


def latents_one_percent_larger(
    cache: LatentCache, src: Tensor, dst: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    move(cache.ckv, cache.kpe, src, dst, delta, inv_freq)
    cache.ckv[:, dst] *= 1.01


def not_turned(
    cache: LatentCache, src: Tensor, dst: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    move(cache.ckv, cache.kpe, src, dst, torch.zeros_like(delta), inv_freq)


@pytest.mark.parametrize(
    "wrong", [the_other_way, one_percent_too_far, latents_one_percent_larger, not_turned]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_move_does_not_pass(
    tiny_folder: Folder, family: str, wrong: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentCache, "move", wrong)
    monkeypatch.setattr(Lockstep, "_same_rows", lambda *_: None)
    folder = tiny_folder(family)
    with tiny_engine(folder, keep_versions=0) as engine:
        lockstep = run_traces(engine, oracle_of(folder), seed=0, num=3)
        assert lockstep.error > 10 * TOLERANCE


def conversation(
    engine: Engine, oracle: Any, rng: random.Random, *, tight: bool = False
) -> Lockstep:
    """A session with an answered turn, and nothing else."""
    lockstep = Lockstep(engine, oracle, tight=tight)
    lockstep.turn("s", random_text(rng) + random_text(rng), params(rng))
    lockstep.run()
    return lockstep


def error_to_fresh_prefill(lockstep: Lockstep, rng: random.Random) -> float:
    """The session's next turn against `transformers` without any cache, by its first logits."""
    hand = lockstep.tracks["s"].hand
    lockstep.turn("s", random_text(rng), SamplingParams(temperature=0.0, max_tokens=1))
    fresh = HandCache(lockstep.oracle, list(hand.tokens)).compute()
    recorded: list[Sample] = []
    while lockstep.engine.has_work:
        lockstep.step()
        recorded += lockstep.tracks["s"].samples
    return relative_error(recorded[0].logits, fresh[-1])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_forget_equals_a_fresh_prefill(tiny_folder: Folder, family: str, seed: int) -> None:
    folder, rng = tiny_folder(family), random.Random(seed)
    with tiny_engine(folder, keep_versions=0) as engine:
        lockstep = conversation(engine, oracle_of(folder), rng)
        for _ in range(2):
            edits = random_edits(rng, lockstep.length("s"))
            lockstep.edit("s", [(start, end, new, "forget") for start, end, new, _ in edits])
        lockstep.run()
        assert len(engine.session_info("s").pieces) == 1
        assert engine.session_info("s").pieces[0][2]
        assert error_to_fresh_prefill(lockstep, rng) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_amortize_does_not_equal_a_fresh_prefill(tiny_folder: Folder, family: str) -> None:
    folder, rng = tiny_folder(family), random.Random(0)
    with tiny_engine(folder, keep_versions=0) as engine:
        lockstep = conversation(engine, oracle_of(folder), rng)
        lockstep.edit("s", [(6, 14, [50, 51, 52], "amortize")])
        lockstep.run()
        assert error_to_fresh_prefill(lockstep, rng) > 10 * TOLERANCE


@pytest.mark.parametrize("twin", [False, True])
def test_rows_that_another_session_holds_are_copied_and_stay(
    tiny_folder: Folder, twin: bool
) -> None:
    folder, rng = tiny_folder("glm"), random.Random(3)
    with tiny_engine(folder, keep_versions=0) as engine:
        lockstep = conversation(engine, oracle_of(folder), rng)
        if twin:
            told = lockstep.tracks["s"].messages[0]["content"]
            lockstep.turn("twin", told, SamplingParams(temperature=0.0, max_tokens=3))
            lockstep.run()
        rows = lockstep.tracks["s"].hand.num_rows
        lockstep.edit("s", [(5, 9, [60], "amortize")])
        lockstep.run()
        ((receipt,),) = (result.receipts for result in results(lockstep.events))
        assert receipt.moved_in_place + receipt.copied == receipt.kept == rows - 9
        assert (receipt.copied > 0) == twin
        assert (lockstep.num_rows_held > 0) == twin
        for name in lockstep.tracks:
            lockstep.turn(name, "and then?", SamplingParams(temperature=0.0, max_tokens=2))
        lockstep.run()
        assert lockstep.error < TOLERANCE


def test_a_generation_goes_on_from_edits_in_the_middle_of_it(tiny_folder: Folder) -> None:
    folder, rng = tiny_folder("v2_yarn"), random.Random(5)
    with tiny_engine(folder, keep_versions=0) as engine:
        lockstep = conversation(engine, oracle_of(folder), rng)
        lockstep.turn("s", "go on", SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
        for _ in range(6):
            for _ in range(4):
                lockstep.step()
            lockstep.edit("s", random_edits(rng, lockstep.length("s")))
        lockstep.run()
        assert lockstep.tracks["s"].version == 6
        assert lockstep.error < TOLERANCE

"""An engine in numbers: they are those of its inside, and healing is nobody's request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from leyline.directive import Directive, Mode
from leyline.engine import Engine
from leyline.errors import EngineClosedError
from leyline.sampling import SamplingParams
from leyline.stats import EngineStats, Pace, pace_of, stats_of
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]
COUNTERS = (
    "num_preempted num_degraded num_expired num_displaced num_refused num_batches num_batch_tokens"
)
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def check(engine: Engine) -> EngineStats:
    """Numbers that fit together."""
    stats, pace = stats_of(engine), pace_of(engine)
    assert stats.num_free + stats.num_evictable + stats.num_used == stats.num_slots
    assert all(value >= 0 for value in asdict(stats).values())
    assert len(pace.waiting) == stats.num_waiting
    assert pace.num_places == engine.config.max_num_seqs - stats.num_running
    assert (pace.num_batches, pace.num_batch_tokens) == (stats.num_batches, stats.num_batch_tokens)
    return stats


def test_requests_wait_then_run_then_are_gone(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), max_num_seqs=2) as engine:
        idle = check(engine)
        assert idle.num_free == idle.num_slots
        ids = [engine.submit_prompt("in the land", GREEDY) for _ in range(3)]
        assert check(engine).num_waiting == 3 and pace_of(engine).waiting == set(ids)
        engine.step()
        busy = check(engine)
        assert (busy.num_running, busy.num_waiting) == (2, 1) and busy.num_used > 0
        assert pace_of(engine).num_places == 0
        engine.settle()
        done = check(engine)
        assert (done.num_running, done.num_waiting, done.num_used) == (0, 0, 0)
        assert done.num_evictable > 0 and done.num_batch_tokens > idle.num_batch_tokens
        before, after = asdict(idle), asdict(done)
        assert all(after[name] >= before[name] for name in COUNTERS.split())


def test_sessions_are_counted_and_healing_is_not_a_request(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        for name in ("a", "b"):
            engine.session(name).chat("in the land of the rain", GREEDY)
        stats = check(engine)
        assert stats.num_sessions == 2 and stats.session_tokens > 20
        engine.edit("a", [Directive(4, 6, (), Mode.HEAL)])
        assert engine.has_work  # it heals
        while engine.has_work:
            engine.step()
            assert check(engine).num_running == 0 == check(engine).num_waiting
        engine.delete_session("a")
        assert check(engine).num_sessions == 1


def test_what_only_looks_like_an_engine_counts_nothing() -> None:
    assert stats_of(object()) == EngineStats() and pace_of(object()) == Pace()


def test_a_closed_engine_says_so(tiny_folder: Folder) -> None:
    engine = tiny_engine(tiny_folder("v3"))
    engine.close()
    for read in (stats_of, pace_of):
        with pytest.raises(EngineClosedError):
            read(engine)


def test_the_batches_of_a_prompt_that_is_scored_count(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        engine.generate(list(range(3, 43)), SamplingParams(max_tokens=0, prompt_logprobs=0))
        stats = check(engine)
        assert (stats.num_batches, stats.num_batch_tokens) == (2, 40)  # of 24 tokens at most

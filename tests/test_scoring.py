"""Prompts that are scored, and what the executor is told of a sequence's past with each draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leyline.batch import Batch, Broken, Ended, Event, Sampled, StepOutput
from leyline.context import Context
from leyline.errors import LeylineError
from leyline.events import TokenLogprob
from leyline.sampling import Draw, SamplingParams
from leyline.sequence import Sequence as Work
from tests.bench import Bench

SCORED = SamplingParams(prompt_logprobs=1)
LONG = Context.of([1, 2, 0, 1, 1, 2, 0, 0, 2, 1])


def scored(bench: Bench, context: Context, max_tokens: int = 2, **options: Any) -> Work:
    return bench.turn(context, max_tokens, sampling=SCORED, **options)


def assert_scored(work: Work, context: Context) -> None:
    """Every token behind the first is scored once, behind the row in front of it."""
    bench = Bench(64)
    other = scored(bench, context)
    bench.step()
    assert [one.token_id for one in work.scores] == list(context.tokens[1:])
    assert work.scores == other.scores and len(set(other.scores)) == len(other.scores)


# -- scores ---------------------------------------------------------------------------------------


def test_a_scored_prompt_is_computed_whole_whatever_is_cached() -> None:
    bench = Bench()
    bench.file(*LONG.tokens)
    work = scored(bench, LONG)
    (op,) = bench.plan().extends
    assert (op.start, op.tokens, op.targets, op.num_top) == (0, LONG.tokens, LONG.tokens[1:], 1)
    assert (work.cached, work.prompt_len) == (0, 10)


def test_nobody_elses_prompt_is_scored() -> None:
    bench = Bench()
    bench.turn(LONG)
    (op,) = bench.plan().extends
    assert op.targets == () and op.num_top == 0 and not bench.turn(LONG).scoring


@pytest.mark.parametrize("budget", [1, 3, 4, 9, 10, 50])
def test_a_prompt_in_chunks_is_scored_as_the_whole(budget: int) -> None:
    bench = Bench(max_batch_tokens=budget)
    work = scored(bench, LONG)
    assert bench.drain()[-1] == Ended(1, "length")
    assert_scored(work, LONG)
    with pytest.raises(AssertionError):
        assert_scored(work, Context.of([2, *LONG.tokens[1:]]))


def test_a_preempted_prompt_goes_on_from_the_rows_that_it_has_scores_for() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.file(*LONG.tokens)  # somebody else has computed all of it
    work = scored(bench, LONG)
    bench.step()
    bench.scheduler._preempt(work)
    bench.scheduler.max_batch_tokens = 50
    (op,) = bench.plan().extends
    assert (op.start, op.targets, work.cached) == (4, LONG.tokens[5:], 0)
    bench.land(Batch(extends=(op,)))
    assert_scored(work, LONG)


def test_rows_that_were_evicted_are_scored_once_more() -> None:
    bench = Bench(max_batch_tokens=4)
    work = scored(bench, LONG)
    bench.step()
    bench.step()
    bench.scheduler._preempt(work)
    bench.prefix.reclaim(bench.num_slots - 2)
    (op,) = bench.plan().extends
    assert (op.start, op.targets) == (2, LONG.tokens[3:7])
    bench.land(Batch(extends=(op,)))
    bench.drain()
    assert_scored(work, LONG)


def test_once_all_scores_are_there_the_cache_may_be_read_again() -> None:
    bench = Bench()
    work = scored(bench, LONG, 3)
    bench.step(1)
    bench.scheduler._preempt(work)
    (op,) = bench.plan().extends
    assert (op.start, op.tokens, op.targets, work.scoring) == (10, (1,), (), False)
    bench.land(Batch(extends=(op,)))
    bench.drain()
    assert_scored(work, LONG)


@pytest.mark.parametrize("length", [1, 2, 10])
@pytest.mark.parametrize("budget", [1, 4, 50])
def test_a_prompt_that_is_only_scored_ends_without_a_token(length: int, budget: int) -> None:
    bench = Bench(max_batch_tokens=budget)
    context = LONG.prefix(length)
    work = scored(bench, context, 0)
    assert bench.drain() == [Ended(1, "length")]
    assert_scored(work, context)
    assert not work.samples and not work.generated and bench.prefix.resident(context) == length


def test_a_prompt_that_fills_the_cache_is_scored() -> None:
    bench = Bench(10)
    work = scored(bench, LONG, 0)
    assert bench.drain() == [Ended(1, "length")]
    assert_scored(work, LONG)


def test_a_scored_prompt_waits_for_room_for_all_of_its_rows() -> None:
    """Those in the tree are none that it could take."""
    bench = Bench(14)
    bench.turn(LONG)
    bench.step()
    assert bench.scheduler._fits(bench.turn(LONG))
    assert not bench.scheduler._fits(scored(bench, LONG))


def land(bench: Bench, batch: Batch, output: StepOutput) -> list[Event]:
    """Run a batch, and have this come of it."""
    bench.machine.run(batch, {op.sequence_id: b"" for op in batch.extends})
    return bench.scheduler.commit(batch, output)


def broken(events: list[Event], sequence_id: int) -> Exception:
    (event,) = (one for one in events if isinstance(one, Broken))
    assert event.sequence_id == sequence_id
    return event.error


@pytest.mark.parametrize("lost", ["scores", "tokens"])
def test_a_prompt_that_cannot_be_scored_ends_and_nothing_of_it_is_found(lost: str) -> None:
    bench = Bench()
    scored(bench, LONG)
    other = bench.turn(Context.of([2, 2]))
    batch = bench.plan()
    complete: Any = {"scores": {1: (TokenLogprob(0, -1.0),) * 9}, "tokens": {1: 0}}
    complete["tokens"][2] = 0
    del complete[lost][1]
    events = land(bench, batch, StepOutput(**complete))
    assert "not a finite number" in str(broken(events, 1))
    assert bench.prefix.resident(LONG) == 0 and bench.scheduler.unfinished() == [other]
    bench.check()


# -- draws ----------------------------------------------------------------------------------------


class Free:
    """A constraint that is never asked here."""

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        raise NotImplementedError


FREE = Free()


def draws(params: SamplingParams, *tokens: int) -> list[Draw]:
    """What the executor is told with each token of a turn behind the tokens 1, 2."""
    bench, told = Bench(), []
    bench.turn(Context.of([1, 2]), len(tokens), sampling=params)
    for token in tokens:
        batch = bench.plan()
        (op,) = batch.extends
        assert op.draw is not None
        told.append(op.draw)
        bench.land(batch, token)
    assert not bench.scheduler.has_work
    return told


def test_a_draw_knows_no_more_of_the_past_than_it_needs() -> None:
    plain = SamplingParams(temperature=0.0)
    assert draws(plain, 0, 0) == [Draw(plain, 0), Draw(plain, 1)]
    assert not any(draw.adjusts for draw in draws(plain, 0, 0))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=-0.5),
        SamplingParams(constraint=FREE),
    ],
)
def test_penalties_and_constraints_look_at_what_was_generated(params: SamplingParams) -> None:
    expected = [Draw(params, 0), Draw(params, 1, (0,)), Draw(params, 2, (0, 2))]
    assert draws(params, 0, 2, 0) == expected
    assert all(draw.adjusts for draw in expected)


def test_the_repetition_penalty_looks_at_the_context_too() -> None:
    params = SamplingParams(repetition_penalty=1.5)
    assert draws(params, 0, 2) == [Draw(params, 0, (), (1, 2)), Draw(params, 1, (0,), (1, 2))]


def test_the_context_is_told_as_what_is_in_it_and_looked_through_once() -> None:
    bench = Bench()
    work = bench.turn(
        Context.of([5, 3, 5, 3, 3, 9]), 2, sampling=SamplingParams(repetition_penalty=2)
    )
    first, second = work.draw(), work.draw()
    assert first is not None and second is not None
    assert first.context == (3, 5, 9) and second.context is first.context


def test_stop_tokens_are_barred_as_long_as_the_reply_is_too_short() -> None:
    params = SamplingParams(min_tokens=2)
    told = draws(params, 0, 0, 3)
    assert [draw.barred for draw in told] == [(3,), (3,), ()]
    assert [draw.adjusts for draw in told] == [True, True, False]


def test_after_preemption_a_draw_is_the_same() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, min_tokens=3)
    bench = Bench()
    work = bench.turn(Context.of([1, 2]), 4, sampling=params)
    bench.step(0)
    bench.step(2)
    before = work.draw()
    bench.scheduler._preempt(work)
    (op,) = bench.plan().extends
    after = op.draw
    assert before is not None and after is not None
    assert {*after.context, *after.generated} == {*before.context, *before.generated}
    assert replace(after, context=before.context) == before


def test_an_edit_draws_nothing() -> None:
    bench = Bench()
    assert bench.add(LONG).draw() is None
    assert [op.draw for op in bench.plan().extends] == [None]


def test_how_likely_a_token_was_is_told_with_it() -> None:
    bench = Bench()
    bench.turn(Context.of([1]), 1)
    told = TokenLogprob(2, -0.5)
    events = bench.scheduler.commit(bench.plan(), StepOutput({1: 2}, logprobs={1: told}))
    assert events == [Sampled(1, 2, told), Ended(1, "length")]


def test_a_refused_draw_ends_its_own_sequence_with_its_own_error() -> None:
    bench = Bench()
    bench.turn(Context.of([1, 2]))
    other = bench.turn(Context.of([2, 2]))
    error = LeylineError("The reply cannot follow its form.")
    events = land(bench, bench.plan(), StepOutput({2: 0}, {1: error}))
    assert broken(events, 1) is error and Sampled(2, 0) in events
    assert bench.scheduler.unfinished() == [other]
    bench.check()

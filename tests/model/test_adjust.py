"""What parameters do to logits, against a loop over single numbers; and constraints that fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leyline.errors import LeylineError
from leyline.model.adjust import NEXT_TO_IMPOSSIBLE, adjusted
from leyline.model.sampler import sample
from leyline.sampling import Draw, SamplingParams

VOCABULARY = 70  # not a multiple of 32: the last word of a mask is not full
# A handful of float32 operations on numbers below 200.
TOLERANCE = 1e-4


class Allows:
    """A constraint that always allows the same ids, and tells what it was asked."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        self.asked.append(tuple(generated))
        words = np.zeros(-(-VOCABULARY // 32), dtype=np.uint32)
        for token in self.ids:
            words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return words.view(np.int32)


class Fails:
    """A constraint that cannot be followed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        raise self.error


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def reference(row: Tensor, draw: Draw) -> list[float]:
    """One row, a number at a time."""
    params, values = draw.params, row.tolist()
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in {*draw.context, *draw.generated}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in draw.generated:
        values[token] -= params.frequency_penalty
    for token in set(draw.generated):
        values[token] -= params.presence_penalty
    for token in draw.barred:
        values[token] = NEXT_TO_IMPOSSIBLE
    if isinstance(params.constraint, Allows):
        ids = params.constraint.ids
        values = [value if i in ids else -math.inf for i, value in enumerate(values)]
    return values


def random_draw(random: np.random.Generator) -> Draw:
    def tokens(most: int) -> tuple[int, ...]:
        return tuple(random.integers(0, VOCABULARY, random.integers(0, most)).tolist())

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if random.random() < 0.6 else otherwise

    repetition = sometimes(float(random.uniform(0.5, 3)), 1.0)
    biases = tuple((token, float(random.uniform(-9, 9))) for token in tokens(6))
    params = SamplingParams(
        logit_bias=sometimes(biases, ()),
        presence_penalty=sometimes(float(random.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(float(random.uniform(-2, 2)), 0.0),
        repetition_penalty=repetition,
        constraint=sometimes(Allows(5, *tokens(40)), None),
    )
    context = tokens(20) if repetition != 1 else ()
    return Draw(params, 0, tokens(20), context, sometimes(tokens(4), ()))


def assert_close(actual: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_what_a_loop_over_its_numbers_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, draws = logits(5, seed), [random_draw(random) for _ in range(5)]
    before = rows.clone()
    actual, refused = adjusted(rows, draws)
    expected = [reference(row, draw) for row, draw in zip(rows, draws, strict=True)]
    assert_close(actual, expected)
    assert torch.equal(rows, before) and not refused
    for row, draw in enumerate(draws):
        alone, _ = adjusted(rows[row : row + 1], [draw])
        assert torch.equal(alone[0], actual[row]), "a row depends on its batch"


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": ((3, 2.02),)},
        {"presence_penalty": 1.01},
        {"frequency_penalty": 1.01},
        {"repetition_penalty": 1.515},
    ],
)
def test_a_hundredth_of_a_parameter_is_noticed(change: dict[str, Any]) -> None:
    one = SamplingParams(
        logit_bias=((3, 2.0),),
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
    )
    draw = Draw(one, 0, (3, 3, 4), (5,))
    rows = logits(1)
    assert_close(adjusted(rows, [draw])[0], [reference(rows[0], draw)])
    other = replace(draw, params=replace(one, **change))
    with pytest.raises(AssertionError):
        assert_close(adjusted(rows, [other])[0], [reference(rows[0], draw)])


def test_biases_of_one_token_add_up() -> None:
    draw = Draw(SamplingParams(logit_bias=((3, 2.0), (4, 1.0), (3, -0.5))))
    changed = adjusted(torch.zeros(1, VOCABULARY), [draw])[0]
    assert changed[0, :6].tolist() == [0, 0, 0, 1.5, 1, 0]


def test_ids_that_are_never_sampled_count_for_nothing() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    draw = Draw(params, 0, (VOCABULARY,), (VOCABULARY + 5, 1), (VOCABULARY + 1,))
    changed = adjusted(torch.full((2, VOCABULARY), -1.0), [draw, Draw(SamplingParams())])[0]
    assert (changed != -1).nonzero().tolist() == [[0, 1]]


def test_a_constraint_is_asked_once_a_token_with_all_that_was_generated() -> None:
    constraint = Allows(7)
    params = SamplingParams(temperature=0.0, constraint=constraint)
    tokens, refused = sample(logits(2), [Draw(params, 2, (9, 8)), Draw(SamplingParams(), 0)])
    assert constraint.asked == [(9, 8)] and tokens[0] == 7 and not refused


def test_a_mask_may_go_on_behind_the_vocabulary_and_end_before_it() -> None:
    class Masked:
        def allowed(self, generated: Sequence[int]) -> np.ndarray:
            return np.full(len(generated), -1, dtype=np.int32)

    draws = [Draw(SamplingParams(constraint=Masked()), 0, (5,) * words) for words in (2, 3, 4)]
    rows, refused = adjusted(logits(3), draws)
    assert rows.isfinite().sum(dim=-1).tolist() == [64, 70, 70] and not refused


def test_where_only_the_end_is_allowed_it_comes_however_early() -> None:
    params = SamplingParams(temperature=1.0, seed=1, constraint=Allows(2))
    assert sample(logits(1), [Draw(params, barred=(2,))])[0].tolist() == [2]
    params = replace(params, constraint=Allows(2, 9), top_p=0.5, min_p=0.1, top_k=3)
    assert sample(logits(1), [Draw(params, barred=(2,))])[0].tolist() == [9]


@pytest.mark.parametrize(
    "constraint",
    [Fails(LeylineError("no further")), Fails(ValueError("a bug")), Allows(), Allows(VOCABULARY)],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_that_fails_costs_its_own_row_alone(
    constraint: Any, temperature: float
) -> None:
    rows = logits(3)
    others = [Draw(SamplingParams(seed=3, presence_penalty=1.0), 1, (4,)), Draw(SamplingParams())]
    failing = Draw(SamplingParams(temperature=temperature, constraint=constraint))
    tokens, refused = sample(rows, [others[0], failing, others[1]])
    assert [*refused] == [1]
    if isinstance(constraint, Fails):
        assert refused[1] is constraint.error
    else:
        assert isinstance(refused[1], LeylineError)
    assert tokens[[0, 2]].tolist() == sample(rows[[0, 2]], others)[0].tolist()

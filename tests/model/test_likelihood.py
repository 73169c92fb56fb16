"""Log-probabilities against float64, equal ones, impossible ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from leyline.model.likelihood import LEAST, likelihoods

# float32 sums of 300 numbers.
TOLERANCE = 1e-5


def reference(row: torch.Tensor) -> list[float]:
    values = row.double().numpy()
    return (values - np.log(np.exp(values - values.max()).sum()) - values.max()).tolist()


def test_they_are_the_logarithms_of_the_softmax() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 4
    found = likelihoods(logits, [0, 7, 299, 7], [0, 1, 20, 5])
    for row, token, num, one in zip(logits, [0, 7, 299, 7], [0, 1, 20, 5], found, strict=True):
        expected = reference(row)
        assert one.token_id == token
        assert one.logprob == pytest.approx(expected[token], abs=TOLERANCE)
        assert one.logprob != pytest.approx(1.01 * expected[token], abs=TOLERANCE)
        likeliest = sorted(range(300), key=lambda i: (-expected[i], i))[:num]
        assert [index for index, _ in one.top] == likeliest
        assert [value for _, value in one.top] == pytest.approx(
            [expected[index] for index in likeliest], abs=TOLERANCE
        )


def test_of_equal_ones_the_lowest_ids_come_first_as_in_greedy_sampling() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, [1500, 40]] = 3.0
    (one,) = likelihoods(logits, [0], [6])
    assert [index for index, _ in one.top] == [40, 1500, 0, 1, 2, 3]
    assert one.top[0][0] == int(logits.argmax())


def test_what_is_impossible_is_told_as_a_finite_number() -> None:
    logits = torch.full((2, 5), -math.inf)
    logits[0, 3] = 1.0
    logits[1] = torch.tensor([0.0, -3e38, -1e30, 1.0, -2e4])
    for one in likelihoods(logits, [1, 1], [5, 20]):
        assert one.logprob == LEAST
        assert len(one.top) == 5 and all(math.isfinite(value) for _, value in one.top)
        assert one.top[0][1] == pytest.approx(0, abs=0.4) and one.top[-1][1] == LEAST


@pytest.mark.parametrize("vocab_size", [1, 5, 17, 40, 300])
@pytest.mark.parametrize("num_kinds", [1, 2, 30])
def test_many_equal_ones_are_told_in_order(vocab_size: int, num_kinds: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_kinds)
    logits = torch.randint(num_kinds, (24, vocab_size), generator=generator).float()
    num_top = [0, 1, 2, 5, 19, 20] * 4
    for row, num, one in zip(logits, num_top, likelihoods(logits, [0] * 24, num_top), strict=True):
        expected = sorted(range(vocab_size), key=lambda i: (-row[i], i))[:num]
        assert [index for index, _ in one.top] == expected

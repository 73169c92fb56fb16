"""Sampling: the distribution, its limits, and random numbers that depend on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from leyline.model import sampler
from leyline.model.sampler import probabilities, uniform
from leyline.sampling import Draw, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def params(**changes: float) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 3} | changes))  # type: ignore[arg-type]


def sample(
    rows: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]
) -> torch.Tensor:
    tokens, refused = sampler.sample(rows, [*map(Draw, params, steps)])
    assert not refused
    return tokens


def logits(rows: int = 1, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    table = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -2.0, -1.0]])
    assert sample(table, [GREEDY] * 2, [0, 0]).tolist() == [1, 0]


def test_a_token_depends_on_its_own_row_seed_and_step_alone():
    rows = logits(4)
    mixed = [params(seed=1), GREEDY, params(seed=2, top_k=5), params(seed=3, top_p=0.8)]
    steps = [0, 4, 7, 9]
    together = sample(rows, mixed, steps).tolist()
    alone = [int(sample(rows[i : i + 1], [mixed[i]], [steps[i]])) for i in range(4)]
    backwards = sample(rows.flip(0), mixed[::-1], steps[::-1]).tolist()
    assert together == alone == backwards[::-1]


def test_sampling_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    sample(logits(), [params()], [0])
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_numbers_are_uniform_and_all_different():
    numbers = torch.tensor([uniform(seed, step) for seed in range(50) for step in range(100)])
    assert len(numbers.unique()) == 5000
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    # Standard error of a mean of 5,000: 0.0041.
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.015)
    shares = torch.histc(numbers, 10, 0, 1) / 5000
    assert float((shares - 0.1).abs().max()) < 0.02


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64, 10**30])
def test_any_integer_is_a_seed(seed):
    assert 0 <= uniform(seed, 0) < 1
    assert uniform(seed, 0) == uniform(seed, 0) != uniform(seed, 1)


def frequencies(one: SamplingParams, count: int = 4000) -> torch.Tensor:
    row = logits(vocab=8)
    drawn = sample(row.expand(count, -1), [one] * count, list(range(count)))
    return torch.bincount(drawn, minlength=8) / count


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}]
)
def test_tokens_come_as_often_as_they_should(changes):
    one = params(**changes)
    want = probabilities(logits(vocab=8)[0], one)
    got = frequencies(one)
    # Standard error of a share over 4,000 draws: at most 0.008.
    assert (got - want).abs().max() < 0.03
    assert got[want == 0].sum() == 0


def test_another_temperature_is_noticed():
    # A hundredth of temperature is far below the noise of 4,000 draws; the table shows it.
    row = logits()[0]
    one, other = (probabilities(row, params(temperature=t)) for t in (1.0, 1.01))
    assert (one - other).abs().max() > 1e-4


def test_temperature_divides_the_logits():
    row = logits()[0]
    torch.testing.assert_close(
        probabilities(row, params(temperature=0.7)), (row.double() / 0.7).softmax(-1)
    )


def test_top_k_keeps_the_k_most_likely_and_low_ids_among_equals():
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    kept = probabilities(row, params(top_k=2)).nonzero().flatten()
    assert kept.tolist() == [1, 2]


@pytest.mark.parametrize("top_k", [0, 5, 6, 10**9])
def test_top_k_of_none_or_of_all_keeps_all(top_k):
    row = logits(vocab=5)[0]
    torch.testing.assert_close(probabilities(row, params(top_k=top_k)), row.double().softmax(-1))


@pytest.mark.parametrize(
    "top_p, kept", [(1.0, 4), (0.95, 4), (0.85, 3), (0.75, 2), (0.49, 1), (0.45, 1), (1e-9, 1)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    row = torch.tensor([0.1, 0.5, 0.1, 0.3], dtype=torch.float64).log()
    row[2] += 1e-9  # of two equal ones, the third is the likelier
    got = probabilities(row, params(top_p=top_p)).nonzero().flatten().tolist()
    assert got == sorted([1, 3, 2, 0][:kept])


def test_top_p_counts_within_what_top_k_left():
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of 0.4 and 0.3, the first holds 0.57: enough for 0.5, although it holds 0.4 of everything.
    got = probabilities(row, params(top_k=2, top_p=0.5))
    assert got.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "min_p, kept", [(0.0, 4), (0.19, 4), (0.21, 2), (0.59, 2), (0.61, 1), (1.0, 1)]
)
def test_min_p_keeps_what_is_so_likely_beside_the_likeliest(min_p, kept):
    row = torch.tensor([0.1, 0.5, 0.1, 0.3], dtype=torch.float64).log()
    got = probabilities(row, params(min_p=min_p)).nonzero().flatten().tolist()
    assert got == sorted([1, 3, 0, 2][:kept])


def test_min_p_comes_last():
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # At half the temperature the second is 0.5625 times as likely as the first, the third 0.25.
    one = params(temperature=0.5, min_p=0.3)
    assert probabilities(row, one).nonzero().flatten().tolist() == [0, 1]
    assert probabilities(row, params(temperature=0.5, min_p=0.6)).tolist() == [1, 0, 0, 0]


def sorted_whole(row: torch.Tensor, one: SamplingParams) -> torch.Tensor:
    """The distribution by sorting the whole vocabulary, as its definition says."""
    probs = (row.double() / one.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    kept = order[: one.top_k or None]
    total, nucleus = sum(float(probs[i]) for i in kept), list[int]()
    reached = 0.0
    for token in kept:
        if nucleus and reached >= one.top_p * total:
            break
        nucleus.append(token)
        reached += float(probs[token])
    least = one.min_p * float(probs[nucleus[0]])
    table = torch.zeros_like(probs)
    ids = [token for token in nucleus if float(probs[token]) >= least]
    table[ids] = probs[ids]
    return table / table.sum()


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.9},
        {"top_p": 0.3, "top_k": 1000},
        {"top_k": 600, "min_p": 0.001},
        {"top_p": 0.97, "min_p": 0.05, "temperature": 0.6},
    ],
)
def test_a_large_vocabulary_is_cut_as_if_all_of_it_were_sorted(spread, changes):
    row = (logits(vocab=3000, seed=5)[0] * spread).round(decimals=2)  # many are equal
    one = params(**changes)
    got = probabilities(row, one)
    torch.testing.assert_close(got, sorted_whole(row, one), atol=1e-12, rtol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(1.01 * got, sorted_whole(row, one), atol=1e-12, rtol=0)


def test_a_greedy_batch_is_an_argmax_and_nothing_more(monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("a greedy row was worked on")

    for name in ("adjusted", "probabilities", "uniform"):
        monkeypatch.setattr(f"leyline.model.sampler.{name}", never)
    rows = logits(8)
    assert torch.equal(sample(rows, [GREEDY] * 8, [0] * 8), rows.argmax(-1))
    with pytest.raises(AssertionError, match="worked on"):
        sample(rows, [*[GREEDY] * 7, params()], [0] * 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_raise_nothing(bad):
    rows = logits(5)
    rows[:, 7] = bad
    mixed = [GREEDY, params(), params(top_p=0.5), params(top_k=3), params(min_p=0.5)]
    assert len(sample(rows, mixed, [0] * 5)) == 5


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 100.0])
def test_extreme_temperatures_stay_finite(temperature):
    table = probabilities(logits()[0] * 100, params(temperature=temperature))
    assert table.isfinite().all()
    assert float(table.sum()) == pytest.approx(1)


def test_a_tiny_temperature_is_greedy():
    rows = logits(20)
    cold = sample(rows, [params(temperature=1e-9, seed=i) for i in range(20)], [0] * 20)
    assert torch.equal(cold, rows.argmax(-1))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_pick_a_possible_token(number, monkeypatch):
    monkeypatch.setattr("leyline.model.sampler.uniform", lambda *_: number)
    row = torch.tensor([[0.0, 1.0, 5.0, 4.0, -1.0]])
    assert int(sample(row, [params(top_k=2)], [0])) in (2, 3)


def test_a_list_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 rows and 1 draws"):
        sample(logits(2), [GREEDY], [0])

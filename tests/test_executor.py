"""Batches as tensors: slices and gathered slots, the order within a batch, who is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from leyline import SamplingParams, TokenLogprob
from leyline.batch import Batch, Extend, Move
from leyline.cache.latent import LatentCache
from leyline.errors import LeylineError
from leyline.executor import Executor
from leyline.model.config import ModelConfig
from leyline.model.parameters import RandomWeights
from leyline.model.transformer import Transformer
from leyline.sampling import Draw

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "intermediate_size": 28,
        "max_position_embeddings": 128,
    }
)
NUM_TOKENS = 40
NUM_SLOTS = 64
TOKENS = tuple(range(3, 15))
GREEDY = SamplingParams(temperature=0.0)
# Two orders of summation in float32; measured at most 2e-6.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(CONFIG, RandomWeights(CONFIG), dtype=torch.float32)


@pytest.fixture
def executor(model: Transformer) -> Executor:
    cache = LatentCache(2, NUM_SLOTS, 20, 8, dtype=torch.float32)
    cache.fill(torch.arange(NUM_SLOTS), float("nan"))
    return Executor(model, cache, NUM_TOKENS)


def extend(
    start: int, end: int, slots: np.ndarray, sequence_id: int = 1, sample: bool = False
) -> Extend:
    table = slots[:end].astype(np.int64)
    tokens = TOKENS[start:end]
    return Extend(sequence_id, start, tokens, table, Draw(GREEDY) if sample else None)


def whole(executor: Executor, slots: np.ndarray) -> Tensor:
    """Logits of the last token of all, its rows in these slots."""
    return executor.logits(extend(0, len(TOKENS), slots))[-1]


NEIGHBOURS = np.arange(10, 22)
SCATTERED = np.random.default_rng(0).permutation(NUM_SLOTS)[: len(TOKENS)]


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_pieces_and_scattered_slots_give_what_the_whole_gives(executor: Executor, cut: int) -> None:
    expected = whole(executor, NEIGHBOURS)
    executor.run(Batch(extends=(extend(0, cut, SCATTERED),)))
    actual = executor.logits(extend(cut, len(TOKENS), SCATTERED))[-1]
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(1.01 * actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_sequences_of_a_batch_do_not_see_each_other(executor: Executor) -> None:
    alone = executor.run(Batch(extends=(extend(0, 12, NEIGHBOURS, sample=True),)))
    other = np.arange(30, 42)
    executor.run(Batch(extends=(extend(0, 4, other, sequence_id=2),)))
    batch = Batch(
        extends=(
            extend(4, 5, other, sequence_id=2, sample=True),
            extend(0, 12, np.arange(45, 57), sequence_id=1, sample=True),
        )
    )
    together = executor.run(batch)
    assert together.tokens[1] == alone.tokens[1]
    assert set(together.tokens) == {1, 2}


def test_only_those_that_ask_are_sampled(executor: Executor) -> None:
    batch = Batch(extends=(extend(0, 5, NEIGHBOURS), extend(0, 3, np.arange(40, 44), 2, True)))
    assert set(executor.run(batch).tokens) == {2}
    assert executor.run(Batch(extends=(extend(5, 8, NEIGHBOURS),))).tokens == {}


def test_ids_without_a_text_are_never_sampled(executor: Executor) -> None:
    hot = SamplingParams(temperature=50.0, seed=1)
    tokens = set()
    for step in range(80):
        op = Extend(1, 0, TOKENS[:1], NEIGHBOURS[:1].astype(np.int64), Draw(hot, step))
        tokens |= set(executor.run(Batch(extends=(op,))).tokens.values())
    assert max(tokens) < NUM_TOKENS
    assert len(tokens) > NUM_TOKENS // 2


def test_moves_run_before_extends(executor: Executor) -> None:
    executor.run(Batch(extends=(extend(0, 8, NEIGHBOURS),)))
    expected = executor.logits(extend(8, 9, NEIGHBOURS))[-1]
    away = np.arange(40, 52)
    move = Move(2, NEIGHBOURS[:8], away[:8], np.zeros(8, dtype=np.int64))
    executor.cache.fill(torch.from_numpy(away[8:]), float("nan"))
    output = executor.run(Batch((move,), (extend(8, 9, away, sample=True),)))
    assert output.tokens == {1: int(expected[:NUM_TOKENS].argmax())}


def test_a_batch_of_moves_alone_and_empty_moves_sample_nothing(executor: Executor) -> None:
    executor.run(Batch(extends=(extend(0, 8, NEIGHBOURS),)))
    none = np.empty(0, dtype=np.int64)
    moves = (
        Move(1, NEIGHBOURS[:2], np.array([40, 50]), np.array([3, -2])),
        Move(2, none, none, none),
        Move(3, NEIGHBOURS[4:5], NEIGHBOURS[4:5], np.array([7])),
    )
    band = executor.cache.kpe[:, NEIGHBOURS[4]].clone()
    assert executor.run(Batch(moves)).tokens == {}
    assert torch.equal(executor.cache.ckv[:, 50], executor.cache.ckv[:, NEIGHBOURS[1]])
    assert not torch.equal(executor.cache.kpe[:, NEIGHBOURS[4]], band)


# -- log-probabilities ----------------------------------------------------------------------------


def scored(op: Extend, num_top: int = 2) -> Extend:
    """The op as a piece of a prompt whose tokens are scored."""
    return replace(op, targets=TOKENS[op.start + 1 : op.end + 1], num_top=num_top)


def assert_likelihoods(told: Sequence[TokenLogprob], logits: Tensor, tokens: Sequence[int]) -> None:
    """What was told of tokens is what the rows of logits say."""
    table = logits[:, :NUM_TOKENS].double().log_softmax(-1)
    assert [one.token_id for one in told] == list(tokens)
    expected = [float(row[token]) for row, token in zip(table, tokens, strict=True)]
    assert [one.logprob for one in told] == pytest.approx(expected, abs=TOLERANCE)
    assert [one.logprob for one in told] != pytest.approx([1.01 * value for value in expected])
    for one, row in zip(told, table, strict=True):
        values, ids = row.topk(len(one.top))
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_prompt_is_scored_by_the_models_own_logits(
    executor: Executor, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyline.executor.SCORED_LOGITS", at_once * NUM_TOKENS)
    first, second = extend(0, 5, NEIGHBOURS), extend(5, 12, NEIGHBOURS)
    logits = torch.cat([executor.logits(first), executor.logits(second)])
    unscored = extend(0, 3, np.arange(40, 44), sequence_id=2)
    told: list[TokenLogprob] = []
    for op in (scored(first), scored(second)):
        output = executor.run(Batch(extends=(unscored, op)))
        assert set(output.scores) == {1}
        told += output.scores[1]
    assert len(told) == len(TOKENS) - 1
    assert_likelihoods(told, logits[:-1], TOKENS[1:])


def test_logits_are_computed_no_more_than_so_many_at_a_time(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyline.executor.SCORED_LOGITS", 4 * NUM_TOKENS + 1)
    sizes: list[int] = []
    whole = executor.model.logits
    monkeypatch.setattr(
        executor.model, "logits", lambda hidden: sizes.append(len(hidden)) or whole(hidden)
    )
    executor.run(Batch(extends=(scored(extend(0, 12, NEIGHBOURS)),)))
    assert sizes == [4, 4, 3]


def test_a_sampled_token_is_told_with_the_models_own_probability(executor: Executor) -> None:
    """Whatever bias, temperature and the like made of it."""
    prompt = extend(0, 12, NEIGHBOURS)
    logits = executor.logits(prompt)[-1:]
    params = SamplingParams(temperature=0.01, logprobs=4, logit_bias=((7, 100.0),), top_k=1)
    plain = replace(extend(0, 3, np.arange(40, 44), sequence_id=2), draw=Draw(GREEDY))
    output = executor.run(Batch(extends=(plain, replace(prompt, draw=Draw(params)))))
    assert output.tokens[1] == 7 and set(output.logprobs) == {1}
    assert_likelihoods([output.logprobs[1]], logits, [7])


class Fails:
    """A constraint that cannot be followed."""

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        raise LeylineError("It ends here.")


def test_a_constraint_that_fails_is_told_and_the_others_are_sampled(executor: Executor) -> None:
    failing = replace(
        extend(0, 12, NEIGHBOURS),
        draw=Draw(SamplingParams(constraint=Fails(), logprobs=1)),
    )
    other = replace(extend(0, 3, np.arange(40, 44), sequence_id=2), draw=Draw(GREEDY))
    output = executor.run(Batch(extends=(failing, other)))
    assert set(output.tokens) == {2} and not output.logprobs
    assert [(number, str(error)) for number, error in output.refused.items()] == [
        (1, "It ends here.")
    ]


def test_rows_that_are_no_numbers_have_neither_token_nor_score(executor: Executor) -> None:
    executor.cache.fill(torch.from_numpy(NEIGHBOURS[:1]), float("nan"))
    op = scored(extend(1, 12, NEIGHBOURS, sample=True))
    sound = scored(extend(0, 4, np.arange(40, 52), sequence_id=2, sample=True))
    output = executor.run(Batch(extends=(op, sound)))
    assert set(output.tokens) == set(output.scores) == {2} and not output.refused

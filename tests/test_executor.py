"""Batches as tensors: slices and gathered slots, the order within a batch, who is sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from leyline import SamplingParams
from leyline.batch import Batch, Extend, Move
from leyline.cache.latent import LatentCache
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

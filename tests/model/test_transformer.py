"""The forward pass on ragged steps: forms, views and gathers, neighbours, precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leyline.kernels import attention as forms
from leyline.model.config import ModelConfig
from leyline.model.parameters import RandomWeights, parameter_shapes
from leyline.model.transformer import Transformer
from tests.model.steps import Resident, error, make_cache, run_pieces, run_together

# Two orders of summation in float32; measured at most 2e-6.
TOLERANCE = 1e-5
BASE = {
    "model_type": "deepseek_v3",
    "vocab_size": 50,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "intermediate_size": 28,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "moe_intermediate_size": 14,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
VARIANTS = {
    "dense": {},
    "experts": EXPERTS,
    "no shared expert": {**EXPERTS, "n_shared_experts": 0},
    "q_lora": {"q_lora_rank": 14},
    "no nope, tied": {
        "qk_nope_head_dim": 0,
        "tie_word_embeddings": True,
        "latent_norm_eps": 1e8,
        "rope_inv_freq": [1.0, 0.1, 0.01, 0.1],
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def model(request) -> Transformer:
    config = ModelConfig.from_dict(BASE | VARIANTS[request.param])
    return Transformer(config, RandomWeights(config), dtype=torch.float32)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(seed))


def alone(model: Transformer, ids: Tensor, size: int, slots: Tensor | None = None) -> Tensor:
    cache = make_cache(model, 200)
    slots = torch.arange(len(ids)) if slots is None else slots
    return run_pieces(model, cache, Resident(slots, gather=True), ids, size)


@pytest.mark.parametrize("size", [1, 7, 40])
def test_scrambled_slots_give_a_bit_equal_result(model, size):
    ids = tokens(80)
    scrambled = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:80]
    assert torch.equal(alone(model, ids, size), alone(model, ids, size, scrambled))


@pytest.mark.parametrize("size", [1, 7, 80])
def test_a_slice_reads_what_a_gather_reads(model, size):
    ids = tokens(80)
    cache = make_cache(model, 200)
    sliced = run_pieces(model, cache, Resident(100 + torch.arange(80), gather=False), ids, size)
    assert error(sliced, alone(model, ids, size)) <= TOLERANCE


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("size", [1, 7, 33, 80])
def test_both_forms_agree_at_any_chunk(model, monkeypatch, absorbed, size):
    ids = tokens(80)
    want = alone(model, ids, 80)
    monkeypatch.setattr(forms, "prefer_absorbed", lambda *_, **__: absorbed)
    assert error(alone(model, ids, size), want) <= TOLERANCE


def test_neighbours_in_a_step_do_not_change_a_sequence(model):
    """A prefill, two decodes, a chunk and a decode again: both forms, several groups."""
    ids = [tokens(n, seed) for seed, n in enumerate((60, 9, 21, 50, 5))]
    last = (60, 1, 1, 37, 1)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(2)).split(40)
    slots = torch.cat(slots)
    cache, parts, first = make_cache(model, 200), [], 0
    for row, count in zip(ids, last, strict=True):
        sequence = Resident(slots[first : first + len(row)])
        first += len(row)
        if len(row) > count:
            run_pieces(model, cache, sequence, row[:-count], 200)
        parts.append((sequence, row[-count:]))
    together = run_together(model, cache, parts).split(last)
    for row, count, got in zip(ids, last, together, strict=True):
        assert error(got, alone(model, row, 200)[-count:]) <= TOLERANCE


def test_a_token_one_percent_off_is_noticed(model):
    ids = tokens(40)
    want = alone(model, ids, 40)
    model._embedding[ids[3]] *= 1.01
    got = alone(model, ids, 40)
    model._embedding[ids[3]] /= 1.01
    assert error(got, want) > 10 * TOLERANCE


def test_positions_are_the_steps_not_the_spans(model):
    ids = tokens(20)
    cache = make_cache(model, 20)
    run_pieces(model, cache, Resident(torch.arange(20), offset=100), ids, 20)
    other = make_cache(model, 20)
    run_pieces(model, other, Resident(torch.arange(20)), ids, 20)
    assert error(cache[0][0], other[0][0]) == 0  # a first layer's latent holds no position
    assert error(cache[0][1], other[0][1]) > 0.1


def test_other_slots_stay_as_they_were(model):
    cache = make_cache(model, 50)
    run_pieces(model, cache, Resident(torch.arange(10, 30)), tokens(20), 20)
    for tensor in (tensor for layer in cache for tensor in layer):
        assert tensor[:10].isnan().all() and tensor[30:].isnan().all()
        assert tensor[10:30].isfinite().all()


# A near tie flips an expert, which no bound on roundings covers: test_parity has one for those.
@pytest.mark.parametrize("variant", ["dense", "q_lora", "no nope, tied"])
@pytest.mark.parametrize("band", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 80])
def test_bf16_stays_near_float32(variant, band, size):
    config = ModelConfig.from_dict(BASE | VARIANTS[variant])
    full = Transformer(config, RandomWeights(config), dtype=torch.float32)
    low = Transformer(config, RandomWeights(config), dtype=torch.bfloat16)
    ids = tokens(80)
    cache = make_cache(low, 80, band)
    got = run_pieces(low, cache, Resident(torch.arange(80), gather=False), ids, size)
    # Two layers of weights, activations and latents, each rounded to 8 bits: about 2^-9 * 8.
    assert error(got, alone(full, ids, 80)) < 0.03


def test_the_latent_eps_can_be_overridden():
    config = ModelConfig.from_dict(BASE)
    plain = Transformer(config, dtype=torch.float32)
    other = Transformer(config, dtype=torch.float32, latent_norm_eps=0.5)
    assert other.config.latent_norm_eps == 0.5
    assert error(alone(other, tokens(9), 9), alone(plain, tokens(9), 9)) > 0.01


def test_random_weights_depend_on_the_seed_alone():
    config = ModelConfig.from_dict(BASE)
    models = [Transformer(config, RandomWeights(config, s), dtype=torch.float32) for s in (0, 0, 1)]
    first, same, other = (alone(model, tokens(9), 9) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_model_takes_exactly_its_parameters(model):
    taken = []

    class Recorder(RandomWeights):
        def take(self, name: str, dtype: torch.dtype) -> Tensor:
            taken.append(name)  # take_all goes through here as well
            return super().take(name, dtype)

    Transformer(model.config, Recorder(model.config), dtype=torch.float32)
    assert sorted(taken) == sorted(name for name, _ in parameter_shapes(model.config))

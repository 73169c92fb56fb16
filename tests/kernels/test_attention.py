"""Both forms of latent attention against the formula, and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leyline.kernels import attention
from leyline.kernels.attention import causal_mask, example, explicit, prefer_absorbed, reference

# Sums of a few dozen products, in two orders.
TOLERANCE = 1e-5
SHAPES = {
    "decode": {"queries": 1, "keys": 50},
    "one key": {"queries": 1, "keys": 1},
    "prefill": {"queries": 40, "keys": 40},
    "chunk": {"queries": 40, "keys": 77},
    "short chunk": {"queries": 5, "keys": 60},
    "no nope": {"nope": 0, "queries": 4},
    "no nope, many queries": {"nope": 0, "queries": 50, "keys": 90},
    "wide values": {"value": 40, "queries": 40, "keys": 50},
    "wide latent": {"latent": 70, "queries": 40, "keys": 50},
}


def absorbed(*inputs: Tensor | float, mask: Tensor | None = None) -> Tensor:
    q_nope, q_rope, ckv, kpe, kv_b, scale = inputs
    folded = attention.fold(q_nope, kv_b)  # type: ignore[arg-type]
    mixed = attention.absorbed(folded, q_rope, ckv, kpe, scale, mask)  # type: ignore[arg-type]
    return attention.unfold(mixed, kv_b, q_nope.shape[-1])  # type: ignore[arg-type,union-attr]


FORMS = {"absorbed": absorbed, "explicit": explicit}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_equal_the_formula(form, shape):
    inputs = example(**SHAPES[shape])
    torch.testing.assert_close(
        FORMS[form](*inputs), reference(*inputs), rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("queries", [3, 40])
def test_one_percent_on_any_input_is_noticed(form, which, queries):
    inputs = list(example(queries=queries, keys=60))
    want = reference(*inputs)  # type: ignore[arg-type]
    inputs[which] = inputs[which] * 1.01
    assert (FORMS[form](*inputs) - want).norm() > 50 * TOLERANCE * want.norm()  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("queries", [3, 40])
def test_no_query_sees_a_later_key(form, queries):
    inputs = example(queries=queries, keys=60)
    ckv, kpe = inputs[2].clone(), inputs[3].clone()
    ckv[-1], kpe[-1] = 100.0, 100.0
    changed = (*inputs[:2], ckv, kpe, *inputs[4:])
    before, after = FORMS[form](*inputs), FORMS[form](*changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_made_once_changes_nothing(form):
    inputs = example(queries=40, keys=60)
    assert torch.equal(FORMS[form](*inputs), FORMS[form](*inputs, mask=causal_mask(40, 60)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 40])
def test_bf16_stays_near_the_formula(form, band, queries):
    q_nope, q_rope, ckv, kpe, kv_b, scale = example(queries=queries, keys=60)
    low = q_nope.bfloat16(), q_rope, ckv.bfloat16(), kpe.to(band), kv_b.bfloat16(), scale
    want = reference(*low)
    # Queries, probabilities and results are each rounded once or twice to 8 bits.
    assert (FORMS[form](*low) - want).norm() < 0.015 * want.norm()


def test_decode_is_absorbed_and_a_long_chunk_explicit():
    shape = {"heads": 16, "latent": 512, "rope_dim": 64, "nope": 128, "value": 128}
    assert prefer_absorbed(1, 2000, **shape)
    assert prefer_absorbed(32, 2000, **shape)
    assert not prefer_absorbed(512, 2000, **shape)
    assert not prefer_absorbed(512, 512, **shape)


def test_without_nope_the_latent_score_costs_nothing():
    # 110,592 multiply-adds a key to project, 1,152 a pair saved: even at 96 queries.
    shape = {"heads": 9, "latent": 192, "rope_dim": 192, "nope": 0, "value": 64}
    assert prefer_absorbed(64, 10_000, **shape)
    assert not prefer_absorbed(128, 10_000, **shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "which, shape", [(1, (2, 4, 8)), (2, (3, 12)), (3, (11, 6)), (0, (3, 5, 6))]
)
def test_shapes_that_do_not_fit_are_refused(form, which, shape):
    inputs = list(example())
    inputs[which] = torch.zeros(shape)
    with pytest.raises(ValueError):
        FORMS[form](*inputs)  # type: ignore[arg-type]

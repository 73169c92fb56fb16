"""bf16 attention over many keys: a budget that does not grow with the length of the context.

One head geometry of the targets (latent 512, band 64, nope and v 128), inputs rounded to bf16
beforehand, so that what is measured is the forms' own rounding, against float64. Measured over
three seeds: explicit at most 0.0045, absorbed at most 0.0071, at 250 keys as at 8,000.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leyline.kernels import attention as forms

BUDGET = 0.009
NOPE = 128
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]


def inputs(keys: int) -> Inputs:
    q_nope, q_rope, ckv, kpe, kv_b, scale = forms.example(
        heads=4, queries=24, keys=keys, latent=512, rope_dim=64, nope=NOPE, value=128
    )
    return q_nope.bfloat16(), q_rope, ckv.bfloat16(), kpe, kv_b.bfloat16(), scale


def formula(q_nope, q_rope, ckv, kpe, kv_b, scale) -> Tensor:
    """The definition in float64: [H, T, V]."""
    up = torch.einsum("hjc,sc->hsj", kv_b.double(), ckv.double())
    key = torch.cat([up[..., :NOPE], kpe.double().expand(len(kv_b), -1, -1)], dim=-1)
    score = torch.cat([q_nope, q_rope], dim=-1).double() @ key.transpose(1, 2) * scale
    mask = forms.causal_mask(q_nope.shape[1], len(ckv))
    return score.masked_fill(~mask, float("-inf")).softmax(-1) @ up[..., NOPE:]


def explicit(q_nope, q_rope, ckv, kpe, kv_b, scale) -> Tensor:
    return forms.explicit(q_nope, q_rope, ckv, kpe, kv_b, scale)


def absorbed(q_nope, q_rope, ckv, kpe, kv_b, scale) -> Tensor:
    mixed = forms.absorbed(forms.fold(q_nope, kv_b), q_rope, ckv, kpe, scale)
    return forms.unfold(mixed, kv_b, NOPE)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("form", [explicit, absorbed])
@pytest.mark.parametrize("keys", [250, 2000, 8000])
def test_each_form_keeps_the_budget_at_any_length(form, keys):
    given = inputs(keys)
    assert error(form(*given), formula(*given)) < BUDGET


@pytest.mark.parametrize("form", [explicit, absorbed])
def test_one_percent_does_not_fit_into_the_budget(form):
    given = inputs(2000)
    sharper = (*given[:5], given[5] * 1.05)
    assert error(form(*given) * 1.01, formula(*given)) > BUDGET
    assert error(form(*sharper), formula(*given)) > BUDGET


@pytest.mark.parametrize("form", [explicit, absorbed])
def test_later_keys_cost_no_more_than_early_ones(form):
    short, long = inputs(250), inputs(8000)
    assert error(form(*long), formula(*long)) < 1.3 * error(form(*short), formula(*short))

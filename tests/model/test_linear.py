"""Projections: packed where that pays, the plain product elsewhere, equal either way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from leyline.model import linear
from leyline.model.linear import Linear


def inputs(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 40, generator=generator)
    return x.to(dtype), torch.randn(24, 40, generator=generator).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_is_the_plain_product(rows, dtype):
    x, weight = inputs(rows, dtype)
    # One rounding of the result, which two orders of summation may push either way.
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(
        Linear(weight)(x), F.linear(x, weight), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_before_the_one_rounding(dtype):
    x, weight = inputs(16, dtype)
    bias = (torch.arange(24) - 12.0).to(dtype) * 3
    want = F.linear(x.double(), weight.double(), bias.double())
    # Half a step of a bf16 at the size of the result.
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-6}[dtype]
    good, off = (Linear(weight, b)(x).double() for b in (bias, bias * 1.01))
    assert ((good - want).abs() <= tolerance * want.abs() + 1e-5).all()
    assert not ((off - want).abs() <= tolerance * want.abs() + 1e-5).all()


def test_one_percent_is_noticed():
    x, weight = inputs(200, torch.bfloat16)
    want = F.linear(x.float(), weight.float())
    good, off = (Linear(w)(x).float() for w in (weight, (weight * 1.01).bfloat16()))
    assert (good - want).norm() < 0.003 * want.norm() < (off - want).norm()


def test_without_the_private_names_the_plain_product_runs(monkeypatch):
    x, weight = inputs(3, torch.bfloat16)

    class Missing:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Missing())
    assert torch.equal(Linear(weight)(x), F.linear(x, weight))


def test_rows_may_be_a_view():
    x, weight = inputs(6, torch.bfloat16)
    wide = torch.cat([x, x], dim=-1)
    torch.testing.assert_close(Linear(weight)(wide[:, 40:]), Linear(weight)(x))


def test_a_weight_is_kept_once():
    _, weight = inputs(1, torch.bfloat16)
    assert (Linear(weight)._weight is None) == (linear._pack(weight) is not None)

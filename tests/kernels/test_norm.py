"""The norm against its formula, at the sizes of eps that models use."""

from __future__ import annotations

import pytest
import torch

from leyline.kernels.norm import example, reference, rms_norm

# Two orders of summing a few hundred squares in float32.
TOLERANCE = 1e-6


@pytest.mark.parametrize("rows, width", [(1, 576), (7, 24), (0, 5), (300, 33)])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1.0])
def test_rms_norm_equals_the_formula(rows, width, eps):
    x, weight, _ = example(rows, width)
    torch.testing.assert_close(
        rms_norm(x, weight, eps), reference(x, weight, eps), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_one_percent_on_the_weight_is_noticed():
    x, weight, eps = example()
    off = (rms_norm(x, weight * 1.01, eps) - reference(x, weight, eps)).norm()
    assert off > 1000 * TOLERANCE * reference(x, weight, eps).norm()


def test_a_huge_eps_makes_the_norm_the_identity():
    x = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))
    y = rms_norm(x, torch.full((192,), 1e4), 1e8)
    assert (y - x).abs().max() <= 5e-7 * x.abs().max()


def test_bf16_rows_are_normalised_in_float32():
    x, weight, eps = example()
    y = rms_norm(x.bfloat16(), weight, eps)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, reference(x.bfloat16().float(), weight, eps))


def test_the_input_is_left_alone():
    x, weight, eps = example()
    before = x.clone()
    rms_norm(x, weight, eps)
    assert torch.equal(x, before)


@pytest.mark.parametrize("weight", [torch.ones(23), torch.ones(24).bfloat16(), torch.ones(1, 24)])
def test_a_weight_that_does_not_fit_is_refused(weight):
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(example()[0], weight, 1e-5)

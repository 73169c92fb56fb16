"""Turning interleaved pairs: against even and odd elements, and from strided views."""

from __future__ import annotations

import pytest
import torch

from leyline.kernels.rope import example, reference, rotate


@pytest.mark.parametrize("rows, heads, rope_dim", [(5, 3, 8), (1, 1, 2), (0, 2, 4), (4, 7, 64)])
def test_rotate_equals_the_formula(rows, heads, rope_dim):
    x, phases = example(rows, heads, rope_dim)
    torch.testing.assert_close(rotate(x, phases), reference(x, phases), rtol=1e-6, atol=1e-6)


def test_one_percent_on_the_angle_is_noticed():
    x, phases = example()
    off = torch.polar(torch.ones_like(phases.real), phases.angle() * 1.01)
    assert (rotate(x, off) - reference(x, phases)).abs().max() > 1e-3


def test_a_view_into_wider_odd_rows_is_read_right():
    x, phases = example(5, 3, 8)
    wide = torch.cat([torch.zeros(5, 3, 3), x], dim=-1)
    torch.testing.assert_close(rotate(wide[..., 3:], phases), rotate(x, phases))


def test_the_input_is_left_alone():
    x, phases = example()
    before = x.clone()
    rotate(x, phases).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (5, 4, 1)])
def test_phases_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="phases must be"):
        rotate(example()[0], torch.zeros(shape, dtype=torch.complex64))


def test_real_phases_are_refused():
    with pytest.raises(ValueError, match="complex64"):
        rotate(example()[0], torch.zeros(5, 4))

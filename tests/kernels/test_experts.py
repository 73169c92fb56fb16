"""The experts' sum against one token and one expert at a time."""

from __future__ import annotations

import pytest
import torch

from leyline.kernels.experts import example, experts, reference


@pytest.mark.parametrize("rows, num_experts, top_k", [(6, 5, 2), (1, 8, 8), (40, 3, 1), (0, 4, 2)])
def test_experts_equals_the_reference(rows, num_experts, top_k):
    inputs = example(rows=rows, experts=num_experts, top_k=top_k)
    torch.testing.assert_close(experts(*inputs), reference(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", range(5))
def test_one_percent_on_any_input_is_noticed(which):
    inputs = list(example())
    want = reference(*inputs)
    if which == 1:  # ids cannot be a little off: one token goes to its neighbour
        inputs[1] = (inputs[1] + 1) % 5
    else:
        inputs[which] = inputs[which] * 1.01
    assert (experts(*inputs) - want).norm() > 1e-3 * want.norm()


def test_experts_that_nobody_chose_are_not_read():
    x, _, weights, gate_up, down = example()
    gate_up[3:], down[3:] = float("nan"), float("nan")
    ids = torch.tensor([[0, 2]] * x.shape[0])
    assert experts(x, ids, weights, gate_up, down).isfinite().all()


@pytest.mark.parametrize(
    "which, shape", [(1, (6, 3)), (2, (5, 2)), (3, (5, 24, 15)), (4, (5, 16, 11))]
)
def test_shapes_that_do_not_fit_are_refused(which, shape):
    inputs = list(example())
    inputs[which] = torch.zeros(shape, dtype=inputs[which].dtype)
    with pytest.raises(ValueError):
        experts(*inputs)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_dtypes_that_do_not_fit_are_refused(which):
    inputs = list(example())
    inputs[which] = inputs[which].to(torch.float16 if which != 1 else torch.int32)
    with pytest.raises(ValueError):
        experts(*inputs)

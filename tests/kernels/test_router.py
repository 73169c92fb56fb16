"""Routing against a sort in plain Python, for every method, scoring and option."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from leyline.kernels.router import Routing, example, reference, route

OPTIONS = [
    Routing(3, scoring, method, norm, scale, groups, max(1, groups // 2))
    for scoring, method, norm, scale, groups in itertools.product(
        ("softmax", "sigmoid"),
        ("greedy", "group_limited_greedy", "noaux_tc"),
        (True, False),
        (1.0, 2.5),
        (1, 4),
    )
]


def as_table(ids: Tensor, weights: Tensor, experts: int = 16) -> Tensor:
    """[T, E] float32 with each chosen expert's weight: the order of choice does not matter."""
    return torch.zeros(ids.shape[0], experts).scatter_(1, ids, weights)


def inputs(routing: Routing) -> tuple[Tensor, Tensor, Tensor | None, Routing]:
    x, gate, bias, _ = example(rows=20, experts=16)
    return x, gate, bias if routing.topk_method == "noaux_tc" else None, routing


@pytest.mark.parametrize("routing", OPTIONS, ids=lambda r: "-".join(map(str, vars_of(r))))
def test_route_equals_the_reference(routing):
    got, want = route(*inputs(routing)), reference(*inputs(routing))
    torch.testing.assert_close(as_table(*got), as_table(*want), rtol=1e-5, atol=1e-6)


def vars_of(routing: Routing) -> tuple[object, ...]:
    return dataclasses.astuple(routing)


@pytest.mark.parametrize("which", ["gate", "bias", "scale"])
def test_one_percent_is_noticed(which):
    x, gate, bias, routing = example(rows=200)
    want = as_table(*reference(x, gate, bias, routing))
    if which == "scale":
        scale = routing.routed_scaling_factor * 1.01
        got = route(x, gate, bias, dataclasses.replace(routing, routed_scaling_factor=scale))
    else:
        got = route(x, gate * (1.01 if which == "gate" else 1), bias * 1.01, routing)
    assert (as_table(*got) - want).abs().max() > 1e-3


def test_the_bias_chooses_but_does_not_weigh():
    x, gate, _, routing = example(experts=8)
    bias = torch.zeros(8)
    bias[:3] = 100.0
    ids, weights = route(x, gate, bias, dataclasses.replace(routing, norm_topk_prob=False))
    assert ids.sort().values.tolist() == [[0, 1, 2]] * x.shape[0]
    scores = (x @ gate.T).sigmoid() * routing.routed_scaling_factor
    torch.testing.assert_close(weights, scores.gather(1, ids))


def test_a_negative_biased_score_still_beats_a_masked_group():
    x, gate, _, _ = example(rows=20, experts=8)
    bias = torch.full((8,), -5.0)
    routing = Routing(4, "sigmoid", "noaux_tc", True, 1.0, n_group=2, topk_group=1)
    ids, _ = route(x, gate, bias, routing)
    assert all(len({expert // 4 for expert in row}) == 1 for row in ids.tolist())


def test_bf16_rows_are_routed_in_float32():
    x, gate, bias, routing = example(rows=50)
    low = x.bfloat16()
    got, want = route(low, gate, bias, routing), reference(low.float(), gate, bias, routing)
    torch.testing.assert_close(as_table(*got), as_table(*want))


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": torch.zeros(8, 15)},
        {"gate": torch.zeros(8, 16).bfloat16()},
        {"bias": None},
        {"bias": torch.zeros(7)},
        {"bias": torch.zeros(8).bfloat16()},
        {"routing": Routing(3, "sigmoid", "greedy", True, 1.0)},
    ],
)
def test_what_does_not_fit_is_refused(changes):
    names = ("x", "gate", "bias", "routing")
    with pytest.raises(ValueError):
        route(**(dict(zip(names, example(), strict=True)) | changes))

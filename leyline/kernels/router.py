"""Choose each token's experts and their weights.

    scores  = softmax(x W^T)  or  sigmoid(x W^T)                          [T, E] float32
    choice  = scores, plus e_score_correction_bias for noaux_tc
    chosen  = top K of choice, within the topk_group best groups where n_group > 1
    weights = scores[chosen], without the bias
    weights = weights / (sum + 1e-20)      if norm_topk_prob
    weights = weights * routed_scaling_factor

The last two lines are independent: engines that scale only where they renormalise, or the other
way round, got expert outputs of the wrong size. The whole router runs in float32 whatever the
model's dtype, because rounding flips near ties and with them whole experts.

Source: DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3 (noaux_tc), arXiv 2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's options, in the config's words.

    Attributes:
        top_k: Experts a token, K.
        scoring_func: "softmax" or "sigmoid".
        topk_method: "greedy", "group_limited_greedy" or "noaux_tc".
        norm_topk_prob: Whether the K weights are divided by their sum.
        routed_scaling_factor: Multiplies the weights in any case.
        n_group: Groups the experts are cut into.
        topk_group: Groups a token may choose from.
    """

    top_k: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    n_group: int = 1
    topk_group: int = 1


def reference(
    x: Tensor, gate: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Token by token, by sorting in plain Python; ties go to the lower expert."""
    logits = x.to(torch.float32) @ gate.to(torch.float32).T
    scores = logits.softmax(-1) if routing.scoring_func == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    rows = [_choose_one(row.tolist(), routing) for row in choice]
    ids = torch.tensor(rows, dtype=torch.int64)
    return ids, _weights(scores, ids, routing)


def example(
    rows: int = 6, width: int = 16, experts: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Routing]:
    """Seeded valid inputs for noaux_tc: x, gate, bias, routing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    gate = torch.randn(experts, width, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.2
    return x, gate, bias, Routing(3, "sigmoid", "noaux_tc", True, 2.5)


def route(x: Tensor, gate: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts for every row.

    Args:
        x: [T, D], any floating dtype.
        gate: Router weight [E, D] float32.
        bias: `e_score_correction_bias` [E] float32; None unless the method is noaux_tc.
        routing: The options.

    Returns:
        ids [T, K] int64 in no promised order, and their weights [T, K] float32.

    Raises:
        ValueError: A shape or dtype does not fit, or the bias does not fit the method.
    """
    _check(x, gate, bias, routing)
    logits = F.linear(x.to(torch.float32), gate)
    scores = logits.softmax(-1) if routing.scoring_func == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.n_group > 1 and routing.topk_method != "greedy":
        choice = _mask_groups(choice, routing)
    ids = choice.topk(routing.top_k, dim=-1, sorted=False).indices
    return ids, _weights(scores, ids, routing)


def _check(x: Tensor, gate: Tensor, bias: Tensor | None, routing: Routing) -> None:
    if gate.dtype != torch.float32 or gate.ndim != 2 or gate.shape[1] != x.shape[-1]:
        raise ValueError(f"gate must be [E, {x.shape[-1]}] float32, not {tuple(gate.shape)}")
    if (bias is not None) != (routing.topk_method == "noaux_tc"):
        raise ValueError("a bias belongs to noaux_tc and to nothing else")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != gate.shape[:1]):
        raise ValueError(f"bias must be [{gate.shape[0]}] float32")


def _weights(scores: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    weights = scores.gather(1, ids)
    if routing.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.routed_scaling_factor


def _mask_groups(choice: Tensor, routing: Routing) -> Tensor:
    """`choice` with minus infinity outside the best groups (a biased score may be negative)."""
    grouped = choice.unflatten(-1, (routing.n_group, -1))
    best = 2 if routing.topk_method == "noaux_tc" else 1
    group_scores = grouped.topk(best, dim=-1).values.sum(-1)
    chosen = group_scores.topk(routing.topk_group, dim=-1).indices
    keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
    return grouped.masked_fill(~keep[..., None], float("-inf")).flatten(-2)


def _choose_one(choice: list[float], routing: Routing) -> list[int]:
    size = len(choice) // routing.n_group
    best = 2 if routing.topk_method == "noaux_tc" else 1
    groups = [range(g * size, (g + 1) * size) for g in range(routing.n_group)]
    if routing.topk_method != "greedy":
        groups.sort(key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:best]))
        groups = groups[: routing.topk_group]
    experts = [e for group in groups for e in group]
    return sorted(experts, key=lambda e: (-choice[e], e))[: routing.top_k]

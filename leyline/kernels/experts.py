"""The routed experts of one layer.

    y[t] = sum_k weights[t, k] * down[e] (silu(g) * u),   (g, u) = gate_up[e] x[t],   e = ids[t, k]

Rows are sorted by expert, so that each expert in use is read once and multiplies all its rows
together; the weighted results are added in float32.

Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One token and one expert at a time, in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            out[token] += weight * (down[expert].float() @ (F.silu(gate) * up))
    return out


def example(
    rows: int = 6, width: int = 16, inner: int = 12, experts: int = 5, top_k: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Seeded valid inputs: x, ids, weights, gate_up, down."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    ids = torch.rand(rows, experts, generator=generator).topk(top_k).indices
    weights = torch.rand(rows, top_k, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    down = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    return x, ids, weights, gate_up, down


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run the chosen experts of every row and add them up.

    Args:
        x: [T, D] in the model's dtype.
        ids: Experts of each row [T, K] int64, distinct within a row.
        weights: Their weights [T, K] float32.
        gate_up: Gate rows, then up rows, of every expert [E, 2I, D], dtype of `x`.
        down: [E, D, I], dtype of `x`.

    Returns:
        [T, D] float32.

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """
    _check(x, ids, weights, gate_up, down)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order = ids.flatten().argsort(stable=True)
    rows = order // ids.shape[1]
    scales = weights.flatten()[order, None]
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mine = rows[start : start + count]
            gate, up = F.linear(x[mine], gate_up[expert]).chunk(2, dim=-1)
            partial = F.linear(F.silu(gate) * up, down[expert]).to(torch.float32)
            out.index_add_(0, mine, partial * scales[start : start + count])
            start += count
    return out


def _check(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    num_experts, inner, width = gate_up.shape[0], gate_up.shape[1] // 2, x.shape[1]
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0] or ids.dtype != torch.int64:
        raise ValueError("ids and weights must both be [T, K], ids int64")
    if gate_up.shape != (num_experts, 2 * inner, width) or down.shape != (
        num_experts,
        width,
        inner,
    ):
        raise ValueError(f"gate_up must be [E, 2I, {width}] and down [E, {width}, I]")
    if not (gate_up.dtype == down.dtype == x.dtype and weights.dtype == torch.float32):
        raise ValueError("gate_up and down must have x's dtype, weights float32")

"""Turn interleaved pairs by the angle of their position.

    (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i] sin + x[2i+1] cos)

which is the complex product (x[2i] + j x[2i+1]) * phase[i]. The amplitude of a YaRN model is
already in the phases.

Source: Su et al., "RoFormer", arXiv 2104.09864; the interleaved layout is the one in which the
checkpoints store their rope rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, phases: Tensor) -> Tensor:
    """The formula on even and odd elements, in float32."""
    cos, sin = phases.real[:, None, :], phases.imag[:, None, :]
    even, odd = x[..., 0::2].to(torch.float32), x[..., 1::2].to(torch.float32)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def example(rows: int = 5, heads: int = 3, rope_dim: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    """Seeded valid inputs: x [rows, heads, rope_dim], phases [rows, rope_dim / 2]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, rope_dim, generator=generator)
    angle = torch.rand(rows, rope_dim // 2, generator=generator) * 6
    return x, torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Turn every head of every row.

    Args:
        x: [T, H, R], any floating dtype.
        phases: cos + j sin of each row's angles [T, R/2] complex64.

    Returns:
        [T, H, R] float32, never an alias of `x`.

    Raises:
        ValueError: The shapes do not fit or `phases` is not complex64.
    """
    rows, _, width = x.shape
    if phases.dtype != torch.complex64 or phases.shape != (rows, width // 2) or width % 2:
        raise ValueError(f"phases must be [{rows}, {width // 2}] complex64 for an even width")
    pairs = torch.view_as_complex(x.to(torch.float32).contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * phases[:, None, :]).flatten(-2)

"""FP8 in blocks: one float32 factor for every block of a weight.

    weight[i, j] = stored[i, j] * scale_inv[i // rows, j // columns]

The factors are named "inv" because they undo a division; they multiply. A weight whose sides are
no multiples of the block has smaller blocks at its lower and right edge: 576 rows in blocks of 128
have five rows of factors. Blocks know nothing of heads (448 rows a head are 3.5 blocks), so a
weight is restored as a whole, and heads are sliced from the result.

Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leyline.model.schemes import Block


def scale_shape(weight_shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of the factors of a weight: its sides in blocks, rounded up."""
    return tuple(-(-side // size) for side, size in zip(weight_shape, block, strict=True))


def dequantise_into(out: Tensor, stored: Tensor, scale_inv: Tensor, block: Block) -> None:
    """Restore a weight, a row of blocks at a time, so that little more than `out` is held.

    Args:
        out: [rows, columns] in any float dtype, on any device; overwritten.
        stored: [rows, columns] float8_e4m3fn.
        scale_inv: [rows in blocks, columns in blocks], rounded up; a float dtype.
        block: Rows and columns of a block.
    """
    height, width = block
    columns = stored.shape[1]
    for index, factors in enumerate(scale_inv.to(out.device, torch.float32)):
        rows = slice(index * height, (index + 1) * height)
        wide = factors.repeat_interleave(width)[:columns]
        out[rows].copy_(stored[rows].to(out.device).to(torch.float32).mul_(wide))

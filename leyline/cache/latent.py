"""The tensors of the cache: for every layer and slot, one latent and one rope band.

The latent (`ckv`) holds no position. The rope band (`kpe`) is the part of the key that does, and
the only part that a `Move` turns. It is stored in float32 by default: turned in place again and
again, a bfloat16 band drifts linearly with the number of small turns (design notes, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from leyline.kernels.move import move


class LatentCache:
    """Rows of `num_slots` tokens in `num_layers` layers.

    Args:
        num_layers: L.
        num_slots: S.
        kv_lora_rank: C, width of a latent.
        rope_dim: R, width of a rope band.
        dtype: Of the latents.
        rope_dtype: Of the rope bands.
        device: Where the tensors live.

    Attributes:
        ckv: Latents [L, S, C].
        kpe: Rope bands [L, S, R], turned pairs side by side (elements 2i and 2i + 1).
        layers: `(ckv, kpe)` of each layer, [S, C] and [S, R]: views.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_lora_rank: int,
        rope_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rope_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ckv = torch.zeros(num_layers, num_slots, kv_lora_rank, dtype=dtype, device=device)
        self.kpe = torch.zeros(num_layers, num_slots, rope_dim, dtype=rope_dtype, device=device)
        self.layers = list(zip(self.ckv, self.kpe, strict=True))

    def move(self, src_slots: Tensor, dst_slots: Tensor, delta: Tensor, inv_freq: Tensor) -> None:
        """Carry rows and turn their bands; see `leyline.kernels.move`."""
        move(self.ckv, self.kpe, src_slots, dst_slots, delta, inv_freq)

    def fill(self, slots: Tensor, value: float) -> None:
        """Overwrite rows [n], in every layer: with zeros to scrub, with NaN to poison."""
        self.ckv[:, slots] = value
        self.kpe[:, slots] = value


def row_bytes(
    num_layers: int, kv_lora_rank: int, rope_dim: int, dtype: torch.dtype, rope_dtype: torch.dtype
) -> int:
    """Bytes that one token takes in all layers."""
    return num_layers * (kv_lora_rank * dtype.itemsize + rope_dim * rope_dtype.itemsize)

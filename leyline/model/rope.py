"""Rotary positions: frequencies, amplitude and the softmax scale that goes with them.

    angle[t, i] = position[t] * inv_freq[i]
    (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i] sin + x[2i+1] cos)

Pairs are interleaved: elements 2i and 2i+1 turn together, in queries and in stored `kpe` alike.
Angles are formed in float64, because a float32 angle at position 30,000 is off by a milliradian;
cos and sin are then rounded to float32.

YaRN (arXiv 2309.00071) slows the slow pairs by `factor` and blends between. DeepSeek's two mscales
have separate roles, and mixing them up is a bug that several engines shipped: their *ratio* is the
amplitude of cos and sin, `mscale_all_dim` alone, squared, multiplies the softmax scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leyline.model.config import ModelConfig, YarnScaling


class Rope:
    """The rotary part of one model.

    Attributes:
        inv_freq: Radians a position for each pair, [R/2] float64 on the CPU.
        amplitude: Factor on cos and sin of the forward pass; a turn of cached rows has none.
        softmax_scale: Factor on the attention scores.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.inv_freq = _inverse_frequencies(config)
        self.amplitude = 1.0 if config.yarn is None else _amplitude(config.yarn)
        self.softmax_scale = config.qk_head_dim**-0.5
        if config.yarn is not None and config.yarn.mscale_all_dim:
            self.softmax_scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every angle, amplitude included.

        Args:
            positions: [T] integers.

        Returns:
            Two tensors [T, R/2] float32 on the device of `positions`.
        """
        inv_freq = self.inv_freq.to(positions.device)
        angle = positions.to(torch.float64)[:, None] * inv_freq
        return (
            (angle.cos() * self.amplitude).to(torch.float32),
            (angle.sin() * self.amplitude).to(torch.float32),
        )


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """[R/2] float64: given outright, or by theta, blended where the model has YaRN."""
    if config.rope_inv_freq is not None:
        return torch.tensor(config.rope_inv_freq, dtype=torch.float64)
    half = config.qk_rope_head_dim // 2
    pairs = torch.arange(half, dtype=torch.float64)
    inv_freq = config.rope_theta ** -(pairs / half)
    if config.yarn is None:
        return inv_freq
    ramp = _ramp(config.yarn, config.rope_theta, half)
    return inv_freq * (1 - ramp) + inv_freq / config.yarn.factor * ramp


def _ramp(yarn: YarnScaling, theta: float, half: int) -> Tensor:
    """[R/2] float64: 0 where a pair keeps its frequency, 1 where it is slowed by the factor."""

    def pair_that_turns(times: float) -> float:
        length = yarn.original_max_position_embeddings
        return half * math.log(length / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = max(high - low, 1e-3)
    pairs = torch.arange(half, dtype=torch.float64)
    return ((pairs - low) / width).clamp(0, 1)


def _amplitude(yarn: YarnScaling) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

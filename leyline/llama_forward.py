"""A llama's own forward pass, plainly: what a rewritten model is compared with.

    x = x + W_o attention(W_q n, W_k n, W_v n),  n = norm(x)
    x = x + W_down (silu(W_gate m) * W_up m),    m = norm(x)

Everything is float32, in the layout in which the source stores its rope pairs, and nothing of the
rewrite or of the engine is used, so that an error in either cannot hide here. Tensors are asked
for one at a time: memory holds one weight, whatever the model's size.

Source: Touvron et al., "LLaMA", arXiv 2302.13971; grouped heads: arXiv 2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leyline.llama import Llama

TensorOf = Callable[[str], Tensor]


def llama_logits(
    llama: Llama,
    tensor: TensorOf,
    ids: Tensor,
    tick: Callable[[int], Any] = lambda layer: None,
) -> Tensor:
    """Compute the logits of a text.

    Args:
        llama: The model's sizes.
        tensor: Its tensors by hub name, in any float dtype.
        ids: Token ids [T] int64, from position 0 on.
        tick: Is told each finished layer's number.

    Returns:
        [T, V] float32.
    """
    embedding = tensor("model.embed_tokens.weight")
    x = F.embedding(ids, embedding).to(torch.float32)
    cos, sin = _cos_sin(llama, len(ids))
    for layer in range(llama.shape.num_layers):

        def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
            return tensor(prefix + name).to(torch.float32)

        normed = _norm(x, weight("input_layernorm.weight"), llama.rms_norm_eps)
        x = x + _attention(llama, weight, normed, cos, sin)
        normed = _norm(x, weight("post_attention_layernorm.weight"), llama.rms_norm_eps)
        gate = F.silu(normed @ weight("mlp.gate_proj.weight").T)
        x = (
            x
            + (gate * (normed @ weight("mlp.up_proj.weight").T)) @ weight("mlp.down_proj.weight").T
        )
        tick(layer)
    x = _norm(x, tensor("model.norm.weight").to(torch.float32), llama.rms_norm_eps)
    head = embedding if llama.tied else tensor("lm_head.weight")
    return x @ head.to(torch.float32).T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _attention(llama: Llama, weight: TensorOf, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Attention over the text itself [T, D]."""
    shape, length = llama.shape, x.shape[0]

    def project(name: str) -> Tensor:
        """[heads, T, head_dim]."""
        bias = weight(f"self_attn.{name}.bias") if llama.qkv_bias else None
        rows = F.linear(x, weight(f"self_attn.{name}.weight"), bias)
        return rows.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)

    query, key, value = (project(name) for name in ("q_proj", "k_proj", "v_proj"))
    query, key = (_turn(rows, cos, sin, llama.interleaved) for rows in (query, key))
    repeats = shape.num_heads // shape.num_kv_heads
    key, value = (rows.repeat_interleave(repeats, dim=0) for rows in (key, value))
    score = query @ key.transpose(1, 2) * llama.softmax_scale
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = score.masked_fill(hidden, float("-inf")).softmax(-1) @ value
    bias = weight("self_attn.o_proj.bias") if llama.output_bias else None
    return F.linear(mixed.transpose(0, 1).flatten(1), weight("self_attn.o_proj.weight"), bias)


def _cos_sin(llama: Llama, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair of one head, [T, head_dim / 2] float32."""
    half = llama.shape.head_dim // 2
    inv_freq = torch.tensor(llama.shape.inv_freq[:half], dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inv_freq
    return angle.cos().float(), angle.sin().float()


def _turn(rows: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn every pair of [heads, T, head_dim], wherever its two elements lie."""
    if interleaved:
        first, second = rows[..., 0::2], rows[..., 1::2]
        turned = first * cos - second * sin, first * sin + second * cos
        return torch.stack(turned, dim=-1).flatten(-2)
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

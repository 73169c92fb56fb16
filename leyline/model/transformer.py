"""The transformer: embedding, layers, final norm, head.

The residual stream is float32 whatever the model's dtype; each half of a layer reads a rounded,
normalised copy and adds its result back:

    x = x + attention(norm(x));    x = x + mlp(norm(x))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from leyline.kernels.norm import rms_norm
from leyline.model.attention import Attention, LayerCache, Plan, plan_step
from leyline.model.config import ModelConfig
from leyline.model.linear import Linear
from leyline.model.moe import MixtureOfExperts, Mlp
from leyline.model.parameters import RandomWeights, WeightSource
from leyline.model.rope import Rope
from leyline.model.step import Step

Observer = Callable[[int, Tensor], None]


class Layer:
    """One decoder layer; `x` is changed in place."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: WeightSource,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        prefix = f"model.layers.{index}."
        self._dtype = dtype
        self._eps = config.rms_norm_eps
        self._input_norm = weights.take(f"{prefix}input_layernorm.weight", torch.float32)
        self._attention = Attention(config, weights, f"{prefix}self_attn.", dtype, scale)
        self._post_norm = weights.take(f"{prefix}post_attention_layernorm.weight", torch.float32)
        self._mlp = (
            Mlp(weights, f"{prefix}mlp.", dtype)
            if config.is_dense(index)
            else MixtureOfExperts(config, weights, f"{prefix}mlp.", dtype)
        )

    def __call__(self, x: Tensor, plan: Plan, cache: LayerCache) -> None:
        """Add both halves to the residual stream `x` [T, D] float32."""
        normed = rms_norm(x, self._input_norm, self._eps).to(self._dtype)
        x += self._attention(normed, plan, cache)
        normed = rms_norm(x, self._post_norm, self._eps).to(self._dtype)
        x += self._mlp(normed)


class Transformer:
    """An MLA model, ready to run.

    Args:
        config: The model's shape.
        weights: Where the parameters come from; None makes seeded random ones.
        dtype: Dtype of projections, latents and hidden states.
        device: Where the parameters and all tensors of a step are.
        latent_norm_eps: eps of the norms inside attention, in place of the config's.

    Attributes:
        config: The shape, `latent_norm_eps` as it runs.
        rope: Frequencies and softmax scale.
        dtype: As given.
        device: As given.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        latent_norm_eps: float | None = None,
    ) -> None:
        if latent_norm_eps is not None:
            config = dataclasses.replace(config, latent_norm_eps=latent_norm_eps)
        source = RandomWeights(config, device=device) if weights is None else weights
        self.config = config
        self.rope = Rope(config)
        self.dtype = dtype
        self.device = torch.device(device)
        self._embedding = source.take("model.embed_tokens.weight", dtype)
        self._layers = [
            Layer(config, index, source, dtype, self.rope.softmax_scale)
            for index in range(config.num_hidden_layers)
        ]
        self._norm = source.take("model.norm.weight", torch.float32)
        self._head = (
            Linear(self._embedding)
            if config.tie_word_embeddings
            else Linear.load(source, ("lm_head.weight",), dtype)
        )

    def forward(
        self,
        input_ids: Tensor,
        step: Step,
        cache: Sequence[LayerCache],
        *,
        observe: Observer | None = None,
    ) -> Tensor:
        """Compute and store the rows of a step.

        Args:
            input_ids: Tokens [T] int64 of all spans in a row.
            step: Their positions, where their rows go, and what each may read.
            cache: ckv [S, C] and kpe [S, R] of every layer; changed at `step.write_slots`.
            observe: Receives (layer, residual stream [T, D] float32) after every layer; the
                tensor is overwritten by the next layer.

        Returns:
            Hidden rows after the final norm [T, D] in the model's dtype.
        """
        plan = plan_step(step, self.config, self.rope)
        x = F.embedding(input_ids, self._embedding).to(torch.float32, copy=True)
        for index, layer in enumerate(self._layers):
            layer(x, plan, cache[index])
            if observe is not None:
                observe(index, x)
        return rms_norm(x, self._norm, self.config.rms_norm_eps).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token: hidden [B, D] in the model's dtype to [B, V] float32."""
        return self._head(hidden).to(torch.float32)

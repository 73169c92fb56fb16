"""The parameters a config calls for: their names, shapes and where they come from.

Names are the hub's. A `WeightSource` hands each of them out once; the model is built by taking
them, so a parameter that nobody takes or that two modules take cannot go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from leyline.errors import ModelError
from leyline.model.config import ModelConfig

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """Hands out each parameter of a model exactly once."""

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """The parameter of that name, on the model's device, in `dtype`, in memory of its own.

        Raises:
            ModelError: There is none, it was taken before, or its values are not finite.
        """
        ...

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Parameters [rows, in] below one another, for somebody who copies or packs them anyway.

        The tensor may be overwritten by the next call of this source.

        Raises:
            ModelError: As `take`.
        """
        ...

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        """Fill each place with the parameter of its name; the place fixes device and dtype.

        Whoever builds a model must not look at a place: a source may be told to fill it later.

        Raises:
            ModelError: As `take`, or a parameter has not the shape of its place.
        """
        ...


class RandomWeights:
    """Seeded random parameters, scaled so that activations keep their size: for tests."""

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu"):
        self._shapes = dict(parameter_shapes(config))
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter that was not taken before; see `WeightSource.take`."""
        if name not in self._shapes:
            raise ModelError(f"The parameter {name} does not exist or was taken twice.")
        value = torch.randn(self._shapes.pop(name), generator=self._generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif value.ndim == 2:
            value *= value.shape[1] ** -0.5
        return value.to(dtype).to(self._device)

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Parameters that were not taken before; see `WeightSource.lend`."""
        return torch.cat([self.take(name, dtype) for name in names])

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        """Parameters that were not taken before; see `WeightSource.take_all`."""
        for name, out in places.items():
            value = self.take(name, out.dtype)
            check_shape(name, tuple(value.shape), out)
            out.copy_(value)


class EmptyWeights:
    """Parameters that have a name, a shape and a dtype but no values: for a model's size alone.

    Args:
        config: The model's shape.
        device: Where they are not; on "meta" they take no memory.

    Attributes:
        left: Parameters not taken yet, with their shapes.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "meta") -> None:
        self.left = dict(parameter_shapes(config))
        self._device = device

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter that was not taken before; see `WeightSource.take`."""
        return torch.empty(self._claim(name), dtype=dtype, device=self._device)

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Parameters that were not taken before; see `WeightSource.lend`."""
        return torch.cat([self.take(name, dtype) for name in names])

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        """Parameters that were not taken before; see `WeightSource.take_all`."""
        for name, out in places.items():
            check_shape(name, self._claim(name), out)

    def _claim(self, name: str) -> Shape:
        if name not in self.left:
            raise ModelError(f"The parameter {name} does not exist or was taken twice.")
        return self.left.pop(name)


def check_shape(name: str, shape: Shape, out: Tensor) -> None:
    """Refuse a place that does not fit its parameter: copying would broadcast in silence.

    Raises:
        ModelError: The shapes differ.
    """
    if tuple(out.shape) != shape:
        raise ModelError(
            f"The parameter {name} has shape {list(shape)}, its place {list(out.shape)}: a bug in "
            "Leyline."
        )


def num_parameters(config: ModelConfig) -> int:
    """All parameters of a model; a tied head counts once, MTP layers not at all."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config))


def num_active_parameters(config: ModelConfig) -> int:
    """The parameters that one token is multiplied by: no embedding, only the chosen experts."""
    skipped = config.vocab_size * config.hidden_size * (not config.tie_word_embeddings)
    idle = config.n_routed_experts - config.num_experts_per_tok if config.n_routed_experts else 0
    sparse = sum(not config.is_dense(layer) for layer in range(config.num_hidden_layers))
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return num_parameters(config) - skipped - sparse * idle * expert


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every parameter's hub name and shape; the head is absent where it is tied."""
    vocab = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", vocab
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in _layer_shapes(config, layer):
            yield prefix + name, shape
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", vocab


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, shape in _attention_shapes(config):
        yield f"self_attn.{name}.weight", shape
    if config.attention_bias:
        yield from _attention_biases(config)
    if config.is_dense(layer):
        yield from _mlp_shapes("mlp.", hidden, config.intermediate_size)
    else:
        yield from _moe_shapes(config)


def _attention_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * config.qk_head_dim
    if config.q_lora_rank is None:
        yield "q_proj", (queries, hidden)
    else:
        yield "q_a_proj", (config.q_lora_rank, hidden)
        yield "q_a_layernorm", (config.q_lora_rank,)
        yield "q_b_proj", (queries, config.q_lora_rank)
    yield "kv_a_proj_with_mqa", (latent + config.qk_rope_head_dim, hidden)
    yield "kv_a_layernorm", (latent,)
    yield "kv_b_proj", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield "o_proj", (hidden, heads * config.v_head_dim)


def _attention_biases(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """The biases of DeepSeek's architecture; a q_proj that projects at once has none."""
    if config.q_lora_rank is not None:
        yield "self_attn.q_a_proj.bias", (config.q_lora_rank,)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    yield "self_attn.kv_a_proj_with_mqa.bias", (width,)
    yield "self_attn.o_proj.bias", (config.hidden_size,)


def _moe_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield "mlp.gate.weight", (config.n_routed_experts, hidden)
    if config.has_router_bias:
        yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _mlp_shapes(f"mlp.experts.{expert}.", hidden, inner)
    if config.n_shared_experts:
        yield from _mlp_shapes("mlp.shared_experts.", hidden, inner * config.n_shared_experts)


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)

"""Multi-head latent attention of one layer over a ragged step.

A layer writes the new tokens' rows first, a normalised latent and a turned rope band a token, and
then attends over the cache alone. What is the same for every layer (which form each sequence
takes, masks, rope phases) is planned once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leyline.kernels import attention as forms
from leyline.kernels.norm import rms_norm
from leyline.kernels.rope import rotate
from leyline.model.config import ModelConfig
from leyline.model.linear import Linear
from leyline.model.parameters import WeightSource
from leyline.model.rope import Rope
from leyline.model.step import Span, Step

LayerCache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Neighbouring spans that take the same form; an explicit span is a group by itself.

    Attributes:
        start: First row of the step.
        end: One past the last.
        spans: Each span with its causal mask, where it needs one that is worth keeping.
        absorbed: The form.
    """

    start: int
    end: int
    spans: tuple[tuple[Span, Tensor | None], ...]
    absorbed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What all layers of one step share.

    Attributes:
        write_slots: Where the new rows go [T] int64.
        phases: cos + j sin of their positions [T, R/2] complex64.
        groups: The step's rows in order.
    """

    write_slots: Tensor
    phases: Tensor
    groups: tuple[Group, ...]


def plan_step(step: Step, config: ModelConfig, rope: Rope) -> Plan:
    """Choose every span's form and prepare what the layers share."""
    phases = torch.complex(*rope.cos_sin(step.positions))
    groups = tuple(_groups(step, config))
    return Plan(step.write_slots, phases, groups)


def _groups(step: Step, config: ModelConfig) -> Iterator[Group]:
    """Absorbed neighbours together, so that their queries are folded in one product."""
    waiting: list[tuple[Span, Tensor | None]] = []
    for span in step.spans:
        member = span, _mask(span, config, step.positions.device)
        if _takes_absorbed(span, config):
            waiting.append(member)
            continue
        yield from _absorbed_group(waiting)
        waiting = []
        yield Group(span.query_start, span.query_end, (member,), absorbed=False)
    yield from _absorbed_group(waiting)


def _absorbed_group(members: list[tuple[Span, Tensor | None]]) -> Iterator[Group]:
    if members:
        start, end = members[0][0].query_start, members[-1][0].query_end
        yield Group(start, end, tuple(members), absorbed=True)


def _takes_absorbed(span: Span, config: ModelConfig) -> bool:
    return forms.prefer_absorbed(
        span.num_queries,
        span.num_keys,
        heads=config.num_attention_heads,
        latent=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        nope=config.qk_nope_head_dim,
        value=config.v_head_dim,
    )


def _mask(span: Span, config: ModelConfig, device: torch.device) -> Tensor | None:
    few = span.num_queries * config.num_attention_heads <= forms.FEW_ROWS
    if few or span.start == 0:
        return None
    return forms.causal_mask(span.num_queries, span.num_keys, device)


class Attention:
    """One layer's attention.

    Args:
        config: The model's shape.
        weights: Where the parameters come from.
        prefix: What their names begin with, the dot included.
        dtype: Dtype of the projections and of the latents.
        scale: Softmax scale.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        prefix: str,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self._heads = config.num_attention_heads
        self._nope = config.qk_nope_head_dim
        self._head_dim = config.qk_head_dim
        self._eps = config.latent_norm_eps
        self._scale = scale
        lora = config.q_lora_rank
        queries = self._heads * self._head_dim if lora is None else lora
        self._widths = [queries, config.kv_lora_rank, config.qk_rope_head_dim]

        def take(name: str, dtype: torch.dtype = dtype) -> Tensor:
            return weights.take(f"{prefix}{name}.weight", dtype)

        def linear(*names: str, bias: Tensor | None = None) -> Linear:
            full = [f"{prefix}{name}.weight" for name in names]
            return Linear.load(weights, full, dtype, bias)

        down_bias, out_bias = _biases(config, weights, prefix, dtype, queries)
        first = "q_proj" if lora is None else "q_a_proj"
        self._down = linear(first, "kv_a_proj_with_mqa", bias=down_bias)
        self._q_norm = None if lora is None else take("q_a_layernorm", torch.float32)
        self._q_up = None if lora is None else linear("q_b_proj")
        self._kv_norm = take("kv_a_layernorm", torch.float32)
        self._kv_b = take("kv_b_proj").unflatten(0, (self._heads, -1))
        self._out = linear("o_proj", bias=out_bias)

    def __call__(self, x: Tensor, plan: Plan, cache: LayerCache) -> Tensor:
        """Write the rows of `x` to the cache, then attend.

        Args:
            x: Normalised hidden rows [T, D] in the model's dtype.
            plan: The step's plan.
            cache: ckv [S, C] and kpe [S, R] of this layer; changed at the plan's write slots.

        Returns:
            [T, D] in the model's dtype.
        """
        ckv, kpe = cache
        query, latent, band = self._down(x).split(self._widths, dim=-1)
        latent = rms_norm(latent, self._kv_norm, self._eps)
        ckv.index_copy_(0, plan.write_slots, latent.to(ckv.dtype))
        band = rotate(band[:, None, :], plan.phases)[:, 0]
        kpe.index_copy_(0, plan.write_slots, band.to(kpe.dtype))
        if self._q_up is not None and self._q_norm is not None:
            query = self._q_up(rms_norm(query, self._q_norm, self._eps).to(x.dtype))
        heads = query.unflatten(-1, (self._heads, self._head_dim))
        q_nope = heads[..., : self._nope].transpose(0, 1)
        q_rope = rotate(heads[..., self._nope :], plan.phases).transpose(0, 1)
        parts = [self._attend(group, q_nope, q_rope, ckv, kpe) for group in plan.groups]
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self._out(values.transpose(0, 1).flatten(1))

    def _attend(
        self, group: Group, q_nope: Tensor, q_rope: Tensor, ckv: Tensor, kpe: Tensor
    ) -> Tensor:
        """Values [H, rows, V] of one group."""
        rows = slice(group.start, group.end)
        if not group.absorbed:
            ((span, mask),) = group.spans
            keys = _rows(ckv, span.keys), _rows(kpe, span.keys)
            return forms.explicit(
                q_nope[:, rows], q_rope[:, rows], *keys, self._kv_b, self._scale, mask
            )
        folded = forms.fold(q_nope[:, rows], self._kv_b)
        mixed = [
            self._mix(folded, group.start, span, mask, q_rope, ckv, kpe)
            for span, mask in group.spans
        ]
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)
        return forms.unfold(joined, self._kv_b, self._nope)

    def _mix(
        self,
        folded: Tensor | None,
        offset: int,
        span: Span,
        mask: Tensor | None,
        q_rope: Tensor,
        ckv: Tensor,
        kpe: Tensor,
    ) -> Tensor:
        """Mixed latents [H, rows, C] of one absorbed span."""
        start, end = span.query_start, span.query_end
        latent = None if folded is None else folded[:, start - offset : end - offset]
        keys = _rows(ckv, span.keys), _rows(kpe, span.keys)
        return forms.absorbed(latent, q_rope[:, start:end], *keys, self._scale, mask)


def _biases(
    config: ModelConfig, weights: WeightSource, prefix: str, dtype: torch.dtype, query_rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Biases of the joined first projection and of the output; zeros for a direct q_proj."""
    if not config.attention_bias:
        return None, None
    key_value = weights.take(f"{prefix}kv_a_proj_with_mqa.bias", dtype)
    query = key_value.new_zeros(query_rows)
    if config.q_lora_rank is not None:
        query = weights.take(f"{prefix}q_a_proj.bias", dtype)
    return torch.cat([query, key_value]), weights.take(f"{prefix}o_proj.bias", dtype)


def _rows(cache: Tensor, keys: slice | Tensor) -> Tensor:
    """The rows of neighbouring slots as a view, of scattered ones gathered."""
    return cache[keys] if isinstance(keys, slice) else cache.index_select(0, keys)

"""Run sequences through a model with a cache of its own, in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leyline.model.step import Span, Step
from leyline.model.transformer import Transformer


def make_cache(
    model: Transformer, num_slots: int, band: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """Rows of NaN, so that reading what was never written is seen."""
    config = model.config
    shapes = (
        (config.kv_lora_rank, model.dtype),
        (config.qk_rope_head_dim, band),
    )
    return [
        tuple(torch.full((num_slots, width), float("nan"), dtype=dtype) for width, dtype in shapes)
        for _ in range(config.num_hidden_layers)
    ]  # type: ignore[return-value]


@dataclass
class Resident:
    """One sequence in a cache: which slot holds each position, and how far it is."""

    slots: Tensor
    gather: bool = True
    offset: int = 0
    length: int = 0
    hidden: dict[int, list[Tensor]] = field(default_factory=dict)

    def keys(self, length: int) -> slice | Tensor:
        if self.gather:
            return self.slots[:length]
        return slice(int(self.slots[0]), int(self.slots[0]) + length)


def run_together(
    model: Transformer, cache: list[tuple[Tensor, Tensor]], parts: Sequence[tuple[Resident, Tensor]]
) -> Tensor:
    """One step with the next tokens of several sequences; logits of all rows [T, V]."""
    spans, positions, writes, row = [], [], [], 0
    for sequence, ids in parts:
        start, end = sequence.length, sequence.length + len(ids)
        spans.append(Span(row, row + len(ids), sequence.keys(end), start))
        positions.append(torch.arange(start, end) + sequence.offset)
        writes.append(sequence.slots[start:end])
        sequence.length = end
        row += len(ids)
    step = Step(torch.cat(positions), torch.cat(writes), tuple(spans))

    def observe(layer: int, x: Tensor) -> None:
        for span, (sequence, _) in zip(spans, parts, strict=True):
            rows = x[span.query_start : span.query_end].clone()
            sequence.hidden.setdefault(layer, []).append(rows)

    ids = torch.cat([ids for _, ids in parts])
    return model.logits(model.forward(ids, step, cache, observe=observe))


def run_pieces(
    model: Transformer,
    cache: list[tuple[Tensor, Tensor]],
    sequence: Resident,
    ids: Tensor,
    size: int,
) -> Tensor:
    """All tokens of one sequence, `size` at a time; logits of all rows [T, V]."""
    return torch.cat([run_together(model, cache, [(sequence, part)]) for part in ids.split(size)])


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    return float((got.float() - want.float()).norm() / want.float().norm())

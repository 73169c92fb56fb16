"""Run sequences through a model with a cache of its own, in pieces of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leyline.model.parameters import WeightSource
from leyline.model.step import Span, Step
from leyline.model.transformer import Transformer
from tests.model.oracle import Answer


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


def answer(model: Transformer, ids: Tensor, size: int, offset: int = 0) -> Answer:
    """What the model says of a sequence that starts at a position, run in pieces."""
    cache = make_cache(model, len(ids))
    sequence = Resident(torch.arange(len(ids)), gather=False, offset=offset)
    logits = run_pieces(model, cache, sequence, ids, size)
    return Answer(
        ckv=[ckv for ckv, _ in cache],
        kpe=[kpe for _, kpe in cache],
        hidden=[torch.cat(parts) for parts in list(sequence.hidden.values())[:-1]],
        logits=logits,
    )


def greedy(model: Transformer, ids: Tensor, count: int) -> list[int]:
    """The next tokens, one at a time."""
    room = len(ids) + count
    cache, sequence = make_cache(model, room), Resident(torch.arange(room), gather=False)
    chosen: list[int] = []
    while len(chosen) < count:
        logits = run_pieces(model, cache, sequence, ids, len(ids))
        chosen.append(int(logits[-1].argmax()))
        ids = torch.tensor(chosen[-1:])
    return chosen


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    return float((got.float() - want.float()).norm() / want.float().norm())


class OnePercentOff:
    """A source in which every parameter of one kind is 1 % too large."""

    def __init__(self, source: WeightSource, kind: str) -> None:
        self._source = source
        self._kind = kind

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        value = self._source.take(name, dtype)
        return value * 1.01 if self._kind in name else value

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return torch.cat([self.take(name, dtype) for name in names])

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        self._source.take_all(places)
        for name, out in places.items():
            if self._kind in name:
                out *= 1.01

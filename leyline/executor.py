"""A batch becomes tensors: first the moves, then the extends, then the samples.

The executor decides nothing. It reads slots as slices where they are neighbours, because a slice
is a view and a gather is a copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leyline.batch import Batch, Extend, Move, Slots, StepOutput
from leyline.cache.latent import LatentCache
from leyline.model.sampler import sample
from leyline.model.step import Span, Step
from leyline.model.transformer import Transformer
from leyline.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Executor:
    """Runs batches of one model over one cache.

    Args:
        model: The transformer.
        cache: Its rows.
        num_tokens: Token ids from here on have no text, and are never sampled.
    """

    def __init__(self, model: Transformer, cache: LatentCache, num_tokens: int) -> None:
        self.model = model
        self.cache = cache
        self.num_tokens = num_tokens
        self._inv_freq = model.rope.inv_freq.to(model.device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Execute a batch; returns the token that each sampling extend chose."""
        self._move([op for op in batch.moves if op.num_rows])
        if not batch.extends:
            return StepOutput()
        hidden = self._extend(batch.extends)
        return StepOutput(self._sample(batch.extends, hidden))

    def logits(self, extend: Extend) -> Tensor:
        """Logits [T, V] float32 of one extend's rows, which are written; for evaluation."""
        with torch.inference_mode():
            return self.model.logits(self._extend((extend,)))

    def _move(self, moves: list[Move]) -> None:
        """Carry all rows of a batch with one call."""
        if moves:
            src, dst, delta = (
                self._tensor(np.concatenate([getattr(op, name) for op in moves]))
                for name in ("src_slots", "dst_slots", "delta")
            )
            self.cache.move(src, dst, delta, self._inv_freq)

    def _extend(self, extends: tuple[Extend, ...]) -> Tensor:
        """Compute all new rows; hidden states [T, D]."""
        ids = np.array([token for op in extends for token in op.tokens], dtype=np.int64)
        positions = np.concatenate([np.arange(op.start, op.end, dtype=np.int64) for op in extends])
        writes = np.concatenate([op.written_slots for op in extends])
        step = Step(self._tensor(positions), self._tensor(writes), self._spans(extends))
        return self.model.forward(self._tensor(ids), step, self.cache.layers)

    def _spans(self, extends: tuple[Extend, ...]) -> tuple[Span, ...]:
        """Each op's rows of the step, and the slots it may read."""
        ends = np.cumsum([len(op.tokens) for op in extends]).tolist()
        return tuple(
            Span(end - len(op.tokens), end, self._keys(op.table), op.start)
            for op, end in zip(extends, ends, strict=True)
        )

    def _keys(self, table: Slots) -> slice | Tensor:
        """Slots as a slice if they are neighbours in order, else as a tensor."""
        first, last = int(table[0]), int(table[-1])
        if last - first == len(table) - 1 and bool((np.diff(table) == 1).all()):
            return slice(first, last + 1)
        return self._tensor(table)

    def _sample(self, extends: tuple[Extend, ...], hidden: Tensor) -> dict[int, int]:
        """The next token of each op that asks for one, by sequence; see `StepOutput`."""
        ends = np.cumsum([len(op.tokens) for op in extends])
        chosen = [(op, int(end) - 1) for op, end in zip(extends, ends, strict=True) if op.sample]
        if not chosen:
            return {}
        rows = self._tensor(np.array([row for _, row in chosen], dtype=np.int64))
        logits = self.model.logits(hidden[rows])[:, : self.num_tokens]
        params = [op.sampling or GREEDY for op, _ in chosen]
        tokens = sample(logits, params, [op.step for op, _ in chosen]).tolist()
        # Not a number and infinity both show in the largest.
        sound = logits.amax(dim=-1).isfinite().tolist()
        told = zip(chosen, tokens, sound, strict=True)
        return {op.sequence_id: token for (op, _), token, is_sound in told if is_sound}

    def _tensor(self, values: np.ndarray) -> Tensor:
        """A numpy array on the model's device."""
        return torch.from_numpy(values).to(self.model.device)

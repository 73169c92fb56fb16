"""A batch becomes tensors: first the moves, then the extends, then the samples.

The executor decides nothing. It reads slots as slices where they are neighbours, because a slice
is a view and a gather is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from leyline.batch import Batch, Extend, Move, Slots, StepOutput
from leyline.cache.latent import LatentCache
from leyline.events import TokenLogprob
from leyline.model.likelihood import likelihoods
from leyline.model.sampler import sample
from leyline.model.step import Span, Step
from leyline.model.transformer import Transformer
from leyline.sampling import Draw

SCORED_LOGITS = 2**22  # at a time: 16 MiB, whatever a prompt's length


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
        """Execute a batch; returns the token that each sampling extend chose, and scores."""
        self._move([op for op in batch.moves if op.num_rows])
        if not batch.extends:
            return StepOutput()
        hidden = self._extend(batch.extends)
        output = self._sample(batch.extends, hidden)
        if any(op.targets for op in batch.extends):
            output = replace(output, scores=dict(self._score(batch.extends, hidden)))
        return output

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

    def _sample(self, extends: tuple[Extend, ...], hidden: Tensor) -> StepOutput:
        """The next token of each op that asks for one; see `StepOutput`."""
        ends = np.cumsum([len(op.tokens) for op in extends]).tolist()
        last = [(op, op.draw, end - 1) for op, end in zip(extends, ends, strict=True)]
        asked = [(op.sequence_id, draw, row) for op, draw, row in last if draw is not None]
        if not asked:
            return StepOutput()
        ids, draws, rows = zip(*asked, strict=True)
        logits = self._logits(hidden[self._tensor(np.array(rows, dtype=np.int64))])
        chosen, refused = sample(logits, draws)
        told = enumerate(zip(chosen.tolist(), _sound(logits), strict=True))
        tokens = {row: token for row, (token, sound) in told if sound and row not in refused}
        logprobs = _logprobs(logits, tokens, draws)
        return StepOutput(
            tokens={ids[row]: token for row, token in tokens.items()},
            refused={ids[row]: error for row, error in refused.items()},
            logprobs={ids[row]: logprob for row, logprob in logprobs.items()},
        )

    def _score(
        self, extends: tuple[Extend, ...], hidden: Tensor
    ) -> Iterator[tuple[int, tuple[TokenLogprob, ...]]]:
        """The log-probabilities of each op's targets; see `StepOutput`."""
        end = 0
        for op in extends:
            start, end = end, end + len(op.tokens)
            if op.targets:
                scores = self._scores(op, hidden[start:end])
                if scores is not None:
                    yield op.sequence_id, scores

    def _scores(self, op: Extend, hidden: Tensor) -> tuple[TokenLogprob, ...] | None:
        """Those of one op, a few rows at a time; none if a logit is not finite."""
        scores: list[TokenLogprob] = []
        at_once = max(1, SCORED_LOGITS // self.num_tokens)
        for first in range(0, len(op.targets), at_once):
            targets = op.targets[first : first + at_once]
            logits = self._logits(hidden[first : first + len(targets)])
            if not all(_sound(logits)):
                return None
            scores += likelihoods(logits, targets, [op.num_top] * len(targets))
        return tuple(scores)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of the tokens that may be sampled."""
        return self.model.logits(hidden)[:, : self.num_tokens]

    def _tensor(self, values: np.ndarray) -> Tensor:
        """A numpy array on the model's device."""
        return torch.from_numpy(values).to(self.model.device)


def _logprobs(
    logits: Tensor, tokens: dict[int, int], draws: Sequence[Draw]
) -> dict[int, TokenLogprob]:
    """Those of the tokens that rows have chosen, for the rows that want them."""
    wanted = {row: draws[row].params.logprobs for row in tokens}
    num_top = {row: num for row, num in wanted.items() if num is not None}
    if not num_top:
        return {}
    rows = list(num_top)
    found = likelihoods(logits[rows], [tokens[row] for row in rows], list(num_top.values()))
    return dict(zip(rows, found, strict=True))


def _sound(logits: Tensor) -> list[bool]:
    """Whether a token can be chosen from each row; NaN and infinity both show in the largest."""
    return logits.amax(dim=-1).isfinite().tolist()

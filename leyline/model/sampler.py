"""Choose the next tokens from logits.

Temperature first, then the `top_k` most likely, then the smallest set of those that holds `top_p`
of their probability; one uniform number picks from what is left, by the inverse of the cumulated
probabilities in the order of token ids.

That number is a pure function of (seed, step), the first output of a Philox counter generator with
that key. So a request gets the same numbers alone or in any batch, before or after preemption.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox), SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leyline.sampling import SamplingParams

_WORD = 2**64 - 1


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    """One token a row.

    Args:
        logits: [B, V] float32.
        params: The sampling parameters of each row; a None seed counts as 0.
        steps: How many tokens each row's request has sampled before.

    Returns:
        Token ids [B] int64 on the device of `logits`. At temperature 0 the most likely one, the
        lowest id among equals.
    """
    if not (len(params) == len(steps) == logits.shape[0]):
        raise ValueError(f"{logits.shape[0]} rows, {len(params)} params and {len(steps)} steps")
    tokens = logits.argmax(dim=-1)
    for row, (one, step) in enumerate(zip(params, steps, strict=True)):
        if one.temperature > 0:
            tokens[row] = _sample_row(logits[row], one, uniform(one.seed or 0, step))
    return tokens


def uniform(seed: int, step: int) -> float:
    """The random number of (seed, step), in [0, 1)."""
    key = np.array([seed & _WORD, step & _WORD], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """What a row is sampled from: logits [V] to probabilities [V] float64 that sum to 1.

    Needs a temperature above 0.
    """
    scaled = logits.to(torch.float64)
    # Shifting first keeps a tiny temperature from overflowing.
    scaled = (scaled - scaled.max()) / params.temperature
    probs = scaled.softmax(dim=-1)
    if 0 < params.top_k < probs.shape[0]:
        probs = _keep(probs, _order(probs)[: params.top_k])
    if params.top_p < 1:
        probs = _keep(probs, _nucleus(probs, params.top_p))
    return probs


def _sample_row(logits: Tensor, params: SamplingParams, number: float) -> Tensor:
    cumulated = probabilities(logits, params).cumsum(dim=-1)
    target = cumulated[-1] * number
    # right: skip the tokens of probability 0 that lie before the first possible one.
    return torch.searchsorted(cumulated, target, right=True).clamp_max(cumulated.shape[0] - 1)


def _order(probs: Tensor) -> Tensor:
    """Ids from most to least likely, lower ids first among equals."""
    return probs.argsort(descending=True, stable=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The fewest most likely ids whose probability reaches `top_p`; at least one."""
    order = _order(probs)
    before = probs[order].cumsum(dim=-1) - probs[order]
    return order[: max(1, int((before < top_p).sum()))]


def _keep(probs: Tensor, ids: Tensor) -> Tensor:
    """Only these ids, rescaled to sum to 1."""
    kept = torch.zeros_like(probs)
    kept[ids] = probs[ids]
    return kept / kept.sum()

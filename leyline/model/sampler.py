"""Choose the next tokens from logits.

What `leyline.model.adjust` does comes first. Then temperature, then the `top_k` most likely, then
the smallest set of those that holds `top_p` of their probability, then those of it whose
probability is at least `min_p` of the largest; one uniform number picks from what is left, by the
inverse of the cumulated probabilities in the order of token ids.

That number is a pure function of (seed, step), the first output of a Philox counter generator with
that key. So a request gets the same numbers alone or in any batch, before or after preemption.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox), SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leyline.model.adjust import adjusted
from leyline.sampling import Draw, SamplingParams

_WORD = 2**64 - 1
_FEW = 512  # most nuclei are smaller than that, and to sort a whole vocabulary takes long
_SLACK = 1e-9  # far above what float64 sums are off by


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, dict[int, Exception]]:
    """One token a row.

    Args:
        logits: [B, V] float32; left alone.
        draws: How each row's token is chosen; a None seed counts as 0.

    Returns:
        Token ids [B] int64 on the device of `logits`, and for each row whose constraint could not
        be followed, what went wrong; the token of such a row means nothing. At temperature 0 it is
        the most likely one, the lowest id among equals.
    """
    if len(draws) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows and {len(draws)} draws")
    refused: dict[int, Exception] = {}
    if any(draw.adjusts for draw in draws):
        logits, refused = adjusted(logits, draws)
    tokens = logits.argmax(dim=-1)
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0 and row not in refused:
            number = uniform(draw.params.seed or 0, draw.step)
            tokens[row] = _sample_row(logits[row], draw.params, number)
    return tokens, refused


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
        probs = _keep(probs, _likeliest(probs, params.top_k))
    if params.top_p < 1:
        probs = _keep(probs, _nucleus(probs, params.top_p))
    if params.min_p > 0:
        probs = _keep(probs, (probs >= params.min_p * probs.max()).nonzero()[:, 0])
    return probs


def _sample_row(logits: Tensor, params: SamplingParams, number: float) -> Tensor:
    cumulated = probabilities(logits, params).cumsum(dim=-1)
    target = cumulated[-1] * number
    # right: skip the tokens of probability 0 that lie before the first possible one.
    return torch.searchsorted(cumulated, target, right=True).clamp_max(cumulated.shape[0] - 1)


def _likeliest(probs: Tensor, num: int) -> Tensor:
    """The `num` most likely ids in order, lower ids first among equals; impossible ones never."""
    likely = probs > 0
    if num < probs.shape[0]:
        # `topk` may pick any of several equal ones at its end: look at all of those.
        likely &= probs >= probs.topk(num).values[-1]
    ids = likely.nonzero()[:, 0]
    return ids[probs[ids].argsort(descending=True, stable=True)[:num]]


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The fewest most likely ids whose probability reaches `top_p`; at least one."""
    order = _likeliest(probs, _FEW)
    if float(probs[order].sum()) < top_p + _SLACK:
        order = _likeliest(probs, probs.shape[0])
    before = probs[order].cumsum(dim=-1) - probs[order]
    return order[: max(1, int((before < top_p).sum()))]


def _keep(probs: Tensor, ids: Tensor) -> Tensor:
    """Only these ids, rescaled to sum to 1."""
    kept = torch.zeros_like(probs)
    kept[ids] = probs[ids]
    return kept / kept.sum()

"""How likely the model itself found tokens: log-probabilities from untouched logits.

    logprob(token) = logits[token] - log(sum(exp(logits)))

in float32 over the ids that may be sampled. What is below `LEAST`, such as an impossible token's
minus infinity, is told as `LEAST`: the numbers end up in JSON, which has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from leyline.events import TokenLogprob

LEAST = -9999.0


def likelihoods(
    logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """The log-probability of one token a row, and of the likeliest ones.

    Args:
        logits: [B, V] float32, of which none is NaN and none plus infinity.
        tokens: One a row, below V.
        num_top: How many of the likeliest ones are told, a row.

    Returns:
        One a row; among equals the lower id is the likelier one, as in greedy sampling.
    """
    table = logits.log_softmax(dim=-1).clamp_min(LEAST)
    chosen = table.gather(1, table.new_tensor(tokens).long()[:, None])[:, 0].tolist()
    return [
        TokenLogprob(token, logprob, _top(row, num))
        for token, logprob, row, num in zip(tokens, chosen, table, num_top, strict=True)
    ]


def _top(row: Tensor, num: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens of a row [V], and how likely they are."""
    num = min(num, len(row))
    if not num:
        return ()
    # `topk` may pick any of several equal ones at its end: look at all of those.
    least = row.topk(num).values[-1]
    ids = (row >= least).nonzero()[:, 0]
    ids = ids[row[ids].argsort(descending=True, stable=True)[:num]]
    return tuple(zip(ids.tolist(), row[ids].tolist(), strict=True))

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

Top = tuple[tuple[int, float], ...]

_MORE = 16  # looked at beside those that are told: equal ones behind the last of them


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
    table = logits.log_softmax(dim=-1)
    chosen = table.gather(1, table.new_tensor(tokens).long()[:, None])[:, 0].clamp_min(LEAST)
    tops = _tops(table, num_top)
    return [
        TokenLogprob(token, logprob, top)
        for token, logprob, top in zip(tokens, chosen.tolist(), tops, strict=True)
    ]


def _tops(table: Tensor, num_top: Sequence[int]) -> list[Top]:
    """The likeliest tokens of each row [B, V], and how likely they are: all rows at once."""
    if not any(num_top):
        return [()] * len(num_top)
    found = table.topk(min(max(num_top) + _MORE, table.shape[1]))
    likely, ids = found.values.clamp_min(LEAST).tolist(), found.indices.tolist()
    return [
        _first(row, values, below, num)
        for row, values, below, num in zip(table, likely, ids, num_top, strict=True)
    ]


def _first(row: Tensor, likely: list[float], ids: list[int], num: int) -> Top:
    """The first `num` of a row's likeliest tokens, of equal ones those of lower ids."""
    num = min(num, len(likely))
    if num and likely[num - 1] == likely[-1] and len(likely) < len(row):
        # `topk` may pick any of several equal ones at its end: look at all of those.
        row = row.clamp_min(LEAST)
        ids = (row >= likely[-1]).nonzero()[:, 0].tolist()
        likely = row[ids].tolist()
    ordered = sorted(zip(likely, ids, strict=True), key=lambda one: (-one[0], one[1]))
    return tuple((index, value) for value, index in ordered[:num])

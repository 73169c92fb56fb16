"""What a request's parameters do to the logits before a token is chosen from them.

In this order, a whole batch at a time: the bias is added; the repetition penalty divides positive
and multiplies negative logits of tokens that were seen; the presence and frequency penalties are
taken off; tokens that would end the reply too early become next to impossible; what the
constraint rules out becomes impossible. So where a constraint leaves nothing but the end, the end
comes, early or not.

Each row is changed by its own parameters alone, element by element, so that the result does not
depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leyline.errors import LeylineError
from leyline.sampling import Constraint, Draw

NEXT_TO_IMPOSSIBLE = -1e30

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, dict[int, Exception]]:
    """The logits that each row's token is chosen from.

    Args:
        logits: [B, V] float32; left alone.
        draws: One a row.

    Returns:
        New logits [B, V], and for each row whose constraint could not be followed, what went
        wrong; such a row means nothing.
    """
    logits = logits.clone(memory_format=torch.contiguous_format)
    _apply(logits, map(_biases, draws), lambda old, bias: old + bias)
    _apply(logits, map(_repeated, draws), _repelled)
    _apply(logits, map(_penalties, draws), lambda old, penalty: old - penalty)
    _apply(logits, map(_barred, draws), lambda _, value: value)
    return logits, _constrain(logits, draws)


def _biases(draw: Draw) -> Iterator[tuple[Ids, Values]]:
    """The ids that have a bias, each once, and their biases."""
    if draw.params.logit_bias:
        given, bias = zip(*draw.params.logit_bias, strict=True)
        ids, index = np.unique(np.array(given, dtype=np.int64), return_inverse=True)
        yield ids, np.bincount(index, np.array(bias)).astype(np.float32)


def _repeated(draw: Draw) -> Iterator[tuple[Ids, Values]]:
    """The ids that the repetition penalty is about."""
    if draw.params.repetition_penalty != 1:
        ids = np.unique(np.array((*draw.context, *draw.generated), dtype=np.int64))
        yield ids, np.full(len(ids), draw.params.repetition_penalty, dtype=np.float32)


def _penalties(draw: Draw) -> Iterator[tuple[Ids, Values]]:
    """The ids that were generated before, and what is taken off their logits."""
    params = draw.params
    if draw.generated and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(np.array(draw.generated, dtype=np.int64), return_counts=True)
        off = params.presence_penalty + params.frequency_penalty * counts
        yield ids, off.astype(np.float32)


def _barred(draw: Draw) -> Iterator[tuple[Ids, Values]]:
    """The ids that would end the reply too early."""
    if draw.barred:
        ids = np.array(draw.barred, dtype=np.int64)
        yield ids, np.full(len(ids), NEXT_TO_IMPOSSIBLE, dtype=np.float32)


def _repelled(old: Tensor, penalty: Tensor) -> Tensor:
    """Logits after the repetition penalty: nearer to minus infinity, whatever their sign."""
    return torch.where(old > 0, old / penalty, old * penalty)


def _apply(
    logits: Tensor,
    changes: Iterable[Iterable[tuple[Ids, Values]]],
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Change some logits in place; ids from V on, which are never sampled, are left out."""
    vocab_size = logits.shape[1]
    places, values = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
    for row, found in enumerate(changes):
        for ids, value in found:
            places.append(row * vocab_size + ids[ids < vocab_size])
            values.append(value[ids < vocab_size])
    if len(places) > 1:
        at = torch.from_numpy(np.concatenate(places)).to(logits.device)
        value = torch.from_numpy(np.concatenate(values)).to(logits.device)
        flat = logits.view(-1)
        flat[at] = change(flat[at], value)


def _constrain(logits: Tensor, draws: Sequence[Draw]) -> dict[int, Exception]:
    """Rule tokens out in place; what went wrong, by row."""
    refused: dict[int, Exception] = {}
    masks: dict[int, npt.NDArray[np.bool_]] = {}
    for row, draw in enumerate(draws):
        if draw.params.constraint is not None:
            try:
                masks[row] = _allowed(draw.params.constraint, draw.generated, logits.shape[1])
            except Exception as error:  # somebody else's code: only its own request may end
                refused[row] = error
    if masks:
        rows = torch.tensor(list(masks), device=logits.device)
        ruled_out = torch.from_numpy(~np.stack(list(masks.values()))).to(logits.device)
        logits[rows] = logits[rows].masked_fill(ruled_out, float("-inf"))
    return refused


def _allowed(
    constraint: Constraint, generated: tuple[int, ...], vocab_size: int
) -> npt.NDArray[np.bool_]:
    """Which tokens a constraint allows [V].

    Raises:
        LeylineError: If it allows none of them.
    """
    words = np.ascontiguousarray(constraint.allowed(generated), dtype="<i4")
    allowed = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(
        np.bool_
    )
    if not allowed.any():
        raise LeylineError(
            "No token of the vocabulary can follow here without breaking the form that the output "
            "must have; loosen it."
        )
    return allowed

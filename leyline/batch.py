"""The one frozen value in which mind and muscle meet.

The scheduler plans a `Batch`, the executor turns it into tensors and answers with a `StepOutput`,
and the scheduler commits that and says what came of it as `Event`s. A batch holds plain integers
and numpy arrays only, so it can be printed, compared, recorded and replayed without a tensor
library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from leyline.directive import Edit, Receipt
from leyline.events import TokenLogprob
from leyline.sampling import Draw

Slots = npt.NDArray[np.int64]
EndReason = Literal["stop", "length", "edited"]


@dataclass(frozen=True, slots=True, eq=False)
class Extend:
    """Compute the rows of `tokens` at positions `[start, start + len(tokens))`.

    Attributes:
        sequence_id: Whose op it is.
        start: Position of the first token.
        tokens: Token ids [T].
        table: Slots of positions `[0, start + T)` in order [start + T]; the last T of them are
            written, the others only read.
        draw: How the last row's logits choose a token, if they are to.
        targets: The tokens that follow the first rows, one each, where their log-probabilities
            are wanted.
        num_top: How many of the likeliest tokens are told beside each target.
    """

    sequence_id: int
    start: int
    tokens: tuple[int, ...]
    table: Slots
    draw: Draw | None = None
    targets: tuple[int, ...] = ()
    num_top: int = 0

    @property
    def sample(self) -> bool:
        """Whether the last row's logits choose a token."""
        return self.draw is not None

    @property
    def end(self) -> int:
        """One past the last position this op computes."""
        return self.start + len(self.tokens)

    @property
    def written_slots(self) -> Slots:
        """The slots this op writes [T]."""
        return self.table[self.start :]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Carry rows to another position and turn their rope band by the difference.

    Attributes:
        sequence_id: Whose op it is.
        src_slots: Where the rows are [M].
        dst_slots: Where they go [M]; equal to `src_slots` row by row where they stay in place.
        delta: New position minus old position of each row [M].
    """

    sequence_id: int
    src_slots: Slots
    dst_slots: Slots
    delta: Slots

    @property
    def num_rows(self) -> int:
        """Number of rows moved, M."""
        return len(self.src_slots)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """At most one op a sequence; all moves run before all extends."""

    moves: tuple[Move, ...] = ()
    extends: tuple[Extend, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this batch: what the token budget limits."""
        return sum(len(op.tokens) for op in self.extends)

    def __bool__(self) -> bool:
        return bool(self.moves or self.extends)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the executor hands back, by sequence.

    Attributes:
        tokens: The sampled token of each extend that asked for one, but for those whose logits
            are not finite, and those
        refused: whose constraint could not be followed, with what went wrong.
        logprobs: The tokens' log-probabilities, where they are wanted.
        scores: Those of an extend's targets; none if a logit is not finite.
    """

    tokens: dict[int, int] = field(default_factory=dict[int, int])
    refused: dict[int, Exception] = field(default_factory=dict[int, Exception])
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict[int, TokenLogprob])
    scores: dict[int, tuple[TokenLogprob, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprob, ...]]
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence sampled a token; its log-probability is told where that is wanted."""

    sequence_id: int
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Edited:
    """An edit committed.

    Attributes:
        sequence_id: Whose context was edited.
        request_id: Who asked for it.
        receipts: What each of its directives did, in order of position.
        edit: What became of which row.
        kept: Whether the context before still has every row that it had, where the tree had it.
    """

    sequence_id: int
    request_id: int
    receipts: tuple[Receipt, ...]
    edit: Edit
    kept: bool = False

    @property
    def length_before(self) -> int:
        """Context length before."""
        return len(self.edit.before)

    @property
    def length_after(self) -> int:
        """Context length afterwards, without the tokens that the request appends."""
        return len(self.edit.after)


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence has nothing left to do: it met a stop token, its length limit, or its edits."""

    sequence_id: int
    reason: EndReason


@dataclass(frozen=True, slots=True, eq=False)
class Broken:
    """A result could not land: its sequence has ended and owns nothing, all others go on."""

    sequence_id: int
    error: Exception


Event = Sampled | Edited | Ended | Broken

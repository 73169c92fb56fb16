"""What the engine tells whoever drives it: text as it comes, and how each request ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leyline.directive import Mode, Receipt
from leyline.errors import LeylineError
from leyline.marks import Mark, MessageSpan

FinishReason = Literal["stop", "length"]
SessionState = Literal["exact", "healing", "spliced"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a request's tokens came from; the kinds never mix.

    Attributes:
        prompt_tokens: Length of the context that the request was answered from.
        completion_tokens: Tokens of the reply, its stop token included: as many as `token_ids`.
            Those that a stop string cut away are not counted.
        cached_tokens: Prompt tokens whose rows were not computed for this request.
        spliced_tokens: Cached tokens whose rows are grafted.
        degraded: Whether a graft was lost and computed from the edited tokens instead.
        state: What the context is: `exact`, `spliced`, or `healing` on its way from one to the
            other.
        first_difference: With an edited history, the first position at which it differs from
            what the session held; None if it went on from there.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spliced_tokens: int
    degraded: bool = False
    state: SessionState = "exact"
    first_difference: int | None = None

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens whose rows were computed for this request."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself found a token, before any sampling parameter.

    Attributes:
        token_id: The token, and
        logprob: its natural log-probability; finite.
        top: `(token id, log-probability)` of the likeliest tokens, as many as were asked for, the
            likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a reply; the texts of a request concatenate to its completion's text.

    Attributes:
        request_id: Which request.
        text: Text that became certain; may be empty where tokens or log-probabilities are told.
        token_ids: The tokens that are settled since the last one: all of their text is told. Those
            of a request concatenate to its completion's.
        logprobs: Theirs, one each, if they were asked for.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A request is answered.

    Attributes:
        request_id: Which one.
        text: The whole reply, without stop strings and special tokens that were not to be shown.
        token_ids: The tokens that the context keeps of it, a stop token included.
        finish_reason: `stop` for a stop token or string, `length` for a limit.
        usage: Where its tokens came from.
        session_id: The session it went to, if any, and
        version: the number of edits that session has seen.
        receipts: What the client's own edit of its history did, where it was carried over.
        stopped_by: The stop string that ended it, or the id from `stop_token_ids` that did.
        logprobs: One for each token of `token_ids`, if they were asked for.
        prompt_token_ids: The prompt.
        prompt_logprobs: One for each of the prompt's tokens, None for the first, if asked for.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    session_id: str | None = None
    version: int | None = None
    receipts: tuple[Receipt, ...] = ()
    stopped_by: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Purged:
    """What a FORGET that reaches the whole cache removed.

    Attributes:
        rows: Rows taken out of the cache because they were computed with the span in view.
        slots: Free slots afterwards; zeros were written to all of them.
        sequences: Running requests that lost rows and compute them again.
        versions: Kept versions that were dropped.
        degraded: Sessions whose carried rows had seen the span; they are exact now.
        still_held: Sessions whose own text still spells the span; forget it there too.
    """

    rows: int
    slots: int
    sequences: int
    versions: int
    degraded: tuple[str, ...] = ()
    still_held: tuple[str, ...] = ()

    def and_then(self, later: Purged) -> Purged:
        """This purge and one after it, told as one."""
        return Purged(
            self.rows + later.rows,
            later.slots,
            self.sequences + later.sequences,
            self.versions + later.versions,
            tuple(sorted({*self.degraded, *later.degraded})),
            tuple(sorted({*self.still_held, *later.still_held})),
        )


@dataclass(frozen=True, slots=True)
class EditResult:
    """A set of directives is carried out.

    Attributes:
        request_id: Which request asked for it.
        session_id: Whose context it was.
        version: The session's version afterwards.
        length_before: Context length in tokens before.
        length_after: And after.
        receipts: What each directive did, in order of position.
        elapsed_ms: From submission to this report, in milliseconds; with an idle session that
            includes the rows that had to be computed again.
        state: What the context is now.
        purged: What `scope: cache` removed beyond this context, if it was asked for.
    """

    request_id: int
    session_id: str
    version: int
    length_before: int
    length_after: int
    receipts: tuple[Receipt, ...]
    elapsed_ms: float
    state: SessionState = "exact"
    purged: Purged | None = None


@dataclass(frozen=True, slots=True)
class EditPlan:
    """What a set of directives would do; nothing has been done.

    Attributes:
        session_id: Whose context it would be.
        version: The session's present version.
        length_before: Context length in tokens now.
        length_after: And after the set.
        receipts: What each directive would answer, in every count.
        amortize_ms: Estimate for keeping the rows behind the edits, in milliseconds, from rates
            that the engine measured on itself; None before it has computed anything.
        forget_ms: The same for computing everything behind the first edit again.
    """

    session_id: str
    version: int
    length_before: int
    length_after: int
    receipts: tuple[Receipt, ...]
    amortize_ms: float | None
    forget_ms: float | None

    @property
    def cheaper(self) -> Mode | None:
        """The mode that costs less time; None where nothing was measured yet."""
        if self.amortize_ms is None or self.forget_ms is None:
            return None
        return Mode.FORGET if self.forget_ms < self.amortize_ms else Mode.AMORTIZE


@dataclass(frozen=True, slots=True)
class Reverted:
    """A session went back to a kept version.

    Attributes:
        session_id: Which session.
        version: Its version now: going back is an edit like any other.
        restored: The version whose context it has again.
        length_before: Context length in tokens before.
        length_after: And after.
        kept: Rows of the restored context that are still there, from its start.
        recomputed: Rows that the next turn computes again, because they were not.
        state: What the context is now; carried rows that are gone cannot be computed again.
    """

    session_id: str
    version: int
    restored: int
    length_before: int
    length_after: int
    kept: int
    recomputed: int
    state: SessionState


@dataclass(frozen=True, slots=True)
class Found:
    """Whether anything in the cache depends on a span.

    Attributes:
        rows: Rows in the cache that were computed with the span in view.
        sessions: Sessions whose context spells it, or attends to rows that saw it.
    """

    rows: int
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request ended without an answer; the error says why."""

    request_id: int
    error: LeylineError


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A resident session, as of now.

    Attributes:
        session_id: Its name.
        version: Edits committed so far.
        context_length: Tokens in its context.
        pieces: `(start, end, exact)` of each piece, in positions.
        token_ids: The context's tokens.
        text: Their text, special tokens included.
        busy: Whether a turn or an edit is under way.
        state: Whether its rows are `exact`, `spliced`, or `healing`.
        versions: `(number, length, rows kept)` of each version it can go back to, oldest first.
        marks: Its pins, decays and scratches.
        messages: Where the content of each message stands that the client sent or got.
    """

    session_id: str
    version: int
    context_length: int
    pieces: tuple[tuple[int, int, bool], ...]
    token_ids: tuple[int, ...]
    text: str
    busy: bool
    state: SessionState = "exact"
    versions: tuple[tuple[int, int, bool], ...] = ()
    marks: tuple[Mark, ...] = ()
    messages: tuple[MessageSpan, ...] = ()


EngineEvent = Delta | Completion | EditResult | Failure

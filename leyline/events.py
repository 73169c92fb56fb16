"""What the engine tells whoever drives it: text as it comes, and how each request ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leyline.directive import Receipt
from leyline.errors import LeylineError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a request's tokens came from; the kinds never mix.

    Attributes:
        prompt_tokens: Length of the context that the request was answered from.
        completion_tokens: Tokens generated.
        cached_tokens: Prompt tokens whose rows were not computed for this request.
        spliced_tokens: Cached tokens whose rows are grafted.
        degraded: Whether a graft was lost and computed from the edited tokens instead.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spliced_tokens: int
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a reply; the texts of a request concatenate to its completion's text."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A request is answered.

    Attributes:
        request_id: Which one.
        text: The whole reply, without stop strings and special tokens.
        token_ids: The tokens that the context keeps of it, a stop token included.
        finish_reason: `stop` for a stop token or string, `length` for a limit.
        usage: Where its tokens came from.
        session_id: The session it went to, if any, and
        version: the number of edits that session has seen.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    session_id: str | None = None
    version: int | None = None


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
    """

    request_id: int
    session_id: str
    version: int
    length_before: int
    length_after: int
    receipts: tuple[Receipt, ...]
    elapsed_ms: float


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
    """

    session_id: str
    version: int
    context_length: int
    pieces: tuple[tuple[int, int, bool], ...]
    token_ids: tuple[int, ...]
    text: str
    busy: bool


EngineEvent = Delta | Completion | EditResult | Failure

"""What can go wrong for a caller.

Every error a caller can meet is a `LeylineError`: it carries a sentence for people, a stable
`code` for programs, the HTTP status the server answers with, and the offending `param` if there
is one. Nothing else may cross a public boundary: an `AssertionError` or a tensor library's
exception that reaches a caller is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LeylineError(Exception):
    """The root of all errors meant for callers.

    Args:
        message: What was wrong, what is allowed, what to do.
        param: The name of the offending field or argument, if one can be named.
        details: What a program needs to go on, such as the current version; JSON values only.
    """

    code = "internal_error"
    status = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = dict(details or {})


class InvalidRequestError(LeylineError):
    """A field has a wrong type, shape or range."""

    code = "invalid_value"
    status = 400


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the window or the cache."""

    code = "context_length_exceeded"


class DirectiveError(InvalidRequestError):
    """A directive is malformed or does not fit the context it is aimed at."""

    code = "invalid_directive"
    status = 422


class SessionNotFoundError(LeylineError):
    """No session of that name is resident."""

    code = "session_not_found"
    status = 404


class SessionBusyError(LeylineError):
    """The session is in the middle of a turn; a retry after it is safe."""

    code = "session_busy"
    status = 409


class VersionNotFoundError(LeylineError):
    """A session does not keep the version that it should go back to."""

    code = "version_not_found"
    status = 404


class MarkNotFoundError(LeylineError):
    """A session has no mark of that name: it never had, or the mark has done its work."""

    code = "mark_not_found"
    status = 404


class VersionConflictError(LeylineError):
    """A session was edited since its caller last looked; `details` holds its present version."""

    code = "version_conflict"
    status = 412


class IdempotencyError(LeylineError):
    """An idempotency key was used before for another request."""

    code = "idempotency_mismatch"
    status = 422


class RequestPendingError(LeylineError):
    """The first request with this idempotency key is still under way; a retry is safe."""

    code = "request_pending"
    status = 409


class QuotaError(LeylineError):
    """A tenant asks for more than its share."""

    code = "quota_exceeded"
    status = 429


class QueueFullError(LeylineError):
    """More requests wait than the server lets wait; a retry after a while is safe."""

    code = "queue_full"
    status = 429


class RequestTimeoutError(LeylineError):
    """A request took longer than requests may take."""

    code = "request_timeout"
    status = 504


class DrainingError(LeylineError):
    """The server lets running requests end before it stops, and takes no new ones."""

    code = "draining"
    status = 503


class ModelNotFoundError(LeylineError):
    """A request names a model that this server does not serve."""

    code = "model_not_found"
    status = 404


class ModelError(LeylineError):
    """A model folder cannot be loaded: missing, incomplete, inconsistent or unsupported."""

    code = "model_error"


class ConfigError(LeylineError):
    """An engine option has a value that is not allowed."""

    code = "invalid_option"
    status = 400


class CapacityError(LeylineError):
    """There is no room for this request now, and waiting would not make any."""

    code = "capacity_exceeded"
    status = 503


class CancelledError(LeylineError):
    """The request was cancelled by its owner."""

    code = "cancelled"
    status = 499


class EngineClosedError(LeylineError):
    """The engine was closed, or it died; the message says which."""

    code = "engine_closed"
    status = 503


def internal(cause: Exception) -> LeylineError:
    """An error for callers; an unexpected one without its inner details."""
    if isinstance(cause, LeylineError):
        return cause
    return LeylineError(f"The engine could not run this request ({type(cause).__name__}).")


def not_forgotten(cause: Exception) -> LeylineError:
    """Why an edit that should reach the whole cache ends, though its context is edited."""
    return LeylineError(
        f"The context was edited, but the cache could not be purged ({type(cause).__name__}): rows "
        "that saw the span may be left. Look for it in the cache, and forget it once more."
    )


def not_finite() -> LeylineError:
    """Why a request ends whose next token could not be chosen."""
    return LeylineError(
        "The model's output for this request is not a finite number; send it again, and if that "
        "does not help, run the model in float32."
    )


def superseded() -> LeylineError:
    """Why an edit ends when one in front of it is cancelled."""
    return CancelledError(
        "An edit in front of this one was cancelled, and its positions counted on it; nothing has "
        "changed. Look at the session and send it again."
    )

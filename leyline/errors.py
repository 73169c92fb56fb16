"""What can go wrong for a caller.

Every error a caller can meet is a `LeylineError`: it carries a sentence for people, a stable
`code` for programs, the HTTP status the server answers with, and the offending `param` if there
is one. Nothing else may cross a public boundary: an `AssertionError` or a tensor library's
exception that reaches a caller is a bug.
"""

from __future__ import annotations


class LeylineError(Exception):
    """The root of all errors meant for callers.

    Args:
        message: What was wrong, what is allowed, what to do.
        param: The name of the offending field or argument, if one can be named.
    """

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


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


def superseded() -> LeylineError:
    """Why an edit ends when one in front of it is cancelled."""
    return CancelledError(
        "An edit in front of this one was cancelled, and its positions counted on it; nothing has "
        "changed. Look at the session and send it again."
    )

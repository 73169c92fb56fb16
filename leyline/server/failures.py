"""Errors as clients see them: one shape everywhere.

`{"error": {"message", "type", "param", "code"}}`, with OpenAI's type names, for whatever goes
wrong: a refused field, an unknown route, a body that is not JSON, an exception nobody foresaw.
What a program needs to go on, such as a session's present version, stands beside the four.
Texts that came from the client are never echoed except escaped and cut short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from leyline.errors import LeylineError
from leyline.server.bodies import RepeatedKeyError
from leyline.server.wire import Json

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    412: "conflict_error",
    429: "rate_limit_error",
}
_CODES = {
    400: "invalid_request",
    404: "unknown_route",
    405: "method_not_allowed",
    413: "body_too_large",
}
_MESSAGES = {
    400: "The request body could not be read: it must be a JSON object in UTF-8.",
    404: "There is no such route here. GET /openapi.json lists those that exist.",
    405: "This route exists, but not with this method.",
}
_UNFORESEEN = "Something went wrong inside the server; its log says what."

# What the normalised form of a field adds to an error's location, and its client never wrote.
_WHOLE_FIELDS = frozenset({"prompt", "stop"})


def type_of(status: int) -> str:
    """OpenAI's name for the kind of error that `status` stands for."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(error: LeylineError) -> dict[str, Any]:
    """The JSON form of an error, as an answer's body or as a line of a stream."""
    body = _shape(error.message, error.status, error.param, error.code)
    return {"error": {**error.details, **body["error"]}}


def unforeseen() -> LeylineError:
    """What a client is told of an exception that nobody foresaw: nothing about its cause."""
    return LeylineError(_UNFORESEEN)


def refusal(
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error answer that stems from HTTP itself and not from the engine."""
    return Json(_shape(message, status, param, code), status_code=status, headers=headers)


def quoted(text: str, limit: int = 80) -> str:
    """Client text made safe for a message or a log line: escaped, and cut after `limit`."""
    return ascii(text if len(text) <= limit else text[:limit] + "...")


def install(app: FastAPI) -> None:
    """Give every error of `app` the one shape."""
    app.add_exception_handler(LeylineError, _leyline)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RepeatedKeyError, _repeated)
    app.add_exception_handler(Exception, _unforeseen)


def _shape(message: str, status: int, param: str | None, code: str) -> dict[str, Any]:
    error = {"message": message, "type": type_of(status), "param": param, "code": code}
    return {"error": error}


async def _leyline(_: Request, error: Exception) -> Response:
    assert isinstance(error, LeylineError)
    return Json(error_body(error), status_code=error.status)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = _MESSAGES.get(status, str(error.detail))
    code = _CODES.get(status, "http_error")
    return refusal(status, message, code=code, headers=error.headers)


async def _repeated(_: Request, error: Exception) -> Response:
    assert isinstance(error, RepeatedKeyError)
    message = f"The body has an object with the key {quoted(error.detail)} twice; send it once."
    return refusal(400, message, code="invalid_json")


async def _unforeseen(_: Request, __: Exception) -> Response:
    return Json(error_body(unforeseen()), status_code=500)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first, *others = error.errors()
    param = _param(first["loc"])
    if param is None:
        return _unreadable(request, first)
    message = f"{param}: {first['msg']}."
    if others:
        message += f" ({len(others)} more field errors.)"
    custom = str(first["type"]) in ("unsupported_value", "unsupported_content")
    code = "unsupported_value" if custom else "invalid_value"
    return refusal(400, message, code=code, param=param)


def _unreadable(request: Request, detail: Mapping[str, Any]) -> Response:
    """The body as a whole is wrong: not JSON, not announced as JSON, or not an object."""
    if not _is_json(request.headers.get("content-type", "")):
        message = "The body must be JSON, sent with the header Content-Type: application/json."
        return refusal(415, message, code="unsupported_media_type")
    if detail["type"] == "json_invalid":
        position = detail["loc"][-1]
        reason = detail.get("ctx", {}).get("error", "")
        return refusal(
            400,
            f"The body is not valid JSON: {reason} at character {position}.",
            code="invalid_json",
        )
    return refusal(400, "The body must be a JSON object.", code="invalid_json")


def _is_json(content_type: str) -> bool:
    kind = content_type.split(";")[0].strip().lower()
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))


def _param(location: Sequence[int | str]) -> str | None:
    """The field that an error is about, as in `messages[0].content`; None for the whole body."""
    path = [part for at, part in enumerate(location[1:]) if not at or not _is_tag(part)]
    if not path or isinstance(path[0], int):
        return None
    if path[0] in _WHOLE_FIELDS:
        return path[0]
    steps = (f"[{part}]" if isinstance(part, int) else f".{quoted(part)[1:-1]}" for part in path)
    return "".join(steps).lstrip(".")


def _is_tag(part: int | str) -> bool:
    """Whether a step of a place is a union's own; see `fields.TAG`."""
    return isinstance(part, str) and part[:1] == "<"

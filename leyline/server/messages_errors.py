"""Errors of the Messages API, in Anthropic's shape, wherever they come from.

`{"type": "error", "error": {"type", "message", "param", "code"}, "request_id"}`. Most errors stem
from what all routes share: the key, the body's size, the path, a field. So the shape is given
where answers leave the server, to whatever error has a path of this API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline.server.wire import encode

PATH = "/v1/messages"
REQUEST_ID = "request-id"
"""The header that Anthropic's clients read a request's id from; Leyline's own is `x-request-id`."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # clients look for these words, to shorten it and try again
_NO_WORDS = "The request failed."


class AnthropicErrorDetail(BaseModel):
    """What went wrong; `details` that a program needs may stand beside the rest."""

    model_config = ConfigDict(extra="allow")

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class AnthropicError(BaseModel):
    """The shape of errors of this API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "The request was refused."},
    "5XX": {"model": AnthropicError, "description": "The server could not answer."},
}
"""What the routes of this API say of their errors in the OpenAPI document."""


def anthropic_error(
    status: int, error: Mapping[str, Any], request_id: str | None = None
) -> dict[str, Any]:
    """The JSON form of an error.

    Args:
        status: The HTTP status that it has, or would have if the answer had not begun.
        error: What OpenAI's form has under `error`; all but the type is kept.
        request_id: The request's id, if it has one.
    """
    message = str(error.get("message") or _NO_WORDS)
    if error.get("code") == "context_length_exceeded":
        message = _TOO_LONG + message
    body = {**error, "type": type_of(status), "message": message}
    named = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": body, **named}


def type_of(status: int) -> str:
    """Anthropic's name for the kind of error that `status` stands for."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


class MessagesErrors:
    """Gives errors their shape on the way out; everything else passes as it is.

    It stands outside of whatever may answer with an error, such as the check of keys.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, and its answer out."""
        if scope["type"] != "http" or not _is_ours(scope):
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, _Shaped(send))


class _Shaped:
    """`send`, but the body of an error is held until it is whole, and is spelt anew."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            _name_request(message)
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._answer(self._start)

    async def _answer(self, start: Message) -> None:
        request_id = Headers(raw=start["headers"]).get(REQUEST_ID)
        body = encode(anthropic_error(start["status"], _error_in(self._body), request_id))
        headers = MutableHeaders(raw=start["headers"])
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def _is_ours(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PATH or path.startswith(PATH + "/")


def _name_request(start: Message) -> None:
    """Say the request's id in the header in which Anthropic's clients look for it."""
    headers = MutableHeaders(raw=start.setdefault("headers", []))
    if REQUEST_ID not in headers and "x-request-id" in headers:
        headers[REQUEST_ID] = headers["x-request-id"]


def _error_in(body: bytes) -> Mapping[str, Any]:
    """What an error's body says in OpenAI's form; nothing if it is in another."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return {}
    return error if isinstance(error, dict) else {}

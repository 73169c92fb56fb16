"""What is checked before a request meets a route: where it was sent to, and how big it is."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline.server.failures import quoted, refusal


class HostCheck:
    """Refuses requests whose Host header names another machine.

    A web page can point a name of its own at 127.0.0.1 and drive a local server from a visitor's
    browser (DNS rebinding); the Host header gives it away.

    Args:
        app: The application behind the door.
        allowed: Host names that are let in, without ports.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self.app = app
        self.allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer 403."""
        if scope["type"] != "http" or _host(Headers(scope=scope)) in self.allowed:
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        message = (
            f"This server listens on this machine only and was asked for as {quoted(host)}. "
            "Use localhost or 127.0.0.1."
        )
        await refusal(403, message, code="host_not_allowed")(scope, receive, send)


class BodyLimit:
    """Refuses bodies over a size, announced or not, before they are held in memory.

    Args:
        app: The application behind the door.
        max_bytes: Largest body let in.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, counting; or answer 413."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _announced(Headers(scope=scope)) > self.max_bytes:
            await refusal(413, self._message(), code="body_too_large")(scope, receive, send)
        else:
            await self.app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        """`receive`, but it raises once more than the limit has come in."""
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.max_bytes:
                raise HTTPException(413, self._message())
            return message

        return counted

    def _message(self) -> str:
        return f"The request body is larger than the {self.max_bytes} bytes allowed here."


def _host(headers: Headers) -> str:
    """The Host header in lower case, without port and without an IPv6 address's brackets."""
    host = headers.get("host", "").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _announced(headers: Headers) -> int:
    """The Content-Length, or 0 where there is none to be read."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0

"""What is checked before a request meets a route: where it was sent, by whom, and how big it is."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline.server import tenants
from leyline.server.failures import quoted, refusal
from leyline.server.keys import Keyring
from leyline.server.session_names import SESSION_HEADERS

ANY_HOST = "*"
_READING = frozenset({"GET", "HEAD"})
_NAMING = frozenset(SESSION_HEADERS)


class HostCheck:
    """Refuses requests whose Host header names another machine.

    A web page can point a name of its own at 127.0.0.1 and drive a local server from a visitor's
    browser (DNS rebinding); the Host header gives it away.

    Args:
        app: The application behind the door.
        allowed: Host names that are let in, without ports.
        open_paths: Paths that are read under any name: probes come by a machine's address.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str], open_paths: frozenset[str]) -> None:
        self.app = app
        self.allowed = allowed
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer 403."""
        named = scope["type"] == "http" and _host(Headers(scope=scope)) not in self.allowed
        if not named or _is_read(scope, self.open_paths):
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        message = (
            f"This server was asked for as {quoted(host)} and does not answer to that name. "
            "On the same machine use localhost; else have it started with --allowed-hosts."
        )
        await refusal(403, message, code="host_not_allowed")(scope, receive, send)


class NoSessionHeaders:
    """Takes the headers away by which agents name sessions, where they are not to count."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without them."""
        if scope["type"] == "http":
            sent = scope["headers"]
            scope["headers"] = [one for one in sent if one[0].decode("latin-1") not in _NAMING]
        await self.app(scope, receive, send)


class KeyCheck:
    """Refuses whoever has no key, whatever is asked for: what is open is listed, nothing else is.

    Args:
        app: The application behind the door.
        keyring: The keys; without any, everybody is let in.
        open_paths: Paths that are read without a key, in exactly this spelling.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: frozenset[str]) -> None:
        self.app = app
        self.keyring = keyring
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in as its tenant's, or answer 401."""
        tenant = None
        if self.keyring and not _is_read(scope, self.open_paths):
            tenant = self.keyring.tenant_of(Headers(scope=scope))
            if tenant is None:
                await _unknown(scope, receive, send)
                return
        tenants.enter(scope, self.keyring, tenant)
        await self.app(scope, receive, send)


class WholeBody:
    """Reads a request's body before a route sees the request, within a size and a time.

    A body that is too large is refused as soon as that is certain, announced or not, and never
    held in memory. One that comes with a GET has no meaning and is not read: some routes are open
    to strangers, who could fill the memory with bodies that never end.

    Args:
        app: The application behind the door.
        max_bytes: Largest body let in.
        max_seconds: How long it may take to come in.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in with its body, or answer 413 or 408."""
        if scope["type"] != "http" or scope["method"] in _READING:
            await self.app(scope, receive, send)
            return
        if _announced(Headers(scope=scope)) > self.max_bytes:
            await self._too_large(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self.max_seconds)
        except (asyncio.TimeoutError, TimeoutError):
            message = f"The request's body took longer than {self.max_seconds:g} s to arrive."
            headers = {"connection": "close"}
            answer = refusal(408, message, code="body_timeout", headers=headers)
            await answer(scope, receive, send)
        except _TooLargeError:
            await self._too_large(scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _again(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if its sender hung up in the middle of it."""
        parts, taken, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            taken, more = taken + len(parts[-1]), message.get("more_body", False)
            if taken > self.max_bytes:
                raise _TooLargeError
        return b"".join(parts)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"The request body is larger than the {self.max_bytes} bytes allowed here."
        await refusal(413, message, code="body_too_large")(scope, receive, send)


class _TooLargeError(Exception):
    """A body is larger than allowed."""


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` for a body that was read already; afterwards it tells of the hang-up as ever."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a stranger; a WebSocket is closed, which the server turns into a 403."""
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    message = (
        "This server needs an API key: send it as Authorization: Bearer KEY, or as x-api-key. "
        "None was sent, or it is not one of the server's."
    )
    headers = {"www-authenticate": "Bearer"}
    await refusal(401, message, code="invalid_api_key", headers=headers)(scope, receive, send)


def _is_read(scope: Scope, paths: frozenset[str]) -> bool:
    """Whether a request reads one of these paths, in exactly this spelling."""
    if scope["type"] != "http" or scope["method"] not in _READING:
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in paths


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

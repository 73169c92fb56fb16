"""The outermost layer: every request gets an id, an answer, a line in the log and a count."""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline.errors import DrainingError, LeylineError
from leyline.server import logs
from leyline.server.failures import error_body, unforeseen
from leyline.server.instruments import Instruments
from leyline.server.wire import Json
from leyline.server.worker import Worker

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_TRY_LATER = frozenset({429, 503})
_RETRY_SECONDS = b"1"
_CUT_OFF = "The server stopped before it could answer; send the request again to another."


class Record:
    """Gives a request its id, and notes what became of it.

    Answers that say "try again later" also say when. An exception that nobody foresaw is logged
    with the request's id and answered in the one shape of errors.

    Args:
        app: The application.
        worker: Whose draining is told to clients, so that they connect to another server.
        instruments: Where requests are counted.
        access_log: Whether a line is logged for each.
    """

    def __init__(
        self, app: ASGIApp, worker: Worker, instruments: Instruments, access_log: bool
    ) -> None:
        self.app = app
        self._worker = worker
        self._instruments = instruments
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        asked = Headers(scope=scope).get(REQUEST_ID)
        exchange = logs.Exchange(logs.request_id(asked), method)
        token = logs.current.set(exchange)
        try:
            await self._run(exchange, scope, receive, send)
        finally:
            logs.current.reset(token)

    async def _run(
        self, exchange: logs.Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._more(exchange, message)]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except asyncio.CancelledError:  # the end of the server's patience with whoever is slow
            if status or not self._worker.is_draining:
                raise
            await _refuse(DrainingError(_CUT_OFF), scope, receive, sending)
        except Exception:
            logger.exception("A request failed in a way that nobody foresaw.")
            if not status:
                await _refuse(unforeseen(), scope, receive, sending)
        finally:
            self._note(exchange, _route(scope), status)

    def _more(self, exchange: logs.Exchange, message: Message) -> list[tuple[bytes, bytes]]:
        """Headers that an answer gets."""
        more = [(REQUEST_ID.encode(), exchange.request_id.encode())]
        known = {name.lower() for name, _ in message.get("headers", ())}
        if message["status"] in _TRY_LATER and b"retry-after" not in known:
            more.append((b"retry-after", _RETRY_SECONDS))
        if self._worker.is_draining and b"connection" not in known:
            more.append((b"connection", b"close"))
        return more

    def _note(self, exchange: logs.Exchange, route: str, status: int) -> None:
        """Count and log a request that has ended; 499 if its client left before any answer."""
        status = status or 499
        self._instruments.http.labels(exchange.method, route, str(status)).inc()
        if self._access_log:
            logs.log_access(exchange, route, status)


async def _refuse(error: LeylineError, scope: Scope, receive: Receive, send: Send) -> None:
    await Json(error_body(error), status_code=error.status)(scope, receive, send)


def _route(scope: Scope) -> str:
    """The template of the route that a request met, never its path."""
    return getattr(scope.get("route"), "path", "unmatched")

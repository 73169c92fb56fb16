"""Bytes on the wire: JSON answers, server-sent events, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyline.errors import CancelledError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def encode(value: Any) -> bytes:
    """Compact JSON in pure ASCII.

    Escaping everything else costs a few bytes and makes two kinds of bug impossible: a lone
    surrogate cannot break the encoder, and readers of streams that split lines at U+2028 or U+0085
    have nothing to split at. NaN and infinity are refused: they are not JSON.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return encode(content)


class EventStream(Response):
    """A stream of server-sent events that ends when its client hangs up.

    A client that reads slowly slows the stream down and nothing else: what it has not read yet
    waits in its own subscription, which holds a reply at most.

    Args:
        lines: The encoded events.
        source: Where they come from; left, as a context, however the stream ends, even if the
            client was gone before the first line.
        keep_alive_s: Seconds of silence after which a comment is sent, so that nobody on the way
            takes the connection for dead; None sends none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        lines: AsyncGenerator[bytes, None],
        source: AbstractContextManager[object],
        keep_alive_s: float | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._lines = lines
        self._source = source
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or nobody is left to read them."""
        with self._source, suppress(CancelledError, OSError):  # nobody is left to be told
            await while_connected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._lines) as lines, _Pulse(send, self._keep_alive_s) as pulse:
            async for line in lines:
                await pulse.send(line)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Pulse:
    """Sends lines, and comments where no line comes for a while; two sends never overlap."""

    def __init__(self, send: Send, interval_s: float | None) -> None:
        self._send = send
        self._interval_s = interval_s
        self._last = time.monotonic()
        self._turn = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Pulse:
        if self._interval_s is not None:
            self._beating = asyncio.create_task(self._beat(self._interval_s))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._beating is None:
            return
        if kind is None:  # what is being sent is sent to its end
            await self._turn.acquire()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def send(self, line: bytes) -> None:
        """Send a line."""
        async with self._turn:
            self._last = time.monotonic()
            await self._send({"type": "http.response.body", "body": line, "more_body": True})

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if time.monotonic() - self._last >= interval_s:
                await self.send(KEEP_ALIVE)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client hangs up.

    Polling for the disconnect misses it behind some middleware, so the work races against the
    message instead. The body must have been read before.

    Raises:
        CancelledError: if the client hung up first.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CancelledError("The client hung up.")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

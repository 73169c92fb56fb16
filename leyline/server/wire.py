"""Bytes on the wire: JSON answers, server-sent events, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyline.errors import CancelledError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


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

    Args:
        lines: The encoded events.
        source: Where they come from; left, as a context, however the stream ends, even if the
            client was gone before the first line.
    """

    media_type = "text/event-stream"

    def __init__(
        self, lines: AsyncGenerator[bytes, None], source: AbstractContextManager[object]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._lines = lines
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or nobody is left to read them."""
        with self._source, suppress(CancelledError, OSError):  # nobody is left to be told
            await while_connected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._lines) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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

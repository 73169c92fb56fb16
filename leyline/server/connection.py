"""Connections: HTTP/1.1 as uvicorn speaks it, with limits on what a client may leave undone.

A connection may be open without a request for so long; its request's head must come in that time
too, and so must a reader take what it is sent. There are so many connections at most. Whatever is
refused here has the one shape of errors.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from leyline.server.failures import refusal

MAX_HEADER_BYTES = 64 * 1024
_PART_BYTES = 4096
_LINGER_SECONDS = 2.0
_NO_REQUEST = (400, "invalid_http", "What was sent is no HTTP/1.1 request.")
_TOO_LARGE = (
    431,
    "headers_too_large",
    f"The head of a request may have {MAX_HEADER_BYTES} bytes; this one has more.",
)
_TOO_SLOW = (408, "headers_timeout", "The head of the request took too long to arrive.")
_TOO_MANY = (503, "too_many_connections", "Too many connections are open; try again in a while.")


class Connection(H11Protocol):
    """One connection; uvicorn makes it. `max_connections` is set by who makes the class."""

    max_connections = 8192
    _patience: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _begun = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection in, or refuse it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(*_TOO_MANY)
            transport.close()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of a connection."""
        self._patience = _stopped(self._patience)
        self._reading = _stopped(self._reading)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; a head that comes in bit by bit gets no more time for that.

        h11 asks for the size of a head only while the head is not whole, so it is fed in parts.
        """
        self._begun = True
        while data and not self._refused:
            in_body = self.conn.their_state is h11.SEND_BODY
            size = len(data) if in_body else _PART_BYTES
            super().data_received(data[:size])
            data = data[size:]
        if self._answering:
            self._patience = _stopped(self._patience)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._begun = False
        if not self._answering and not self.transport.is_closing():
            self._wait()

    def pause_writing(self) -> None:
        """The client does not read: it has a while to go on."""
        super().pause_writing()
        self._reading = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._reading = _stopped(self._reading)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not make a request of."""
        unread, _ = self.conn.trailing_data
        self._refuse(*(_TOO_LARGE if len(unread) > MAX_HEADER_BYTES else _NO_REQUEST))

    @property
    def _answering(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        """Give the client its time for the next request."""
        _stopped(self._patience)
        self._patience = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        """Close a connection on which no whole request came; say so if one had begun."""
        if self._begun and not self.transport.is_closing():
            self._refuse(*_TOO_SLOW)
        else:
            self.timeout_keep_alive_handler()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, where h11 still can, and close.

        What the client goes on sending is thrown away for a moment: to close at once on bytes that
        nobody read would take the answer from it too.
        """
        body = bytes(refusal(status, message, code=code).body)
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
            _stopped(self._patience)
            self._patience = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()


def limited(max_connections: int) -> type[Connection]:
    """Connections of which there may be so many."""
    return type("Connection", (Connection,), {"max_connections": max_connections})


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    """Stop a timer if there is one."""
    if timer is not None:
        timer.cancel()

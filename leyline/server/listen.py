"""Run the application on a socket until a signal says stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from leyline.errors import ConfigError
from leyline.server.app import create_app
from leyline.server.settings import ServerConfig
from leyline.server.surface import ServedEngine
from leyline.server.worker import Worker

logger = logging.getLogger(__name__)

# uvicorn's other HTTP parser has no limit on the size of a header.
_PARSER = "h11"
_MAX_HEADER_BYTES = 64 * 1024
# How long a client that does not read may hold up the end.
_CLOSING_SECONDS = 5


def print_ready(url: str) -> None:
    """Say where the server is."""
    print(f"Leyline is ready: {url}", flush=True)


def serve(
    engine: ServedEngine,
    config: ServerConfig | None = None,
    *,
    on_ready: Callable[[str], None] = print_ready,
) -> None:
    """Serve `engine` until SIGINT or SIGTERM; open requests then end with an error.

    A second signal does not wait for connections to close. The engine is left open and idle: who
    made it closes it. `on_ready` is called with the URL once requests are accepted.

    Raises:
        ConfigError: if the address cannot be listened on.
    """
    config = config or ServerConfig()
    with _listen(config) as listener:
        worker = Worker(engine)
        worker.start()
        try:
            _Server(worker, config, listener, on_ready).run(sockets=[listener])
        finally:
            worker.stop()


class _Server(uvicorn.Server):
    """uvicorn with three changes.

    It says when it is ready, ends the requests before it waits for their connections to close,
    and returns after a signal instead of raising that signal again.
    """

    def __init__(
        self,
        worker: Worker,
        config: ServerConfig,
        listener: socket.socket,
        on_ready: Callable[[str], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(worker, config),
                http=_PARSER,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                lifespan="off",
                timeout_graceful_shutdown=_CLOSING_SECONDS,
                access_log=False,
                log_config=None,
                server_header=False,
            )
        )
        self._worker = worker
        self._on_ready = on_ready
        self._url = _url(config.host, listener.getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready(self._url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the requests, then the connections."""
        await asyncio.to_thread(self._worker.stop)
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over while serving, where Python allows it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, at once at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _listen(config: ServerConfig) -> socket.socket:
    """A listening socket, so that a port that is taken is found out before anything starts."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(
            f"Cannot listen on {config.host}, port {config.port}: {reason}. "
            "Choose another address with --host or --port.",
            param="port",
        ) from error
    if not config.is_loopback:
        logger.warning(
            "Listening on %s: whoever can reach this address can use the server.", config.host
        )
    return listener


def _url(host: str, port: int) -> str:
    """The address to type into a client."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

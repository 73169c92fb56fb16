"""Run the application on a socket until a signal says stop.

The server answers from the start, on a thread of its own: while the model loads on the main
thread, it says that. Signals reach the main thread. The first one has running requests end, for as
long as they may, and refuses new ones; the second one ends them.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import Empty, SimpleQueue
from types import FrameType

import uvicorn

from leyline.server import sockets
from leyline.server.app import create_app
from leyline.server.connection import MAX_HEADER_BYTES, limited
from leyline.server.front import Front
from leyline.server.keys import Keyring
from leyline.server.settings import ServerConfig
from leyline.server.surface import ServedEngine
from leyline.server.worker import Worker

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long a client that does not read may hold up the end.
_CLOSING_SECONDS = 5
_LOOK_SECONDS = 0.05

Loading = Callable[[], AbstractContextManager[ServedEngine]]
"""Loads an engine: what it returns is entered for the engine, and left when serving has ended."""


def print_ready(url: str) -> None:
    """Say where the server is."""
    print(f"Leyline is ready: {url}", flush=True)


def serve(
    engine: ServedEngine,
    config: ServerConfig | None = None,
    *,
    on_ready: Callable[[str], None] = print_ready,
) -> None:
    """Serve `engine` until SIGINT or SIGTERM.

    Open requests then have `shutdown_timeout_s` to end; what is left of them ends with an error,
    at once after a second signal. The engine is left open and idle: who made it closes it.
    `on_ready` is called with the URL once requests are accepted.

    Raises:
        ConfigError: if the address cannot be listened on, or a file of keys or of TLS not be read.
    """
    serve_loading(lambda: nullcontext(engine), config, on_ready=on_ready)


def serve_loading(
    load: Loading,
    config: ServerConfig | None = None,
    *,
    on_ready: Callable[[str], None] = print_ready,
) -> None:
    """Listen at once, and serve the engine that `load` returns; see `serve`.

    Raises:
        ConfigError: see `serve`.
        LeylineError: what `load` raises.
        KeyboardInterrupt: if a signal came while it loaded.
    """
    config = config or ServerConfig()
    sockets.check_certificate(config)
    sockets.warn_of_strangers(config, has_keys=bool(Keyring.of(config)))
    sockets.allow_connections(config.max_connections)
    with sockets.listening(config) as listener, _signals() as signals:
        front = Front()
        server = _Background(uvicorn.Server(_uvicorn(front, config)), listener, signals)
        with server, load() as engine:
            worker = Worker(engine)
            worker.start()
            try:
                front.app = create_app(worker, config)
                on_ready(sockets.url_of(config, listener))
                _wait(server, signals)
                _drain(worker, signals, config.shutdown_timeout_s)
            finally:
                worker.stop()


class _Background:
    """uvicorn on a thread of its own, for as long as a `with` block lasts."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, signals: _Signals) -> None:
        self._server = server
        self._listener = listener
        self._signals = signals
        self._thread = threading.Thread(target=self._run, name="leyline-http", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        while self.is_running:
            self._server.force_exit |= self._signals.came(_LOOK_SECONDS) or self._signals.forced
        if self._error is not None:
            raise self._error

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:
            self._error = error


class _Signals:
    """The signals that have come; a queue that a signal's handler may put into at any moment.

    Attributes:
        loading: Whether the model loads, which a signal breaks off.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[int] = SimpleQueue()
        self._count = 0
        self._handled = 0
        self.loading = True

    def handle(self, number: int, _: FrameType | None) -> None:
        """Note a signal; a third one is not ours any more, should the second one not help."""
        self._queue.put(number)
        self._handled += 1
        if self._handled > 1:
            signal.signal(number, signal.SIG_DFL)
        if self.loading:
            self.loading = False
            raise KeyboardInterrupt

    def came(self, seconds: float) -> bool:
        """Wait for a signal; whether one came in time."""
        try:
            self._queue.get(timeout=seconds)
        except Empty:
            return False
        self._count += 1
        return True

    @property
    def forced(self) -> bool:
        """Whether a second one was seen: everything is to end at once."""
        return self._count > 1


@contextmanager
def _signals() -> Generator[_Signals, None, None]:
    """Take the signals over, where Python allows it."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    previous = {number: signal.signal(number, signals.handle) for number in _SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(server: _Background, signals: _Signals) -> None:
    """Wait for the first signal, or for the end of the server."""
    signals.loading = False
    while server.is_running and not signals.came(1.0):
        pass


def _drain(worker: Worker, signals: _Signals, seconds: float) -> None:
    """Let open requests end, for a time, or until a second signal."""
    worker.drain()
    deadline = time.monotonic() + seconds
    while worker.num_open and time.monotonic() < deadline:
        if signals.came(_LOOK_SECONDS):
            return


def _uvicorn(front: Front, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's own options; its log says nothing that ours does not."""
    return uvicorn.Config(
        front,
        http=limited(config.max_connections),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]  # a number will do
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
    )

"""A server on a real socket in this process, whose engine a test can hold."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from leyline.server import ServerConfig, Worker, create_app, listen, sockets
from leyline.server.front import Front

from .fake_engine import FakeEngine

GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass
class Running:
    """The server, and what may be looked at of it."""

    url: str
    port: int
    engine: FakeEngine
    worker: Worker
    server: uvicorn.Server

    def connect(self, buffer_bytes: int | None = None) -> socket.socket:
        """A plain connection; a small buffer makes a slow reader."""
        client = socket.socket()
        if buffer_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.settimeout(30)
        client.connect(("127.0.0.1", self.port))
        return client

    def serves(self) -> bool:
        """Whether an ordinary request is answered as ever."""
        answer = httpx.get(self.url + "/v1/models", timeout=30)
        return answer.status_code == 200 and answer.json()["data"][0]["id"] == "fake-model"

    def settles(self) -> bool:
        """Wait until nothing is open any more; each look is a whole exchange with the server."""
        while self.worker.num_open or len(self.server.server_state.connections) > 1:
            assert self.serves()
        return True


@contextmanager
def running(engine: FakeEngine | None = None, **options: Any) -> Generator[Running, None, None]:
    """Serve an engine until the block ends."""
    engine = engine or FakeEngine()
    config = ServerConfig(**{"port": 0, "access_log": False, **options})
    with sockets.listening(config) as listener:
        front = Front()
        server = uvicorn.Server(listen._uvicorn(front, config))
        with listen._Background(server, listener, listen._Signals()):
            worker = Worker(engine)
            worker.start()
            try:
                front.app = create_app(worker, config)
                port = 0 if config.uds else listener.getsockname()[1]
                yield Running(sockets.url_of(config, listener), port, engine, worker, server)
            finally:
                worker.stop()


def answer_of(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of what comes until the connection is closed."""
    received = b""
    while part := client.recv(65536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def first_answer(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer on a connection that may stay open."""
    with http.client.HTTPResponse(client) as answer:
        answer.begin()
        return answer.status, answer.read()

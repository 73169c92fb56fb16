from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from leyline.server import ServerConfig, Worker, create_app

from .client import Client
from .fake_engine import FakeEngine

Connect = Callable[..., Client]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Start a worker over an engine and hand out a client of the application on it."""
    workers: list[Worker] = []

    def start(engine: FakeEngine | None = None, config: ServerConfig | None = None) -> Client:
        engine = engine or FakeEngine()
        worker = Worker(engine)
        worker.start()
        workers.append(worker)
        return Client(create_app(worker, config), worker, engine)

    yield start
    for worker in workers:
        worker.stop()

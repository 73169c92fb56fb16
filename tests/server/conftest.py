from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from leyline import Engine
from leyline.server import ServerConfig, Worker, create_app
from tests.lockstep import tiny_engine

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


@pytest.fixture
def engine(tiny_folder: Callable[[str], Path]) -> Iterator[Engine]:
    """A real engine that edits rows in place."""
    with tiny_engine(tiny_folder("v2_yarn"), keep_versions=0) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    """A synchronous client of a server over it."""
    worker = Worker(engine)
    worker.start()
    with TestClient(create_app(worker), base_url="http://127.0.0.1:8000") as client:
        yield client
    worker.stop()

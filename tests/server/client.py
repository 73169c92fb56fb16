"""A client that speaks ASGI by itself, so that it can hang up at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from leyline import Engine
from leyline.server import ServerConfig, Worker, create_app

from .fake_engine import FakeEngine

JSON = "application/json"


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that must be one, of the one shape."""
        assert set(self.json) == {"error"}, self.json
        error = self.json["error"]
        details = {"version"} if self.status == 412 else set()
        assert set(error) == {"message", "type", "param", "code"} | details
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str) and isinstance(error["code"], str)
        return error

    @property
    def lines(self) -> list[str]:
        """The payloads of a stream, which must end as a stream must end."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, rest = self.body.decode("ascii").split("\n\n")
        assert rest == "" and all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [event.removeprefix("data: ") for event in events[:-1]]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


class Exchange:
    """One request in flight."""

    def __init__(
        self, app: FastAPI, scope: dict[str, Any], body: Iterable[bytes], broken: bool = False
    ) -> None:
        self.answer = Answer()
        self.sent = asyncio.Event()
        self._hang_up = asyncio.Event()
        self._body = list(body)
        self._broken = broken
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def finish(self) -> Answer:
        await self._task
        return self.answer

    async def hang_up(self) -> Answer:
        """Close the connection and wait until the server has let go of it."""
        self._hang_up.set()
        return await self.finish()

    async def first_bytes(self) -> None:
        """Wait until some of the body has come back."""
        await self.sent.wait()

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            part = self._body.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._body)}
        await self._hang_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._broken:
            raise OSError("broken pipe")
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.answer.body += message["body"]
            self.sent.set()


@dataclass
class Client:
    app: FastAPI
    worker: Worker
    engine: FakeEngine

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | list[bytes] | None = None,
        headers: dict[str, str] | None = None,
        broken: bool = False,
    ) -> Exchange:
        """Send a request without waiting for its answer."""
        parts = raw if isinstance(raw, list) else [raw or b""]
        if body is not None:
            parts = [json.dumps(body).encode()]
        path, _, query = path.partition("?")
        sent = {"host": "localhost:8000", "content-type": JSON, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        return Exchange(self.app, scope, parts, broken)

    async def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        return await self.open("POST", path, body, **more).finish()

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.open("GET", path, **more).finish()

    async def delete(self, path: str) -> Answer:
        return await self.open("DELETE", path).finish()

    async def edit(self, *directives: dict[str, Any], **fields: Any) -> Answer:
        """Edit the session "s1"."""
        body = {"session_id": "s1", "directives": list(directives), **fields}
        return await self.post("/v1/directives", body)

    async def chat(self, content: Any = "hi", **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", chat_body(content, **fields))

    async def complete(self, prompt: Any = "hi", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def open_requests(self) -> int:
        """Requests that the engine still works on, once everything posted so far has run."""
        return await self.worker.call(lambda: len(self.engine.open))


def chat_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@contextmanager
def over_engine(
    folder: Path, config: ServerConfig | None = None, **options: Any
) -> Iterator[Client]:
    """A client of a server over a real engine with a model of the tests."""
    with Engine(model=str(folder), dtype="float32", progress=False, **options) as engine:
        worker = Worker(engine)
        worker.start()
        try:
            yield Client(create_app(worker, config or ServerConfig()), worker, engine)  # type: ignore[arg-type]
        finally:
            worker.stop()

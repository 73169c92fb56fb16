"""Who is there, and how it is: `/health`, `/live`, `/version` and `/`.

Two questions, two routes. `/health` asks whether requests should be sent here: not while the model
loads, not while the server drains, not when the engine died. `/live` asks whether the process
should be left alone: loading and draining are no reason to kill it, a dead engine is.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from leyline import __version__
from leyline.errors import DrainingError, EngineClosedError
from leyline.server.wire import Json
from leyline.server.worker import Worker

HEALTH, LIVE = "/health", "/live"
NAME = {"name": "leyline", "version": __version__}


def routes(worker: Worker) -> APIRouter:
    """The routes that say how the server is."""
    router = APIRouter()

    async def health() -> Response:
        """200 if requests should be sent here, else 503."""
        if worker.is_draining:
            raise DrainingError("The server is about to stop.")
        return await live()

    async def live() -> Response:
        """200 as long as the engine runs, else 503: the process should be replaced."""
        if not (worker.is_alive or worker.is_draining):
            raise EngineClosedError("The engine is not running.")
        return Json({"status": "ok"})

    async def version() -> Response:
        """The version of Leyline."""
        return Json(NAME)

    async def root() -> Response:
        """What this is: some clients look here before they send anything."""
        return Json(NAME)

    for path, endpoint in ((HEALTH, health), (LIVE, live), ("/version", version), ("/", root)):
        router.get(path)(endpoint)
        router.head(path, include_in_schema=False)(endpoint)
    return router

"""The FastAPI application: routes, doors and the one error shape."""

from __future__ import annotations

from fastapi import FastAPI, Response

from leyline import __version__
from leyline.errors import EngineClosedError
from leyline.server import cache, chat, completions, directives, failures, models, sessions
from leyline.server.doors import BodyLimit, HostCheck
from leyline.server.serving import Serving
from leyline.server.settings import LOOPBACK_HOSTS, ServerConfig
from leyline.server.wire import Json
from leyline.server.worker import Worker


def create_app(worker: Worker, config: ServerConfig | None = None) -> FastAPI:
    """Build the application over a worker.

    The caller starts the worker and stops it. Cross-origin requests are not allowed for: there
    are no CORS headers, and a body must come as `application/json`, which no web page can send
    to another origin without asking first.
    """
    serving = Serving(worker, config or ServerConfig())
    app = FastAPI(title="Leyline", version=__version__, redirect_slashes=False)
    failures.install(app)
    for module in (chat, completions, models, directives, sessions, cache):
        app.include_router(module.routes(serving))
    _add_health(app, worker)
    app.add_middleware(BodyLimit, max_bytes=serving.config.max_body_bytes)
    if serving.config.is_loopback:
        allowed = frozenset({*LOOPBACK_HOSTS, serving.config.host})
        app.add_middleware(HostCheck, allowed=allowed)
    return app


def _add_health(app: FastAPI, worker: Worker) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while requests are served, else 503."""
        if not worker.is_alive:
            raise EngineClosedError("The engine is not running.")
        return Json({"status": "ok"})

"""The FastAPI application: routes, doors and the one error shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict
from starlette.middleware.cors import CORSMiddleware

from leyline import __version__
from leyline.server import (
    cache,
    chat,
    completions,
    directives,
    failures,
    health,
    messages,
    metrics,
    models,
    responses,
    sessions,
    texts,
)
from leyline.server.doors import ANY_HOST, HostCheck, KeyCheck, NoSessionHeaders, WholeBody
from leyline.server.instruments import Instruments
from leyline.server.keys import Keyring
from leyline.server.messages_errors import MessagesErrors
from leyline.server.record import REQUEST_ID, Record
from leyline.server.serving import Serving
from leyline.server.settings import LOOPBACK_HOSTS, ServerConfig
from leyline.server.worker import Worker

_API = (chat, completions, responses, messages, models, texts, directives, sessions, cache)
_PROBES = frozenset({health.HEALTH, health.LIVE})


class ErrorDetail(BaseModel):
    """What went wrong; `details` that a program needs may stand beside the four."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The one shape of errors."""

    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request was refused; the error says why."},
    "5XX": {"model": ErrorBody, "description": "The server could not answer."},
}


def create_app(worker: Worker, config: ServerConfig | None = None) -> FastAPI:
    """Build the application over a worker, whose limits are set to those of the config.

    The caller starts the worker and stops it.

    Raises:
        ConfigError: If the file of keys cannot be read.
    """
    config = config or ServerConfig()
    instruments = Instruments()
    worker.max_queued = config.max_queued_requests
    worker.max_seconds = config.request_timeout_s or None
    # FastAPI itself has browsers load the page at /docs from elsewhere.
    app = FastAPIOffline(
        title="Leyline", version=__version__, redirect_slashes=False, redoc_url=None
    )
    failures.install(app)
    serving = Serving(worker, config)
    for module in _API:
        app.include_router(module.routes(serving), responses=_ERRORS)
    app.include_router(health.routes(worker), responses=_ERRORS)
    if config.metrics:
        worker.observer = metrics.Meter(instruments)
        app.include_router(metrics.routes(worker, instruments), responses=_ERRORS)
    _add_doors(app, config)
    app.add_middleware(Record, worker=worker, instruments=instruments, access_log=config.access_log)
    app.add_middleware(MessagesErrors)
    return app


def _add_doors(app: FastAPI, config: ServerConfig) -> None:
    """Put the checks around the application, the innermost first.

    No other origin may call unless it is named: without CORS headers, and with bodies that must
    come as `application/json`, no web page of another origin gets anything done. A browser asks
    first and sends no key with that, so origins that are named are answered before keys are.
    """
    if not config.session_headers:
        app.add_middleware(NoSessionHeaders)
    app.add_middleware(
        WholeBody, max_bytes=config.max_body_bytes, max_seconds=config.body_timeout_s
    )
    open_paths = _PROBES | ({"/metrics"} if config.metrics_open else set())
    app.add_middleware(KeyCheck, keyring=Keyring.of(config), open_paths=open_paths)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID,),
        )
    allowed = _hosts(config)
    if allowed:
        app.add_middleware(HostCheck, allowed=allowed, open_paths=_PROBES)


def _hosts(config: ServerConfig) -> frozenset[str]:
    """Names that the server answers to; none of them for any name."""
    named = frozenset(name.lower() for name in config.allowed_hosts)
    if ANY_HOST in named or config.uds:
        return frozenset()
    if config.is_loopback:
        return named | {*LOOPBACK_HOSTS, config.host}
    return named

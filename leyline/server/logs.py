"""What the server writes to its log: a line for each request, and errors with the request's id.

No line holds what a client wrote beyond an id of harmless characters: routes appear as their
templates and methods as known ones. Control characters never reach the log, so that no text can
end a line and forge the next one.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from leyline.events import Completion, EngineEvent

access = logging.getLogger("leyline.access")

_PROBED = frozenset({"/health", "/live", "/metrics"})
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


@dataclass(slots=True)
class Exchange:
    """One request over HTTP, from its first byte to the last of its answer.

    Attributes:
        request_id: Its id: the client's `x-request-id` if that is harmless, else a fresh one.
        method: A known method, or `OTHER`.
        started: On the clock of `time.perf_counter`.
        prompt_tokens: Of all engine requests that it led to, and so on.
    """

    request_id: str
    method: str
    started: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    def add(self, event: EngineEvent) -> None:
        """Count the tokens of an answer."""
        if isinstance(event, Completion):
            self.prompt_tokens += event.usage.prompt_tokens
            self.cached_tokens += event.usage.cached_tokens
            self.completion_tokens += event.usage.completion_tokens


current: ContextVar[Exchange | None] = ContextVar("leyline_exchange", default=None)
"""The request that the running task works for."""


def request_id(asked: str | None) -> str:
    """The id of a request: the one its client chose if it is harmless, else a fresh one."""
    if asked is not None and _SANE_ID.fullmatch(asked):
        return asked
    return f"req-{secrets.token_hex(16)}"


def configure(level: str) -> None:
    """Have the process log to standard error, a line a record; for `leyline serve` alone."""
    logging.basicConfig()
    root = logging.getLogger()
    root.setLevel(level.upper())
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it tells of every start and stop


def log_access(exchange: Exchange, route: str, status: int) -> None:
    """Write the line of a request that has ended; what probes ask all day is for debugging."""
    access.log(
        logging.DEBUG if route in _PROBED and status == 200 else logging.INFO,
        "%s %s status=%d ms=%.1f prompt_tokens=%d cached_tokens=%d completion_tokens=%d",
        exchange.method,
        route,
        status,
        1e3 * exchange.elapsed_s,
        exchange.prompt_tokens,
        exchange.cached_tokens,
        exchange.completion_tokens,
    )


class _OneLine(logging.Formatter):
    """Control characters of a message are escaped; a traceback keeps its lines, indented."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line, and for which request it was written."""
        exchange, line = current.get(), super().formatMessage(record)
        behind = "" if exchange is None else f" request_id={exchange.request_id}"
        return line.translate(_CONTROLS) + behind

    def formatException(self, ei: object) -> str:
        """The traceback, in lines that none of the log's own begins like."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join("  " + line.translate(_CONTROLS) for line in text.split("\n"))

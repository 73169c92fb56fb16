"""`GET /metrics`: what happened, counted where it happens.

A `Meter` watches a worker: it is told of every request and every event on the engine's thread.
The engine's own numbers are read when somebody asks, between two of its steps; a long step, or an
engine that died, is not waited for, and what was read last is told again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from leyline.directive import Mode, Receipt
from leyline.errors import EngineClosedError
from leyline.events import Completion, Delta, EditResult, EngineEvent, Failure
from leyline.server.instruments import CONTENT_TYPE, Instruments
from leyline.server.surface import ServedEngine
from leyline.server.worker import Worker
from leyline.stats import pace_of, stats_of

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0
_MODES = frozenset(mode.value for mode in Mode)


@dataclass(slots=True)
class _Timing:
    """When things happened to a request, in seconds."""

    opened: float
    began: float | None = None
    first: float | None = None
    last: float | None = None


class Meter:
    """Counts what a worker does; all methods but `refused` belong to the engine's thread."""

    def __init__(self, instruments: Instruments) -> None:
        self.instruments = instruments
        self._open: dict[int, _Timing] = {}
        self._waiting: set[int] = set()
        self._batches = self._tokens = 0

    def opened(self, request_id: int) -> None:
        """A request was accepted."""
        self._open[request_id] = _Timing(time.perf_counter())
        self._waiting.add(request_id)

    def closed(self, request_id: int) -> None:
        """A request was given up by its client."""
        self._forget(request_id)
        self.instruments.failure.labels("cancelled").inc()

    def stepped(self, engine: ServedEngine, events: Sequence[EngineEvent], since: float) -> None:
        """The engine did a step; who waits no longer began with it."""
        now, pace = time.perf_counter(), pace_of(engine)
        if pace.num_batches > self._batches:
            self.instruments.step_tokens.observe(pace.num_batch_tokens - self._tokens)
            self._batches, self._tokens = pace.num_batches, pace.num_batch_tokens
        for request_id in self._waiting - pace.waiting:
            timing = self._open[request_id]
            timing.began = max(since, timing.opened)
            self.instruments.queue.observe(timing.began - timing.opened)
        self._waiting &= pace.waiting
        for event in events:
            self._take(event, now)

    def refused(self, modes: Iterable[str]) -> None:
        """A set of directives was refused; modes that do not exist share one name."""
        for mode in modes:
            known = mode if mode in _MODES else "unknown"
            self.instruments.directives.labels(known, "refused").inc()

    def _take(self, event: EngineEvent, now: float) -> None:
        timing = self._open.get(event.request_id)
        if isinstance(event, Delta):
            self._note_tokens(timing, len(event.token_ids), now)
            return
        self._forget(event.request_id)
        if isinstance(event, Failure):
            self.instruments.failure.labels(event.error.code).inc()
        elif isinstance(event, EditResult):
            self._note_edit(event)
        else:
            self._note_tokens(timing, 1, now, only_first=True)
            self._note_completion(event)
            if timing is not None:
                self._note_times(timing, now)

    def _forget(self, request_id: int) -> None:
        self._open.pop(request_id, None)
        self._waiting.discard(request_id)

    def _note_tokens(
        self, timing: _Timing | None, count: int, now: float, *, only_first: bool = False
    ) -> None:
        """Tokens came; those that came together took equally long."""
        if timing is None or not count:
            return
        if timing.last is None:
            timing.first = now
            self.instruments.first_token.observe(now - timing.opened)
        elif not only_first:
            for _ in range(count):
                self.instruments.inter_token.observe((now - timing.last) / count)
        timing.last = now

    def _note_times(self, timing: _Timing, now: float) -> None:
        """How long an answer took, and its two parts."""
        self.instruments.latency.observe(now - timing.opened)
        if timing.first is not None:
            began = timing.opened if timing.began is None else timing.began
            self.instruments.prefill.observe(timing.first - began)
            self.instruments.decode.observe(now - timing.first)

    def _note_completion(self, completion: Completion) -> None:
        tell, usage = self.instruments, completion.usage
        tell.success.labels(completion.finish_reason).inc()
        tell.prompt_tokens.inc(usage.prompt_tokens)
        tell.queries.inc(usage.prompt_tokens)
        tell.cached.inc(usage.cached_tokens)
        tell.hits.inc(usage.cached_tokens)
        tell.spliced.inc(usage.spliced_tokens)
        computed = max(0, usage.prompt_tokens - usage.cached_tokens)
        tell.computed.inc(computed)
        tell.prefilled.observe(computed)
        tell.generated.inc(usage.completion_tokens)
        tell.degraded.inc(usage.degraded)
        self._note_receipts(completion.receipts)

    def _note_edit(self, result: EditResult) -> None:
        modes = {receipt.mode.value for receipt in result.receipts}
        mode = modes.pop() if len(modes) == 1 else "mixed"
        self.instruments.edit_seconds.labels(mode).observe(result.elapsed_ms / 1e3)
        self._note_receipts(result.receipts)
        if result.purged is not None:
            self.instruments.purges.inc()
            self.instruments.purged_rows.inc(result.purged.rows)

    def _note_receipts(self, receipts: Iterable[Receipt]) -> None:
        tell = self.instruments
        for receipt in receipts:
            mode = receipt.mode.value
            tell.directives.labels(mode, "degraded" if receipt.reason else "done").inc()
            tell.removed.labels(mode).inc(receipt.removed)
            tell.inserted.labels(mode).inc(receipt.inserted)
            tell.kept.labels(mode).inc(receipt.kept)
            tell.turned.labels(mode).inc(receipt.moved_in_place + receipt.copied)
            tell.reprefilled.labels(mode).inc(receipt.recomputed)


def routes(worker: Worker, instruments: Instruments) -> APIRouter:
    """The route for Prometheus."""
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Everything that is counted, in Prometheus' text form."""
        await _read(worker, instruments)
        return Response(instruments.encode(), media_type=CONTENT_TYPE)

    return router


async def _read(worker: Worker, instruments: Instruments) -> None:
    """Read the engine's numbers, if it comes to it in time."""
    try:
        reading = worker.call(stats_of, worker.engine)
        instruments.tell(await asyncio.wait_for(reading, _PATIENCE_SECONDS))
    except (asyncio.TimeoutError, TimeoutError):
        logger.info("The engine is in the middle of a long step; the last numbers are told again.")
    except EngineClosedError:
        instruments.tell(None)

"""The metrics that the server exports: their names, what they mean, and how finely they are told.

Names follow those that dashboards and load tools know from other engines, under the prefix
`leyline:`. Counters end in `_total`, times are in seconds, shares from 0 to 1. Labels have few
values, all of them ours: never an id, and never a text that a client wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from leyline.directive import Mode
from leyline.stats import EngineStats

PREFIX = "leyline:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
_EDIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Instruments:
    """The metrics of one server, in a registry of its own; two servers in a process keep apart."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineMetrics()
        self._registry.register(self._engine)  # type: ignore[arg-type]
        counter = self._counter
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the contexts of answered requests")
        self.cached = counter("prompt_tokens_cached", "Prompt tokens whose rows were there")
        self.spliced = counter("prompt_tokens_spliced", "Prompt tokens whose rows an edit carried")
        self.computed = counter(
            "prompt_tokens_recomputed", "Prompt tokens whose rows were computed"
        )
        self.generated = counter("generation_tokens", "Tokens generated")
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self.hits = counter("prefix_cache_hits", "Prompt tokens found there")
        self.success = counter("request_success", "Requests answered", "finished_reason")
        self.failure = counter("request_failure", "Requests that ended in an error", "code")
        self.degraded = counter("requests_degraded", "Answers for which carried rows were lost")
        self.http = counter("http_requests", "HTTP requests", "method", "route", "status")
        self._add_times()
        self._add_edits()

    def _add_times(self) -> None:
        seconds = tokens = self._histogram
        self.first_token = seconds(
            "time_to_first_token_seconds", "From a request to its first token", _FIRST_SECONDS
        )
        self.inter_token = seconds(
            "inter_token_latency_seconds", "Between two tokens of an answer", _TOKEN_SECONDS
        )
        self.latency = seconds(
            "e2e_request_latency_seconds",
            "From a request to the end of its answer",
            _REQUEST_SECONDS,
        )
        self.queue = seconds(
            "request_queue_time_seconds", "From a request to its first step", _FIRST_SECONDS
        )
        self.prefill = seconds(
            "request_prefill_time_seconds", "From its first step to its first token", _FIRST_SECONDS
        )
        self.decode = seconds(
            "request_decode_time_seconds", "From its first token to its end", _REQUEST_SECONDS
        )
        self.prefilled = tokens(
            "request_prefill_kv_computed_tokens", "Rows computed for a prompt", _STEP_TOKENS
        )
        self.step_tokens = tokens(
            "iteration_tokens_total", "Tokens computed in a step of the engine", _STEP_TOKENS
        )

    def _add_edits(self) -> None:
        counter = self._counter
        self.directives = counter("directives", "Edits of contexts", "mode", "result")
        self.edit_seconds = self._histogram(
            "directive_seconds", "From a set of edits to its result", _EDIT_SECONDS, "mode"
        )
        self.removed = counter("directive_tokens_removed", "Tokens that edits took out", "mode")
        self.inserted = counter("directive_tokens_inserted", "Tokens that edits put in", "mode")
        self.kept = counter("directive_tokens_kept", "Rows behind edits that were kept", "mode")
        self.turned = counter(
            "directive_tokens_turned", "Rows behind edits that were turned", "mode"
        )
        self.reprefilled = counter(
            "directive_tokens_reprefilled", "Rows behind edits that were computed again", "mode"
        )
        for mode in Mode:  # so that each is there, at 0, before it happens
            for result in ("done", "degraded", "refused"):
                self.directives.labels(mode.value, result)
            for tokens in (self.removed, self.inserted, self.kept, self.turned, self.reprefilled):
                tokens.labels(mode.value)
        self.purges = counter("cache_purges", "Edits that reached the whole cache")
        self.purged_rows = counter("cache_purged_rows", "Rows that such edits removed")

    def tell(self, stats: EngineStats | None) -> None:
        """Take over an engine's numbers; None for one that died, whose last ones stay."""
        self._engine.alive = stats is not None
        self._engine.stats = stats or self._engine.stats

    def encode(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(_WithoutDates(self._registry))  # type: ignore[arg-type]

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, f"{what}.", labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            PREFIX + name, f"{what}.", labels, buckets=tuple(buckets), registry=self._registry
        )


@dataclass(eq=False)
class _EngineMetrics:
    """What the engine says of itself, in Prometheus' terms."""

    stats: EngineStats = field(default_factory=EngineStats)
    alive: bool = True

    def collect(self) -> Iterator[Metric]:
        """The metrics as of what was told last."""
        stats = self.stats
        needed = stats.num_used / stats.num_slots if stats.num_slots else 0.0
        yield _gauge("engine_up", "Whether the engine runs", int(self.alive))
        yield _gauge("num_requests_running", "Requests that run", stats.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait for a place", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the cache in need, 0 to 1", needed)
        yield _gauge("kv_available_tokens", "Rows that nobody owns", stats.num_free)
        yield _gauge("kv_evictable_tokens", "Rows kept for reuse alone", stats.num_evictable)
        yield _gauge("kv_used_tokens", "Rows that somebody needs", stats.num_used)
        yield _gauge("sessions", "Sessions that are resident", stats.num_sessions)
        yield _gauge("session_held_tokens", "Tokens that sessions hold", stats.session_tokens)
        yield _counted("num_preemptions", "Requests put back into the queue", stats.num_preempted)
        yield _counted("degraded_splices", "Carried rows lost, or not made", stats.num_degraded)
        yield _counted("sessions_expired", "Sessions that nobody used", stats.num_expired)
        yield _counted("sessions_displaced", "Sessions that made room", stats.num_displaced)
        yield _counted("sessions_refused", "Sessions without room", stats.num_refused)
        yield _counted("engine_steps", "Batches that have run", stats.num_batches)


class _WithoutDates:
    """A registry without the date of every counter, which would double what is told."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, f"{what}.", value)


def _counted(name: str, what: str, value: float) -> Any:
    return CounterMetricFamily(PREFIX + name, f"{what}.", value)

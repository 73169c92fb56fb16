"""An engine in numbers, for dashboards.

Gauges say how it is now; counters say what happened since it was made, and never go back. The
engine's thread reads them: nothing here takes a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from leyline.jobs import Jobs


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing and has done. Healing in the background counts as nothing running.

    Attributes:
        num_running: Requests that own rows and are planned.
        num_waiting: Requests that wait for a place among them.
        num_slots: Rows that the cache has room for.
        num_free: Rows that nobody owns.
        num_evictable: Rows that are kept for reuse alone and can be given up.
        num_preempted: How often a request was put back into the queue, to make room for another
            or because its rows were purged; a counter.
        num_degraded: How often carried rows were lost, or could not be made; a counter.
        num_sessions: Sessions that are resident, and
        session_tokens: tokens that they hold, kept versions included.
        num_expired: Sessions forgotten because nobody used them; a counter.
        num_displaced: Sessions forgotten to make room; a counter.
        num_refused: Sessions not made because there was no room; a counter.
        num_batches: Batches that have run; a counter.
        num_batch_tokens: Tokens that they computed; a counter.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0
    num_free: int = 0
    num_evictable: int = 0
    num_preempted: int = 0
    num_degraded: int = 0
    num_sessions: int = 0
    session_tokens: int = 0
    num_expired: int = 0
    num_displaced: int = 0
    num_refused: int = 0
    num_batches: int = 0
    num_batch_tokens: int = 0

    @property
    def num_used(self) -> int:
        """Rows that somebody needs: neither free nor evictable."""
        return self.num_slots - self.num_free - self.num_evictable


@dataclass(frozen=True, slots=True)
class Pace:
    """How far an engine has come; cheap enough to be read at every step.

    Attributes:
        num_batches: Batches that have run.
        num_batch_tokens: Tokens that they computed.
        waiting: Requests that wait for a place.
        num_places: Places that are free.
    """

    num_batches: int = 0
    num_batch_tokens: int = 0
    waiting: frozenset[int] = frozenset()
    num_places: int = 0


def stats_of(engine: object) -> EngineStats:
    """Read an engine's numbers, on its thread; a pass over the cache's bookkeeping.

    What only looks like an engine, as in tests, counts nothing.
    """
    if not _is_ours(engine):
        return EngineStats()
    scheduler, sessions = engine.parts.scheduler, engine.sessions
    ledger = scheduler.prefix.ledger
    return EngineStats(
        num_running=_num_running(engine),
        num_waiting=len(_waiting(engine)),
        num_slots=ledger.num_slots,
        num_free=ledger.num_free,
        num_evictable=scheduler.prefix.evictable(),
        num_preempted=scheduler.num_preempted,
        num_degraded=scheduler.num_degraded,
        num_sessions=len(sessions),
        session_tokens=sessions.num_tokens,
        num_expired=sessions.num_expired,
        num_displaced=sessions.num_displaced,
        num_refused=sessions.num_refused,
        num_batches=engine.rates.num_batches,
        num_batch_tokens=engine.rates.num_tokens,
    )


def pace_of(engine: object) -> Pace:
    """Read how far an engine has come, on its thread; see `stats_of`."""
    if not _is_ours(engine):
        return Pace()
    return Pace(
        num_batches=engine.rates.num_batches,
        num_batch_tokens=engine.rates.num_tokens,
        waiting=_waiting(engine),
        num_places=max(0, engine.parts.scheduler.max_sequences - _num_running(engine)),
    )


def _is_ours(engine: object) -> TypeGuard[Jobs]:
    """Whether an engine has our inside; asked so, no tensor library is loaded for the question."""
    return hasattr(engine, "rates") and hasattr(engine, "parts")


def _num_running(engine: Jobs) -> int:
    running = engine.parts.scheduler.running.values()
    return sum(not one.background for one in running)


def _waiting(engine: Jobs) -> frozenset[int]:
    """Requests in the queue; a sequence has the id of the request that made it."""
    queue = engine.parts.scheduler.waiting
    return frozenset(one.sequence_id for one in queue if not one.background)

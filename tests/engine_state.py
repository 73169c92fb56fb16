"""Looking at an engine's state as a whole: what it owns, and whether anything has changed."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from leyline import Engine
from leyline.cache.radix import Node
from leyline.job import Job
from leyline.sequence import Sequence as Work
from leyline.session import Session

BOOKKEEPING = ("turn", "reply", "session", "work")  # of a job: seen through what they hold


def state_digest(engine: Engine) -> str:
    """SHA-256 over sessions, tree, ledger, queues and counters: equal if nothing has changed.

    Everything that a request could notice later is in it, the order of eviction included; how
    fast the machine is found to be is not.
    """
    scheduler, sessions = engine.parts.scheduler, engine.sessions
    state = (
        sorted(session_state(one) for one in sessions),
        (sessions.num_expired, sessions.num_displaced, sessions.num_refused, gone(engine)),
        sorted(repr(node_state(node)) for node in scheduler.prefix.tree.nodes()),
        scheduler.prefix.ledger.counts.tolist(),
        scheduler.prefix.clock,
        [work_state(work) for work in scheduler.waiting],
        [work_state(work) for work in scheduler.running.values()],
        (scheduler.num_preempted, scheduler.num_degraded),
        [job_state(job) for _, job in sorted(engine._jobs.items())],
        [(one.session_id, request) for one, (request, _) in engine._deferred.items()],
        (list(map(repr, engine._outbox)), len(engine._reach._origins)),
    )
    return hashlib.sha256(repr(state).encode("utf-8", "surrogatepass")).hexdigest()


def session_state(session: Session) -> str:
    """Everything that a session is."""
    state = {one.name: getattr(session, one.name) for one in fields(session)}
    state["answers"] = list(session.answers._known.items())
    return repr((session.session_id, state))


def node_state(node: Node) -> tuple[Any, ...]:
    """What a node of the tree holds, and when it was last wanted."""
    where = (node.start, node.tokens, node.slots.tolist(), node.starts)
    return (*where, node.origin, node.last_used, node.parent is None)


def work_state(work: Work) -> str:
    """What a sequence is, has and misses."""
    state = {one.name: getattr(work, one.name) for one in fields(work)}
    view, splice = state.pop("view"), state.pop("splice")
    table = view.table[: view.coverage.reach].tolist()
    on_its_way = splice and (splice.edit, splice.held.tolist(), splice.keep, splice.waited)
    return repr((state, view.context, view.appended, view.coverage, table, on_its_way))


def job_state(job: Job) -> str:
    """What a job has not answered yet."""
    names = [one.name for one in fields(job) if one.name not in BOOKKEEPING]
    return repr((job.request_id, [getattr(job, name) for name in names]))


def gone(engine: Engine) -> list[Any]:
    """The names of sessions that are remembered to be gone."""
    return [(root, list(names.items())) for root, names in engine.sessions._gone.items()]


def rows_of(engine: Engine, slots: np.ndarray) -> bytes:
    """The numbers that stand in slots, bit for bit, in every layer."""
    cache, index = engine.parts.cache, torch.from_numpy(np.array(slots, dtype=np.int64))
    parts = (cache.ckv[:, index], cache.kpe[:, index])
    return b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)


def session_rows(engine: Engine, session_id: str, salt_root: bytes = b"") -> bytes:
    """The rows of a session's context that the tree holds, from its start."""
    session = engine.sessions.get(session_id, salt_root)
    return rows_of(engine, engine.parts.scheduler.prefix.tree.match(session.context))


def counted_afresh(engine: Engine) -> np.ndarray:
    """Owners of every slot, counted from those who say that they own it."""
    scheduler = engine.parts.scheduler
    counts = np.zeros(scheduler.prefix.ledger.num_slots, dtype=np.int64)
    for node in scheduler.prefix.tree.nodes():
        np.add.at(counts, node.slots, 1)
    for work in scheduler.running.values():
        np.add.at(counts, work.view.owned(), 1)
        if work.splice is not None:
            np.add.at(counts, work.splice.held, 1)
    return counts


def assert_books_in_order(engine: Engine) -> None:
    """Every slot is counted as often as somebody says that he owns it."""
    counts = engine.parts.scheduler.prefix.ledger.counts
    assert (counted_afresh(engine) == counts).all()


def assert_at_rest(engine: Engine) -> None:
    """Nothing runs, and every slot is free or in the tree, counted as often as it is there."""
    scheduler = engine.parts.scheduler
    assert not engine.has_work and not scheduler.has_work
    assert not any(session.busy for session in engine.sessions)
    assert not any(session.heal_id is not None for session in engine.sessions)
    assert not engine._deferred
    assert_books_in_order(engine)

"""Looking at an engine's state as a whole: what it owns, and whether anything has changed."""

from __future__ import annotations

import hashlib

import numpy as np

from leyline import Engine


def state_digest(engine: Engine) -> str:
    """SHA-256 over sessions, tree, ledger and queues: equal if and only if nothing has changed."""
    scheduler = engine.parts.scheduler
    sessions = sorted(
        (
            one.session_id,
            one.context.digest(),
            one.context.tokens,
            one.transcript,
            one.version,
            one.computed,
            one.sequence_id,
        )
        for one in engine.sessions
    )
    nodes = sorted(
        (node.start, node.tokens, tuple(node.slots.tolist()), node.origin or b"", node.starts)
        for node in scheduler.prefix.tree.nodes()
    )
    queues = (
        [(work.sequence_id, list(work.edits)) for work in scheduler.waiting],
        [(key, list(work.edits), work.view.coverage) for key, work in scheduler.running.items()],
        sorted(engine._jobs),
    )
    counts = scheduler.prefix.ledger.counts.tolist()
    return hashlib.sha256(repr((sessions, nodes, queues, counts)).encode()).hexdigest()


def counted_afresh(engine: Engine) -> np.ndarray:
    """Owners of every slot, counted from those who say that they own it."""
    scheduler = engine.parts.scheduler
    counts = np.zeros(scheduler.prefix.ledger.num_slots, dtype=np.int64)
    for node in scheduler.prefix.tree.nodes():
        np.add.at(counts, node.slots, 1)
    for work in scheduler.running.values():
        np.add.at(counts, work.view.owned(), 1)
        if work.splice is not None:
            np.add.at(counts, work.splice.private, 1)
    return counts


def assert_at_rest(engine: Engine) -> None:
    """Nothing runs, and every slot is free or in the tree, counted as often as it is there."""
    scheduler = engine.parts.scheduler
    assert not engine.has_work and not scheduler.has_work
    assert not any(session.busy for session in engine.sessions)
    assert (counted_afresh(engine) == scheduler.prefix.ledger.counts).all()

"""Looking into an engine from outside: what it sampled from, which rows it has, what it planned.

What a test wants to know about rows is asked of the raw tensors here, never of the engine's books
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leyline import Engine
from leyline.batch import Batch, Extend, StepOutput
from leyline.context import Context
from leyline.events import Completion, EngineEvent, Failure
from leyline.executor import Executor
from tests.hand_cache import HandCache
from tests.lockstep import record, terminals

Rows = tuple[Tensor, Tensor]


def plain_engine(folder: Path, **options: Any) -> Engine:
    """A float32 engine that leaves free slots as they are: what is in them is part of the test."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_tokens": 2048,
        "max_num_batched_tokens": 32,
        "num_threads": 1,
        "progress": False,
    }
    return Engine(model=str(folder), **{**defaults, **options})


def drain(engine: Engine) -> dict[int, EngineEvent]:
    """Step until nothing is left to do; how each request ended."""
    ended: dict[int, EngineEvent] = {}
    while engine.has_work:
        ended.update({event.request_id: event for event in terminals(engine.step())})
    return ended


def completed(engine: Engine, request: int) -> Completion:
    """Step until a request is answered, and no further."""
    while True:
        for event in engine.step():
            assert not isinstance(event, Failure), event.error
            if event.request_id == request and isinstance(event, Completion):
                return event


def first_logits(engine: Engine, request: int) -> tuple[Completion, Tensor]:
    """Run a request to its end; its answer, and the logits of its first token."""
    recording = record(engine)
    completion = completed(engine, request)
    mine = [sample for sample in recording.samples if sample.sequence_id == request]
    return completion, mine[0].logits


def fresh_logits(oracle: Any, tokens: Sequence[int]) -> Tensor:
    """Logits behind these tokens, computed by `transformers` from nothing."""
    return HandCache(oracle, list(tokens)).compute()[-1]


def slots_of(engine: Engine, context: Context) -> Tensor:
    """Slots of the rows of a context that are in the tree."""
    return torch.from_numpy(engine.parts.scheduler.prefix.tree.match(context).copy())


def rows_of(engine: Engine, context: Context) -> Rows:
    """Copies of the rows of a context that are in the tree: ckv [L, n, C], kpe [L, n, R]."""
    slots = slots_of(engine, context)
    return engine.parts.cache.ckv[:, slots], engine.parts.cache.kpe[:, slots]


def same_rows(left: Rows, right: Rows) -> bool:
    """Whether two copies of rows are the same, bit for bit."""
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def latents_left(engine: Engine, rows: Rows, spared: frozenset[int] = frozenset()) -> int:
    """How many of these rows some slot still holds: a latent is never turned, so it tells.

    Slots that are `spared` do not count: another tenant that said the same has the same rows.
    """
    latents = enumerate(engine.parts.cache.ckv[-1])
    held = {row.numpy().tobytes() for slot, row in latents if slot not in spared}
    return sum(row.numpy().tobytes() in held for row in rows[0][-1])


def free_slots(engine: Engine) -> Tensor:
    """Slots that nobody owns."""
    return torch.from_numpy(np.flatnonzero(engine.parts.scheduler.prefix.ledger.counts == 0))


def free_slots_are_zero(engine: Engine) -> bool:
    """Whether nothing is left in any slot that nobody owns."""
    free, cache = free_slots(engine), engine.parts.cache
    return not cache.ckv[:, free].any() and not cache.kpe[:, free].any()


def evict_everything(engine: Engine) -> None:
    """Have the cache lose every row that nobody holds."""
    prefix = engine.parts.scheduler.prefix
    prefix.reclaim(prefix.ledger.num_slots)


class PlanLog(list[Batch]):
    """Every batch that an engine plans from now on, empty ones left out."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        scheduler = engine.parts.scheduler
        plan = scheduler.plan

        def planned() -> Batch:
            batch = plan()
            if batch:
                self.append(batch)
            return batch

        scheduler.plan = planned  # pyright: ignore[reportAttributeAccessIssue]

    def owners(self, batch: Batch) -> set[int]:
        """The sequences that have an op in a batch."""
        return {op.sequence_id for op in (*batch.moves, *batch.extends)}


class ForcedExecutor(Executor):
    """An executor whose model 'says' what a test wants said, whatever its logits are."""

    replies: Iterator[int]

    def _sample(self, extends: tuple[Extend, ...], hidden: Tensor) -> StepOutput:
        sampled = super()._sample(extends, hidden)
        said = {number: next(self.replies, token) for number, token in sampled.tokens.items()}
        return dataclasses.replace(sampled, tokens=said)


def force(engine: Engine, replies: Sequence[int]) -> None:
    """Have the next sampled tokens be these; after them the model speaks for itself."""
    executor = engine.parts.executor
    forced = ForcedExecutor(executor.model, executor.cache, executor.num_tokens)
    forced.replies = iter(replies)
    engine._parts = dataclasses.replace(engine.parts, executor=forced)

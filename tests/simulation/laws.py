"""The laws of a step: what may be planned, written, read and owned, and what rows must be."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from leyline.batch import Batch, Ended, Move
from leyline.cache.ledger import NO_SLOTS
from leyline.cache.prefix import PrefixCache
from leyline.cache.radix import Node
from leyline.context import Context
from leyline.sequence import Sequence
from tests.simulation.cast import Twin
from tests.simulation.promises import pinned_beyond, pinned_rows
from tests.simulation.symbols import (
    Symbol,
    Violation,
    advance,
    computed,
    require,
    root_state,
)

if TYPE_CHECKING:
    from tests.simulation.world import World


def gap(world: World) -> None:
    """A running sequence misses something, or waits to edit; else it is finished."""
    for work in world.scheduler.running.values():
        unfinished = work.view.missing > work.owed or work.edits or work.splice
        require("gap", unfinished, f"sequence {work.sequence_id} runs and misses nothing")


def one_op(world: World, batch: Batch) -> None:
    """At most one op a sequence, only for those that run, within the budget."""
    ids = [op.sequence_id for op in (*batch.moves, *batch.extends)]
    require("one op", len(ids) == len(set(ids)), f"two ops of one sequence: {ids}")
    require("one op", set(ids) <= world.scheduler.running.keys(), f"an op of nobody: {ids}")
    require("one op", batch.num_tokens <= world.scheduler.max_batch_tokens, "over budget")
    require("one op", len(world.scheduler.running) <= world.scheduler.max_sequences, "too many")


def background(world: World, batch: Batch) -> None:
    """Whoever is in the background has an op only while nobody else runs or waits."""
    ids = {op.sequence_id for op in (*batch.moves, *batch.extends)}
    behind = {n for n in ids if world.live[n].work.background}
    others = [n for n, twin in world.live.items() if not twin.work.background]
    require("background", not (behind and others), f"{behind} did not wait for {others}")


def holders(world: World, slots: Iterable[int]) -> dict[int, list[object]]:
    """Who owns each of these slots, counted afresh: tree nodes, and running sequences."""
    found: dict[int, list[object]] = {slot: [] for slot in slots}
    for node in walk(world.prefix):
        for slot in found.keys() & node.slots.tolist():
            found[slot].append(node)
    for work in world.scheduler.running.values():
        private = work.splice.held.tolist() if work.splice else []
        for slot in [*work.view.owned().tolist(), *private]:
            if slot in found:
                found[slot].append(work)
    return found


def walk(prefix: PrefixCache) -> Iterable[Node]:
    """Every node of the tree but the roots."""
    stack = [child for root in prefix.tree.roots.values() for child in root.children.values()]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node


def write(world: World, batch: Batch) -> None:
    """No slot is written twice in a batch, and none that anybody else holds or needs."""
    if not batch:
        return
    parts = [op.written_slots for op in batch.extends] + [op.dst_slots for op in batch.moves]
    owners = holders(world, np.concatenate(parts).tolist())
    written: list[int] = []
    for op in batch.extends:
        work = world.scheduler.running[op.sequence_id]
        private = set(work.splice.private.tolist()) if work.splice else set()
        for slot in op.written_slots.tolist():
            written.append(slot)
            mine = owners.get(slot, []) == ([work] if slot in private else [])
            require("write", mine, f"sequence {op.sequence_id} writes {slot}, held by others")
    for op in batch.moves:
        written += op.dst_slots.tolist()
        write_of_move(world, op, owners)
    require("write", len(written) == len(set(written)), "two ops write one slot")
    counts = world.ledger.counts[written]
    require("write", (counts > 0).all(), "a free slot is written")


def write_of_move(world: World, op: Move, owners: dict[int, list[object]]) -> None:
    """Copies go to slots of nobody; rows turn in place only where nobody else looks."""
    work = world.scheduler.running[op.sequence_id]
    places = list(zip(op.src_slots.tolist(), op.dst_slots.tolist(), strict=True))
    for src, dst in places:
        others = [owner for owner in owners.get(dst, []) if owner is not work]
        if src != dst:
            require("write", not owners.get(dst), f"a copy goes to {dst}, which is held")
        require("write", len(others) <= 1, f"{dst} turns in place and is held by others")
        foreign = [owner for owner in others if not isinstance(owner, Node)]
        require("write", not foreign, f"{dst} turns in place under another sequence")
    stays = [src for src, dst in places if src == dst]
    require("write", not set(stays) & needed(world, op) if stays else True, "a session's row turns")
    copied = {src for src, dst in places if src != dst}
    require("write", not copied & {dst for _, dst in places}, "a move reads what it writes")


def needed(world: World, op: Move) -> set[int]:
    """Slots through which the contexts of other sessions and of waiting sequences run."""
    contexts = [work.view.context for work in world.scheduler.waiting]
    for session in world.sessions:
        contexts += [session.context] if session.sequence_id != op.sequence_id else []
        contexts += [version.context for version in session.versions if version.kept]
    return {slot for context in contexts for slot in world.prefix.tree.match(context).tolist()}


def read(world: World, batch: Batch) -> None:
    """An extend reads the rows of `[0, start)` of its own context, and not past its end."""
    for op in batch.extends:
        twin = world.live[op.sequence_id]
        require("read", len(op.table) == op.end and op.tokens, "a table of another length")
        rows = [world.machine.read(slot) for slot in op.table[: op.start].tolist()]
        splice = twin.work.splice
        new = splice.next_insert() if splice else None
        head = new.start if new else op.start
        tokens = new.tokens if new else [token for token, _ in twin.symbols[head:]]
        want = twin.symbols[:head] + computed(twin.root, twin.symbols[:head], tokens)
        have = [(row.token, row.seen) for row in rows]
        require("read", have == want[: op.start], f"sequence {op.sequence_id} reads other rows")
        places = [row.position for row in rows]
        require("read", places == list(range(op.start)), f"rows stand at {places}")
        ahead = [token for token, _ in want[op.start : op.end]]
        require("read", [*op.tokens] == ahead, "other tokens are computed")


def last_row(world: World) -> None:
    """Whoever samples next computes the last token's row itself: it is never covered.

    A turn that begins with an edit of its own samples only behind that.
    """
    for work in world.scheduler.running.values():
        last = len(work.view) - 1
        if work.samples and not work.own_edit:
            require("last row", work.view.coverage.reach <= last, "its last row is covered")


def ledger(world: World) -> None:
    """Owners counted afresh equal the stored count; free slots hold nothing."""
    owned = [node.slots for node in walk(world.prefix)]
    for work in world.scheduler.running.values():
        owned += [work.view.owned(), work.splice.held] if work.splice else [work.view.owned()]
    slots = np.concatenate(owned) if owned else NO_SLOTS
    counts = np.bincount(slots, minlength=world.num_slots)
    require("ledger", (counts == world.ledger.counts).all(), "a count is not its owners")
    held, there = world.machine.held, set(slots.tolist())
    require("ledger", held == there, f"free and held: {held ^ there}")


def labelled(world: World, context: Context) -> list[Symbol]:
    """What a context's labels say about its rows, by the origins that the world has learned."""
    symbols: list[Symbol] = []
    state = root_state(context.root)
    for piece in context.pieces:
        chain = None if piece.origin is None else origin(world, piece.origin)
        for token in piece.tokens:
            seen = state if chain is None else chain
            symbols.append((token, seen))
            state = advance(state, token, seen)
            chain = None if chain is None else advance(chain, token, chain)
    return symbols


def origin(world: World, digest: bytes) -> int:
    """What an origin stands for."""
    require("provenance", digest in world.origins, "an origin that no edit made")
    return world.origins[digest]


def learn(world: World, context: Context, symbols: list[Symbol]) -> None:
    """Note what the origins of an edited context stand for; one never stands for two things."""
    for start, _, piece in context.spans():
        if piece.origin is not None:
            known = world.origins.setdefault(piece.origin, symbols[start][1])
            require("provenance", known == symbols[start][1], "one origin for two contexts")


def provenance(world: World) -> None:
    """Every row under a tree path and of every running sequence is what the path says."""
    for root in world.prefix.tree.roots.items():
        state = root_state(root[0])
        for child in root[1].children.values():
            provenance_below(world, child, 0, state, None)
    for work in world.scheduler.running.values():
        symbols = world.live[work.sequence_id].symbols
        require("provenance", len(symbols) == len(work.view), "a context of another length")
        for start, end in work.view.coverage:
            provenance_of(world, work.view.table[start:end].tolist(), start, symbols[start:end])


def provenance_below(
    world: World, node: Node, start: int, state: int, graft: tuple[bytes, int] | None
) -> None:
    """One node of the tree and all below it, given what was computed above it."""
    chain = None
    if node.origin is not None:
        if not node.starts:
            require("provenance", graft and graft[0] == node.origin, "a graft continues nothing")
        chain = origin(world, node.origin) if node.starts or not graft else graft[1]
    symbols: list[Symbol] = []
    for token in node.tokens:
        seen = state if chain is None else chain
        symbols.append((token, seen))
        state = advance(state, token, seen)
        chain = None if chain is None else advance(chain, token, chain)
    provenance_of(world, node.slots.tolist(), start, symbols)
    below = None if node.origin is None or chain is None else (node.origin, chain)
    for edge, child in node.children.items():
        require("provenance", child.edge == edge and child.parent is node, "a crooked tree")
        provenance_below(world, child, start + len(symbols), state, below)


def provenance_of(world: World, slots: list[int], start: int, symbols: list[Symbol]) -> None:
    """The rows in these slots are these symbols, standing from `start` on."""
    require("provenance", len(slots) == len(symbols), "rows without tokens")
    rows = world.machine.rows
    for position, (slot, symbol) in enumerate(zip(slots, symbols, strict=True), start):
        row = rows[slot]
        if row is None or row[:3] != (symbol[0], position, symbol[1]):
            raise Violation(f"provenance: {row} in slot {slot}, not {symbol} at {position}")


def terminal(twin: Twin, event: Ended) -> None:
    """A sequence ends for the reason it gives."""
    work = twin.work
    generated = work.generated
    require("terminal", twin.num_sampled == len(generated) <= work.max_tokens, "tokens miscounted")
    stopped = bool(generated) and generated[-1] in work.stop_ids
    true: dict[str, bool] = {
        "stop": stopped,
        "length": not stopped and len(generated) == work.max_tokens,
        "edited": not work.samples and not twin.requests and work.view.missing <= work.owed,
    }
    require("terminal", true[event.reason], f"it did not end by {event.reason}")
    scored(twin)


def scores(work: Sequence) -> bool:
    """Whether a sequence's prompt is to be scored."""
    return work.sampling is not None and work.sampling.prompt_logprobs is not None


def scored(twin: Twin) -> None:
    """Every token behind a prompt's first has its score, computed behind the row in front of it."""
    work = twin.work
    prompt = twin.symbols[: work.prompt_len]
    told = [(one.token_id, one.logprob) for one in work.scores]
    true = [(token, -float(seen % 2**32)) for (_, seen), (token, _) in pairwise(prompt)]
    require("score", told == (true if scores(work) else []), "a score is missing, or another's")
    require("score", not (scores(work) and work.cached), "a scored prompt reads the cache")


def drained(world: World) -> None:
    """At the end everything has ended, and every slot is free or in the tree."""
    require("terminal", not world.scheduler.has_work, "it does not come to an end")
    require("terminal", not world.live, f"never ended: {[*world.live]}")
    require("terminal", len(world.ended) + len(world.answers) == world.num_ids, "an id without end")
    prefix = world.prefix
    owned = {slot for node in walk(prefix) for slot in node.slots.tolist()}
    require("ledger", world.ledger.num_free + len(owned) == world.num_slots, "a slot has leaked")
    pinned = {slot for slots in pinned_rows(world) for slot in slots}
    if not pinned_beyond(world):
        spare = len(owned - pinned)
        require("pin", prefix.evictable() == spare, "another number of rows can be evicted")
        require("pin", prefix.reclaim(world.num_slots) == spare, "eviction stops at another row")
    for talk in world.talks:
        talk.promises = {}
        talk.session.marks = []
    left = world.num_slots - world.ledger.num_free
    require("ledger", prefix.evictable() == left, "a row of nobody cannot be evicted")
    require("ledger", prefix.reclaim(world.num_slots) == left, "eviction frees less")
    require("ledger", world.ledger.num_free == world.num_slots, "a slot is stuck")

"""The laws of sessions: marks, pins, versions, healing and dry runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from leyline.batch import Edited
from leyline.context import Context
from leyline.directive import Directive
from leyline.session import Session
from tests.simulation.cast import Promise, Talk, Twin
from tests.simulation.symbols import require

if TYPE_CHECKING:
    from tests.simulation.world import World


def text(world: World, talk: Talk) -> None:
    """A session's context consists of the very tokens that went into it."""
    there = [world.texts[tag] for tag in talk.tags]
    require("marks", [*talk.context.tokens] == there, "a session has another text")


def marks(world: World, talk: Talk) -> None:
    """Marks stand where the tokens do that they are about, and nowhere else.

    Of what remains of a span they reach from the first token to the last.
    """
    text(world, talk)
    have: dict[str, list[tuple[int, int]]] = {}
    for mark in talk.session.marks:
        if not mark.ended(world.now):
            spans = have.setdefault(mark.mark_id, [])
            spans += [(mark.start, mark.end)] if mark.of == "span" else []
    want: dict[str, list[tuple[int, int]]] = {}
    for name, promise in talk.promises.items():
        ranges = promise.ranges(talk.tags)
        if not promise.mark.ended(world.now) and (ranges or promise.spans is None):
            want[name] = ranges
    have = {name: sorted(ranges) for name, ranges in have.items()}
    require("marks", have == want, f"marks stand at {have}, not {want}")
    talk.promises = {name: talk.promises[name] for name in want}
    for promise in talk.promises.values():
        promise.absorb(talk.tags)


def turn_ends(world: World, talk: Talk) -> tuple[Directive, ...]:
    """Count a turn, and see that exactly the marks fire that are due, on the very tokens."""
    due: list[Promise] = []
    for name, promise in list(talk.promises.items()):
        if promise.turns is not None:
            promise.turns -= 1
        if promise.turns == 0 or promise.mark.ended(world.now):
            due += [promise] if promise.mark.verb != "pin" else []
            del talk.promises[name]
    fired = talk.session.end_turn(world.now)
    want = {at for one in due for span in one.ranges(talk.tags) for at in range(*span)}
    have = [at for directive in fired for at in range(directive.start, directive.end)]
    require("marks", have == sorted(want), f"marks fire on {have}, not on {sorted(want)}")
    puts = {(one.mark.replacement, one.mark.mode) for one in due}
    asked = {(directive.replacement, directive.mode) for directive in fired}
    require("marks", asked <= puts, "a mark puts in what nobody asked for")
    marks(world, talk)
    return fired


def doomed(twin: Twin) -> None:
    """Marks that fire take their own tokens out, and no others."""
    require("marks", not twin.doomed & {*twin.tags}, "a mark left some of its tokens")


def settle(talk: Talk, of: str, spans: list[frozenset[int]], *, answered: bool) -> None:
    """A turn has ended: what the scratches are about which waited for it.

    A turn that nobody got an answer to has no reasoning, and may come again.
    """
    for name, promise in list(talk.promises.items()):
        if promise.spans is None and promise.mark.of == of:
            if spans or answered:
                promise.spans = spans
            if not spans and answered:
                del talk.promises[name]


def pinned_end(world: World, talk: Talk) -> int:
    """How many leading rows of a session are pinned."""
    pins = [one for one in talk.promises.values() if one.mark.verb == "pin"]
    return max((pin.end(talk.tags) for pin in pins if not pin.mark.ended(world.now)), default=0)


def pin_room(world: World, root: bytes) -> int:
    """How many more rows a tenant may pin."""
    ends = [(talk.context.root, pinned_end(world, talk)) for talk in world.talks]
    mine = sum(end for owner, end in ends if owner == root)
    quota = world.sessions.pin_slots
    assert quota is not None, "a world without a quota of pins"
    return min(quota - mine, world.num_slots // 2 - sum(end for _, end in ends))


def pinned_rows(world: World) -> list[list[int]]:
    """The slots of the rows that are pinned and there; of nobody's where pins exceed a quota."""
    ends = [(talk, pinned_end(world, talk)) for talk in world.talks if talk.promises]
    pinned = [talk.context.prefix(end) for talk, end in ends if end]
    if not pinned or pinned_beyond(world):
        return []
    return [world.prefix.tree.match(context).tolist() for context in pinned]


def pinned_beyond(world: World) -> bool:
    """Whether edits have pushed pins so far back that they hold more than a quota."""
    return any(pin_room(world, talk.context.root) < 0 for talk in world.talks)


def protected(world: World) -> Iterable[tuple[tuple[Talk, int], Context]]:
    """Contexts whose rows nobody may take: those of idle sessions, and kept versions.

    What a client has edited in a busy session becomes a kept version later; its rows are needed
    until then.
    """
    for talk in world.talks:
        number = talk.session.sequence_id
        job = None if number is None else world.live[number].job
        if job is None or (job.keep and job.owes_version):
            yield (talk, -1), talk.context
        for version in talk.session.versions:
            if version.kept:
                yield (talk, version.number), version.context


def left_alone(world: World) -> None:
    """Rows that somebody is to keep stay where they are, unless they are evicted."""
    guarded = {key: (one, world.prefix.tree.match(one).tolist()) for key, one in protected(world)}
    for key, (context, slots) in guarded.items():
        before, had = world.guarded.get(key, (None, []))
        if before is context and not world.lossy:
            require("kept", slots[: len(had)] == had, "rows were taken that were to be kept")
    world.guarded, world.lossy = guarded, False


def versions(world: World, talk: Talk, before: list[tuple[int, bool]], room: int | None) -> None:
    """After `fit`: versions lost their rows, the oldest first, only as far as the quota asks."""
    session = talk.session
    kept = [number for number, had in before if had]
    while room is not None and kept and distinct_rows(session, kept) > room:
        kept = kept[1:]
    have = [(version.number, version.kept) for version in session.versions]
    want = [(number, number in kept) for number, _ in before]
    require("versions", have == want, f"versions are {have}, not {want}")
    world.tally["versions let go"] += have != before


def distinct_rows(session: Session, kept: list[int]) -> int:
    """How many rows a session's context and these versions have together."""
    paths: set[int] = set()
    for context in [session.context, *(v.context for v in session.versions if v.number in kept)]:
        path = 0
        for start, end, piece in context.spans():
            for at in range(start, end):
                label = (piece.origin, at == start, piece.tokens[at - start])
                path = hash((path, *label) if piece.origin else (path, label[2]))
                paths.add(path)
    return len(paths)


def healed(world: World, twin: Twin, talk: Talk) -> None:
    """A session swaps to its exact form between turns, when its rows are there."""
    session, exact = talk.session, twin.work.view.whole()
    require("heal", not session.busy, "a session healed in the middle of a turn")
    require("heal", exact.tokens == session.context.tokens, "healing has changed the text")
    there = world.prefix.resident(exact)
    require("heal", there >= session.computed, "a session goes on from rows that are not there")
    session.heal(exact)
    require("heal", session.context.first_graft() == len(exact), "a healed session has grafts")
    require("heal", session.state == "exact", f"a healed session is {session.state}")
    base = session.checkpoint[0] if session.checkpoint else exact
    require("heal", base.first_graft() == len(base), "asking again brings the grafts back")
    world.tally["swaps"] += 1


def foreseen(world: World, twin: Twin, event: Edited) -> None:
    """A dry run says what the real run does, if nothing comes between."""
    if twin.forecast is None:
        return
    told = twin.forecast.pop(0)
    same = told.receipts == event.receipts and told.edit == event.edit and told.kept == event.kept
    require("rehearsal", same, f"it was to be {told}, and is {event}")
    world.tally["dry runs come true"] += 1

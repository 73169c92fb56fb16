"""The law of purges, told from what every row has really seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.simulation.laws import labelled
from tests.simulation.machine import Machine
from tests.simulation.symbols import SPELLING, Row, Symbol, require, spelled

if TYPE_CHECKING:
    from tests.simulation.world import World


class Memory:
    """What rows know of a text, straight from the computations that made them.

    A row knows a text if the tokens that it attended to, its own included, spell it, or if a row
    that it attended to knows it.

    Args:
        machine: Which computed them.
        text: At least one byte.
    """

    def __init__(self, machine: Machine, text: bytes) -> None:
        self.text = text
        self.ends: dict[int, bytes] = {}
        self.told: set[int] = set()
        self.hinted: set[int] = set()
        for state, (before, token, seen) in machine.lineage.items():
            data = self.ends.get(before, b"") + SPELLING[token]
            self.ends[state] = data[max(0, len(data) - len(text) + 1) :]
            symbol = token, seen
            if before in self.told or text in data or self.knows(symbol):
                self.told.add(state)
            if before in self.hinted or self.hinted_at(symbol):
                self.hinted.add(state)

    def knows(self, row: Row | Symbol) -> bool:
        """Whether a row knows the text."""
        token, seen = what(row)
        return seen in self.told or self.text in self.ends.get(seen, b"") + SPELLING[token]

    def hinted_at(self, row: Row | Symbol) -> bool:
        """Whether a row knows the first byte of the text; else it has nothing to do with it."""
        token, seen = what(row)
        return seen in self.hinted or self.text[:1] in SPELLING[token]

    def any_knows(self, symbols: Iterable[Symbol]) -> bool:
        """Whether any of these rows knows the text, or all of them together spell it."""
        symbols = list(symbols)
        whole = spelled(token for token, _ in symbols)
        return self.text in whole or any(map(self.knows, symbols))


def what(row: Row | Symbol) -> Symbol:
    """A row's token, and the digest of what it saw."""
    return (row.token, row.seen) if isinstance(row, Row) else row


class Scene:
    """What there is just before a purge."""

    def __init__(self, world: World, root: bytes, text: bytes) -> None:
        self.world, self.root, self.text = world, root, text
        self.memory = Memory(world.machine, text)
        self.mine = rows_of(world, root)
        self.others = {owner: rows_of(world, owner) for owner in owners(world) if owner != root}
        self.innocent = set(self.found_in_innocence())

    def found_in_innocence(self) -> Iterable[int]:
        """Slots of filed rows that no row on their path, themselves included, gives a hint of."""
        top = self.world.prefix.tree.roots.get(self.root)
        waiting = [top] if top else []
        while waiting:
            node = waiting.pop()
            slots = node.slots.tolist()
            if not any(self.memory.hinted_at(self.mine[slot]) for slot in slots):
                waiting += node.children.values()
                yield from slots

    @property
    def known(self) -> set[int]:
        """Slots of the tenant's rows that know the text."""
        return {slot for slot, row in self.mine.items() if self.memory.knows(row)}


def owners(world: World) -> set[bytes]:
    """The tenants that have a row."""
    return {*world.prefix.tree.roots, *(twin.root for twin in world.live.values())}


def rows_of(world: World, root: bytes) -> dict[int, Row]:
    """A tenant's rows by slot: those in its tree, and those of its running sequences."""
    slots = filed(world, root)
    for work in world.scheduler.running.values():
        slots.update(work.owned().tolist() if work.view.context.root == root else ())
    return {slot: world.machine.read(slot) for slot in slots}


def filed(world: World, root: bytes) -> set[int]:
    """Slots of the rows in a tenant's tree."""
    tree = world.prefix.tree
    nodes = tree.below(tree.roots[root]) if root in tree.roots else ()
    return {slot for node in nodes for slot in node.slots.tolist()}


def found(scene: Scene) -> None:
    """Whoever looks for a text finds all that knows it."""
    told = scene.world.reach.find(scene.root, scene.text).rows
    require("purge", told >= len(scene.known), f"{told} rows found of {len(scene.known)}")


def purge(scene: Scene) -> None:
    """A purge leaves no row that knows the text, and takes none that has nothing to do with it."""
    world, memory = scene.world, scene.memory
    left = rows_of(world, scene.root)
    knowing = [slot for slot, row in left.items() if memory.knows(row)]
    require("purge", not knowing, f"the rows in {knowing} know {scene.text!r}")
    told = world.reach.find(scene.root, scene.text).rows
    require("purge", told == 0, f"{told} rows are found after the purge")
    gone = scene.innocent - filed(world, scene.root)
    require("purge", not gone, f"the rows in {gone} had nothing to do with {scene.text!r}")
    for owner, rows in scene.others.items():
        require("purge", rows_of(world, owner) == rows, "another tenant's rows were touched")
    sessions_forget(scene)
    remains = [slot for slot in world.ledger.free_slots.tolist() if slot in world.machine.remains]
    require("purge", not remains, f"something remains in the free slots {remains}")


def sessions_forget(scene: Scene) -> None:
    """Nothing that a tenant's sessions can go on from, or go back to, carries the text along."""
    world, memory = scene.world, scene.memory
    for talk in world.talks:
        session = talk.session
        if session.context.root != scene.root:
            continue
        symbols = labelled(world, session.context)
        grafts = (span for span in session.context.spans() if not span[2].exact)
        knowing = any(memory.knows(one) for start, end, _ in grafts for one in symbols[start:end])
        require("purge", not knowing, "a session has grafts that know the text")
        contexts = [version.context for version in session.versions]
        contexts += [session.checkpoint[0]] if session.checkpoint else []
        held = [one for one in contexts if memory.any_knows(labelled(world, one))]
        require("purge", not held, "a session can go back to what knows the text")
        puts = [mark for mark in session.marks if scene.text in spelled(mark.replacement)]
        require("purge", not puts, "a mark would put the text in again")

"""A radix tree over provenance: contexts in, slots out.

An edge is keyed by `(origin, starts, token)`: a graft's rows can only be found by somebody who
presents the graft's origin, and an exact prompt can only ever walk exact edges. `starts` tells
where a graft begins; without it two neighbouring grafts of one origin would read like one longer
graft, whose rows are others.

The tree is structure only. It knows no counts and no clock; `cache.prefix` pairs it with the
ledger and decides what to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from leyline.batch import Slots
from leyline.cache.ledger import NO_SLOTS
from leyline.context import Context, Tokens, common_length

Edge = tuple[bytes | None, bool, int]


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens of one piece, with the slots of their rows.

    Attributes:
        origin: Provenance of the run: None for exact rows.
        starts: Whether a graft begins with the run's first token.
        tokens: Token ids [n]; empty for a root only.
        slots: Their slots [n].
        start: Position of the first token.
        last_used: Logical time of the last look-up or insertion that went through here.
        parent: None for a root and for a node that was removed.
        children: By the edge that leads to them.
    """

    origin: bytes | None
    starts: bool
    tokens: Tokens
    slots: Slots
    start: int
    last_used: int
    parent: Node | None
    children: dict[Edge, Node] = field(default_factory=lambda: {})

    @property
    def end(self) -> int:
        """One past the position of the last token."""
        return self.start + len(self.tokens)

    @property
    def edge(self) -> Edge:
        """The key under which the parent holds this node."""
        return self.origin, self.starts, self.tokens[0]


class RadixTree:
    """Finds rows by pieces; one root for each tenant or cache salt."""

    def __init__(self) -> None:
        self.roots: dict[bytes, Node] = {}

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        for root in self.roots.values():
            yield from self.below(root)

    def below(self, node: Node) -> Iterator[Node]:
        """Every node below this one, parents first."""
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            stack.extend(child.children.values())
            yield child

    def copy(self) -> RadixTree:
        """The same tree in nodes of its own, in the same order; token tuples are shared."""
        twin = RadixTree()
        twin.roots = {key: _alike(root, None) for key, root in self.roots.items()}
        waiting = list(zip(self.roots.values(), twin.roots.values(), strict=True))
        while waiting:
            node, other = waiting.pop()
            other.children = {edge: _alike(child, other) for edge, child in node.children.items()}
            waiting += zip(node.children.values(), other.children.values(), strict=True)
        return twin

    def path(self, context: Context, now: int | None = None) -> list[tuple[Node, int]]:
        """The nodes that hold the context's longest resident prefix, and how much of each.

        Args:
            context: What is looked up.
            now: Logical time to mark the nodes with; None leaves them unmarked.
        """
        node = self.roots.get(context.root)
        found: list[tuple[Node, int]] = []
        for start, end, piece in context.spans():
            position = start
            while node is not None and position < end:
                edge = (
                    piece.origin,
                    _starts(piece.origin, position, start),
                    piece.tokens[position - start],
                )
                node = node.children.get(edge)
                if node is None:
                    return found
                length = common_length(node.tokens, piece.tokens[position - start :])
                found.append((node, length))
                position += length
                if now is not None:
                    node.last_used = now
                if length < len(node.tokens):
                    return found
        return found

    def match(self, context: Context, now: int | None = None) -> Slots:
        """Slots of the context's longest resident prefix [n]."""
        found = [node.slots[:length] for node, length in self.path(context, now)]
        return np.concatenate(found) if found else NO_SLOTS

    def insert(self, context: Context, slots: Slots, now: int) -> Slots:
        """File the rows of a whole context.

        Args:
            context: The pieces whose rows are filed.
            slots: Their slots [len(context)].
            now: Logical time.

        Returns:
            Those of the slots that the tree now holds and did not before; where it already had
            a row for a position, its own slot stays.
        """
        found = self.path(context, now)
        present = sum(length for _, length in found)
        if present == len(context):
            return NO_SLOTS
        node = self._fork(context.root, found, now)
        for start, end, piece in context.spans():
            first = max(start, present)
            if first < end:
                tokens = piece.tokens[first - start :]
                starts = _starts(piece.origin, first, start)
                child = Node(piece.origin, starts, tokens, slots[first:end], first, now, node)
                node.children[child.edge] = child
                node = child
        return slots[present:]

    def truncate(self, node: Node, length: int) -> Slots:
        """Cut a leaf to its first `length` tokens, or remove it; returns the slots let go."""
        assert not node.children, "only a leaf can be cut"
        dropped = node.slots[length:]
        if length == 0:
            self._remove(node)
        else:
            node.tokens, node.slots = node.tokens[:length], node.slots[:length]
        return dropped

    def _remove(self, node: Node) -> None:
        """Unlink a leaf, and its root if that holds nothing more."""
        parent = node.parent
        assert parent is not None, "a root is not removed by hand"
        del parent.children[node.edge]
        node.parent = None
        if parent.parent is None and not parent.children:
            self.roots = {key: root for key, root in self.roots.items() if root is not parent}

    def _fork(self, root: bytes, found: list[tuple[Node, int]], now: int) -> Node:
        """The node below which an insertion goes on: splits the last one found if need be."""
        if not found:
            empty = Node(None, False, (), NO_SLOTS, 0, now, None)
            return self.roots.setdefault(root, empty)
        node, length = found[-1]
        return node if length == len(node.tokens) else self._split(node, length)

    def _split(self, node: Node, length: int) -> Node:
        """Put the first `length` tokens of a node into a new node above it."""
        assert node.parent is not None, "a root has nothing to split"
        upper = Node(
            node.origin,
            node.starts,
            node.tokens[:length],
            node.slots[:length],
            node.start,
            node.last_used,
            node.parent,
        )
        node.parent.children[upper.edge] = upper
        node.starts = False
        node.tokens, node.slots = node.tokens[length:], node.slots[length:]
        node.start += length
        node.parent = upper
        upper.children[node.edge] = node
        return upper


def _alike(node: Node, parent: Node | None) -> Node:
    """A node like this one below another parent, still without children."""
    return replace(node, slots=np.array(node.slots), parent=parent, children={})


def _starts(origin: bytes | None, position: int, start: int) -> bool:
    """Whether a graft begins at this position of a piece that starts at `start`."""
    return origin is not None and position == start

"""The prefix cache: the radix tree and the ledger under one roof.

Publishing a context files its rows in the tree, which becomes one of their owners. Acquiring one
makes the caller an owner of the rows that are there. Reclaiming evicts leaves until enough slots
are free. Nobody else pairs the tree with the ledger.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from leyline.batch import Slots
from leyline.cache.ledger import NO_SLOTS, Ledger
from leyline.cache.radix import Node, RadixTree
from leyline.context import Context

EvictionKey = Callable[[Node], Any]
Pinned = Callable[[], Iterable[Context]]


def nobody() -> Iterable[Context]:
    """Pins of a cache in which nothing is pinned."""
    return ()


class PrefixCache:
    """Rows of contexts that nobody runs at the moment, kept for those who will.

    Args:
        ledger: Counts the owners of the slots.
        evict: Sort key of a leaf; the smallest goes first. Among equals it is the tree's own
            order, which a copy has too.
        pinned: Contexts whose rows are not evicted, asked at every count and every eviction. A
            pin is no owner: a branch that its own user gives up goes, pinned or not.
    """

    def __init__(self, ledger: Ledger, evict: EvictionKey, pinned: Pinned = nobody) -> None:
        self.ledger = ledger
        self.tree = RadixTree()
        self.evict = evict
        self.pinned = pinned
        self.clock = 0

    def copy(self) -> PrefixCache:
        """The same books, to try something out: what is done to the one never shows in the other.

        Slots that become free in the copy are nobody's business: its ledger calls no `on_free`.
        """
        twin = PrefixCache(self.ledger.copy(), self.evict, self.pinned)
        twin.tree = self.tree.copy()
        twin.clock = self.clock
        return twin

    def resident(self, context: Context) -> int:
        """How many leading rows of the context are in the tree; changes nothing."""
        return len(self.tree.match(context))

    def acquire(self, context: Context, limit: int | None = None) -> Slots:
        """Slots of the longest resident prefix, at most `limit`, with the caller as an owner."""
        slots = self.tree.match(context, self._tick())[:limit]
        self.ledger.retain(slots)
        return slots

    def publish(self, context: Context, slots: Slots) -> None:
        """File the rows of a context; the caller stays an owner of `slots` and releases them."""
        self.ledger.retain(self.tree.insert(context, slots, self._tick()))

    def reclaim(self, num_free: int) -> int:
        """Evict leaves until `num_free` slots are free or nothing more can go.

        A leaf is cut from its end, only as far as needed, and as far as the tree alone owns it.
        If that is not enough, rows that somebody holds leave the tree too where they stand below
        rows that nobody holds: their slots stay with their owners.

        Returns:
            Slots freed; a row that has a second place in the tree does not count.
        """
        before = self.ledger.num_free
        for force in (False, True):
            wanted = num_free - self.ledger.num_free
            if wanted > 0:
                self._evict(wanted, force)
        return self.ledger.num_free - before

    def evictable(self) -> int:
        """Slots that no pin keeps and whose every owner is a tree node: what `reclaim` can free."""
        return int(np.count_nonzero(self._idle()))

    def exclusive(self, context: Context, others: Iterable[Context], owners: int) -> int:
        """From which position on only one branch of the tree, and its own user, hold the rows.

        Args:
            context: The branch, as it was published.
            others: Contexts that must keep their rows.
            owners: Owners beside the tree that the branch's own user accounts for.

        Returns:
            The smallest `p` such that the branch could be given up behind `p`.
        """
        branch = self.tree.path(context)
        bound = max((context.common_prefix(other) for other in others), default=0)
        below: Node | None = None
        for node, length in reversed(branch):
            children = [child for child in node.children.values() if child is not below]
            counts = self.ledger.counts[node.slots[:length]]
            foreign = np.flatnonzero(counts != 1 + owners)
            if children or length < len(node.tokens):
                return max(bound, node.start + length)
            if len(foreign):
                return max(bound, node.start + int(foreign[-1]) + 1)
            below = node
        return bound

    def give_up(self, context: Context, start: int) -> None:
        """Take a branch out of the tree from position `start` on, as `exclusive` allowed."""
        for node, length in reversed(self.tree.path(context)):
            if node.start + length <= start:
                return
            self.ledger.release(self.tree.truncate(node, max(0, start - node.start)))

    def let_go(self, context: Context, start: int, others: Iterable[Context]) -> None:
        """Take a branch that nobody goes on from out of the tree, from its end up to `start`.

        It goes as far as nothing else hangs on it, whoever else owns its slots.

        Args:
            context: The branch, as it was published.
            start: Rows in front of it stay.
            others: Contexts whose rows stay.
        """
        start = max([start, *(context.common_prefix(other) for other in others)])
        for node, length in reversed(self.tree.path(context)):
            if node.children or length < len(node.tokens) or node.end <= start:
                return
            self.ledger.release(self.tree.truncate(node, max(0, start - node.start)))

    def cut(self, node: Node, offset: int) -> Slots:
        """Take a node from its token `offset` on, and everything below it, out of the tree.

        Unlike `give_up` it asks nobody: whoever runs on these rows goes on owning them, and would
        file them again. A pin does not help either.

        Args:
            node: A node of the tree; no root.
            offset: How many of its tokens stay, at most all of them.

        Returns:
            Slots freed, each once.
        """
        assert node.parent is not None, "a node is cut that is not in the tree"
        freed = [
            self.ledger.release(self.tree.truncate(child, 0))
            for child in reversed(list(self.tree.below(node)))
        ]
        freed.append(self.ledger.release(self.tree.truncate(node, offset)))
        return np.concatenate((NO_SLOTS, *freed))

    def clear(self) -> None:
        """Forget every row that nobody else owns a share of."""
        for node in reversed(list(self.tree.nodes())):
            self.ledger.release(node.slots)
        self.tree = RadixTree()

    def _evict(self, wanted: int, force: bool) -> None:
        """Cut leaves in the order of the policy until `wanted` slots are freed."""
        # Dropping a tree node's share never changes whether the tree alone owns a slot.
        idle = self._idle()
        order = count()
        leaves = (node for node in self.tree.nodes() if not node.children)
        heap = [(self.evict(node), next(order), node) for node in leaves]
        heapq.heapify(heap)
        while heap and wanted > 0:
            node = heapq.heappop(heap)[2]
            parent, length = node.parent, len(node.tokens)
            wanted -= self._shorten(node, wanted, idle, force)
            # A row with a second place in the tree frees nothing yet: the leaf may go on giving.
            again = node if node.parent is not None and len(node.tokens) < length else parent
            if again is not None and _is_leaf(again):
                heapq.heappush(heap, (self.evict(again), next(order), again))

    def _shorten(self, node: Node, wanted: int, idle: npt.NDArray[np.bool_], force: bool) -> int:
        """Cut a leaf from its end by up to `wanted` freed slots; returns how many were freed."""
        mine = idle[node.slots]
        if force:
            keep = 0 if _below_idle(node, idle) else len(mine)
        else:
            keep = int(np.flatnonzero(~mine)[-1]) + 1 if not mine.all() else 0
        if mine.any():
            keep = max(keep, int(np.flatnonzero(mine)[-wanted:][0]))
        if keep == len(mine):
            return 0
        return len(self.ledger.release(self.tree.truncate(node, keep)))

    def _idle(self) -> npt.NDArray[np.bool_]:
        """Which slots may be evicted [num_slots]."""
        owned = self._tree_counts()
        idle = (owned > 0) & (owned == self.ledger.counts)
        for context in self.pinned():
            idle[self.tree.match(context)] = False
        return idle

    def _tree_counts(self) -> npt.NDArray[np.int32]:
        """How many tree nodes own each slot."""
        owned = np.zeros(self.ledger.num_slots, dtype=np.int32)
        for node in self.tree.nodes():
            np.add.at(owned, node.slots, 1)
        return owned

    def _tick(self) -> int:
        """The next logical time."""
        self.clock += 1
        return self.clock


def _is_leaf(node: Node) -> bool:
    """Whether a node is in the tree and nothing hangs below it."""
    return node.parent is not None and not node.children


def _below_idle(node: Node | None, idle: npt.NDArray[np.bool_]) -> bool:
    """Whether a row that the tree alone owns is in this node or above it."""
    while node is not None and not idle[node.slots].any():
        node = node.parent
    return node is not None

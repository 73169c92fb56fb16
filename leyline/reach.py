"""FORGET with reach: what else in the cache has seen a span, and how to be rid of it.

A purge takes every row of a tenant that was computed with a text in view out of the cache, and
overwrites every free slot with zeros: a row that was evicted earlier is gone from the tree, but
its numbers are not gone from memory until somebody writes there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from leyline.cache.radix import RadixTree
from leyline.context import Context
from leyline.directive import Edit
from leyline.events import Found, Purged
from leyline.marks import Mark
from leyline.origins import Origins
from leyline.parts import Parts
from leyline.purge import Purge
from leyline.sequence import Sequence
from leyline.session import Session
from leyline.sessions import Sessions

SPARE_ORIGINS = 256


class Reach:
    """Finds and removes what a text has left behind in one engine.

    Args:
        parts: The engine's inside.
        sessions: Its sessions.
    """

    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._scheduler = parts.scheduler
        self._cache = parts.cache
        self._sessions = sessions
        self._origins = Origins()
        self._spell = partial(parts.tokenizer.token_bytes, skip_special=False)
        self._num_live = 0

    def learn(self, edit: Edit) -> None:
        """Note what the grafts of an edit were computed under; forget what nobody refers to."""
        self._origins.learn(edit)
        if len(self._origins) > 2 * self._num_live + SPARE_ORIGINS:
            self._prune()

    def find(self, root: bytes, text: bytes) -> Found:
        """What of a tenant depends on a text now."""
        search, slots = self._search(text), set[int]()
        for node, offset in search.dependents(self._tree, root):
            slots.update(node.slots[offset:].tolist())
            for below in self._tree.below(node):
                slots.update(below.slots.tolist())
        for work in self._scheduler.running.values():
            if work.view.context.root == root:
                slots.update(_slots_that_saw(search, work))
        held = [
            one.session_id
            for one in self._of(root)
            if any(_saw(search, context) for context in _contexts(one))
        ]
        return Found(len(slots), tuple(held))

    def purge(self, root: bytes, text: bytes) -> Purged:
        """Remove what of a tenant was computed with a text in view.

        A sequence that runs on rows which saw it loses them and computes what its own tokens say
        again; so do sessions. One whose tokens spell the text will compute it anew: it is told.
        """
        search = self._search(text)
        displaced = self._scheduler.displace(partial(_doubted, search, root))
        num_rows = self._cut(search, root)
        degraded, versions = self._clean_sessions(search, root)
        free = self._scheduler.prefix.ledger.free_slots
        self._cache.fill(torch.from_numpy(free).to(self._cache.ckv.device), 0.0)
        return Purged(
            rows=num_rows,
            slots=len(free),
            sequences=len(displaced),
            versions=versions,
            degraded=tuple(degraded),
            still_held=tuple(one.session_id for one in self._of(root) if search.holds(one.context)),
        )

    def clean(self, purged: Iterable[tuple[bytes, bytes]]) -> None:
        """Have sessions that were told of their last step only after a purge forget its text too.

        Args:
            purged: Root and text of every purge of the step.
        """
        for root, text in purged:
            self._clean_sessions(self._search(text), root)
        self._prune()

    @property
    def _tree(self) -> RadixTree:
        return self._scheduler.prefix.tree

    def _search(self, text: bytes) -> Purge:
        return Purge(text, self._origins, self._spell)

    def _cut(self, search: Purge, root: bytes) -> int:
        """Take the rows of the tree that saw the text out of it; returns how many there were."""
        num_rows = 0
        # A path that was cut may end with a part of the text now, which counts as the text.
        while places := search.dependents(self._tree, root):
            for node, offset in places:
                num_rows += len(node.slots) - offset
                num_rows += sum(len(one.slots) for one in self._tree.below(node))
                self._scheduler.prefix.cut(node, offset)
        return num_rows

    def _clean_sessions(self, search: Purge, root: bytes) -> tuple[list[str], int]:
        """Have a tenant's sessions forget what saw the text.

        Returns:
            Sessions that lost carried rows, and how many kept versions were dropped.
        """
        degraded, num_versions = list[str](), 0
        for session in self._of(root):
            context = search.cleaned(session.context)
            if context is not session.context:
                session.context = context
                degraded.append(session.session_id)
            session.drop_marks(partial(self._puts, search.text))
            num_versions += session.drop_versions(partial(_saw, search))
        return degraded, num_versions

    def _puts(self, text: bytes, mark: Mark) -> bool:
        """Whether a mark would put the text in when it fires."""
        return text in b"".join(map(self._spell, mark.replacement))

    def _of(self, root: bytes) -> list[Session]:
        """The tenant's sessions."""
        return [session for session in self._sessions if session.context.root == root]

    def _prune(self) -> None:
        self._origins.prune(self._live())
        self._num_live = len(self._origins)

    def _live(self) -> set[bytes]:
        """Origins that anything still refers to."""
        scheduler = self._scheduler
        live = {node.origin for node in scheduler.prefix.tree.nodes()}
        works = [*scheduler.running.values(), *scheduler.waiting]
        contexts = [work.view.context for work in works]
        for session in self._sessions:
            contexts += _contexts(session)
        live.update(piece.origin for context in contexts for piece in context.pieces)
        return {origin for origin in live if origin is not None}


def _contexts(session: Session) -> list[Context]:
    """Everything that a session goes on from, or can go back to."""
    versions = (version.context for version in session.versions)
    checkpoint = [session.checkpoint[0]] if session.checkpoint else []
    return [session.context, *versions, *checkpoint]


def _saw(search: Purge, context: Context) -> bool:
    """Whether any row of a context knows the text."""
    return search.first_dependent(context) < len(context)


def _slots_that_saw(search: Purge, work: Sequence) -> set[int]:
    """Slots of a running sequence whose rows know the text, those of an edit under way included."""
    context = work.view.whole()
    first = search.first_dependent(context)
    slots = set(work.view.owned_from(first).tolist())
    if work.splice is None:
        return slots
    for new in work.splice.edit.inserts:
        # No path ends with an insert: a part of the text at its end is no trace of it.
        if first < new.start or search.holds(context.prefix(new.start).append(new.tokens)):
            slots.update(work.splice.private.tolist())
    return slots


def _doubted(search: Purge, root: bytes, context: Context) -> Context | None:
    """What a sequence must go on from if it has rows that saw the text; None if it has none."""
    if context.root != root or not _saw(search, context):
        return None
    return search.cleaned(context)

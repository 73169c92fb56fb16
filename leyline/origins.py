"""What the rows of a graft saw: from an origin back to the context it is the digest of.

A digest tells contexts apart and cannot be read backwards. `Origins` is the book in which every
edit enters, when it commits, the contexts under which the first rows of its grafts were computed.
Such a context may hold grafts itself, whose origins are in the book too.

What is not in the book is unknown, and whoever asks must then think the worst: a context that was
restored from a file has grafts that no edit of this process made. The book is no longer than some
number of tokens; the contexts that it has known for longest are unknown again when it is full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from leyline.context import Context, Piece, Tokens
from leyline.directive import Edit

MAX_TOKENS = 8_000_000  # 64 MB of references to token ids


class View(NamedTuple):
    """The first `length` tokens of a context, which other views of it share."""

    context: Context
    length: int

    def read(self) -> Context:
        """The context that this stands for."""
        whole = self.length == len(self.context)
        return self.context if whole else self.context.prefix(self.length)

    def extended(self, tokens: Tokens) -> View:
        """With exact tokens behind it: without a copy where they follow in its own context."""
        end = self.length + len(tokens)
        index, offset = _place(self.context, self.length)
        piece = self.context.pieces[index] if index < len(self.context.pieces) else Piece(())
        if piece.exact and piece.tokens[offset : offset + len(tokens)] == tokens:
            return View(self.context, end)
        return View(self.read().append(tokens), end)


class Origins:
    """The contexts that grafts were computed under, by the digests that are their origins.

    Args:
        max_tokens: How many tokens the contexts in the book have at most, all together.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._views: dict[bytes, View] = {}
        self._origins: dict[int, list[bytes]] = {}  # Of each context, by its id; the oldest first.

    def __len__(self) -> int:
        """How many origins are known."""
        return len(self._views)

    def learn(self, edit: Edit) -> None:
        """Note where the grafts of an edit come from: before anybody edits the result again."""
        before = _bare(edit.before)
        for start, _, piece in edit.after.spans():
            if piece.origin is not None and piece.origin not in self._views:
                view = self._source(edit, before, start)
                if view is not None:
                    self._note(piece.origin, view)
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._origins)))

    def view(self, origin: bytes) -> View | None:
        """`of`, as a part of a context that other origins share."""
        return self._views.get(origin)

    def of(self, origin: bytes) -> Context | None:
        """The context under which the first row of a graft of this origin was computed.

        Every later row of the graft saw the graft's own tokens before it too. None if unknown.
        """
        view = self.view(origin)
        return None if view is None else view.read()

    def seen(self, context: Context, position: int) -> Context | None:
        """The context under which the row at a position was computed.

        Args:
            context: Any context; its labels say what is at the position.
            position: At most its length: there the answer is the context itself.

        Returns:
            None where the position lies in a graft of unknown origin.
        """
        view = self._view(context, position)
        return None if view is None else view.read()

    def prune(self, live: Iterable[bytes | None]) -> None:
        """Forget all but these origins and those that the contexts they stand for refer to.

        Args:
            live: Origins of all grafts that exist: in the tree, in the contexts and versions of
                sessions, in sequences and their edits. None, which is no origin, is ignored.
        """
        kept, waiting = set[bytes](), list(live)
        while waiting:
            origin = waiting.pop()
            view = self._views.get(origin) if origin is not None else None
            if origin is not None and view is not None and origin not in kept:
                kept.add(origin)
                spans = view.context.spans()
                waiting += [piece.origin for start, _, piece in spans if start < view.length]
        old = self._views
        self._views, self._origins, self.num_tokens = {}, {}, 0
        for origin, view in old.items():
            if origin in kept:
                self._note(origin, view)

    def _note(self, origin: bytes, view: View) -> None:
        """Enter an origin."""
        if id(view.context) not in self._origins:
            self._origins[id(view.context)] = []
            self.num_tokens += len(view.context)
        self._origins[id(view.context)].append(origin)
        self._views[origin] = view

    def _drop(self, context_id: int) -> None:
        """Forget a context and all origins that need it."""
        views = [self._views.pop(origin) for origin in self._origins.pop(context_id)]
        self.num_tokens -= len(views[0].context)

    def _source(self, edit: Edit, before: Context, position: int) -> View | None:
        """What the row at a position after the edit saw."""
        for run in edit.kept:
            if run.dst <= position < run.dst + run.length:
                return self._view(before, position - run.delta)
        for new in edit.inserts:
            if new.dst <= position < new.end:
                return View(before, new.start).extended(new.tokens[: position - new.dst])
        for share in edit.shares:
            if share.dst <= position < share.end:
                source = _bare(share.source.context)
                return self._view(source, share.source.start + position - share.dst)
        return None

    def _view(self, context: Context, position: int) -> View | None:
        """What the row at a position of a context saw."""
        index, offset = _place(context, position)
        piece = context.pieces[index] if index < len(context.pieces) else Piece(())
        if piece.origin is None:
            return View(context, position)
        view = self._views.get(piece.origin)
        return None if view is None else view.extended(piece.tokens[:offset])


def _place(context: Context, position: int) -> tuple[int, int]:
    """Which piece holds a position, and how far into it; behind the last piece at the end."""
    index = bisect_right(context.starts, position) - 1
    return index, position - context.starts[index]


def _bare(context: Context) -> Context:
    """The same context without what it and its pieces may carry along."""
    return Context(tuple(Piece(one.tokens, one.origin) for one in context.pieces), context.root)

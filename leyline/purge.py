"""Which rows know a text: those that FORGET with the scope of the cache must take away.

A row knows a text if it was computed with the text in view: if the bytes of the tokens that it
attended to, or that one of the rows which it attended to had attended to before, spell it. Tokens
say what exact rows saw. What a graft saw, its context no longer says: that is in `Origins`. A text
is sought by its bytes, however it was cut into tokens, and also across the border between what a
graft saw and the graft's own tokens.

Too much may be taken away, never too little:

* An occurrence counts from its first token on: rows in the middle of it hold parts of it. Branches
  that share no more than this first token go with it.
* Where a path *ends* with a proper prefix of the text that is at least half of it (a reply that
  was stopped, a leaf that eviction has cut short), that counts as an occurrence.
* A graft of unknown origin may have seen anything.
* An empty text is nowhere, and nothing knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leyline.cache.radix import Node, RadixTree
from leyline.context import Context, Piece, Tokens
from leyline.origins import Origins, View

MAX_SPELLED = 2_000_000  # tokens whose spelling is remembered
Spell = Callable[[int], bytes]
Place = tuple[Node, int]  # a node, and the offset of a token in it
Step = tuple[Node, bytes, bytes | None]  # a node, its path so far, what its graft saw so far


def first_dependent(context: Context, text: bytes, origins: Origins, spell: Spell) -> int:
    """`Purge.first_dependent` of a single context."""
    return Purge(text, origins, spell).first_dependent(context)


def dependents(
    tree: RadixTree, root: bytes, text: bytes, origins: Origins, spell: Spell
) -> list[Place]:
    """`Purge.dependents` of a tree."""
    return Purge(text, origins, spell).dependents(tree, root)


def cleaned(context: Context, text: bytes, origins: Origins, spell: Spell) -> Context:
    """`Purge.cleaned` of a single context."""
    return Purge(text, origins, spell).cleaned(context)


def holds(context: Context, text: bytes, spell: Spell) -> bool:
    """`Purge.holds` of a single context."""
    return Purge(text, Origins(), spell).holds(context)


class Purge:
    """A search for all that knows one text.

    It remembers what it found out about an origin: whoever asks about many contexts makes one,
    and asks before the next edit commits.

    Args:
        text: The bytes of what is forgotten, as `spell` spells it.
        origins: What grafts saw.
        spell: The bytes that a token stands for, possibly none.
    """

    def __init__(self, text: bytes, origins: Origins, spell: Spell) -> None:
        self.text = text
        self.origins = origins
        self._bytes = _Bytes(spell)
        self._runs: dict[int, _Spelled] = {}
        self._num_spelled = 0
        self._ends: dict[bytes, bytes | None] = {}
        self._needed: dict[tuple[int, bytes | None], tuple[object, int]] = {}

    def holds(self, context: Context) -> bool:
        """Whether the context's own tokens spell the text, whatever its rows saw."""
        return self._find(self._text(context), False) >= 0

    def first_dependent(self, context: Context) -> int:
        """Position of the first row that knows the text; the length if there is none.

        Once that row is taken away, none behind it can be found in the cache.
        """
        at = self._find(self._text(context), True)
        first = len(context) if at < 0 else self._token(context.tokens, at)
        return min(self._first_graft(context), first)

    def cleaned(self, context: Context) -> Context:
        """The same tokens without the grafts that know the text: exact from the first of them on.

        Where the tokens themselves spell the text (`holds`), so will the rows that are computed
        from them. The same object if no graft knows it.
        """
        first = self._first_graft(context)
        return context if first == len(context) else context.exact_from(first)

    def dependents(self, tree: RadixTree, root: bytes) -> list[Place]:
        """Where one tenant's part of the tree must be cut so that no row in it knows the text.

        Returns:
            Nodes, and the offsets in them from which on they and all below them must go; none of
            the nodes is below another one.
        """
        cuts: dict[Node, int] = {}
        top = tree.roots.get(root)
        waiting = self._below(top, b"", b"") if top else []
        while waiting:
            node, path, seen = waiting.pop()
            data = self._spelled(node.tokens)
            for first, offset in self._places(node, data, path, seen):
                cuts[first] = min(offset, cuts.get(first, offset))
            # On below a cut too: a text that ends there may begin further up.
            seen = None if seen is None else self._end(seen + data)
            waiting += self._below(node, self._end(path + data), seen)
        return [(node, offset) for node, offset in cuts.items() if not _is_below(node, cuts)]

    def _below(self, node: Node, path: bytes, seen: bytes | None) -> list[Step]:
        """The children of a node, each with what is in front of it."""
        return [
            (child, path, self._seen(child.origin) if child.origin and child.starts else seen)
            for child in node.children.values()
        ]

    def _places(self, node: Node, data: bytes, path: bytes, seen: bytes | None) -> list[Place]:
        """Where the text begins each time that a row of this node is the first to know it.

        Args:
            node: Any.
            data: What its tokens spell.
            path: The last bytes of the path in front of it.
            seen: For a graft the last bytes of what was in view in front of it; None if the text
                was.
        """
        places = [self._place(node, data, path)]
        if node.origin is not None:
            graft = (node, 0) if seen is None else self._place(node, data, seen, graft=True)
            places.append(graft)
        return [place for place in places if place is not None]

    def _place(
        self, node: Node, data: bytes, before: bytes, *, graft: bool = False
    ) -> Place | None:
        """The token with which the first occurrence in a node begins, there or further up.

        Args:
            node: Where it ends.
            data: What the node's tokens spell.
            before: The last bytes in front of them.
            graft: Whether those are what a graft saw; then further up is no further than its own
                first token.
        """
        at = self._find(before + data, not node.children)
        if at < 0:
            return None
        at -= len(before)
        while at < 0 and not (graft and node.starts):
            assert node.parent is not None, "an occurrence begins above the root"
            node = node.parent
            at += len(self._spelled(node.tokens))
        return node, self._token(node.tokens, at)

    def _first_graft(self, context: Context) -> int:
        """Position of the first grafted row that knows the text; the length if there is none."""
        for start, end, piece in context.spans():
            if piece.origin is not None:
                seen, last = self._seen(piece.origin), end == len(context)
                first = 0 if seen is None else self._first(seen, piece.tokens, last)
                if first is not None:
                    return start + first
        return len(context)

    def _first(self, before: bytes, tokens: Tokens, last: bool) -> int | None:
        """Index of the first of the tokens to know the text, given the bytes in front of them."""
        at = self._find(before + self._spelled(tokens), last)
        return None if at < 0 else self._token(tokens, at - len(before))

    def _token(self, tokens: Tokens, at: int) -> int:
        """Index of the token that holds a byte; of the first one if the byte is in front of it."""
        return int(np.searchsorted(self._spell(tokens).ends, at, "right")) if at >= 0 else 0

    def _seen(self, origin: bytes) -> bytes | None:
        """The last bytes of what a graft's first row saw; None if that row knows the text."""
        waiting = [origin]
        while waiting:
            if waiting[-1] in self._ends:
                waiting.pop()
                continue
            view = self.origins.view(waiting[-1])
            grafts = [piece.origin for _, piece in _parts(view) if piece.origin] if view else []
            unread = [graft for graft in grafts if graft not in self._ends]
            waiting += unread  # No recursion: thousands of edits may lie behind a context.
            if not unread:
                self._ends[waiting[-1]] = self._read(view)
        return self._ends[origin]

    def _read(self, view: View | None) -> bytes | None:
        """The last bytes in view, None if a row there knows the text or nobody knows it."""
        if not self.text:
            return b""
        if view is None or self._knows(view):
            return None
        data = b""
        for start, piece in _parts(view):
            data = self._end(data + self._last(piece.tokens, view.length - start))
        return data

    def _knows(self, view: View) -> bool:
        """Whether a row in view knows all of the text. What grafts in it saw has been read."""
        if self._until(view.context) <= view.length:
            return True
        return any(
            self._until_graft(piece) <= min(len(piece.tokens), view.length - start)
            for start, piece in _parts(view)
            if piece.origin is not None
        )

    def _until(self, context: Context) -> int:
        """How many tokens of a context spell the text; one more than all if they do not."""
        key = id(context), None
        if key not in self._needed:  # The context is kept beside the number, and so is its id.
            self._needed[key] = context, self._spells(context)
        return self._needed[key][1]

    def _spells(self, context: Context) -> int:
        """`_until`, found out."""
        data = b""
        for start, _, piece in context.spans():
            length = self._complete(data, piece.tokens)
            if length <= len(piece.tokens):
                return start + length
            data = self._end(data + self._last(piece.tokens, length))
        return len(context) + 1

    def _until_graft(self, piece: Piece) -> int:
        """How many tokens of a graft there are until one knows all of the text."""
        assert piece.origin is not None, "not a graft"
        key, seen = (id(piece.tokens), piece.origin), self._ends[piece.origin]
        if key not in self._needed:
            length = 1 if seen is None else self._complete(seen, piece.tokens)
            self._needed[key] = piece.tokens, length
        return self._needed[key][1]

    def _complete(self, before: bytes, tokens: Tokens) -> int:
        """How many tokens complete the text, given the bytes before; one more than all if none."""
        data, ends = self._spell(tokens).data, self._spell(tokens).ends
        at = (before + data).find(self.text)
        end = at + len(self.text) - len(before)
        return len(tokens) + 1 if at < 0 else int(np.searchsorted(ends, end)) + 1

    def _last(self, tokens: Tokens, length: int) -> bytes:
        """The last bytes of the first `length` tokens: no more than count."""
        data, ends = self._spell(tokens).data, self._spell(tokens).ends
        end = len(data) if length >= len(tokens) else int(ends[length - 1])
        return self._end(data[max(0, end - len(self.text)) : end])

    def _find(self, data: bytes, last: bool) -> int:
        """Offset of the text, or of its first half and more if that is the `last` of a path.

        Returns:
            -1 if it is not there.
        """
        at = data.find(self.text) if self.text else -1
        if at >= 0 or not last or not self.text:
            return at
        half = self.text[: (len(self.text) + 1) // 2]
        at = data.find(half, max(0, len(data) - len(self.text) + 1))
        while at >= 0 and not self.text.startswith(data[at:]):
            at = data.find(half, at + 1)
        return at

    def _end(self, data: bytes) -> bytes:
        """As many of the last bytes as an occurrence that goes on behind them can hold."""
        return data[max(0, len(data) - len(self.text) + 1) :]

    def _text(self, context: Context) -> bytes:
        """What a context spells."""
        return b"".join(self._spelled(piece.tokens) for piece in context.pieces)

    def _spelled(self, tokens: Tokens) -> bytes:
        """What a run of tokens spells."""
        return self._spell(tokens).data

    def _spell(self, tokens: Tokens) -> _Spelled:
        """A run of tokens and what it spells; contexts have most of their runs in common."""
        if id(tokens) not in self._runs:  # The run is kept beside its bytes, and so is its id.
            if self._num_spelled > MAX_SPELLED:
                self._runs, self._num_spelled = {}, 0
            words = [self._bytes[token] for token in tokens]
            ends = np.fromiter(map(len, words), np.int64, len(words)).cumsum()
            self._runs[id(tokens)] = _Spelled(tokens, b"".join(words), ends)
            self._num_spelled += len(tokens)
        return self._runs[id(tokens)]


class _Spelled(NamedTuple):
    """A run of tokens, its bytes, and where in them each token ends."""

    tokens: Tokens
    data: bytes
    ends: npt.NDArray[np.int64]


class _Bytes(dict[int, bytes]):
    """The bytes of tokens, each spelled once."""

    def __init__(self, spell: Spell) -> None:
        super().__init__()
        self.spell = spell

    def __missing__(self, token: int) -> bytes:
        self[token] = self.spell(token)
        return self[token]


def _parts(view: View) -> list[tuple[int, Piece]]:
    """The pieces that a view reaches into, and where they start; the last one may end behind it."""
    return [(start, piece) for start, _, piece in view.context.spans() if start < view.length]


def _is_below(node: Node, cuts: dict[Node, int]) -> bool:
    """Whether one of the cuts is above a node."""
    above = node.parent
    while above is not None and above not in cuts:
        above = above.parent
    return above is not None

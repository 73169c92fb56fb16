"""What the model attends to: token ids, each labelled with where its rows come from.

A `Context` is a list of `Piece`s. The rows of an *exact* piece are what a fresh prefill of this
very context would give. The rows of a *graft* were computed in an earlier context and carried
over; its `origin` is the digest of the context under which its first row was computed, and every
later row of the piece was computed under that context plus the piece's tokens before it. Two
contexts with equal pieces therefore have interchangeable rows, and two contexts with equal tokens
but other pieces never do.

A context is canonical: no piece is empty, neighbouring exact pieces are one piece, a graft that
continues the graft before it is part of it, and a graft whose origin is the digest of the very
context before it is exact. `canonical` establishes this; nothing else builds pieces.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol

import numpy as np

Tokens = tuple[int, ...]


class Sha(Protocol):
    """A running hash."""

    def update(self, data: bytes, /) -> None:
        """Go on with these bytes."""
        ...

    def copy(self) -> Sha:
        """Another one that has come as far."""
        ...

    def digest(self) -> bytes:
        """What it has come to: 32 bytes. It can go on from there."""
        ...


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one provenance.

    Attributes:
        tokens: Token ids, never empty in a canonical context.
        origin: None for exact rows; else the SHA-256 digest (32 bytes) of the context under which
            the first row was computed.
    """

    tokens: Tokens
    origin: bytes | None = None

    @property
    def exact(self) -> bool:
        """Whether a fresh prefill would give these rows."""
        return self.origin is None

    @cached_property
    def packed(self) -> bytes:
        """The ids as they are hashed: u32, little endian."""
        return pack(self.tokens)

    def tail(self, offset: int) -> Piece:
        """The piece without its first `offset` tokens, its origin moved along."""
        return Piece(self.tokens[offset:], self.continued(offset) if offset else self.origin)

    def continued(self, length: int | None = None) -> bytes | None:
        """The origin of a row that continues the first `length` tokens; None for exact ones."""
        if self.origin is None:
            return None
        return hashlib.sha256(self._serialised(b"continuation" + self.origin, length)).digest()

    def labelled(self, length: int | None = None) -> bytes:
        """The first `length` tokens within the serialisation of their context."""
        return self._serialised(b"\0" if self.origin is None else b"\1" + self.origin, length)

    def _serialised(self, label: bytes, length: int | None) -> bytes:
        """A label, and number (u64) and ids (u32) of the first `length` tokens, little endian."""
        size = len(self.tokens) if length is None else length
        return b"".join((label, struct.pack("<Q", size), memoryview(self.packed)[: 4 * size]))

    def cut(self, length: int) -> Piece:
        """The first `length` tokens: the same object if that is all."""
        return self if length >= len(self.tokens) else Piece(self.tokens[:length], self.origin)


@dataclass(frozen=True)
class Context:
    """An immutable list of pieces under one root.

    Attributes:
        pieces: In order of position.
        root: The digest that the tenant or cache salt gives; contexts of different roots share
            nothing.
    """

    pieces: tuple[Piece, ...] = ()
    root: bytes = b""

    @classmethod
    def of(cls, tokens: Iterable[int], root: bytes = b"") -> Context:
        """The exact context of these token ids."""
        return canonical([Piece(tuple(tokens))], root)

    @cached_property
    def tokens(self) -> Tokens:
        """All token ids in order."""
        if len(self.pieces) == 1:
            return self.pieces[0].tokens
        return tuple(chain.from_iterable(piece.tokens for piece in self.pieces))

    @cached_property
    def distinct(self) -> Tokens:
        """The token ids that occur, each once, in order of id."""
        return tuple(sorted({*self.tokens}))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each piece's first token, and the length at the end: `num_pieces + 1`."""
        positions = [0]
        for piece in self.pieces:
            positions.append(positions[-1] + len(piece.tokens))
        return tuple(positions)

    def __len__(self) -> int:
        return self.starts[-1]

    def spans(self) -> Iterator[tuple[int, int, Piece]]:
        """`(start, end, piece)` of every piece, in positions."""
        return zip(self.starts, self.starts[1:], self.pieces, strict=False)

    def prefix(self, length: int) -> Context:
        """The first `length` tokens with their labels."""
        return Context(tuple(_cut(self, length)), self.root)

    def tail(self, start: int, end: int | None = None) -> tuple[Piece, ...]:
        """The pieces from `start` up to `end` as grafts: what a splice carries over.

        An exact piece becomes a graft of the context before it; a graft stays what it is.
        """
        limit = len(self) if end is None else min(end, len(self))
        if start >= limit:
            return ()
        indices = range(self.index(start), bisect_left(self.starts, limit))
        return tuple(self._graft(index, max(self.starts[index], start), limit) for index in indices)

    def _graft(self, index: int, position: int, end: int) -> Piece:
        """What a piece holds from a position up to `end`, as a graft."""
        piece, start = self.pieces[index], self.starts[index]
        if piece.exact:
            return Piece(piece.tokens[position - start : end - start], self.digest(position))
        return piece.tail(position - start).cut(end - position)

    def index(self, position: int) -> int:
        """Which piece holds a position; behind the last piece the number of pieces."""
        return bisect_right(self.starts, position) - 1

    def append(self, tokens: Iterable[int]) -> Context:
        """This context with exact tokens behind it."""
        return canonical([*self.pieces, Piece(tuple(tokens))], self.root)

    def exact_from(self, start: int) -> Context:
        """The same tokens, everything from `start` on labelled exact: the honest re-prefill."""
        if self.first_graft(start) == len(self):
            return self
        return self.prefix(start).append(self.tokens[start:])

    def first_graft(self, start: int = 0) -> int:
        """Position of the first grafted token at or after `start`; the length if there is none."""
        for first, end, piece in self.spans():
            if end > start and not piece.exact:
                return max(first, start)
        return len(self)

    def num_grafted(self, end: int | None = None) -> int:
        """How many of the first `end` tokens are grafted."""
        limit = len(self) if end is None else end
        return sum(
            min(last, limit) - first
            for first, last, piece in self.spans()
            if not piece.exact and first < limit
        )

    def common_prefix(self, other: Context) -> int:
        """How many leading tokens agree with `other` in id and in provenance."""
        if self.root != other.root:
            return 0
        shared = 0
        for mine, theirs in zip(self.pieces, other.pieces, strict=False):
            if mine.origin != theirs.origin:
                return shared
            length = common_length(mine.tokens, theirs.tokens)
            shared += length
            if length < max(len(mine.tokens), len(theirs.tokens)):
                return shared
        return shared

    def digest(self, length: int | None = None) -> bytes:
        """SHA-256 over the canonical serialisation of the first `length` tokens: 32 bytes."""
        return self.hashed(len(self) if length is None else length).digest()

    def hashed(self, length: int, new: Tokens = ()) -> Sha:
        """The hash of the first `length` tokens and exact ones behind them, to go on from."""
        length = min(length, len(self))
        index = max(0, bisect_left(self.starts, length) - 1)
        state, size = self._states[index].copy(), length - self.starts[index]
        if size and new and self.pieces[index].exact:
            state.update(b"\0" + struct.pack("<Q", size + len(new)))
            state.update(self.pieces[index].packed[: 4 * size] + pack(new))
            return state
        if size:
            state.update(self.pieces[index].labelled(size))
        if new:
            state.update(Piece(new).labelled())
        return state

    @cached_property
    def _states(self) -> tuple[Sha, ...]:
        """The hash of what is in front of each piece, at least of nothing."""
        states: list[Sha] = [hashlib.sha256(_serialised_root(self.root))]
        for piece in self.pieces[:-1]:
            states.append(states[-1].copy())
            states[-1].update(piece.labelled())
        return tuple(states)


def canonical(pieces: Iterable[Piece], root: bytes = b"") -> Context:
    """The canonical context of these pieces; see the module's first lines for the rules."""
    merged: list[Piece] = []
    # The hash of all pieces but the last, which may still grow; no token is hashed many times.
    state = hashlib.sha256(_serialised_root(root))
    for piece in pieces:
        last = merged[-1].labelled() if merged else b""
        if piece.origin is not None:
            before = state.copy()
            before.update(last)
            piece = Piece(piece.tokens) if piece.origin == before.digest() else piece
        if merged and continues(merged[-1], piece):
            merged[-1] = Piece(merged[-1].tokens + piece.tokens, merged[-1].origin)
        elif piece.tokens:
            state.update(last)
            merged.append(piece)
    return Context(tuple(merged), root)


def continuation(origin: bytes, tokens: Sequence[int]) -> bytes:
    """Origin of a row that was computed `tokens` behind a graft's first row: 32 bytes."""
    size = struct.pack("<Q", len(tokens))
    return hashlib.sha256(b"continuation" + origin + size + pack(tokens)).digest()


def salted(salt: str) -> bytes:
    """The root of a tenant or cache salt; the empty salt is the shared root."""
    return hashlib.sha256(salt.encode()).digest() if salt else b""


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences; slices are compared, not tokens."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as u32, little endian; an `array` is filled much faster than `struct` packs."""
    return np.asarray(array("I", tokens), "<u4").tobytes()


def continues(left: Piece, right: Piece) -> bool:
    """Whether two neighbours are one piece."""
    if left.origin is None or right.origin is None:
        return left.origin is right.origin
    return right.origin == left.continued()


def _cut(context: Context, length: int) -> Iterator[Piece]:
    """The pieces of the first `length` tokens."""
    for start, _, piece in context.spans():
        if start >= length:
            return
        yield piece.cut(length - start)


def _serialised_root(root: bytes) -> bytes:
    """What the serialisation of a context begins with."""
    return struct.pack("<Q", len(root)) + root

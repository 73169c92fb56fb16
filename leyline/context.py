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
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
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

    def tail(self, offset: int) -> Piece:
        """The piece without its first `offset` tokens, its origin moved along."""
        if offset == 0 or self.origin is None:
            return Piece(self.tokens[offset:], self.origin)
        return Piece(self.tokens[offset:], continuation(self.origin, self.tokens[:offset]))


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
        return tuple(token for piece in self.pieces for token in piece.tokens)

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

    def tail(self, start: int) -> tuple[Piece, ...]:
        """The pieces from `start` on as grafts: what a splice carries over.

        An exact piece becomes a graft of the context before it; a graft stays what it is.
        """
        return tuple(
            self._graft(max(first, start)) for first, end, _ in self.spans() if end > start
        )

    def _graft(self, position: int) -> Piece:
        """The rest of the piece that holds `position`, as a graft."""
        index = bisect_left(self.starts, position + 1) - 1
        rest = self.pieces[index].tail(position - self.starts[index])
        return rest if rest.origin else Piece(rest.tokens, self.digest(position))

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
        state = hashlib.sha256(_serialised_root(self.root))
        for piece in _cut(self, len(self) if length is None else length):
            state.update(_serialised_piece(piece))
        return state.digest()


def canonical(pieces: Iterable[Piece], root: bytes = b"") -> Context:
    """The canonical context of these pieces; see the module's first lines for the rules."""
    merged: list[Piece] = []
    # The hash of all pieces but the last, which may still grow; no token is hashed many times.
    state = hashlib.sha256(_serialised_root(root))
    for piece in pieces:
        last = _serialised_piece(merged[-1]) if merged else b""
        if piece.origin is not None:
            before = state.copy()
            before.update(last)
            piece = Piece(piece.tokens) if piece.origin == before.digest() else piece
        if merged and _continues(merged[-1], piece):
            merged[-1] = Piece(merged[-1].tokens + piece.tokens, merged[-1].origin)
        elif piece.tokens:
            state.update(last)
            merged.append(piece)
    return Context(tuple(merged), root)


def continuation(origin: bytes, tokens: Sequence[int]) -> bytes:
    """Origin of a row that was computed `tokens` behind a graft's first row: 32 bytes."""
    return hashlib.sha256(b"continuation" + origin + _serialise(tokens)).digest()


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


def _continues(left: Piece, right: Piece) -> bool:
    """Whether two neighbours are one piece."""
    if left.origin is None or right.origin is None:
        return left.origin is right.origin
    return right.origin == continuation(left.origin, left.tokens)


def _cut(context: Context, length: int) -> Iterator[Piece]:
    """The pieces of the first `length` tokens."""
    for start, _, piece in context.spans():
        if start >= length:
            return
        yield Piece(piece.tokens[: length - start], piece.origin)


def _serialise(tokens: Sequence[int]) -> bytes:
    """Length (u64) and ids (u32), little endian."""
    return struct.pack(f"<Q{len(tokens)}I", len(tokens), *tokens)


def _serialised_root(root: bytes) -> bytes:
    """What the serialisation of a context begins with."""
    return struct.pack("<Q", len(root)) + root


def _serialised_piece(piece: Piece) -> bytes:
    """A piece within the serialisation of its context."""
    label = b"\0" if piece.origin is None else b"\1" + piece.origin
    return label + _serialise(piece.tokens)

"""Replies read in any pieces, and what was read, put together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from leyline.server.parsers.choosing import Chosen, ReplyParser
from leyline.server.parsers.formats import TOOL_FORMATS
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece
from leyline.server.parsers.thinking import GLM45, NO_REASONING
from tests.server.parsers.corpus import CUT, Case


@dataclass(frozen=True)
class Read:
    """What a reply says.

    Attributes:
        pieces: Neighbours of a kind joined.
        complete: The calls that were closed.
    """

    pieces: tuple[Piece, ...]
    complete: frozenset[int] = frozenset()

    @property
    def content(self) -> str:
        return "".join(one.text for one in self.pieces if isinstance(one, Content))

    @property
    def reasoning(self) -> str:
        kinds = (CallHead, CallArguments, Content)
        return "".join(one.text for one in self.pieces if not isinstance(one, kinds))

    @property
    def heads(self) -> list[CallHead]:
        return [one for one in self.pieces if isinstance(one, CallHead)]

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """As a `Case` writes them."""
        told = []
        for head in self.heads:
            texts = (
                one.text
                for one in self.pieces
                if isinstance(one, CallArguments) and one.index == head.index
            )
            cut = "" if head.index in self.complete else CUT
            told.append((head.name, "".join(texts) + cut))
        return tuple(told)


def reading(case: Case) -> ReplyParser:
    """A fresh reading for a case's reply."""
    reasoning = NO_REASONING if case.reasoning is None else GLM45
    numbers = itertools.count()
    chosen = Chosen(TOOL_FORMATS[case.form], reasoning)
    return chosen.parser(case.use, case.tail, lambda: f"call_{next(numbers)}")


def read(case: Case, pieces: Iterable[str], *, ends: bool = True) -> Read:
    """Read a reply piece by piece, to its end or only so far."""
    reader = reading(case)
    said = [one for piece in pieces for one in reader.push(piece)]
    if ends:
        said += reader.flush()
    return Read(joined(said), reader.complete)


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Neighbours of a kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, CallHead) or type(last) is not type(piece):
            found.append(piece)
        elif isinstance(piece, CallArguments):
            assert isinstance(last, CallArguments) and last.index == piece.index
            found[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            assert last is not None and not isinstance(last, (CallHead, CallArguments))
            found[-1] = type(piece)(last.text + piece.text)
    return tuple(found)


def splits(text: str, seed: int) -> Iterator[list[str]]:
    """A text in two pieces at every place, in single characters, and in random pieces."""
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    yield list(text)
    rng = random.Random(seed)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(2, 9))))
        yield [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]

"""The bytes that tokens spell: where each token's bytes lie, and which tokens cover a range.

A character may be cut between two tokens, and a token may hold the end of one word and the start
of the next. So places in a text are byte offsets here, and become token positions last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from leyline.context import Tokens
from leyline.errors import DirectiveError
from leyline.tokenizer import Tokenizer

CONTINUATIONS = {bytes([byte]) for byte in range(0x80, 0xC0)}  # in UTF-8


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of what tokens `[start, end)` spell.

    Attributes:
        start: Position of the first token.
        end: One past the last.
        before: What the first token spells in front of the part.
        after: What the last token spells behind it.
    """

    start: int
    end: int
    before: bytes = b""
    after: bytes = b""


class Spelling:
    """What a list of tokens spells, special tokens with their text.

    Nothing is looked up before it is needed, and nothing twice: give the same one to many targets.

    Args:
        tokens: Token ids.
        tokenizer: Knows what they stand for; ids without a text count as empty.

    Attributes:
        tokens: As given.
        tokenizer: As given.
    """

    def __init__(self, tokens: Sequence[int], tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self._places: dict[tuple[bytes, int, int], list[int]] = {}

    @classmethod
    def of(cls, tokens: Sequence[int] | Spelling, tokenizer: Tokenizer) -> Spelling:
        """A spelling of tokens; the same if it is one already."""
        return tokens if isinstance(tokens, Spelling) else cls(tokens, tokenizer)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self.tokenizer.token_bytes(token, skip_special=False) for token in self.tokens]

    @cached_property
    def data(self) -> bytes:
        """All bytes."""
        return b"".join(self._pieces)

    @cached_property
    def edges(self) -> list[int]:
        """Offset of each token's first byte, and the length at the end: `num_tokens + 1`."""
        return [0, *accumulate(map(len, self._pieces))]

    def places(self, wanted: bytes, start: int, end: int) -> list[int]:
        """Offsets at which a text stands whole in tokens `[start, end)`; they do not overlap."""
        key = wanted, self.edges[start], self.edges[end]
        if key not in self._places:
            self._places[key] = list(occurrences(self.data, *key))
        return self._places[key]

    def covering(self, first: int, last: int) -> tuple[int, int]:
        """The fewest tokens `[start, end)` that hold bytes `[first, last)`.

        Where there are no bytes, there are no tokens.
        """
        start = bisect_right(self.edges, first) - 1
        return start, max(start, bisect_left(self.edges, last))

    def cut(self, first: int, last: int) -> Cut:
        """Bytes `[first, last)`, which are not none, as a part of the tokens that cover them."""
        start, end = self.covering(first, last)
        before = self.data[self.edges[start] : first]
        return Cut(start, end, before, self.data[last : self.edges[end]])

    def whole(self, cut: Cut) -> Cut:
        """The same part among as many more tokens as it takes to cut no character in two.

        Raises:
            DirectiveError: If it cuts a special token, or its neighbours are no text at all.
        """
        if not cut.before and not cut.after:
            return cut
        start, end = cut.start, cut.end
        while start > 0 and self._inside_character(start):
            start -= 1
        while end < len(self.tokens) and self._inside_character(end):
            end += 1
        before = self.data[self.edges[start] : self.edges[cut.start]] + cut.before
        after = cut.after + self.data[self.edges[cut.end] : self.edges[end]]
        if not _is_text(before) or not _is_text(after) or self._cuts_special(cut):
            raise DirectiveError(
                f"The match begins or ends inside a token at [{cut.start}, {cut.end}) that cannot "
                "be written in part: it is special, or no valid text. Match all of it or nothing "
                "of it, or point by token range.",
                param="match",
            )
        return Cut(start, end, before, after)

    def _inside_character(self, position: int) -> bool:
        """Whether the token there begins with a later byte of a character."""
        offset = self.edges[position]
        return self.data[offset : offset + 1] in CONTINUATIONS

    def _cuts_special(self, cut: Cut) -> bool:
        """Whether one of the outer tokens is special, so that no plain text can produce it."""
        outer = [cut.start] * bool(cut.before) + [cut.end - 1] * bool(cut.after)
        return any(not self.tokenizer.token_bytes(self.tokens[at]) for at in outer)


def occurrences(data: bytes, wanted: bytes, first: int, last: int) -> Iterator[int]:
    """Offsets in `[first, last)` at which `wanted` stands whole; they do not overlap."""
    at = data.find(wanted, first, last)
    while at >= 0:
        yield at
        at = data.find(wanted, at + len(wanted), last)


def plain(cut: Cut, replacement: str | Sequence[int], tokenizer: Tokenizer) -> Tokens:
    """Token ids that put something in the place of a whole cut, and nothing else.

    Args:
        cut: Cuts no character in two; see `Spelling.whole`.
        replacement: A text, which cannot produce special tokens, or token ids.
        tokenizer: Turns texts into ids.
    """
    before, after = cut.before.decode("utf-8"), cut.after.decode("utf-8")
    if isinstance(replacement, str):
        return tuple(tokenizer.encode_plain(before + replacement + after))
    ids = [*tokenizer.encode_plain(before), *replacement, *tokenizer.encode_plain(after)]
    return tuple(ids)


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True

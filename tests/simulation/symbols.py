"""What the simulation's contexts are made of: tokens, and digests of what their rows saw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from leyline.directive import Directive, Mode

VOCABULARY = 4
STOP = 3
THINK, END_THINK = 4, 5
SPELLING = (b"a", b"b", b"ab", b"c", b"<think>", b"</think>")

Symbol = tuple[int, int]  # token, digest of what its row was computed under
T = TypeVar("T")


class Row(NamedTuple):
    """What a slot holds."""

    token: int
    position: int
    seen: int
    birth: int


class Violation(AssertionError):
    """A law was broken."""


def require(law: str, holds: object, what: str) -> None:
    """Raise a `Violation` of the law unless it holds."""
    if not holds:
        raise Violation(f"{law}: {what}")


def spelled(tokens: Iterable[int]) -> bytes:
    """The text of tokens."""
    return b"".join(SPELLING[token] for token in tokens)


class Letters:
    """As much of a tokenizer as sessions need."""

    stop_ids = frozenset({STOP})

    def token_bytes(self, token: int, *, skip_special: bool = False) -> bytes:
        """What a token stands for."""
        return SPELLING[token]

    def decode(
        self, tokens: Iterable[int], *, skip_special: bool = True, shown: Sequence[str] = ()
    ) -> str:
        """The text of tokens."""
        return spelled(tokens).decode()


def root_state(root: bytes) -> int:
    """Digest of an empty context."""
    return hash(tuple(root))


def advance(state: int, token: int, seen: int) -> int:
    """Digest of a context with one more row; integers hash alike in every process."""
    return hash((state, token, seen))


def fold(root: bytes, symbols: Iterable[Symbol]) -> int:
    """Digest of a whole context."""
    state = root_state(root)
    for token, seen in symbols:
        state = advance(state, token, seen)
    return state


def computed(root: bytes, head: Sequence[Symbol], tokens: Iterable[int]) -> list[Symbol]:
    """The symbols of tokens computed behind a head."""
    state, symbols = fold(root, head), []
    for token in tokens:
        symbols.append((token, state))
        state = advance(state, token, state)
    return symbols


def edited(
    root: bytes,
    symbols: list[Symbol],
    resident: int,
    directives: Sequence[Directive],
    brought: Sequence[list[Symbol] | None] = (),
) -> list[Symbol]:
    """What a set of directives means: list slices, from right to left.

    Tokens at or behind `resident` have no row; whatever has none is computed in its place.
    `brought` holds the symbols of each directive whose rows come from elsewhere.
    """
    rows = [(token, seen, index < resident) for index, (token, seen) in enumerate(symbols)]
    shares = [*brought] or [None] * len(directives)
    for directive, share in reversed([*zip(directives, shares, strict=True)]):
        head, tail = rows[: directive.start], rows[directive.end :]
        tokens = list(directive.replacement)
        if directive.mode is Mode.FORGET:
            tokens, tail = [*tokens, *(row[0] for row in tail)], []
        known = share is not None or all(row[2] for row in head)
        new = computed(root, [row[:2] for row in head], tokens) if share is None else share
        rows = [*head, *((*symbol, known) for symbol in new), *tail]
    after: list[Symbol] = []
    state = root_state(root)
    for token, seen, known in rows:
        after.append((token, seen if known else state))
        state = advance(state, *after[-1])
    return after


def replaced(items: Sequence[T], directives: Sequence[Directive], new: Sequence[T]) -> list[T]:
    """Anything that stands at the tokens of a context, after a set of directives.

    Args:
        items: One a token.
        directives: The set.
        new: What stands at the replacements, in order of position.
    """
    after, left = list(items), list(new)
    for directive in reversed(directives):
        num = len(directive.replacement)
        after[directive.start : directive.end] = left[len(left) - num :]
        del left[len(left) - num :]
    return after

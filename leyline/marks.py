"""Spans of a session's context that something is kept about, and how they follow its edits.

A *mark* is a promise about a span: PIN keeps its rows, DECAY edits it after some turns, SCRATCH
takes it out when the turn ends. A *message span* is where the content of a message stands. Both
are positions, so both move when the context is edited.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from leyline.context import Tokens
from leyline.directive import Directive, Mode

Verb = Literal["pin", "decay", "scratch"]
Of = Literal["span", "reasoning", "tool_output"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A promise about tokens `[start, end)` of a session's context.

    Attributes:
        mark_id: Its name.
        verb: `pin`, `decay` or `scratch`.
        start: Position of the first token.
        end: One past the last.
        until: When a pin ends, in seconds on the engine's clock; None for no such end.
        turns_left: Turns after which a pin ends, or a decay or scratch fires; None for never,
            but a scratch fires at the end of the turn in any case.
        replacement: Token ids that a decay or scratch puts in the span's place.
        mode: In which mode it does so.
        of: `span`, or what of the next turn a scratch is about; then `start` and `end` are 0
            until that turn has ended.
    """

    mark_id: str
    verb: Verb
    start: int
    end: int
    until: float | None = None
    turns_left: int | None = None
    replacement: Tokens = ()
    mode: Mode = Mode.AMORTIZE
    of: Of = "span"

    def ended(self, now: float) -> bool:
        """Whether it is a pin whose time is over."""
        return self.verb == "pin" and self.until is not None and self.until <= now

    def after_turn(self) -> Mark:
        """The mark when one more turn has ended."""
        if self.turns_left is None:
            return replace(self, turns_left=0) if self.verb == "scratch" else self
        return replace(self, turns_left=max(0, self.turns_left - 1))


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Where the content of one message stands in a context.

    Attributes:
        role: Who spoke.
        tool_call_id: The call that a tool's result answers, if any.
        start: Position of the content's first token; equal to `end` if it is empty or could not
            be located.
        end: One past its last token.
    """

    role: str
    tool_call_id: str | None
    start: int
    end: int


class Path:
    """Where positions go when a set of directives is carried out; made once for many spans.

    Args:
        directives: Sorted, not overlapping, in the coordinates before the set.
    """

    def __init__(self, directives: Sequence[Directive]) -> None:
        self._directives = directives
        self._starts = [directive.start for directive in directives]
        self._ends = [directive.end for directive in directives]
        # The shift of what stands between directive i - 1 and directive i.
        self._shifts = [0, *accumulate(directive.delta for directive in directives)]

    def span(self, start: int, end: int, *, content: bool = False) -> tuple[int, int] | None:
        """Where the tokens `[start, end)` stand afterwards; see `follow`."""
        first = self._first(start, end, content)
        return None if first is None else (first, self._last(start, end, content))

    def point(self, position: int) -> int:
        """Where a place between two tokens is afterwards; what is inserted there lies behind it."""
        index = bisect_left(self._starts, position)
        if index and self._ends[index - 1] > position:
            return self._starts[index - 1] + self._shifts[index - 1]
        return position + self._shifts[index]

    def _first(self, start: int, end: int, content: bool) -> int | None:
        """New position of the first token that remains."""
        position = start
        for index in range(bisect_right(self._ends, start), len(self._ends)):
            if self._starts[index] > position:
                break
            if content and self._rewrites(index, start, end):
                return self._starts[index] + self._shifts[index]
            position = self._ends[index]
        if position >= end:
            return None
        return position + self._shifts[bisect_right(self._starts, position)]

    def _last(self, start: int, end: int, content: bool) -> int:
        """One past the new position of the last token that remains; there must be one."""
        position = end
        for index in reversed(range(bisect_left(self._starts, end))):
            if self._ends[index] < position:
                break
            if content and self._rewrites(index, start, end):
                return self._ends[index] + self._shifts[index + 1]
            position = self._starts[index]
        return position + self._shifts[bisect_right(self._starts, position - 1)]

    def _rewrites(self, index: int, start: int, end: int) -> bool:
        """Whether a directive puts tokens in the place of some of the span, and of nothing else."""
        inside = start <= self._starts[index] < self._ends[index] <= end
        return inside and bool(self._directives[index].replacement)


def follow(
    start: int, end: int, directives: Sequence[Directive], *, content: bool = False
) -> tuple[int, int] | None:
    """Where tokens `[start, end)` stand after a set of directives; None if nothing remains.

    The answer reaches from the first token of the span that survives to the last, so it includes
    replacements between them, and none at its ends.

    Args:
        start: Position of the span's first token.
        end: One past its last.
        directives: Sorted, not overlapping, in the coordinates before the set.
        content: What is put in the place of a part of the span, or of all of it, survives too: a
            message whose content was replaced can be pointed at again.
    """
    return Path(directives).span(start, end, content=content)


def follow_marks(marks: Iterable[Mark], directives: Sequence[Directive]) -> list[Mark]:
    """The marks after a set of directives, without those of whose span nothing remains."""
    return list(_followed(marks, Path(directives)))


def follow_messages(
    messages: Iterable[MessageSpan], directives: Sequence[Directive]
) -> list[MessageSpan]:
    """The message spans after a set of directives, each in its place.

    A message that was taken out keeps its number, with an empty span.
    """
    path = Path(directives)
    return [_moved(message, path) for message in messages]


def due(marks: Iterable[Mark]) -> tuple[Directive, ...]:
    """What these decays and scratches do, as one set: sorted and without overlaps.

    Every token of every span goes. Where spans overlap, the one that starts earlier takes the
    tokens that both claim; one that has none left does nothing.
    """
    directives: list[Directive] = []
    reached = 0
    for mark in sorted(marks, key=lambda mark: mark.start):
        start = max(mark.start, reached)
        if start < mark.end:
            directives.append(Directive(start, mark.end, mark.replacement, mark.mode))
            reached = mark.end
    return tuple(directives)


def _followed(marks: Iterable[Mark], path: Path) -> Iterator[Mark]:
    """Each mark that remains; one about the next turn stands nowhere yet."""
    for mark in marks:
        if mark.of != "span" and not mark.end:
            yield mark
        elif span := path.span(mark.start, mark.end):
            yield replace(mark, start=span[0], end=span[1])


def _moved(message: MessageSpan, path: Path) -> MessageSpan:
    """A message span at its new place."""
    place = path.point(message.start)
    if message.start == message.end:
        return replace(message, start=place, end=place)
    start, end = path.span(message.start, message.end, content=True) or (place, place)
    return replace(message, start=start, end=end)

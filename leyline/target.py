"""Ways to point at a span of a context.

People do not know token positions. A `Target` is a token range, a message, the result of a tool
call, or a text to look for; `Target.resolve` turns it into a range once there is a context. A
text that is there several times is not guessed at: the error says where, and how to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from leyline.errors import DirectiveError
from leyline.marks import MessageSpan
from leyline.spelling import Cut, Spelling
from leyline.tokenizer import Tokenizer, check_text

MAX_WHOLE = 2**31 - 1  # no position, index, id or count of turns is larger
SHOWN = 8  # places that an error lists
WAYS = (
    "Point in exactly one way: start and end (token positions), message (an index, negative from "
    "the end), tool_call_id, or match (a text; with message or tool_call_id, inside of that)."
)

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Target:
    """A span of a context, pointed at in exactly one way.

    Attributes:
        start: Position of the first token; goes with `end`.
        end: One past the last.
        message: Index of a message, negative from the end; means its content.
        tool_call_id: Means the content of the tool result that answers this call.
        match: Means the place where this text stands; with `message` or `tool_call_id`, inside
            of that.
        occurrence: Which one, if there are several: counts from 0, or negative from the end.

    Raises:
        DirectiveError: If it points in no way or in several, or a field is malformed.
    """

    start: int | None = None
    end: int | None = None
    message: int | None = None
    tool_call_id: str | None = None
    match: str | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            check_whole(getattr(self, name), name, 0)
        for name in ("message", "occurrence"):
            check_whole(getattr(self, name), name)
        for name in ("tool_call_id", "match"):
            _check_words(getattr(self, name), name)
        self._check_ways()

    def _check_ways(self) -> None:
        ranged = self.start is not None or self.end is not None
        ways = [ranged, self.message is not None, self.tool_call_id is not None]
        if sum(ways) + (self.match is not None and ranged) > 1 or not any([*ways, self.match]):
            raise DirectiveError(WAYS, param="target")
        if ranged and (self.start is None or self.end is None or self.start > self.end):
            raise DirectiveError(
                "A token range needs both start and end, with start <= end.", param="end"
            )
        if self.occurrence is not None and self.match is None and self.tool_call_id is None:
            raise DirectiveError(
                "occurrence says which of several places is meant; it goes with match or "
                "tool_call_id.",
                param="occurrence",
            )

    def resolve(
        self,
        tokens: Sequence[int] | Spelling,
        messages: Sequence[MessageSpan],
        tokenizer: Tokenizer,
    ) -> tuple[int, int]:
        """The token range `[start, end)` that is meant; it covers a match, and may spell more.

        Args:
            tokens: The context's, or their spelling, which many targets may share.
            messages: Where the content of each message stands in it.
            tokenizer: Spells the tokens.

        Raises:
            DirectiveError: If there is no such place, or more than one and none is chosen.
        """
        place = self.cut(Spelling.of(tokens, tokenizer), messages)
        return place.start, place.end

    def cut(self, spelling: Spelling, messages: Sequence[MessageSpan]) -> Cut:
        """As `resolve`, with what else the outer tokens spell."""
        if self.start is not None and self.end is not None:
            return self._range(self.start, self.end, len(spelling.tokens))
        contents = [_content(messages, index, self) for index in self._named(messages)]
        if self.match is None:
            return _without_space(self._chosen(contents, "tool_call_id", lambda cut: cut), spelling)
        wanted = self.match.encode("utf-8")
        ranges = [(cut.start, cut.end) for cut in contents] or [(0, len(spelling.tokens))]
        places = [at for inside in ranges for at in spelling.places(wanted, *inside)]

        def around(at: int) -> Cut:
            return spelling.cut(at, at + len(wanted))

        return around(self._chosen(places, "match", around))

    def _range(self, start: int, end: int, length: int) -> Cut:
        if end > length:
            raise DirectiveError(
                f"The range [{start}, {end}) does not fit: the context has {length} tokens.",
                param="end",
            )
        return Cut(start, end)

    def _named(self, messages: Sequence[MessageSpan]) -> list[int]:
        """Indices of the messages that are meant, or in which to search; none for anywhere."""
        if self.message is not None:
            return [_message_index(self.message, len(messages))]
        if self.tool_call_id is None:
            return []
        named = [i for i, span in enumerate(messages) if span.tool_call_id == self.tool_call_id]
        if not named:
            raise DirectiveError(
                f"No tool result answers the call {_quoted(self.tool_call_id)}.",
                param="tool_call_id",
            )
        return named

    def _chosen(self, places: Sequence[Place], param: str, cut: Callable[[Place], Cut]) -> Place:
        """The one place there is, or the one that `occurrence` names."""
        index = self.occurrence
        if index is None and len(places) == 1:
            return places[0]
        if index is not None and -len(places) <= index < len(places):
            return places[index]
        shown = [cut(place) for place in places[:SHOWN]]
        param = param if index is None else "occurrence"
        raise DirectiveError(self._miscount(len(places), shown), param=param)

    def _miscount(self, num_places: int, shown: Sequence[Cut]) -> str:
        """Why no place can be chosen; only the first are shown."""
        what = f"The call {_quoted(self.tool_call_id)} has {num_places} results"
        if self.match is not None:
            inside = "the context" if self.message is self.tool_call_id is None else "that message"
            what = f"The text {_quoted(self.match)} stands in {inside} {num_places} times"
        if not shown:
            return f"{what}. It must stand there exactly as it is given, spaces included."
        where = ", ".join(f"[{place.start}, {place.end})" for place in shown)
        more = ", ..." if num_places > len(shown) else ""
        return (
            f"{what}, at tokens {where}{more}. Say which with occurrence: 0 to {num_places - 1}, "
            "or negative from the end."
        )


def _message_index(index: int, num_messages: int) -> int:
    """An index from the front."""
    counted = index + num_messages if index < 0 else index
    if not 0 <= counted < num_messages:
        known = f"they are {-num_messages} to {num_messages - 1}" if num_messages else "it has none"
        raise DirectiveError(
            f"The session has no message {index}: {known}.",
            param="message",
        )
    return counted


def _content(messages: Sequence[MessageSpan], index: int, target: Target) -> Cut:
    span = messages[index]
    if span.start == span.end:
        raise DirectiveError(
            f"The content of message {index} (role {span.role}) cannot be pointed at: it is empty, "
            "or the chat template changed it beyond recognition. Point by match or token range.",
            param="tool_call_id" if target.message is None else "message",
        )
    return Cut(span.start, span.end)


def _without_space(span: Cut, spelling: Spelling) -> Cut:
    """A content without white space that its outer tokens share with the template around it."""
    first, last = (
        spelling.tokenizer.token_bytes(spelling.tokens[at], skip_special=False)
        for at in (span.start, span.end - 1)
    )
    before = first[: len(first) - len(first.lstrip())] if first.strip() else b""
    after = last[len(last.rstrip()) :] if last.strip() else b""
    return Cut(span.start, span.end, before, after)


def check_whole(value: Any, name: str, least: int = -MAX_WHOLE) -> None:
    """Refuse anything but None and a whole number; True is none.

    Raises:
        DirectiveError: Names the field.
    """
    if value is not None and (type(value) is not int or not least <= value <= MAX_WHOLE):
        raise DirectiveError(
            f"{name} must be a whole number from {least} to {MAX_WHOLE}.", param=name
        )


def _check_words(value: Any, name: str) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise DirectiveError(f"{name} must be a text that is not empty.", param=name)
    if value is not None:
        check_text(value, name)


def _quoted(text: str | None) -> str:
    return repr((text or "")[:60])

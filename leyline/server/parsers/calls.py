"""What the parsers of all tool formats share: content, the edges of calls, their arguments.

The rules that hold for every format:

* A call's name is that of a declared tool, or the text is content, its markup included. The same
  goes for markup without a call. Reading goes on behind the first character of such a marker.
* A call is given out with the first character of its arguments, so that a reply that is cut
  inside a call shows it with JSON that is visibly not closed, or not at all.
* A call is complete when its model closed it. Arguments that are no JSON are given as the text
  that they are: it is for the client to tell the model.
* White space alone, in front of a call, between calls and behind them, is markup.
* Where a request wants one call at most, the reply ends with the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from leyline.server.parsers.json_text import JsonString, JsonValue
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, ToolUse
from leyline.server.parsers.source import Script, Sink, Source, Stops

NewId = Callable[[], str]
_MARGIN = 64  # characters of white space and of what else formats write beside a name


class NoCallError(Exception):
    """What was read is no call, or not all of one."""


class CallParser:
    """Reads a reply in which calls stand between contents.

    A format is a subclass that says what calls begin with, and how to read a block of them.

    Args:
        use: The tools.
        new_id: Makes up the ids of calls.

    Attributes:
        complete: The calls that their model closed, by their indices.
        num_calls: How many calls are behind.
        is_done: Whether whatever else comes is left out.
    """

    openings: tuple[str, ...] = ()

    def __init__(self, use: ToolUse, new_id: NewId) -> None:
        self.complete: set[int] = set()
        self.names = names_of(use)
        self.source = Source()
        self._use = use
        self._new_id = new_id
        self._said: list[Piece] = []
        self._blank: list[str] | None = []
        self.num_calls = 0
        self._head: CallHead | None = None
        self._is_open = False
        self._script = self._reply()
        self.is_done = False

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        if self.is_done:
            return []
        self.source.add(text)
        return self._advanced()

    def flush(self) -> list[Piece]:
        """See `Parser`."""
        self.source.is_over = True
        return self._advanced()

    def _advanced(self) -> list[Piece]:
        self.is_done = self.is_done or next(self._script, self) is self
        said, self._said = self._said, []
        return said

    def _reply(self) -> Script[None]:
        """The whole reply."""
        openings = Stops(*self.openings)
        while not self._is_enough():
            if (yield from self.source.until(openings, self.say)) is None:
                break
            yield from self._try_block()
        if self._blank and not self.num_calls:
            self._said.append(Content("".join(self._blank)))

    def _is_enough(self) -> bool:
        return bool(self.num_calls) and not self._use.parallel

    def _try_block(self) -> Script[None]:
        self.source.hold()
        try:
            yield from self.block()
        except NoCallError:
            if self._is_open:
                self._end_call()
                if self.source.is_over:  # what is left is a tag that was cut off
                    self.source.take(self.source.num_left)
            else:
                self._head = None
                self.source.rewind()
                self.say(self.source.take(1))
        self.source.release()

    # For formats ----------------------------------------------------------------------------------

    def block(self) -> Script[None]:
        """Read what begins with one of `openings`: a call, or a section of them.

        Raises:
            NoCallError: If it turns out not to be one.
        """
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Give out content."""
        if not text:
            return
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._said.append(Content(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call's name is known.

        Raises:
            NoCallError: If it is not declared.
        """
        if name not in self.names:
            raise NoCallError
        self._head = CallHead(self.num_calls, call_id or self._new_id(), name)

    def argue(self, text: str) -> None:
        """Give out arguments of the call that has begun."""
        if not text:
            return
        if self._head is not None:
            self.source.release()
            self._blank = []
            self._said.append(self._head)
            self._head, self._is_open = None, True
        self._said.append(CallArguments(self.num_calls, text))

    def close(self) -> bool:
        """The call is complete; whether another one may follow."""
        if not self._is_open:
            self.argue("{}")
        self.complete.add(self.num_calls)
        self._end_call()
        self.source.hold()
        return not self._is_enough()

    def _end_call(self) -> None:
        self.num_calls += 1
        self._is_open = False

    def name_before(self, *stops: str) -> Script[str]:
        """A name, without white space around, up to a stop, which is not used.

        Raises:
            NoCallError: If no stop comes within the length of the longest name and a little more.
        """
        parts: list[str] = []
        limit = max(map(len, self.names), default=0) + _MARGIN
        if (yield from self.source.until(Stops(*stops), parts.append, limit)) is None:
            raise NoCallError
        return "".join(parts).strip()

    def follows(self, *texts: str) -> Script[str | None]:
        """Which of the texts comes behind white space; if one does, all that is used.

        One that is cut off by the end of the reply is used as well.
        """
        space = yield from self.source.skip_space()
        found = yield from self.source.uses(*texts)
        if found is None and self.source.is_cut_in(*texts):
            self.source.take(self.source.num_left)
        elif found is None:
            self.source.give_back(space)
        return found

    def needs(self, *texts: str) -> Script[str]:
        """One of the texts, which is used, behind white space.

        Raises:
            NoCallError: If another one comes.
        """
        yield from self.source.skip_space()
        if (found := (yield from self.source.uses(*texts))) is None:
            raise NoCallError
        return found

    def arguments(self, ends: Stops, sink: Sink | None = None) -> Script[None]:
        """Read arguments that are written as JSON, and give them out as they come.

        An object in a string is taken out of it, and null is an empty object. What is no JSON goes
        on, as the text that it is, up to one of `ends`, which is not used.

        Raises:
            NoCallError: If the text ends before they do.
        """
        sink = sink or self.argue
        yield from self.source.skip_space()
        first = yield from self.source.peek()
        if (yield from self.source.comes(*ends.texts)) is not None:
            return
        if first == '"':
            yield from self._quoted(sink)
        elif (yield from self.source.uses("null")) is None:
            yield from self.value(sink, ends)

    def value(self, sink: Sink, ends: Stops | None) -> Script[None]:
        """Read one JSON value; without `ends`, one that is none is no call."""
        value = JsonValue()
        while True:
            sink(self.source.feed(value.read))
            if value.is_over:
                return
            if value.is_broken:
                break
            if not (yield from self.source.more()):
                raise NoCallError
        if ends is None or (yield from self.source.until(ends, Trimmed(sink))) is None:
            raise NoCallError

    def _quoted(self, sink: Sink) -> Script[None]:
        string = yield from self.string(sink)
        if not string:
            raise NoCallError

    def string(self, sink: Sink) -> Script[bool]:
        """Read a JSON string and say what it says; false if the text ends before it."""
        self.source.take(1)
        string = JsonString(sink)
        while True:
            self.source.feed(string.read)
            if string.is_over:
                return True
            if not (yield from self.source.more()):
                return False


def names_of(use: ToolUse) -> frozenset[str]:
    """The names of the tools that may be called."""
    if use.choice == "none":
        return frozenset()
    return use.names & {use.name} if use.name is not None else use.names


class Trimmed:
    """A sink that leaves out white space at the end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def __call__(self, text: str) -> None:
        """Take more text."""
        if kept := text.rstrip():
            self._sink("".join(self._space) + kept)
            self._space.clear()
        self._space.append(text[len(kept) :])


def quoted(text: str) -> str:
    """The inside of a JSON string that says `text`; joined, those of pieces are the whole's."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`: the Hermes models' form.

Also what models make of it: several objects in a block, one behind the other or in a list;
arguments in front of the name, or called parameters; a brace too few or too many; no closing tag.
"""

from __future__ import annotations

from leyline.server.parsers.calls import CallParser, NoCallError
from leyline.server.parsers.json_text import JsonValue
from leyline.server.parsers.source import Script, Stops

_ENDS = Stops("</tool_call>")
_ARGUMENTS = ('"arguments"', '"parameters"')
_OTHERS = ('"id"', '"type"')


class HermesParser(CallParser):
    """Reads calls that are JSON objects in tags."""

    openings = ("<tool_call>",)

    def block(self) -> Script[None]:
        """See `CallParser`."""
        self.source.take(len("<tool_call>"))
        yield from self.source.skip_space("[")
        while True:
            yield from self._object()
            may_follow = self.close()
            skipped = yield from self.source.skip_space("],}")
            if not may_follow or (yield from self.source.comes("{")) is None:
                break
        if (yield from self.follows("</tool_call>")) is None and self.source.num_left:
            self.source.give_back(skipped)

    def _object(self) -> Script[None]:
        """One call; what stands behind its name and its arguments does not matter."""
        yield from self.needs("{")
        name, early = None, None
        while True:
            key = yield from self.needs('"name"', *_ARGUMENTS, *_OTHERS)
            yield from self.needs(":")
            if key == '"name"':
                name = yield from self._name()
                self.begin(name)
            elif key not in _ARGUMENTS:
                yield from self.value(_ignore, None)
            elif name is None:
                early = yield from self._early()
            else:
                yield from self.arguments(_ENDS)
                break
            if name is not None and early is not None:
                self.argue(early)
                break
            if (yield from self.needs(",", "}")) == "}":
                if name is None:
                    raise NoCallError
                return
        yield from self._skip_rest()

    def _name(self) -> Script[str]:
        yield from self.needs('"')
        name = yield from self.name_before('"')
        self.source.take(1)
        return name

    def _early(self) -> Script[str]:
        """Arguments whose call has no name yet."""
        parts: list[str] = []
        yield from self.source.skip_space()
        if (yield from self.source.peek()) == '"':
            if not (yield from self.string(parts.append)):
                raise NoCallError
        else:
            yield from self.value(parts.append, None)
        text = "".join(parts)
        return "{}" if text in ("", "null") else text

    def _skip_rest(self) -> Script[None]:
        """The rest of the object, as far as it is JSON."""
        rest = JsonValue.in_object()
        while not (rest.is_over or rest.is_broken):
            self.source.feed(rest.read)
            if not self.source.num_left and not (yield from self.source.more()):
                return


def _ignore(_: str) -> None:
    """A sink for what does not matter."""

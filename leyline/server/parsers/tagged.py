"""Formats that write a call's arguments between tags, as bare text: GLM's and Qwen3-Coder's.

A string is streamed as JSON while it comes. Anything else is read to its end first, since only the
declared type, and whether it parses, tell what it is. A closing tag counts as one if another tag
follows it, so that values may hold the tags of their own format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyline.server.parsers.calls import CallParser, NewId, NoCallError, quoted
from leyline.server.parsers.pieces import ToolUse
from leyline.server.parsers.source import Script, Sink, Stops
from leyline.server.parsers.values import is_text, json_of, properties_of, types_of

_TAG_BEGINS = Stops("<")
_TAG_ENDS = Stops("<", ">")


class TaggedParser(CallParser):
    """What both share: values, by their declared types."""

    value_end = ""
    follows_value: Sequence[str] = ()

    def __init__(self, use: ToolUse, new_id: NewId) -> None:
        super().__init__(use, new_id)
        self._properties = {one["function"]["name"]: properties_of(one) for one in use.tools}
        self._declared: Mapping[str, Any] = {}
        self._separator = "{"

    def begin(self, name: str, call_id: str | None = None) -> None:
        """See `CallParser`."""
        super().begin(name, call_id)
        self._declared, self._separator = self._properties.get(name, {}), "{"

    def close(self) -> bool:
        """See `CallParser`."""
        if self._separator != "{":
            self.argue("}")
        return super().close()

    def argument(self, key: str) -> Script[None]:
        """Read a value and give the argument out."""
        self.argue(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        types = types_of(self._declared.get(key))
        if is_text(types):
            self.argue('"')
            yield from self._value(lambda text: self.argue(quoted(text)))
            self.argue('"')
        else:
            parts: list[str] = []
            yield from self._value(parts.append)
            self.argue(json_of("".join(parts), types))

    def key_before(self, stops: Stops) -> Script[str]:
        """A key, without white space around, up to a stop, which is not used.

        Raises:
            NoCallError: If none comes.
        """
        parts: list[str] = []
        if (yield from self.source.until(stops, parts.append)) is None:
            raise NoCallError
        return "".join(parts).strip()

    def _value(self, sink: Sink) -> Script[None]:
        """Read up to behind the closing tag.

        Raises:
            NoCallError: If none comes.
        """
        # Where a line break belongs to the tags, it is looked for together with the closing one.
        stops = Stops(self.value_end, self.value_end.lstrip("\n"))
        while True:
            stop = yield from self.source.until(stops, sink)
            if stop is None:
                raise NoCallError
            self.source.take(len(stop))
            space = yield from self.source.skip_space()
            if (yield from self.source.comes(*self.follows_value)) is not None:
                return
            if self.source.is_cut_in(*self.follows_value):
                raise NoCallError
            self.source.give_back(space)
            sink(stop)


class Glm47Parser(TaggedParser):
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`."""

    openings = ("<tool_call>",)
    value_end = "</arg_value>"
    follows_value = ("<arg_key>", "</tool_call>", "<tool_call>")

    def block(self) -> Script[None]:
        """See `CallParser`."""
        self.source.take(len("<tool_call>"))
        self.begin((yield from self.name_before("<")))
        while (yield from self.needs("<arg_key>", "</tool_call>")) == "<arg_key>":
            yield from self.argument((yield from self._key()))
            if (yield from self.source.comes("<tool_call>")) is not None:
                break
        self.close()

    def _key(self) -> Script[str]:
        key = yield from self.key_before(_TAG_BEGINS)
        yield from self.source.uses("</arg_key>")
        if (yield from self.needs("<arg_value>", "</tool_call>")) == "</tool_call>":
            raise NoCallError
        return key


class Qwen3CoderParser(TaggedParser):
    r"""`<tool_call><function=name><parameter=k>\nv\n</parameter>...</function></tool_call>`."""

    openings = ("<tool_call>", "<function=")
    value_end = "\n</parameter>"
    follows_value = ("<parameter=", "</function>", "</tool_call>")

    def block(self) -> Script[None]:
        """See `CallParser`."""
        yield from self.source.uses("<tool_call>")
        yield from self.needs("<function=")
        self.begin((yield from self.name_before(">")))
        self.source.take(1)
        while (yield from self.needs(*self.follows_value)) == "<parameter=":
            key = yield from self.key_before(_TAG_ENDS)
            yield from self.needs(">")
            yield from self.source.uses("\n")
            yield from self.argument(key)
        self.close()
        yield from self.follows("</tool_call>")

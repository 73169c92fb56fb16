"""What a reply consists of, once its markup is read: reasoning, content and tool calls.

A `Parser` is a pure incremental function of a reply's text: the pieces of any split of a text,
put together, are those of the whole. A piece is final when it is given out; nothing is ever taken
back, and nothing is serialised anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what it says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallHead:
    """A tool call begins; `index` counts the reply's calls from 0.

    Attributes:
        index: Which call.
        call_id: The id that the model wrote where its template depends on it, else one made up.
        name: A tool that the request declared.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: JSON text, the model's own where it writes JSON."""

    index: int
    text: str


Piece = Reasoning | Content | CallHead | CallArguments


class Parser(Protocol):
    """Reads one reply."""

    def push(self, text: str) -> list[Piece]:
        """Read more text; returns what became certain."""
        ...

    def flush(self) -> list[Piece]:
        """The reply is over: returns what was held back. A call that is not complete stays so."""
        ...


Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of its tools.

    Attributes:
        tools: In OpenAI's form, functions only.
        choice: Whether the model may, may not or must call one.
        name: The one that it must call, if one is named; `choice` is `required` then.
        parallel: Whether it may make several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Choice = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

"""Which formats a model writes its calls and its reasoning in, and what reads a reply in them.

The chat template is the surest witness: what it writes for the calls of a history, and for the
reasoning, is what its model was trained to write. A flag overrides it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from leyline.errors import ConfigError
from leyline.server.parsers.calls import CallParser, NewId
from leyline.server.parsers.formats import (
    DEEPSEEK_V3,
    GLM47,
    HERMES,
    KIMI_K2,
    PROMPTED,
    QWEN3_CODER,
    TOOL_FORMATS,
    ToolFormat,
)
from leyline.server.parsers.pieces import Piece, ToolUse
from leyline.server.parsers.sections import DEEPSEEK_CALL, KIMI_CALL
from leyline.server.parsers.thinking import (
    DEEPSEEK_R1,
    GLM45,
    NO_REASONING,
    ReasoningFormat,
    Thinker,
)

T = TypeVar("T")

REASONING_FORMATS = {one.name: one for one in (GLM45, DEEPSEEK_R1, NO_REASONING)}
TOOL_PARSERS = tuple(TOOL_FORMATS)
REASONING_PARSERS = tuple(REASONING_FORMATS)
_WITNESSES = (
    (("<arg_key>",), GLM47),
    (("<function=",), QWEN3_CODER),
    (DEEPSEEK_CALL[:1], DEEPSEEK_V3),
    (KIMI_CALL[:1], KIMI_K2),
    (("<tool_call>", '"arguments'), HERMES),
)


class ReplyParser:
    """Reads one reply, and keeps account of it.

    Args:
        calls: A fresh parser of its calls.
        thinker: The parser of its reasoning, around `calls`.

    Attributes:
        reasoning_tokens: How many of the tokens that were told of are reasoning or its tags.
    """

    def __init__(self, calls: CallParser, thinker: Thinker) -> None:
        self.reasoning_tokens = 0
        self._calls = calls
        self._thinker = thinker

    @property
    def complete(self) -> frozenset[int]:
        """The calls that their model closed, by index; any other was cut off or broken."""
        return frozenset(self._calls.complete)

    @property
    def is_enough(self) -> bool:
        """Whether whatever else comes is left out: there is a call, and only one was wanted."""
        return self._calls.is_done

    def push(self, text: str, num_tokens: int = 0) -> list[Piece]:
        """Read more text, and the number of tokens that it came in."""
        was_thinking = self._thinker.is_thinking
        pieces = self._thinker.push(text)
        if was_thinking or self._thinker.is_thinking:
            self.reasoning_tokens += num_tokens
        return pieces

    def flush(self) -> list[Piece]:
        """The reply is over; see `Parser`."""
        return self._thinker.flush()


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a model writes its calls and its reasoning in.

    Attributes:
        tool: The format of calls.
        reasoning: The format of reasoning.
    """

    tool: ToolFormat
    reasoning: ReasoningFormat

    def markers(self, use: ToolUse) -> tuple[str, ...]:
        """Texts of special tokens that must be shown; see `SamplingParams.shown`."""
        calls = self.tool.markers if use.tools and use.choice != "none" else ()
        return (*self.reasoning.markers, *calls)

    def parser(self, use: ToolUse, prompt_tail: str, new_id: NewId | None = None) -> ReplyParser:
        """A fresh parser of a reply.

        Args:
            use: The tools.
            prompt_tail: The end of the prompt's text, special tokens shown; 100 characters will do.
                It tells whether the reply begins inside its reasoning.
            new_id: Makes up the ids of calls, where the model does not.
        """
        calls = self.tool.parser(use, new_id)
        return ReplyParser(calls, self.reasoning.parser(calls, prompt_tail))

    def ending(self, use: ToolUse, prompt_tail: str) -> Callable[[str], bool] | None:
        """What says where a reply can end before its model ends it; see `SamplingParams.enough`.

        That is behind the call where one is wanted at most; None where nothing but the end will do.
        """
        if use.parallel or not use.tools:
            return None
        parser = self.parser(use, prompt_tail)

        def is_enough(text: str) -> bool:
            parser.push(text)
            return parser.is_enough

        return is_enough


def choose(
    template_source: str | None, tool: str | None = None, reasoning: str | None = None
) -> Chosen:
    """Choose the formats of a model.

    Args:
        template_source: Its chat template.
        tool: `--tool-call-parser`: one of `TOOL_PARSERS`; None or `auto` goes by the template.
        reasoning: `--reasoning-parser`: one of `REASONING_PARSERS`, likewise.

    Raises:
        ConfigError: If a name is unknown.
    """
    source = template_source or ""
    return Chosen(
        _fitted(_named(tool, TOOL_FORMATS, "--tool-call-parser") or _tool_of(source), source),
        _named(reasoning, REASONING_FORMATS, "--reasoning-parser") or _reasoning_of(source),
    )


def _named(name: str | None, known: Mapping[str, T], flag: str) -> T | None:
    if name is None or name == "auto":
        return None
    if name not in known:
        names = ", ".join(["auto", *known])
        raise ConfigError(f"{flag} is {name!r}; it must be one of {names}.", param=flag)
    return known[name]


def _tool_of(source: str) -> ToolFormat:
    for markers, form in _WITNESSES:
        if all(marker in source for marker in markers):
            return form
    return PROMPTED


def _fitted(form: ToolFormat, source: str) -> ToolFormat:
    """The format for a template: what that does not write is told in messages."""
    if form is PROMPTED:
        return form
    return replace(form, native="tools" in source, writes_calls="tool_calls" in source)


def _reasoning_of(source: str) -> ReasoningFormat:
    if GLM45.begin not in source and GLM45.end not in source:
        return NO_REASONING
    return GLM45 if "<arg_key>" in source else DEEPSEEK_R1

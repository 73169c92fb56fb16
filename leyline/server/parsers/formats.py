"""The formats of tool calls that are known, by name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leyline.server.parsers.calls import CallParser, NewId
from leyline.server.parsers.grammars import (
    NO_IDS,
    SpecialIds,
    deepseek_v3_grammar,
    glm47_grammar,
    hermes_grammar,
    kimi_k2_grammar,
    qwen3_coder_grammar,
)
from leyline.server.parsers.hermes import HermesParser
from leyline.server.parsers.pieces import ToolUse
from leyline.server.parsers.sections import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALLS,
    KIMI_CALLS_SINGULAR,
    DeepSeekV3Parser,
    KimiK2Parser,
)
from leyline.server.parsers.tagged import Glm47Parser, Qwen3CoderParser
from leyline.server.parsers.telling import Write, with_plain_calls, with_tools
from leyline.server.parsers.writing import (
    write_deepseek_v3,
    write_glm47,
    write_hermes,
    write_kimi_k2,
    write_qwen3_coder,
)

Told = Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A `Format`, see there.

    Attributes:
        name: See `Format`.
        markers: See `Format`.
        reader: The class of its parsers.
        write: Calls as its models write them.
        lark: Its grammar.
        native: Whether the chat template tells of tools, and
        writes_calls: whether it writes the calls of a history.
    """

    name: str
    markers: tuple[str, ...]
    reader: type[CallParser]
    write: Write
    lark: Callable[[ToolUse, SpecialIds], str]
    native: bool = True
    writes_calls: bool = True

    def parser(self, use: ToolUse, new_id: NewId | None = None) -> CallParser:
        """A fresh parser; `new_id` makes up the ids of calls.

        Where no tool may be called, everything is content.
        """
        return self.reader(use, new_id or new_call_id)

    @property
    def openings(self) -> tuple[str, ...]:
        """What calls begin with: a reply without any of these texts has none."""
        return self.reader.openings

    def grammar(self, use: ToolUse, special_ids: SpecialIds = NO_IDS) -> str:
        """See `Format`; `special_ids` are those of markers that are special tokens."""
        return self.lark(use, special_ids)

    def prompted(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse
    ) -> list[Mapping[str, Any]]:
        """See `Format`."""
        plain = list(messages) if self.writes_calls else with_plain_calls(messages, self.write)
        if self.native:
            return plain
        return with_tools(plain, use, self.write, plain_results=not self.writes_calls)

    def telling(self, use: ToolUse) -> Told | None:
        """`prompted` for some tools, as a `Rendering` takes it; None where it changes nothing."""
        return None if self.native and self.writes_calls else partial(self.prompted, use=use)


def new_call_id() -> str:
    """A fresh id for a call."""
    return f"call_{secrets.token_hex(12)}"


_HERMES_MARKERS = ("<tool_call>", "</tool_call>")
_GLM_MARKERS = (*_HERMES_MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

GLM47 = ToolFormat("glm47", _GLM_MARKERS, Glm47Parser, write_glm47, glm47_grammar)
QWEN3_CODER = ToolFormat(
    "qwen3_coder", _HERMES_MARKERS, Qwen3CoderParser, write_qwen3_coder, qwen3_coder_grammar
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    (*DEEPSEEK_CALLS, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR),
    DeepSeekV3Parser,
    write_deepseek_v3,
    deepseek_v3_grammar,
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    (*KIMI_CALLS, *KIMI_CALLS_SINGULAR, *KIMI_CALL, KIMI_ARGUMENTS),
    KimiK2Parser,
    write_kimi_k2,
    kimi_k2_grammar,
)
HERMES = ToolFormat("hermes", _HERMES_MARKERS, HermesParser, write_hermes, hermes_grammar)
PROMPTED = ToolFormat(
    "prompted",
    _HERMES_MARKERS,
    HermesParser,
    write_hermes,
    hermes_grammar,
    native=False,
    writes_calls=False,
)
TOOL_FORMATS = {
    one.name: one for one in (GLM47, QWEN3_CODER, DEEPSEEK_V3, KIMI_K2, HERMES, PROMPTED)
}

r"""Formats that write calls in a section of special tokens: DeepSeek-V3's and Kimi-K2's.

DeepSeek-V3 and R1 write `<call_begin>function<sep>name\n```json\n{...}\n```<call_end>`, V3.1
`<call_begin>name<sep>{...}<call_end>`. Kimi-K2 writes
`<call_begin>functions.name:0<argument_begin>{...}<call_end>`, and reads a call's name out of its
id when it is told the result; so the id that it wrote is kept.
"""

from __future__ import annotations

from leyline.server.parsers.calls import CallParser
from leyline.server.parsers.source import Script, Stops

# Full-width bars and U+2581, as in the vocabulary; they are easily mistaken for others.
_BAR, _GAP = "\uff5c", "\u2581"


def deepseek_token(name: str) -> str:
    """A special token of DeepSeek's, by its name with underscores."""
    return f"<{_BAR}{name.replace('_', _GAP)}{_BAR}>"


DEEPSEEK_CALLS = deepseek_token("tool_calls_begin"), deepseek_token("tool_calls_end")
DEEPSEEK_CALL = deepseek_token("tool_call_begin"), deepseek_token("tool_call_end")
DEEPSEEK_SEPARATOR = deepseek_token("tool_sep")
KIMI_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALLS_SINGULAR = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
KIMI_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


class SectionParser(CallParser):
    """What both share: a section of calls, whose own markers may be missing."""

    sections: tuple[str, ...] = ()
    section_ends: tuple[str, ...] = ()
    call_begin = ""
    call_end = ""

    def block(self) -> Script[None]:
        """See `CallParser`."""
        yield from self.source.uses(*self.sections)
        while True:
            yield from self.needs(self.call_begin)
            yield from self.call()
            yield from self.follows(self.call_end)
            if not self.close():
                return
            if (yield from self.follows(*self.section_ends)) is not None:
                return
            space = yield from self.source.skip_space()
            following = yield from self.source.comes(self.call_begin)
            self.source.give_back(space)
            if following is None:
                return

    def call(self) -> Script[None]:
        """Read a call from behind its beginning."""
        raise NotImplementedError


class DeepSeekV3Parser(SectionParser):
    """DeepSeek-V3's form, and V3.1's."""

    sections, section_ends = DEEPSEEK_CALLS[:1], DEEPSEEK_CALLS[1:]
    call_begin, call_end = DEEPSEEK_CALL
    openings = (*sections, call_begin)
    _ends = Stops(
        *(fence + end for end in (call_end, *section_ends) for fence in ("", "```", "```\n"))
    )

    def call(self) -> Script[None]:
        """See `SectionParser`."""
        name = yield from self.name_before(DEEPSEEK_SEPARATOR)
        self.source.take(len(DEEPSEEK_SEPARATOR))
        if name not in self.names:  # the word "function", in the older form
            yield from self.source.skip_space()
            name = yield from self.name_before("\n", "```", "{", "<" + _BAR)
        self.begin(name)
        yield from self.source.skip_space()
        if (yield from self.source.comes(*self._ends.texts)) is None:
            yield from self.source.uses("```json", "```")
        yield from self.arguments(self._ends)
        yield from self.follows("```")


class KimiK2Parser(SectionParser):
    """Kimi-K2's form."""

    sections = (KIMI_CALLS[0], KIMI_CALLS_SINGULAR[0])
    section_ends = (KIMI_CALLS[1], KIMI_CALLS_SINGULAR[1])
    call_begin, call_end = KIMI_CALL
    openings = (*sections, call_begin)
    _ends = Stops(call_end, *section_ends)

    def call(self) -> Script[None]:
        """See `SectionParser`."""
        call_id = yield from self.name_before(KIMI_ARGUMENTS)
        self.source.take(len(KIMI_ARGUMENTS))
        name, _, number = call_id.removeprefix("functions.").rpartition(":")
        if not name:  # an id without a number is none
            name, call_id = number, f"functions.{number}:{self.num_calls}"
        self.begin(name, call_id)
        yield from self.arguments(self._ends)

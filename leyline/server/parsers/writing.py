"""Calls as text, in the form that a family's models write them in.

For chat templates that cannot write calls: a history is told in the same form that the model is
asked to answer in, and a call that a parser read is written as it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from leyline.server.parsers.sections import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALLS,
)

WrittenCall = tuple[str, str, str]
"""A call's id, its name, and its arguments as JSON text."""


def write_hermes(calls: Sequence[WrittenCall]) -> str:
    """As `HermesParser` reads them; arguments that are no JSON object become a string."""
    return "\n".join(
        f'<tool_call>\n{{"name": {_text(name)}, "arguments": {_object(arguments)}}}\n</tool_call>'
        for _, name, arguments in calls
    )


def write_glm47(calls: Sequence[WrittenCall]) -> str:
    """As `Glm47Parser` reads them."""
    return "".join(
        f"<tool_call>{name}"
        + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_bare(value)}</arg_value>"
            for key, value in _pairs(arguments)
        )
        + "</tool_call>"
        for _, name, arguments in calls
    )


def write_qwen3_coder(calls: Sequence[WrittenCall]) -> str:
    """As `Qwen3CoderParser` reads them."""
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in _pairs(arguments)
        )
        + "</function>\n</tool_call>"
        for _, name, arguments in calls
    )


def write_deepseek_v3(calls: Sequence[WrittenCall]) -> str:
    """As `DeepSeekV3Parser` reads them: in the form of V3 and R1."""
    begin, end = DEEPSEEK_CALL
    written = [
        f"{begin}function{DEEPSEEK_SEPARATOR}{name}\n```json\n{_object(arguments)}\n```{end}"
        for _, name, arguments in calls
    ]
    return DEEPSEEK_CALLS[0] + "\n".join(written) + DEEPSEEK_CALLS[1]


def write_kimi_k2(calls: Sequence[WrittenCall]) -> str:
    """As `KimiK2Parser` reads them; an id that is none of its own is made one."""
    begin, end = KIMI_CALL
    written = [
        begin + _kimi_id(call_id, name, index) + KIMI_ARGUMENTS + _object(arguments) + end
        for index, (call_id, name, arguments) in enumerate(calls)
    ]
    return KIMI_CALLS[0] + "".join(written) + KIMI_CALLS[1]


def _kimi_id(call_id: str, name: str, index: int) -> str:
    return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{index}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _object(arguments: str) -> str:
    """JSON text of an object as it is; anything else in a string, so that it stays JSON."""
    if not arguments.strip():
        return "{}"
    return arguments if isinstance(_parsed(arguments), dict) else _text(arguments)


def _pairs(arguments: str) -> list[tuple[str, Any]]:
    parsed = _parsed(arguments)
    return list(parsed.items()) if isinstance(parsed, dict) else []


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

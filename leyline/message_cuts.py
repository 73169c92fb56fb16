"""What policies do to one message: a copy of it without a part, or the same object if it has none.

Messages have OpenAI's form, see `trimming`. They are never mutated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]

CLEARED_RESULT = "[tool result cleared]"
REASONING_FIELDS = ("reasoning_content", "reasoning")
REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")
THINK, END_THINK = "<think>", "</think>"


def with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """The message with every text of its content changed; the same object if none is."""
    content = message.get("content")
    if isinstance(content, str):
        after: Any = change(content)
    elif isinstance(content, list):
        after = [_with_text(part, change) for part in content]
    else:
        return message
    return message if after == content else {**message, "content": after}


def _with_text(part: Any, change: Callable[[str], str]) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": change(part["text"])}
    return part


def without_result(message: Message) -> Message:
    """The message with the placeholder for its content, unless that is shorter already."""
    content = message.get("content")
    if not content or (isinstance(content, str) and len(content) <= len(CLEARED_RESULT)):
        return message
    return {**message, "content": CLEARED_RESULT}


def without_arguments(message: Message, index: int) -> Message:
    """The message with one of its tool calls' arguments empty, in the form they have."""
    calls = list(message["tool_calls"])
    function = calls[index].get("function") or {}
    empty = "{}" if isinstance(function.get("arguments"), str) else {}
    if not function.get("arguments") or function["arguments"] == empty:
        return message
    calls[index] = {**calls[index], "function": {**function, "arguments": empty}}
    return {**message, "tool_calls": calls}


def without_thinking(message: Message) -> Message:
    """The message without its reasoning; the same object if it has none."""
    if message.get("role") != "assistant":
        return message
    kept = {
        key: value for key, value in message.items() if key not in REASONING_FIELDS or not value
    }
    if isinstance(kept.get("content"), list):
        kept["content"] = [part for part in kept["content"] if not _is_reasoning(part)]
    after = with_texts(kept, _without_think_tags)
    return message if after == message else after


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in REASONING_PARTS


def _without_think_tags(text: str) -> str:
    """The text without what stands in think tags, and white space behind them."""
    kept, at = list[str](), 0
    while (start := text.find(THINK, at)) >= 0 and (end := text.find(END_THINK, start)) >= 0:
        kept.append(text[at:start])
        at = end + len(END_THINK)
        while text[at : at + 1].isspace():
            at += 1
    return "".join([*kept, text[at:]])

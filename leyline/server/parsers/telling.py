"""Tools, calls and results told in plain messages, for chat templates that do not know of them.

The tools stand at the end of the system message, in the form that most small models were trained
with: JSON in `<tools>`, and an example of a call. A call in the history is text behind its
message's own, exactly as its model wrote it; results are a user's message. What is told depends on
the messages and the tools alone, and a longer history tells the same first, so that prefixes stay
cached and sessions go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from leyline.server.parsers.pieces import ToolUse
from leyline.server.parsers.writing import WrittenCall
from leyline.template import content_text

Message = Mapping[str, Any]
Write = Callable[[Sequence[WrittenCall]], str]

_INTRODUCTION = "You can call these tools; each line describes one:"
_INSTRUCTION = (
    "To call a tool, reply with its name and its arguments in exactly this form, and wait for the "
    "result:"
)
_RESULTS = "The user then gives you the result in <tool_response>. Use it to answer in plain words."
_EXAMPLE = ("call_0", "TOOL_NAME", '{"ARGUMENT_NAME": "VALUE"}')
_SYSTEM_ROLES = ("system", "developer")


def with_tools(
    messages: Sequence[Message], use: ToolUse, write: Write, *, plain_results: bool
) -> list[Message]:
    """The messages with the tools told in the system message; the same if there are none.

    Args:
        messages: The conversation.
        use: The tools.
        write: Writes calls in the form that the model is asked for.
        plain_results: Whether results come as `with_plain_calls` tells them.
    """
    if not use.tools:
        return list(messages)
    text = tools_text(use, write)
    # Without this sentence the smallest models repeat the result, tags and all.
    text += f"\n\n{_RESULTS}" if plain_results else ""
    if messages and messages[0].get("role") in _SYSTEM_ROLES:
        told = (content_text(messages[0].get("content"), "messages[0].content") or "").rstrip()
        first = {**messages[0], "content": f"{told}\n\n{text}" if told else text}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def tools_text(use: ToolUse, write: Write) -> str:
    """What a model is told of its tools."""
    functions = (dict(tool["function"]) for tool in use.tools)
    lines = [json.dumps(one, ensure_ascii=False) for one in functions]
    tools = "\n".join(["<tools>", *lines, "</tools>"])
    return f"{_INTRODUCTION}\n{tools}\n\n{_INSTRUCTION}\n{write([_EXAMPLE])}"


def with_plain_calls(messages: Sequence[Message], write: Write) -> list[Message]:
    """The messages with calls as text of their own messages, and results as a user's."""
    plain: list[Message] = []
    results: list[str] = []
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            text = content_text(message.get("content"), f"messages[{index}].content") or ""
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        plain += _results(results)
        results = []
        plain.append(_plain(message, index, write) if message.get("tool_calls") else message)
    return [*plain, *_results(results)]


def _results(results: Sequence[str]) -> Iterable[Message]:
    """The results of a turn's calls, in one message: many templates want roles to alternate."""
    return [{"role": "user", "content": "\n".join(results)}] if results else []


def _plain(message: Message, index: int, write: Write) -> Message:
    content = content_text(message.get("content"), f"messages[{index}].content") or ""
    calls = [_written(call) for call in message["tool_calls"]]
    gap = "\n" if content and not content.endswith("\n") else ""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": content + gap + write(calls)}


def _written(call: Mapping[str, Any]) -> WrittenCall:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call.get("id") or "", function["name"], arguments

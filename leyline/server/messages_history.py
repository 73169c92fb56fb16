"""Messages as Anthropic's API has them, put into the form that the engine is given.

There, a turn is a list of blocks; here, OpenAI's form, reasoning and tool calls stand beside a
message's text, and every tool result is a message of its own, in front of what the user says
besides. Texts stay apart where the chat template says what stands between them, and the texts of
an assistant are one, as the model wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from leyline.errors import InvalidRequestError
from leyline.server.messages_blocks import (
    Block,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

BILLING = "x-anthropic-billing-header:"
"""How a system block of claude-code begins that is for its own provider: it differs from request
to request, so that nothing behind it would ever be found in the cache. It is left out."""

OpenAIMessage = dict[str, Any]


def converted(system: Sequence[TextBlock], messages: Sequence[Message]) -> list[OpenAIMessage]:
    """A conversation in OpenAI's form, its instructions first."""
    instructions = [block for block in system if not block.text.startswith(BILLING)]
    head = [{"role": "system", "content": _content(instructions)}] if instructions else []
    return head + [one for message in messages for one in _turn(message)]


def begun(messages: Sequence[Message]) -> tuple[Sequence[Message], bool]:
    """The conversation, and whether its last message is the beginning of the reply.

    An empty message of the assistant at the end begins nothing and is left out.

    Raises:
        InvalidRequestError: If the last message is the assistant's and does not end with text:
            neither reasoning nor a tool call can be gone on with.
    """
    if messages[-1].role != "assistant":
        return messages, False
    last = messages[-1].content
    if not last or all(isinstance(block, TextBlock) and not block.text for block in last):
        return messages[:-1], False
    if not isinstance(last[-1], TextBlock):
        raise InvalidRequestError(
            "The last message is the assistant's and ends with a block of type "
            f"{last[-1].type}. Only text can be gone on with: add a user's message, with a "
            "tool_result for each tool_use.",
            param=f"messages[{len(messages) - 1}]",
        )
    return messages, True


def _turn(message: Message) -> Iterator[OpenAIMessage]:
    if message.role == "assistant":
        yield _reply(message.content)
        return
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    yield from map(_result, results)
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if texts or not results:
        yield {"role": message.role, "content": _content(texts)}


def _reply(blocks: Sequence[Block]) -> OpenAIMessage:
    texts = (block.text for block in blocks if isinstance(block, TextBlock))
    message: OpenAIMessage = {"role": "assistant", "content": "".join(texts)}
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    """A call, its arguments as JSON text, spaced as models and templates mostly write it."""
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock) -> OpenAIMessage:
    content = _content(block.content)
    if block.is_error:
        content = _failed(content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _failed(content: str | list[Any]) -> str | list[Any]:
    """A result that says by itself that the tool failed: OpenAI's form has no field for it."""
    if isinstance(content, list):
        return [{"type": "text", "text": "Error: "}, *content]
    return content if content.lower().startswith("error") else f"Error: {content}"


def _content(blocks: Iterable[TextBlock]) -> str | list[Any]:
    """One text as a string, several as parts."""
    texts = [block.text for block in blocks]
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""

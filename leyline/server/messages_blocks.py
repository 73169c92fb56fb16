"""The messages of Anthropic's Messages API as JSON: turns, and the blocks that they consist of.

A text may stand wherever a list of blocks may, and so may null, which is an empty one.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from leyline.server.fields import Name, Text, WireModel, does, tagged, wrong

MAX_BLOCKS = 4096
ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks in the messages of each role."""

_SURROGATE = re.compile("[\ud800-\udfff]")

Key = Annotated[Name, Field(min_length=1)]


def proper(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object without half a surrogate pair in it: U+FFFD stands there instead.

    A model's own arguments can have one, written as an escape, and come back in its history.

    Raises:
        ValueError: If the object cannot be JSON, having a number that is none.
        RecursionError: If it is too deep to be written.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isascii() or not _SURROGATE.search(text):
        return value
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _as_blocks(content: Any) -> Any:
    """A content as a list of blocks: a text is a block, and nothing is none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [] if content is None else content


def _arguments(value: dict[str, Any]) -> dict[str, Any]:
    try:
        return proper(value)
    except (ValueError, RecursionError):
        raise wrong("must be a JSON object, and not too deep") from None


class TextBlock(WireModel):
    """Text."""

    type: Annotated[Literal["text"], does("`text`.")]
    text: Annotated[Text, does("The text.")]


class ThinkingBlock(WireModel):
    """What the model thought in a turn that is over."""

    type: Annotated[Literal["thinking"], does("`thinking`.")]
    thinking: Annotated[Text, does("What was thought.")]


class RedactedThinkingBlock(WireModel):
    """Reasoning that only its author can read; it is left out of the prompt."""

    type: Annotated[Literal["redacted_thinking"], does("`redacted_thinking`; left out.")]


class ToolUseBlock(WireModel):
    """A tool call of a turn that is over."""

    type: Annotated[Literal["tool_use"], does("`tool_use`.")]
    id: Annotated[Key, does("The call's id, which its result repeats.")]
    name: Annotated[Key, does("The tool's name.")]
    input: Annotated[
        Annotated[dict[str, Any], AfterValidator(_arguments)], does("The call's arguments.")
    ]


TextBlocks = Annotated[
    list[TextBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock] | None),
    Field(max_length=MAX_BLOCKS),
]


class ToolResultBlock(WireModel):
    """What a tool answered."""

    type: Annotated[Literal["tool_result"], does("`tool_result`.")]
    tool_use_id: Annotated[Key, does("The id of the call that it answers.")]
    content: Annotated[
        TextBlocks, Field(default_factory=list), does("The answer: a string, null, or text blocks.")
    ]
    is_error: Annotated[
        bool | None, does('Whether the tool failed; the model then reads "Error: " first.')
    ] = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        tagged("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        custom_error_type="unsupported_content",
        custom_error_message="must be a block of type text, thinking, redacted_thinking, tool_use "
        "or tool_result; this server reads text only, and fetches nothing",
    ),
]
Blocks = Annotated[
    list[Block],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block] | None),
    Field(max_length=MAX_BLOCKS),
]


class Message(WireModel):
    """A turn of the conversation."""

    role: Annotated[Literal["user", "assistant", "system"], does("Who speaks.")]
    content: Annotated[
        Blocks, Field(default_factory=list), does("What is said: a string, null, or blocks.")
    ]

    @field_validator("content")
    @classmethod
    def _fits_role(cls, content: list[Block], info: ValidationInfo) -> list[Block]:
        role = info.data.get("role")  # not there if it was refused
        for block in content:
            if role is not None and block.type not in ALLOWED[role]:
                raise wrong(
                    f"has a block of type {block.type}; a message of the role {role} can have "
                    f"these: {', '.join(ALLOWED[role])}"
                )
        return content

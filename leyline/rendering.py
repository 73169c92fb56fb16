"""What else than its messages goes into a conversation's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is written as a prompt.

    Attributes:
        tools: The tools that the template is told of, in OpenAI's form
            `{"type": "function", "function": {"name", "description", "parameters"}}`.
        variables: More variables for the template (`chat_template_kwargs`), such as
            `enable_thinking`.
        opens_reply: Whether the prompt ends with the head of a reply (`add_generation_prompt`).
        continues_reply: Whether the last message is the beginning of the reply, which goes on
            where its text ends (`continue_final_message`).
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opens_reply: bool = True
    continues_reply: bool = False


PLAIN = Rendering()

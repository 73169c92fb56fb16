"""What else than its messages goes into a conversation's prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from leyline.errors import InvalidRequestError
from leyline.template import content_text

Messages = Sequence[Mapping[str, Any]]

# Stands behind the beginning of a reply that is to be continued; no text has it by chance.
_HERE = "\ue000leyline-goes-on-here\ue001"
# What the engine itself tells a template.
_OURS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
)


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
        told: What a template that knows of no tools is given in the messages' place: the same
            conversation in plain messages, each content somewhere in it as it is. Of a longer
            history it must begin alike. None gives the template the messages.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opens_reply: bool = True
    continues_reply: bool = False
    told: Callable[[Messages], Messages] | None = None


PLAIN = Rendering()


class Renderer(Protocol):
    """What writes prompts; a `leyline.tokenizer.Tokenizer` does."""

    @property
    def part_separator(self) -> str:
        """What it puts between the text parts of a message."""
        ...

    def render(self, messages: Messages, **variables: Any) -> str:
        """The prompt text of a conversation."""
        ...


def rendered(renderer: Renderer, messages: Messages, rendering: Rendering = PLAIN) -> str:
    """The prompt text of a conversation.

    Raises:
        InvalidRequestError: If the messages are malformed, the template refuses them, a variable
            is one that the engine sets itself, or there is no reply to be continued.
    """
    _check_variables(rendering.variables)
    more = {"tools": rendering.tools or None, **rendering.variables}
    told = rendering.told or (lambda messages: messages)
    if not rendering.continues_reply:
        return renderer.render(told(messages), add_generation_prompt=rendering.opens_reply, **more)
    marked = [*messages[:-1], _marked(messages, renderer)]
    text = renderer.render(told(marked), add_generation_prompt=False, **more)
    before, found, _ = text.partition(_HERE)
    if not found:
        raise _nothing_to_continue("the model's chat template does not write its text")
    return before


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in _OURS or name.endswith("_token"):
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {name:.40}; the engine does so itself.",
                param="chat_template_kwargs",
            )


def _marked(messages: Messages, renderer: Renderer) -> Mapping[str, Any]:
    """The last message, with a mark where its text ends."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise _nothing_to_continue("it must be an assistant's, and have no tool calls")
    text = content_text(last.get("content"), separator=renderer.part_separator) or ""
    return {**last, "content": text + _HERE}


def _nothing_to_continue(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The last message cannot be continued: {reason}.", param="continue_final_message"
    )

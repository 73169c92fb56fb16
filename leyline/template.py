"""Chat templates: messages to prompt text, in a sandbox.

A template is code that came with the model folder, so it runs in jinja2's immutable sandbox and
nowhere else: private attributes, imports and files are out of its reach (CVE-2026-5760 is what
happens otherwise). It gets the helpers that transformers offers (`tojson`, `raise_exception`,
`strftime_now`, loop controls, the `generation` block), since published templates rely on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leyline.errors import InvalidRequestError, ModelError

PART_SEPARATOR = "\n"  # between the text parts of one message, as vLLM and llama.cpp join them


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks replies for training; here, just text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Drop the two tags and keep what is between them."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, which here also refuses what it would silently print as ""."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an unsafe attribute at once.

        Raises:
            SecurityError: Always.
        """
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own tojson escapes HTML characters, which models have never seen in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _sandbox() -> TemplateSandbox:
    sandbox = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationBlock]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        if isinstance(part.get("text"), str):
            return part["text"]
        raise InvalidRequestError(f"{where}.text must be a string.", param=f"{where}.text")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{where} is of type {kind!r}, but this model reads text only; "
        'send parts of the form {"type": "text", "text": "..."}.',
        param=where,
    )


def content_text(content: Any, where: str = "content") -> str | None:
    """Turn a message's content into text.

    Args:
        content: A string, None, or a list of text parts, which are joined with a line break.
        where: The field's name for error messages.

    Raises:
        InvalidRequestError: If it is anything else, such as a list with an image in it.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        texts = [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
        return PART_SEPARATOR.join(texts)
    raise InvalidRequestError(
        f"{where} must be a string, null or a list of text parts, not {type(content).__name__}.",
        param=where,
    )


def _mapping_arguments(call: Any) -> Any:
    """Return a tool call whose arguments are a mapping: templates walk over its items."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _plain_message(message: Any, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with a role.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"{where}.role must be a non-empty string such as 'user'.", param=f"{where}.role"
        )
    plain = {**message, "content": content_text(message.get("content"), f"{where}.content")}
    if isinstance(message.get("tool_calls"), Sequence):
        plain["tool_calls"] = [_mapping_arguments(call) for call in message["tool_calls"]]
    if plain["content"] is None and not plain.get("tool_calls"):
        plain["content"] = ""
    return plain


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the messages in the one form that templates are given.

    Content is a string; it stays None only beside tool calls, where templates look for that.

    Raises:
        InvalidRequestError: If the list is empty or a message is malformed; names the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of messages.", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message.", param="messages")
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _without_null(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message["content"] or ""} for message in messages]


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The jinja2 text.
        special_tokens: Texts that the template may name, such as `bos_token`.

    Raises:
        ModelError: If the text is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _sandbox().from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f" (line {line})" if line else ""
            raise ModelError(f"The model's chat template is not valid{place}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text.

        Raises:
            InvalidRequestError: If the messages are malformed, or the template refuses them.
        """
        plain = plain_messages(messages)
        known = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render({**known, "messages": plain})
        except TypeError:
            # Simple templates add content to strings and cannot take the None beside tool calls.
            return self._render_checked({**known, "messages": _without_null(plain)})
        except Exception as error:
            raise _refusal(error) from error

    def _render_checked(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except Exception as error:
            raise _refusal(error) from error


def _refusal(error: Exception) -> InvalidRequestError:
    """Say in one sentence why a template gave up; any exception may come out of foreign code."""
    if isinstance(error, SecurityError):
        text = f"The model's chat template tried something that is not allowed: {error}."
    elif isinstance(error, jinja2.TemplateError):
        text = f"The model's chat template refused these messages: {error.message}"
    else:
        text = f"The model's chat template failed on these messages: {error}"
    return InvalidRequestError(text, param="messages")

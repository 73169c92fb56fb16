"""Chat templates: messages to prompt text, in a sandbox (`leyline.template_sandbox`).

Templates differ in what they expect of a message: some read lists of text parts, some only strings;
some look for a null beside tool calls, others print it as "None"; some walk over a call's
arguments, others append them as JSON text. A template does not say which, so it is asked: a few
probes are rendered when it is loaded, and every later message is given in the form that it writes
well. So a null, an absent and an empty content give the same prompt, and a tool call is never lost,
not even one whose arguments a model left broken: its client sends it back with every later turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from leyline.errors import InvalidRequestError, ModelError
from leyline.template_meter import METER, Meter, plain_copy
from leyline.template_sandbox import TemplateSandbox

# Between the text parts of one message, where the template puts nothing of its own: as vLLM and
# llama.cpp join them.
PART_SEPARATOR = "\n"
MAX_REASON = 300  # characters of a template's own words in an error
MAX_DEPTH = 64  # of the arguments that a template walks over
INVALID = "INVALID_JSON"
"""The one key of a call's arguments that are no JSON object; its value is what they are."""
_HALF_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # by different clients


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


def content_text(
    content: Any, where: str = "content", separator: str = PART_SEPARATOR
) -> str | None:
    """Turn a message's content into text.

    Args:
        content: A string, None, or a list of text parts, which are joined.
        where: The field's name for error messages.
        separator: What joins them.

    Raises:
        InvalidRequestError: If it is anything else, such as a list with an image in it.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        texts = [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
        return separator.join(texts)
    raise InvalidRequestError(
        f"{where} must be a string, null or a list of text parts, not {type(content).__name__}.",
        param=where,
    )


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a template writes messages well.

    Attributes:
        part_separator: What it puts between the text parts of a message.
        null_content: Whether it wants null, not "", as the content beside tool calls.
        text_arguments: Whether it wants a call's arguments as JSON text, not as a mapping.
        list_content: Whether it reads no strings, only lists of parts.
        only_objects: Whether it fails on arguments that are no object.
    """

    part_separator: str = PART_SEPARATOR
    null_content: bool = False
    text_arguments: bool = False
    list_content: bool = False
    only_objects: bool = False


def _formed_call(call: Any, form: Form) -> Any:
    """Return a tool call with its arguments in the template's form."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = _formed_arguments(function.get("arguments") or {}, form)
    return {**call, "function": {**function, "arguments": arguments}}


def _formed_arguments(arguments: Any, form: Form) -> Any:
    """Turn an object into its JSON text or back; what is neither stays text, inside one if need be.

    A model that was cut off, or that wrote no JSON, leaves such text behind.
    """
    if form.text_arguments:
        is_object = isinstance(arguments, Mapping)
        return json.dumps(dict(arguments), ensure_ascii=False) if is_object else arguments
    if not isinstance(arguments, str):
        return arguments
    parsed = _object(arguments)
    if parsed is None:
        return {INVALID: arguments} if form.only_objects else arguments
    return parsed


def _object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text spells; None if it is none, or too deep for a template.

    U+FFFD stands in it for half of a surrogate pair, which an escape can spell and no prompt.
    """
    try:
        value = json.loads(text)
        if _HALF_ESCAPED.search(text):
            spelled = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(spelled.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_deep(value, MAX_DEPTH) else None


def _is_deep(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than so many levels."""
    if not isinstance(value, (dict, list)):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(child, levels - 1) for child in children)


def _plain_message(message: Any, index: int, form: Form) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with a role.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"{where}.role must be a non-empty string such as 'user'.", param=f"{where}.role"
        )
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    calls = plain.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        plain["tool_calls"] = [_formed_call(call, form) for call in calls]
    content = content_text(plain.get("content"), f"{where}.content", form.part_separator)
    empty = None if plain.get("tool_calls") and form.null_content else ""
    plain["content"] = content or empty
    if form.list_content and plain["content"] is not None:
        plain["content"] = [{"type": "text", "text": plain["content"]}]
    return plain


def plain_messages(
    messages: Sequence[Mapping[str, Any]], form: Form | None = None
) -> list[dict[str, Any]]:
    """Return copies of the messages in the one form that a template is given.

    Content is a string, or null beside tool calls where the template wants that. Fields that are
    null are left out, and reasoning has all its names.

    Raises:
        InvalidRequestError: If the list is empty or a message is malformed; names the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of messages.", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message.", param="messages")
    form = form or Form()
    return [_plain_message(message, index, form) for index, message in enumerate(messages)]


class ChatTemplate:
    """A compiled chat template, or two.

    Args:
        source: The jinja2 text.
        special_tokens: Texts that the template may name, such as `bos_token`.
        tool_source: The text to take instead where tools are given.

    Attributes:
        source: As given.

    Raises:
        ModelError: If a text is not a valid template, or does what no template may do.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
    ) -> None:
        tokens = dict(special_tokens or {})
        self.source = source
        self._default = _Program(source, tokens)
        self._for_tools = _Program(tool_source, tokens) if tool_source else self._default

    @property
    def form(self) -> Form:
        """The form in which it is given messages."""
        return self._default.form

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
        program = self._for_tools if tools else self._default
        given = {
            "documents": None,
            **variables,
            "messages": plain_messages(messages, program.form),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return program.text(given)
        except Exception as error:
            raise _refusal(error) from error


class _Program:
    """A compiled template, and the form it wants."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        try:
            self._template = TemplateSandbox().compiled(source)
            self.form = Form()
            separator, list_content = self._content_form()
            self.form = Form(separator, *self._call_form(), list_content)
            self.form = replace(self.form, only_objects=self._wants_objects(self.form))
        except SecurityError as error:
            raise ModelError(f"The model's chat template is refused: {_brief(error)}.") from error
        except Exception as error:
            line = getattr(error, "lineno", None)
            place = f" (line {line})" if line else ""
            raise ModelError(
                f"The model's chat template is not valid{place}: {_brief(error)}"
            ) from error

    def text(self, variables: Mapping[str, Any]) -> str:
        """Render; any exception may come out of foreign code."""
        known: dict[int, int] = {}
        given, size = plain_copy({**self._special_tokens, **variables}, known)
        token = METER.set(Meter(known, size))
        try:
            return self._template.render(given)
        finally:
            METER.reset(token)

    def _content_form(self) -> tuple[str, bool]:
        """What it puts between text parts, if it takes them; whether it takes nothing else."""
        first, second = "Birds", "Fishes"
        parts = [{"type": "text", "text": word} for word in (first, second)]
        both = self._content(parts)
        gap, found, _ = both.partition(first)[2].partition(second)
        separator = gap if found and not gap.strip() else PART_SEPARATOR
        if first in self._content(parts[:1]) and first not in self._content(first):
            return separator, True
        takes_parts = self._content(first + separator + second) == both
        return separator if takes_parts else PART_SEPARATOR, False

    def _content(self, content: Any) -> str:
        return self._probe([{"role": "user", "content": content}]) or ""

    def _call_form(self) -> tuple[bool, bool]:
        """Whether it wants a null content beside tool calls, and their arguments as JSON text."""
        for null_content in (False, True):
            for text_arguments in (False, True):
                arguments: Any = {"bird": "owl"}
                if text_arguments:
                    arguments = json.dumps(arguments)
                text = self._call(arguments, None if null_content else "") or ""
                # Python's own spelling of a mapping, and JSON in JSON, are nobody's wish.
                if "find_birds" in text and not any(odd in text for odd in ("{'bird'", '{\\"bird')):
                    return null_content, text_arguments
        return False, False

    def _wants_objects(self, form: Form) -> bool:
        """Whether a call without JSON is what it fails on, or leaves out."""
        content = None if form.null_content else ""
        written = [self._call(each, content) or "" for each in ({"bird": "owl"}, '{"bird": "ow')]
        return "owl" in written[0] and '"ow' not in written[1].replace("\\", "")

    def _call(self, arguments: Any, content: str | None) -> str | None:
        """How it writes a call beside a content, if it does."""
        function = {"name": "find_birds", "arguments": arguments}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        reply = {"role": "assistant", "content": content, "tool_calls": calls}
        return self._probe([{"role": "user", "content": "Find one."}, reply])

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        """Render a conversation that the template may not like."""
        given = {"messages": messages, "tools": None, "documents": None}
        try:
            return self.text({**given, "add_generation_prompt": False})
        except SecurityError:
            raise
        except RecursionError as error:
            raise SecurityError("it calls itself without end") from error
        except Exception:
            return None


def _brief(error: Exception) -> str:
    """What an error says, in one line; a template may write what it likes into it."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


def _refusal(error: Exception) -> InvalidRequestError:
    """Say in one sentence why a template gave up; any exception may come out of foreign code."""
    if isinstance(error, SecurityError):
        text = f"The model's chat template tried something that is not allowed: {_brief(error)}."
    elif isinstance(error, jinja2.TemplateError):
        text = f"The model's chat template refused these messages: {_brief(error)}"
    else:
        text = f"The model's chat template failed on these messages: {_brief(error)}"
    return InvalidRequestError(text, param="messages")

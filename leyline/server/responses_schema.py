"""The body of `POST /v1/responses`: OpenAI's fields, and Leyline's own on top.

An input is a list of items, not of messages: what was said, thought and called, and what calls
brought back, one item each; `responses_ask` makes messages of them. What an item or a tool is
depends on its `type`, and so do the fields that it needs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from leyline.server.fields import (
    SUPPORT,
    Content,
    Int64,
    Name,
    Salt,
    SessionId,
    Stops,
    Text,
    TokenCount,
    WireModel,
    does,
    only,
    refused,
    wrong,
)
from leyline.server.schema_check import check_parameters, check_schema
from leyline.server.schema_generation import (
    ContextEdits,
    EditMode,
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    Temperature,
    TopK,
    TopP,
    Tops,
    Variables,
)
from leyline.server.schema_messages import MAX_MESSAGES, MAX_TOOLS, ToolName

MAX_ITEMS = 4 * MAX_MESSAGES
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
MAX_INCLUDED = 32
LOGPROBS = "message.output_text.logprobs"

NEEDED = {
    "message": ("role",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "reasoning": (),
}
"""The types of items, and the fields without which one is none."""
TOOL_TYPES = ("function", "namespace")
"""Tools of other types run at OpenAI, or are known to some clients only; they are left out."""
THOUGHTS = ("reasoning_text", "summary_text")


def ignored(meaning: str) -> Any:
    """Says why a field makes no difference."""
    return Field(description=meaning, json_schema_extra={SUPPORT: "ignored"})


def _as_items(value: Any) -> Any:
    """A text is a message from the user."""
    if value is None:
        return []
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_texts(content: Any) -> Any:
    """Content whose thoughts are texts like any other."""
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _as_text(part: Any) -> Any:
    is_thought = isinstance(part, dict) and part.get("type") in THOUGHTS
    return {**part, "type": "text"} if is_thought else part


def _item_type(value: str) -> str:
    if value not in NEEDED:
        allowed = ", ".join(NEEDED)
        advice = "; send the item itself" if value == "item_reference" else ""
        raise wrong(f"must be one of {allowed}{advice}", "unsupported_value")
    return value


def _only(*types: str) -> BeforeValidator:
    """Takes the fields of all but tools of these types, since they may be anything."""

    def bare(tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in types else tool

    def check(value: Any) -> Any:
        return [bare(tool) for tool in value] if isinstance(value, list) else value

    return BeforeValidator(check)


def _as_choice(value: Any) -> Any:
    """The short choices, spelt like the long ones."""
    return {"type": value} if isinstance(value, str) else value


Texts = Annotated[Content, BeforeValidator(_as_texts)]
ItemType = Annotated[str, AfterValidator(_item_type)]
FullName = Annotated[Name, Field(min_length=1)]
Parameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]
Schema = Annotated[dict[str, Any], AfterValidator(check_schema)]


class InputItem(WireModel):
    """One step of a conversation."""

    type: Annotated[ItemType, does("One of " + ", ".join(NEEDED) + ".")] = "message"
    role: Annotated[
        Literal["system", "developer", "user", "assistant"] | None, does("Who says a message.")
    ] = None
    content: Annotated[Texts, does("A message's text or text parts, or a reasoning's.")] = ""
    summary: Annotated[Texts, does("A reasoning's text parts where it has no content.")] = ""
    call_id: Annotated[Name | None, does("Which call, and which call's output.")] = None
    name: Annotated[FullName | None, does("The function that is called.")] = None
    namespace: Annotated[Name | None, does("The namespace that the function is in.")] = None
    arguments: Annotated[Text | None, does("A call's arguments: JSON text.")] = None
    output: Annotated[Texts, does("What a call brought back: text or text parts.")] = ""

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, value: Any) -> Any:
        """What has no type is a message; without a role either, it refers to an item."""
        if isinstance(value, dict) and value.get("type") is None:
            return {**value, "type": "message" if "role" in value else "item_reference"}
        return value

    @model_validator(mode="after")
    def _complete(self) -> InputItem:
        missing = [name for name in NEEDED[self.type] if getattr(self, name) is None]
        if missing:
            raise wrong(f"an item of type {self.type} needs {' and '.join(missing)}")
        return self


class Function(WireModel):
    """A function that the model may call."""

    type: Annotated[Text, does("function; others are left out.")]
    name: Annotated[ToolName | None, does("What it is called.")] = None
    description: Annotated[Text | None, does("What it does.")] = None
    parameters: Annotated[Parameters | None, does("The JSON schema of its arguments.")] = None
    strict: Annotated[
        bool | None,
        does("Taken either way: where a call is demanded, its arguments follow the schema."),
    ] = None

    @model_validator(mode="after")
    def _named(self) -> Function:
        if self.name is None and self.type == "function":
            raise wrong("a function needs a name")
        return self


class Tool(Function):
    """A function, or a namespace of functions."""

    type: Annotated[Text, does("function or namespace; others are left out.")]
    tools: Annotated[
        Annotated[list[Function], _only("function"), Field(max_length=MAX_TOOLS)] | None,
        does("The functions of a namespace."),
    ] = None

    @model_validator(mode="after")
    def _named_space(self) -> Tool:
        if self.name is None and self.type == "namespace":
            raise wrong("a namespace needs a name")
        return self


class AllowedTool(WireModel):
    """One of the tools that may be called."""

    type: Annotated[Text, does("function; others are left out.")]
    name: Annotated[Name | None, does("Its name.")] = None
    namespace: Annotated[Name | None, does("The namespace that it is in.")] = None


class ToolChoice(WireModel):
    """Whether the model may, may not or must call a tool, and which."""

    type: Annotated[
        Literal["auto", "none", "required", "function", "allowed_tools"], does("The choice.")
    ]
    name: Annotated[FullName | None, does("The function that must be called.")] = None
    namespace: Annotated[Name | None, does("The namespace that it is in.")] = None
    mode: Annotated[Literal["auto", "required"], does("The choice among those allowed.")] = "auto"
    tools: Annotated[
        list[AllowedTool],
        Field(max_length=MAX_TOOLS),
        does("Those allowed; the model is not told of others."),
    ] = Field(default_factory=list[AllowedTool])

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "function" and self.name is None:
            raise wrong("a choice of one function needs its name")
        return self


class TextFormat(WireModel):
    """What an answer's text must be."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        does("Any text, any JSON object, or JSON that fits a schema."),
    ] = "text"
    name: Annotated[Name | None, ignored("What the schema is called.")] = None
    schema_: Annotated[Schema | None, Field(alias="schema"), does("The JSON schema.")] = None
    strict: Annotated[bool | None, ignored("A schema is always kept to.")] = None

    @model_validator(mode="after")
    def _with_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise wrong("a format of type json_schema needs a schema")
        return self


class TextOptions(WireModel):
    """How an answer's text comes out."""

    format: Annotated[TextFormat | None, does("What it must be.")] = None
    verbosity: Annotated[Any, ignored("No model here knows it.")] = None


class ReasoningOptions(WireModel):
    """How a model thinks."""

    effort: Annotated[
        Name | None,
        does("Told to the chat template as reasoning_effort; none turns enable_thinking off."),
    ] = None
    summary: Annotated[Any, ignored("Reasoning is told as it is.")] = None


Tools = Annotated[list[Tool], _only(*TOOL_TYPES), Field(max_length=MAX_TOOLS)]
Items = Annotated[list[InputItem], BeforeValidator(_as_items), Field(max_length=MAX_ITEMS)]
MetadataText = Annotated[Text, Field(max_length=MAX_METADATA_CHARS)]
Metadata = Annotated[dict[Name, MetadataText], Field(max_length=MAX_METADATA)]


class ResponsesRequest(WireModel):
    """Body of `POST /v1/responses`."""

    model: Annotated[Name | None, does("The served model; nothing means it too.")] = None
    input: Annotated[Items, does("A text, or items: " + ", ".join(NEEDED) + ".")] = Field(
        default_factory=list[InputItem]
    )
    instructions: Annotated[
        Text | None, does("A system message in front, for this response only.")
    ] = None
    previous_response_id: Annotated[
        Name | None, does("A kept response whose conversation goes on.")
    ] = None
    store: Annotated[bool | None, does("Whether the response is kept; true by default.")] = None
    stream: Annotated[bool | None, does("Whether the answer comes in events.")] = None

    max_output_tokens: Annotated[
        TokenCount | None, does("Tokens to generate at most, reasoning included.")
    ] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Annotated[Int64 | None, does("Makes sampling reproducible.")] = None
    stop: Annotated[Stops, does("Strings that end the reply and are no part of it.")] = Field(
        default_factory=list[str]
    )
    top_logprobs: Annotated[
        Tops | None,
        does("Tells log-probabilities, and those of so many likeliest tokens."),
    ] = None
    include: Annotated[
        Annotated[list[Name], Field(max_length=MAX_INCLUDED)] | None,
        does(f"{LOGPROBS} tells log-probabilities; anything else is ignored."),
    ] = None

    tools: Annotated[
        Tools | None, does("Functions and namespaces of functions; others are left out.")
    ] = None
    tool_choice: Annotated[
        Annotated[ToolChoice, BeforeValidator(_as_choice)] | None,
        does("auto, none, required, one function, or allowed_tools."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, does("Whether a reply may make several calls; true by default.")
    ] = None
    text: Annotated[
        TextOptions | None, does("Its format is text, json_object or json_schema; always enforced.")
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None, does("Its effort is told to the chat template.")
    ] = None
    chat_template_kwargs: Annotated[
        Variables | None, does("More variables for the chat template.")
    ] = None

    session_id: Annotated[SessionId | None, does("The session that the turn belongs to.")] = None
    prompt_cache_key: Annotated[
        Text | None, does("Names a session that the request can do without.")
    ] = None
    cache_salt: Annotated[
        Salt | None, does("Keeps the request's cache and response apart from others'.")
    ] = None
    edit_mode: EditMode = None
    context_management: ContextEdits = None
    metadata: Annotated[Metadata | None, does("Given back with the response.")] = None
    user: Annotated[Text | None, does("Given back with the response.")] = None

    background: Annotated[Any, only(False), refused("Refused if true: nothing runs unseen.")] = None
    conversation: Annotated[
        Any, only(), refused("Refused: name a previous_response_id or a session_id.")
    ] = None
    prompt: Annotated[Any, only(), refused("Refused: there are no stored prompts.")] = None
    messages: Annotated[Any, only(), refused("Refused: send input.")] = None
    max_tokens: Annotated[Any, only(), refused("Refused: send max_output_tokens.")] = None
    response_format: Annotated[Any, only(), refused("Refused: send text.format.")] = None
    n: Annotated[Any, only(1), refused("Refused unless 1.")] = None
    logit_bias: Annotated[Any, only({}), refused("Refused unless empty.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, ignored("What does not fit is always refused.")
    ] = None
    service_tier: Annotated[Any, ignored("There is one.")] = None
    safety_identifier: Annotated[Any, ignored("Nobody looks at it.")] = None
    max_tool_calls: Annotated[Any, ignored("It counts calls of built-in tools.")] = None

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are told beside each token; None if nothing is told."""
        told = self.top_logprobs is not None or LOGPROBS in (self.include or [])
        return (self.top_logprobs or 0) if told else None

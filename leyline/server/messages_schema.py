"""The bodies of Anthropic's Messages API as JSON: every field typed, bounded and described.

What the API has and this server has not is dealt with as everywhere: fields that would change
what the answer means are refused, those that would not are ignored. Tools that Anthropic's own
servers run, or that its models know without a schema, have another `type` than `custom`; they are
left out, and a `tool_choice` that names one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from leyline.sampling import SamplingParams
from leyline.server.ask import OutputForm
from leyline.server.fields import (
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
    tagged,
    wrong,
)
from leyline.server.messages_blocks import Message, TextBlocks
from leyline.server.parsers.pieces import Choice, ToolUse
from leyline.server.schema_check import check_parameters, check_schema
from leyline.server.schema_generation import ContextEdits, EditMode, Temperature, TopK, TopP
from leyline.server.schema_messages import MAX_MESSAGES, MAX_TOOLS, OtherTool, ToolName

IGNORED: Mapping[str, str] = {
    "cache_control": "Every prompt is cached; the mark may stand on any block and tool.",
    "metadata": "The server keeps no accounts.",
    "service_tier": "There is one.",
    "speed": "There is one.",
    "inference_geo": "The server is where it is.",
    "fallbacks": "No answer is refused by a policy.",
    "diagnostics": "Usage says what was cached; see first_difference.",
    "betas": "What they stand for is told from the other fields.",
    "thinking.budget_tokens": "max_tokens limits reasoning and answer together.",
    "thinking.display": "Reasoning is always shown.",
    "messages[].content[].signature": "Nothing is signed.",
    "messages[].content[].citations": "Nothing is cited.",
    "tools[].strict": "Where a call is demanded, its arguments follow the schema.",
}
"""Known fields that clients send and nothing depends on."""

CHOICES: Mapping[str, Choice] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class CustomTool(WireModel):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"] | None, does("`custom`, or nothing.")] = None
    name: Annotated[ToolName, does("Its name.")]
    description: Annotated[Text | None, does("What it does.")] = None
    input_schema: Annotated[
        Annotated[dict[str, Any], AfterValidator(check_parameters)],
        does("The JSON schema of its arguments, an object's."),
    ]

    def told(self) -> dict[str, Any]:
        """What the chat template and the parsers are told of it, in OpenAI's form."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(tagged("custom", none="<custom>", other="<other>")),
]


def _distinct(tools: list[CustomTool | OtherTool]) -> list[CustomTool | OtherTool]:
    names = [tool.name for tool in tools if isinstance(tool, CustomTool)]
    if len(set(names)) < len(names):
        raise wrong("has two tools of the same name")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_distinct)]


class ToolChoice(WireModel):
    """Whether the model may, may not or must call tools."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        does("auto, any for some call, tool for a call of name, or none."),
    ]
    name: Annotated[ToolName | None, does("The tool that must be called, with tool.")] = None
    disable_parallel_tool_use: Annotated[bool | None, does("true asks for one call at a time.")] = (
        None
    )

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise wrong('must have a name, since its type is "tool"')
        return self


class Thinking(WireModel):
    """Whether the model thinks before it answers."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        does("disabled turns the chat template's enable_thinking off, all else turns it on."),
    ]


class OutputFormat(WireModel):
    """What the answer's text must be."""

    type: Annotated[Literal["json_schema"], does("The only form there is.")]
    # `schema` is a method of pydantic's models
    schema_: Annotated[
        Annotated[Any, AfterValidator(check_schema)],
        Field(alias="schema"),
        does("The schema; it is always enforced."),
    ]


class OutputConfig(WireModel):
    """How the answer is to be."""

    format: Annotated[OutputFormat | None, does("What its text must be.")] = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        does("Told to the chat template, as reasoning_effort."),
    ] = None


class CountTokensRequest(WireModel):
    """Body of `POST /v1/messages/count_tokens`: what of a request makes its prompt."""

    model: Annotated[Name | None, does("The served name, or nothing.")] = None
    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=MAX_MESSAGES),
        does("The conversation; text of the assistant at its end is gone on with."),
    ]
    system: Annotated[
        TextBlocks,
        Field(default_factory=list),
        does("The instructions: a string, null, or text blocks."),
    ]
    tools: Annotated[
        Tools | None, does("Tools that the model may call; other types than custom are left out.")
    ] = None
    tool_choice: Annotated[ToolChoice | None, does("How tools may be used.")] = None
    thinking: Annotated[
        Thinking | None, does("Whether the model thinks first; without it, as it is used to.")
    ] = None
    output_config: Annotated[OutputConfig | None, does("How the answer is to be.")] = None
    output_format: Annotated[OutputFormat | None, does("Older than output_config.format.")] = None
    context_management: ContextEdits = None

    mcp_servers: Annotated[Any, only([]), refused("Refused unless empty.")] = None

    def use(self) -> ToolUse:
        """What the request says of its tools."""
        tools = tuple(tool.told() for tool in self.tools or () if isinstance(tool, CustomTool))
        choice = self.tool_choice
        if choice is None:
            return ToolUse(tools)
        parallel = not choice.disable_parallel_tool_use
        name = choice.name if choice.type == "tool" else None
        return ToolUse(tools, CHOICES[choice.type], name, parallel)

    def form(self) -> OutputForm | None:
        """The constraint that the answer's text is under."""
        config = self.output_config
        if config is not None and config.format is not None:
            return OutputForm("json_schema", config.format.schema_, "output_config.format")
        older = self.output_format
        return older and OutputForm("json_schema", older.schema_, "output_format")

    def variables(self) -> dict[str, Any]:
        """What the chat template is told besides; reasoning goes by two names in templates."""
        told: dict[str, Any] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            told["reasoning_effort"] = self.output_config.effort
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            told |= {"enable_thinking": thinks, "thinking": thinks}
        return told


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[
        TokenCount, does("Tokens to generate at most; more than fit the window are cut to it.")
    ]
    stream: Annotated[bool | None, does("Answer in events.")] = None
    stop_sequences: Annotated[Stops, does("Texts that end the answer, and are no part of it.")] = (
        Field(default_factory=list[str])
    )
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    session_id: Annotated[
        SessionId | None, does("Leyline's: the session whose context goes on.")
    ] = None
    cache_salt: Annotated[Salt | None, does("Leyline's: sets the cache apart from others'.")] = None
    edit_mode: EditMode = None

    container: Annotated[Any, only("", {}), refused("Refused unless empty.")] = None
    thread: Annotated[Any, only(), refused("Refused; send session_id.")] = None
    compaction: Annotated[Any, only(), refused("Refused; send context_management.")] = None

    def sampling(self) -> SamplingParams:
        """The request's fields in the engine's words."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),  # -1 means "all" elsewhere, 0 means it here
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
        )

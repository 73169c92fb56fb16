"""Messages and tools as JSON, in OpenAI's form."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from leyline.server.fields import (
    Content,
    Name,
    Reasoning,
    Text,
    WireModel,
    does,
    encodable,
    only,
    refused,
    tagged,
    wrong,
)
from leyline.server.parsers.pieces import Choice, ToolUse
from leyline.server.schema_check import check_parameters

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 256
MAX_TOOLS = 512
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def _tool_name(value: str) -> str:
    if _TOOL_NAME.fullmatch(value) is None:
        raise wrong("must be 1 to 128 of A-Z a-z 0-9 _ . : / -")
    return value


ToolName = Annotated[str, AfterValidator(_tool_name)]


def _arguments(value: Any) -> Any:
    """Arguments that are no text are an object; none at all are an empty one."""
    if value is None:
        return "{}"
    if not isinstance(value, str | dict):
        raise wrong("must be a string of JSON")
    return value


class CalledFunction(WireModel):
    """What a tool call of an assistant's message calls."""

    name: Annotated[Name, Field(min_length=1), does("The function's name.")]
    arguments: Annotated[
        Annotated[Any, BeforeValidator(_arguments), AfterValidator(encodable)],
        does("Its arguments as JSON text; text that is no JSON is rendered as it is."),
    ] = "{}"


class ToolCall(WireModel):
    """A tool call of an assistant's message."""

    id: Annotated[Name | None, does("The call's id, which its result repeats.")] = None
    type: Annotated[Literal["function"], does("Only functions are called.")] = "function"
    function: Annotated[CalledFunction, does("What is called.")]


class ChatMessage(WireModel):
    """One message of a conversation, from whichever side."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        does("Who speaks; developer is the same as system."),
    ]
    content: Annotated[
        Content,
        does("A string, null, nothing, or a list of text parts; other parts are refused."),
    ] = ""
    name: Annotated[Name | None, does("The speaker's name, if the chat template shows it.")] = None
    tool_call_id: Annotated[Name | None, does("The call that a tool's message answers.")] = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None,
        does("The calls that an assistant made."),
    ] = None
    reasoning_content: Annotated[
        Reasoning, does("What an assistant thought, if the chat template shows it.")
    ] = None
    reasoning: Annotated[Reasoning, does("The same by its other name.")] = None
    function_call: Annotated[
        Any, only(), refused("Refused unless null; functions are called in tool_calls.")
    ] = None
    audio: Annotated[Any, only(), refused("Refused unless null.")] = None

    def rendered(self) -> dict[str, Any]:
        """What the chat template gets to see: only what was said, a developer as the system."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if not message.get(name):
                message.pop(name, None)
        return message


class Function(WireModel):
    """A function that the model may call."""

    name: Annotated[ToolName, does("Its name.")]
    description: Annotated[Text | None, does("What it does.")] = None
    parameters: Annotated[
        Annotated[dict[str, Any] | None, AfterValidator(check_parameters)],
        does("The JSON schema of its arguments, an object's."),
    ] = None
    strict: Annotated[
        bool | None,
        does("Taken either way: where a call is demanded, its arguments follow the schema."),
    ] = None


class FunctionTool(WireModel):
    """A tool that is a function."""

    type: Literal["function"]
    function: Function

    def told(self) -> dict[str, Any]:
        """What the chat template and the parsers are told of it."""
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class OtherTool(WireModel):
    """A tool of a kind that hosted models bring along; it is left out."""

    type: Annotated[Text, Field(min_length=1, max_length=64)]


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(tagged("function", none="<function>", other="<other>")),
]


def _distinct(tools: list[FunctionTool | OtherTool]) -> list[FunctionTool | OtherTool]:
    names = [tool.function.name for tool in tools if isinstance(tool, FunctionTool)]
    if len(set(names)) < len(names):
        raise wrong("has two functions of the same name")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_distinct)]


def _tool_choice(value: Any) -> Any:
    """`auto`, `none`, `required`, or the name of a function in a tuple."""
    if value is None or value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return (_tool_name(name),)
    if isinstance(value, dict) and value.get("type") in ("allowed_tools", "custom"):
        raise wrong("not supported by this server; leave tools out instead", "unsupported_value")
    raise wrong(
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'
    )


ToolChoice = Annotated[Any, AfterValidator(_tool_choice)]


def tool_use(
    tools: list[FunctionTool | OtherTool] | None, choice: Any, parallel: bool | None
) -> ToolUse:
    """What a request says of its tools, once its fields have been read."""
    told = tuple(tool.told() for tool in tools or () if isinstance(tool, FunctionTool))
    name = choice[0] if isinstance(choice, tuple) else None
    chosen: Choice = "required" if isinstance(choice, tuple) else choice or "auto"
    return ToolUse(told, chosen, name, parallel is not False)

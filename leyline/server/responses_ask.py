"""From the body of `POST /v1/responses` to an `Ask`: items become messages, tools become functions.

What the model thought, said and called in one go is one message. A function in a namespace is told
to the model as `namespace__function`, and told back to the client as the two names again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leyline.errors import InvalidRequestError
from leyline.sampling import SamplingParams
from leyline.server.ask import Ask, Message, OutputForm
from leyline.server.parsers.pieces import ToolUse
from leyline.server.responses_schema import (
    AllowedTool,
    Function,
    InputItem,
    ResponsesRequest,
    TextFormat,
    Tool,
    ToolChoice,
)
from leyline.server.schema_generation import variables_of
from leyline.server.schema_messages import MAX_MESSAGES, MAX_TOOLS
from leyline.server.session_names import SessionName

ROLES = {"developer": "system"}  # templates know no developers


class Called(NamedTuple):
    """What a client calls a function."""

    name: str
    namespace: str | None = None

    @property
    def told(self) -> str:
        """What the model is told that it is called."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


@dataclass(frozen=True, slots=True)
class Past:
    """The conversation that a response goes on from.

    Attributes:
        messages: All of it, without instructions.
        session_id: The session that it runs in, if any.
    """

    messages: tuple[Message, ...] = ()
    session_id: str | None = None


def asked_of(body: ResponsesRequest, past: Past, salt: str, session: SessionName) -> Ask:
    """What a body asks for.

    Args:
        body: The body.
        past: What it goes on from.
        salt: The tenant and cache salt.
        session: The session that the body or its headers name.

    Raises:
        InvalidRequestError: If there is nothing to answer, or too much.
    """
    return Ask(
        messages=[*_instructions(body), *_continued(body, past)],
        params=_sampling(body),
        salt=salt,
        use=tool_use(body),
        form=_form(body.text.format if body.text is not None else None),
        session=_session(past, session),
        edit_mode=body.edit_mode,
        context_management=body.context_management,
        variables=_variables(body),
    )


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """Items as messages; each is what a client of the chat API would have sent."""
    return [message for turn in _turns(items) for message in _spoken(turn)]


def called(tools: Sequence[Tool] | None) -> dict[str, Called]:
    """What the client calls each function, by what the model is told that it is called."""
    return {one.told: one for one, _ in _functions(tools or [])}


def tool_use(body: ResponsesRequest) -> ToolUse:
    """What a body says of its tools.

    Raises:
        InvalidRequestError: If two have the same name, or a choice is for none of them.
    """
    choice = body.tool_choice or ToolChoice(type="auto")
    tools = _distinct(body.tools or [])
    parallel = body.parallel_tool_calls is not False
    if choice.type == "allowed_tools":
        allowed = tuple(tools[name] for name in _allowed(choice.tools, tools))
        return ToolUse(allowed, choice.mode, parallel=parallel)
    if choice.type == "function":
        told = Called(choice.name or "", choice.namespace).told
        return ToolUse(tuple(tools.values()), "required", told, parallel)
    return ToolUse(tuple(tools.values()), choice.type, parallel=parallel)


def _instructions(body: ResponsesRequest) -> list[Message]:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def _continued(body: ResponsesRequest, past: Past) -> list[Message]:
    messages = [*past.messages, *messages_of(body.input)]
    if not messages:
        raise InvalidRequestError("input is empty: there is nothing to answer.", param="input")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"The conversation has {len(messages)} messages; {MAX_MESSAGES} are allowed.",
            param="input",
        )
    return messages


def _sampling(body: ResponsesRequest) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),  # -1 means "all" elsewhere, 0 means it here
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        max_tokens=body.max_output_tokens,
        stop=tuple(body.stop),
        logprobs=body.num_logprobs,
    )


def _form(given: TextFormat | None) -> OutputForm | None:
    if given is None or given.type == "text":
        return None
    return OutputForm(given.type, given.schema_, "text.format")


def _variables(body: ResponsesRequest) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    return variables_of(effort, body.chat_template_kwargs)


def _session(past: Past, named: SessionName) -> SessionName:
    """A session that the body names, else the conversation's own, else what a header names."""
    if named.required or past.session_id is None:
        return named
    return SessionName(past.session_id)


def _turns(items: Iterable[InputItem]) -> Iterator[list[InputItem]]:
    """Items in groups that make a message each: reasoning, then a text, then calls."""
    turn: list[InputItem] = []
    for item in items:
        if turn and _rank(item) < _next_rank(turn[-1]):
            yield turn
            turn = []
        turn.append(item)
    if turn:
        yield turn


def _rank(item: InputItem) -> int:
    """Where an item may stand in its message; 0 is a message of its own."""
    if item.type == "message":
        return 2 if item.role == "assistant" else 0
    return {"reasoning": 1, "function_call": 3, "function_call_output": 0}[item.type]


def _next_rank(item: InputItem) -> int:
    """The lowest rank that may follow an item in its message."""
    rank = _rank(item)
    alone, repeats = rank == 0, item.type != "message"
    return 4 if alone else rank + (not repeats)


def _spoken(turn: Sequence[InputItem]) -> list[Message]:
    """The message of a turn; none for reasoning alone that nobody can read."""
    first = turn[0]
    if first.type == "function_call_output":
        return [{"role": "tool", "tool_call_id": first.call_id, "content": first.output}]
    if _rank(first) == 0:
        role = first.role or "user"
        return [{"role": ROLES.get(role, role), "content": first.content}]
    return _assistant(
        "".join(_thought(item) for item in turn if item.type == "reasoning"),
        next((item.content for item in turn if item.type == "message"), ""),
        [_call(item) for item in turn if item.type == "function_call"],
        is_certain=any(item.type == "message" for item in turn),
    )


def _assistant(
    reasoning: str, content: Any, calls: Sequence[Mapping[str, Any]], *, is_certain: bool
) -> list[Message]:
    if not (reasoning or calls or is_certain):
        return []
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return [message]


def _thought(item: InputItem) -> str:
    content = item.content or item.summary
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call(item: InputItem) -> Mapping[str, Any]:
    name = Called(item.name or "", item.namespace).told
    function = {"name": name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _functions(tools: Iterable[Tool]) -> Iterator[tuple[Called, Function]]:
    """The functions among tools and in their namespaces."""
    for tool in tools:
        if tool.type == "function":
            yield Called(tool.name or ""), tool
        for function in tool.tools or ():
            if tool.type == "namespace" and function.type == "function":
                yield Called(function.name or "", tool.name), function


def _distinct(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The functions in the chat API's form, by their names."""
    found: dict[str, Mapping[str, Any]] = {}
    for one, tool in _functions(tools):
        if len(found) == MAX_TOOLS:
            raise InvalidRequestError(
                f"There are too many functions; {MAX_TOOLS} are allowed.", param="tools"
            )
        if one.told in found:
            raise InvalidRequestError("Two of the tools have the same name.", param="tools")
        told = {"description": tool.description, "parameters": tool.parameters}
        function = {key: value for key, value in told.items() if value is not None}
        found[one.told] = {"type": "function", "function": {"name": one.told, **function}}
    return found


def _allowed(allowed: Iterable[AllowedTool], tools: Mapping[str, Any]) -> list[str]:
    names = [
        Called(one.name or "", one.namespace).told for one in allowed if one.type == "function"
    ]
    if any(name not in tools for name in names):
        raise InvalidRequestError(
            "tool_choice allows a tool that is not among the tools.", param="tool_choice"
        )
    return list(dict.fromkeys(names))

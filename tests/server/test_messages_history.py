"""Bodies of the Messages API, and the conversations in OpenAI's form that they become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline.errors import InvalidRequestError
from leyline.server.ask import OutputForm
from leyline.server.messages_history import begun, converted
from leyline.server.messages_schema import CountTokensRequest, MessagesRequest

from .messages_scripts import body_of

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USE = {"type": "tool_use", "id": "c1", "name": "read", "input": {"b": 1, "a": "é"}}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}}}
TOOL = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}


def read(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(body_of() | fields)


def history(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    body = read(messages=list(messages), system=system)
    return converted(body.system, body.messages)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def result(content: Any = "done", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **fields}


def test_a_conversation_with_everything_in_it() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "leyline"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    seen = history(
        {"role": "user", "content": "task"},
        assistant(thinking, redacted, text("I "), text("read."), USE | MARK),
        user(result([text("one"), text("two")]), text("go"), text("on", **MARK)),
        {"role": "system", "content": "late words"},
        system=[text("You are", **MARK), text("a bird.")],
    )
    assert seen == [
        {"role": "system", "content": [text("You are"), text("a bird.")]},
        {"role": "user", "content": "task"},
        {
            "role": "assistant",
            "content": "I read.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"b": 1, "a": "é"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [text("one"), text("two")]},
        {"role": "user", "content": [text("go"), text("on")]},
        {"role": "system", "content": "late words"},
    ]


def test_results_come_before_what_the_user_says_and_in_their_order() -> None:
    others = [result("b", tool_use_id="c2"), result("a")]
    seen = history(user(text("first"), *others))
    assert [one["role"] for one in seen] == ["tool", "tool", "user"]
    assert [one.get("tool_call_id") for one in seen] == ["c2", "c1", None]
    assert [one["role"] for one in history(user(*others))] == ["tool", "tool"]


@pytest.mark.parametrize("content", [None, "", []])
def test_what_is_empty_is_the_same_in_every_form(content: Any) -> None:
    seen = history({"role": "user", "content": content}, {"role": "assistant", "content": content})
    assert seen == [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    assert history({"role": "user"}) == seen[:1]
    assert history(user(result(content)))[0]["content"] == ""
    assert history(assistant(*(content or []), USE))[0]["content"] == ""
    assert len(history({"role": "user", "content": "x"}, system=content)) == 1


@pytest.mark.parametrize("content", ["hi", [text("hi")], [text("hi", **MARK, citations=None)]])
def test_a_text_and_a_block_of_it_are_the_same(content: Any) -> None:
    message = {"role": "user", "content": content}
    seen = history(message, user(result(content)), system=content)
    assert [one["content"] for one in seen] == ["hi"] * 3


@pytest.mark.parametrize(
    "content, told",
    [
        ("no such file", "Error: no such file"),
        ("", "Error: "),
        ("error 404", "error 404"),
        ("ERROR", "ERROR"),
        ([text("a"), text("b")], [text("Error: "), text("a"), text("b")]),
    ],
)
def test_a_tool_that_failed_says_so(content: Any, told: Any) -> None:
    assert history(user(result(content, is_error=True)))[0]["content"] == told
    for fine in (False, None):
        assert history(user(result("fine", is_error=fine)))[0]["content"] == "fine"


def test_a_line_for_another_provider_does_not_change_the_prompt() -> None:
    def instructed(number: int) -> list[dict[str, Any]]:
        billing = text(f"x-anthropic-billing-header: cc_version=2; cch={number};")
        return history({"role": "user", "content": "x"}, system=[billing, text("You are")])

    assert instructed(1) == instructed(2)
    assert instructed(1)[0] == {"role": "system", "content": "You are"}


def test_half_a_surrogate_pair_in_arguments_becomes_a_replacement() -> None:
    (message,) = history(assistant(USE | {"input": {"a\udc00": ["\ud83d", "👋"]}}))
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments.encode() and json.loads(arguments) == {"a\ufffd": ["\ufffd", "👋"]}


@pytest.mark.parametrize("blocks", [[text("The answer is (")], [USE, text("x")]])
def test_text_of_the_assistant_at_the_end_is_gone_on_with(blocks: list[Any]) -> None:
    body = read(messages=[user(text("q")), assistant(*blocks)])
    messages, continues = begun(body.messages)
    assert continues and list(messages) == body.messages


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_an_empty_reply_at_the_end_begins_nothing(content: Any) -> None:
    body = read(messages=[user(text("q")), {"role": "assistant", "content": content}])
    messages, continues = begun(body.messages)
    assert not continues and list(messages) == body.messages[:1]


@pytest.mark.parametrize("last", [USE, {"type": "thinking", "thinking": "x"}])
def test_a_call_or_a_thought_at_the_end_cannot_be_gone_on_with(last: Any) -> None:
    body = read(messages=[user(text("q")), assistant(text("x"), last)])
    with pytest.raises(InvalidRequestError) as refusal:
        begun(body.messages)
    assert refusal.value.param == "messages[1]" and last["type"] in refusal.value.message


def test_tools_in_openais_form() -> None:
    other = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    tools = [TOOL | MARK | {"type": "custom", "strict": True}, other, {"type": "mcp_toolset"}]
    use = read(tools=tools).use()
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    assert use.tools == ({"type": "function", "function": function},)
    assert (use.choice, use.name, use.parallel) == ("auto", None, True)
    bare = read(tools=[{"name": "f", "input_schema": {}}]).use()
    assert bare.tools[0]["function"] == {"name": "f", "parameters": {}}
    assert read(tools=None).use().tools == ()


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "read"}, ("required", "read", True)),
        ({"type": "none", "name": "read"}, ("none", None, True)),
        (None, ("auto", None, True)),
    ],
)
def test_how_tools_may_be_used(choice: Any, expected: Any) -> None:
    use = read(tools=[TOOL], tool_choice=choice).use()
    assert (use.choice, use.name, use.parallel) == expected


@pytest.mark.parametrize(
    "fields, variables",
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ({"thinking": {"type": "between_tools"}}, None),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ],
)
def test_what_the_template_is_told_of_reasoning(fields: Any, variables: Any) -> None:
    thinks = {"enable_thinking": True, "thinking": True}
    assert read(**fields).variables() == (thinks if variables is None else variables)


def test_the_form_of_the_answer() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    assert read().form() is None and read(output_config={"effort": None}).form() is None
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert read(**fields).form() == OutputForm("json_schema", SCHEMA)


def test_sampling_in_the_engines_words() -> None:
    params = read(temperature=0.5, top_p=0.9, top_k=-1, stop_sequences=["a"]).sampling()
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 0)
    assert (params.stop, params.max_tokens) == (("a",), 1000)
    plain = read(temperature=None).sampling()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.stop) == (1.0, 1.0, 0, ())


def test_every_field_says_what_it_does() -> None:
    schemas = MessagesRequest.model_json_schema()
    for model in (schemas, *schemas["$defs"].values()):
        for name, field in model["properties"].items():
            told = field.get("description", "")
            assert told.endswith(".") or (model["title"], name) == ("OtherTool", "type"), name
    assert set(CountTokensRequest.model_fields) < set(MessagesRequest.model_fields)

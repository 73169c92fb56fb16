"""From the items of a response's input to the messages of a chat, and what is refused of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leyline.errors import InvalidRequestError
from leyline.server.ask import Ask, OutputForm
from leyline.server.responses_ask import Past, asked_of, messages_of
from leyline.server.responses_schema import InputItem, ResponsesRequest
from leyline.server.schema_messages import MAX_MESSAGES
from leyline.server.session_names import SessionName

CODEX = Path(__file__).parent / "codex_request.json"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
FIND = {"type": "function", "name": "find", "description": "by name"}
CRM = {"type": "namespace", "name": "crm", "description": "", "tools": [FIND]}


def asked(past: Past | None = None, named: SessionName | None = None, **fields: Any) -> Ask:
    body = ResponsesRequest.model_validate({"input": "hi", **fields})
    return asked_of(body, past or Past(), "salt", named or SessionName())


def messages(*items: dict[str, Any]) -> list[Any]:
    return messages_of(InputItem.model_validate(item) for item in items)


def says(role: str, text: str = "x") -> dict[str, Any]:
    return {"role": role, "content": text}


def thinks(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def calls(call_id: str, name: str = "look", **more: Any) -> dict[str, Any]:
    more = {"call_id": call_id, "name": name, "arguments": "{}", **more}
    return {"type": "function_call", **more}


def returns(call_id: str, output: Any = "17") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def call(call_id: str, name: str = "look") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_a_text_is_a_message_from_the_user() -> None:
    assert asked().messages == [{"role": "user", "content": "hi"}]
    assert asked(instructions="Be brief.").messages[0] == says("system", "Be brief.")


def test_a_developer_is_a_system_to_the_template() -> None:
    assert messages(says("developer"), says("system")) == [says("system")] * 2


def test_what_was_said_in_one_go_is_one_message() -> None:
    assert messages(
        says("user"), thinks("hm"), says("assistant", "wait"), calls("a"), calls("b"),
        returns("a"), returns("b", [{"type": "input_text", "text": "18"}]),
    ) == [
        says("user"),
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [call("a"), call("b")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "17"},
        {"role": "tool", "tool_call_id": "b", "content": "18"},
    ]  # fmt: skip


def test_what_was_said_in_two_goes_is_two_messages() -> None:
    assert messages(says("assistant", "a"), says("assistant", "b")) == [
        says("assistant", "a"),
        says("assistant", "b"),
    ]
    first, second = messages(calls("a"), says("assistant", "b"))
    assert first == {"role": "assistant", "content": "", "tool_calls": [call("a")]}
    assert second == says("assistant", "b")
    first, second = messages(says("assistant", "a"), thinks("hm"), calls("b"))
    assert first == says("assistant", "a")
    assert second["reasoning_content"] == "hm" and second["tool_calls"] == [call("b")]


def test_reasoning_comes_from_its_content_or_else_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    both = {**thinks("long"), "summary": summary}
    (message,) = messages(both)
    assert message["reasoning_content"] == "long"
    (message,) = messages({"type": "reasoning", "summary": summary, "content": None})
    assert message["reasoning_content"] == "short"
    (message,) = messages(thinks("a"), thinks("b"))
    assert message["reasoning_content"] == "ab"


def test_reasoning_that_nobody_can_read_is_left_out() -> None:
    sealed = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"}
    assert messages(says("user"), sealed) == [says("user")]
    assert messages(sealed, calls("a"))[0]["tool_calls"] == [call("a")]


def test_several_parts_of_a_message_stay_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (message,) = messages({"role": "user", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    spoken = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    (message,) = messages({"role": "assistant", "content": spoken})
    assert [part["text"] for part in message["content"]] == ["a", "no"]


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        ({"type": "item_reference", "id": "msg_1"}, ("type",), "send the item itself"),
        ({"id": "msg_1"}, ("type",), "send the item itself"),
        ({"type": "web_search_call", "id": "ws_1"}, ("type",), "must be one of message"),
        ({"type": "message", "content": "x"}, (), "needs role"),
        ({"type": "function_call", "name": "look"}, (), "needs call_id and arguments"),
        ({"type": "function_call_output", "output": "x"}, (), "needs call_id"),
        ({"role": "robot", "content": "x"}, ("role",), "'developer'"),
        ({"role": "user", "content": [{"type": "input_image"}]}, ("content",), "text only"),
        ({"role": "user", "content": [{"type": []}]}, ("content",), "text only"),
        ({"role": "user", "content": [7]}, ("content",), "text only"),
        ({"role": "user", "content": "\ud800"}, ("content",), "surrogates"),
        (returns("a", [{"type": "input_image", "image_url": "data:"}]), ("output",), "text only"),
        (7, (), "valid dictionary"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused(item: Any, param: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"input": [{"role": "user"}, item]})
    (error,) = caught.value.errors()
    assert error["loc"] == ("input", 1, *param) and says in error["msg"]


def test_an_input_has_something_to_answer_and_not_too_much() -> None:
    with pytest.raises(InvalidRequestError, match="nothing to answer"):
        asked(input=[])
    with pytest.raises(InvalidRequestError, match="nothing to answer"):
        asked(input=None, instructions="Be brief.")
    past = Past((says("user"),) * (MAX_MESSAGES - 1))
    assert len(asked(past).messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequestError, match="4097 messages"):
        asked(past, input=[says("user")] * 2)


def test_a_conversation_goes_on_behind_new_instructions() -> None:
    past = Past((says("user", "a"), says("assistant", "b")))
    assert asked(past, instructions="new").messages == [
        says("system", "new"),
        *past.messages,
        says("user", "hi"),
    ]
    assert asked(past, input=None).messages == [*past.messages]


@pytest.mark.parametrize(
    ("named", "past", "expected"),
    [
        (SessionName(), None, SessionName()),
        (SessionName("header"), None, SessionName("header")),
        (SessionName(), "old", SessionName("old")),
        (SessionName("header"), "old", SessionName("old")),
        (SessionName("s", True), "old", SessionName("s", True)),
    ],
)
def test_whose_session_counts(named: SessionName, past: str | None, expected: SessionName) -> None:
    assert asked(Past((), past), named).session == expected


def test_functions_are_told_in_the_chat_s_form_and_others_left_out() -> None:
    use = asked(tools=[LOOK, {"type": "web_search", "name": 7}, CRM], parallel_tool_calls=False).use
    assert use.tools == (
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "crm__find", "description": "by name"}},
    )
    assert (use.choice, use.name, use.parallel) == ("auto", None, False)


def test_a_namespace_in_a_namespace_is_left_out() -> None:
    assert asked(tools=[{**CRM, "tools": [CRM, LOOK, {"type": "custom"}]}]).use.names == {
        "crm__look"
    }


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        (None, {"look", "crm__find"}, ("auto", None)),
        ("none", {"look", "crm__find"}, ("none", None)),
        ("required", {"look", "crm__find"}, ("required", None)),
        ({"type": "function", "name": "look"}, {"look", "crm__find"}, ("required", "look")),
        (
            {"type": "function", "name": "find", "namespace": "crm"},
            {"look", "crm__find"},
            ("required", "crm__find"),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}],
            },
            {"look"},
            ("required", None),
        ),
    ],
)
def test_a_choice_of_tools(choice: Any, names: set[str], expected: Any) -> None:
    use = asked(tools=[LOOK, CRM], tool_choice=choice).use
    assert use.names == names and (use.choice, use.name) == expected


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([LOOK, LOOK], None, "same name"),
        (
            [
                {
                    **CRM,
                    "name": f"n{space}",
                    "tools": [{**FIND, "name": f"f{n}"} for n in range(99)],
                }
                for space in range(9)
            ],
            None,
            "512 are allowed",
        ),
        ([CRM, {**FIND, "name": "crm__find"}], None, "same name"),
        (
            [LOOK],
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "find"}]},
            "not among the tools",
        ),
    ],
)
def test_tools_that_make_no_sense_together_are_refused(tools: Any, choice: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        asked(tools=tools, tool_choice=choice)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "tools"),
        ({"tools": [{**LOOK, "parameters": {"type": "array"}}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools"),
        ({"tools": ["look"]}, "tools"),
        ({"tools": [{**CRM, "name": None}]}, "tools"),
        ({"tools": [LOOK] * 513}, "tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "text"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"session_id": "a b"}, "session_id"),
    ],
)
def test_a_field_out_of_range_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate({"input": "hi", **fields})
    assert {error["loc"][0] for error in caught.value.errors()} == {param}


def test_fields_reach_the_engine() -> None:
    schema = {"type": "object"}
    ask = asked(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-2,
        seed=7,
        stop="x",
        max_output_tokens=9,
        top_logprobs=2,
        reasoning={"effort": "none", "summary": "auto"},
        chat_template_kwargs={"thinking": True},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}, "verbosity": "low"},
        edit_mode="heal",
        context_management={"edits": []},
    )
    params = ask.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 0, 7)
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 0.2, -2)
    assert (params.stop, params.max_tokens, params.logprobs) == (("x",), 9, 2)
    told = {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}
    assert ask.variables == told
    assert ask.form == OutputForm("json_schema", schema)
    assert (ask.edit_mode, ask.context_management, ask.salt) == ("heal", {"edits": []}, "salt")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, 0),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"top_logprobs": 0}, 0),
        ({"top_logprobs": 3}, 3),
    ],
)
def test_log_probabilities_are_asked_for_in_two_ways(fields: Any, expected: int | None) -> None:
    assert asked(**fields).params.logprobs == expected


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputForm("json_object")),
    ],
)
def test_forms(form: Any, expected: OutputForm | None) -> None:
    assert asked(text={"format": form}).form == expected


texts = st.text(alphabet="ab", min_size=1, max_size=2)
items = st.one_of(
    st.builds(says, st.sampled_from(["user", "developer", "assistant"]), texts),
    st.builds(thinks, texts),
    st.builds(calls, st.sampled_from("pq")),
    st.builds(returns, st.sampled_from("pq"), texts),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(items, max_size=9))
def test_nothing_is_lost_and_nothing_changes_places(given_items: list[dict[str, Any]]) -> None:
    """The messages, taken apart again, are the items, but for reasoning without a text."""
    made = messages(*given_items)
    assert [one for message in made for one in apart(message)] == [
        one for item in given_items for one in flat(item)
    ]
    for before, after in pairwise(made):
        pair = before["role"] == after["role"] == "assistant"
        assert not pair or rank(before)[-1] >= rank(after)[0], "two goes that could be one"


def flat(item: dict[str, Any]) -> list[tuple[str, str]]:
    kind = item.get("type", "message")
    if kind == "reasoning":
        return [("thinks", character) for character in item["content"][0]["text"]]
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return [(role, item["content"])]
    return [(kind, item["call_id"])]


def apart(message: Any) -> list[tuple[str, str]]:
    role, found = message["role"], [("thinks", one) for one in message.get("reasoning_content", "")]
    if role == "tool":
        return [("function_call_output", message["tool_call_id"])]
    if role != "assistant" or message["content"] or not (found or message.get("tool_calls")):
        found.append((role, message["content"]))
    return [*found, *(("function_call", one["id"]) for one in message.get("tool_calls", []))]


def rank(message: Any) -> list[int]:
    order = ["thinks", "assistant", "function_call"]
    return [order.index(kind) for kind, _ in apart(message)]


def test_a_body_that_codex_sent_is_read() -> None:
    body = json.loads(CODEX.read_text(encoding="utf-8"))
    ask = asked_of(ResponsesRequest.model_validate(body), Past(), "", SessionName())
    assert [message["role"] for message in ask.messages] == [
        *["system", "system", "user", "user", "assistant", "tool"]
    ]
    assistant = ask.messages[4]
    assert assistant["reasoning_content"] == "think"
    assert [one["id"] for one in assistant["tool_calls"]] == ["call_1"]
    assert ask.messages[5]["tool_call_id"] == "call_1"
    assert {"exec_command", "multi_agent_v1__spawn_agent"} <= ask.use.names

"""What went wrong for others on this surface, by the row of the list that we keep of it.

Rows that are about numbers, forms or scores are tested in test_over_a_model.py, refusals in
test_bad_input.py, and what streams and whole answers must have in common in
test_stream_equals_whole.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .client import Client, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeTemplate, FakeTokenizer
from .test_stream_equals_whole import calls_of, choices_of

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
THINKS = 'tools tool_calls <tool_call> {"arguments": <think>'
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]


def says(text: str, *, chunk: int = 1, opening: str = "") -> FakeEngine:
    """An engine that says one thing, a character a step unless told otherwise."""
    tokenizer = FakeTokenizer(FakeTemplate(THINKS), opening=opening)
    return FakeEngine(reply=lambda _: text, tokenizer=tokenizer, chunk=chunk)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def four_ways(client: Client, **fields: Any) -> set[tuple[str, str]]:
    """The text and finish reason of a chat and a completion, whole and streamed."""
    chat = (await client.chat(**fields)).json["choices"][0]
    text = (await client.complete(**fields)).json["choices"][0]
    ways = {
        (chat["message"]["content"], chat["finish_reason"]),
        (text["text"], text["finish_reason"]),
    }
    (deltas,) = choices_of((await client.chat(**fields, **USAGE)).chunks, 1)
    said = "".join(choice["delta"].get("content") or "" for choice in deltas)
    (parts,) = choices_of((await client.complete(**fields, **USAGE)).chunks, 1)
    ways.add((said, deltas[-1]["finish_reason"]))
    ways.add(("".join(part["text"] for part in parts), parts[-1]["finish_reason"]))
    return ways


@pytest.mark.parametrize("chunk", range(1, 8))
async def test_row_1_a_stop_string_over_token_borders(connect: Connect, chunk: int) -> None:
    client = connect(says("The quick brown fox", chunk=chunk))
    assert await four_ways(client, stop="own fox", max_tokens=50) == {("The quick br", "stop")}


async def test_row_2_a_stop_that_never_comes_changes_nothing(connect: Connect) -> None:
    client = connect(says("<think>a</think>b" + call("f", "{}")))
    fields = {"tools": TOOLS, "stop": "x" * 900}
    (choice,) = (await client.chat(**fields)).json["choices"]
    assert choice["message"]["content"] == "b" and choice["message"]["reasoning"] == "a"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


async def test_row_3_what_looked_like_a_stop_is_released_at_the_end(connect: Connect) -> None:
    client = connect(says("the last wor"))
    assert await four_ways(client, stop="word") == {("the last wor", "stop")}
    assert await four_ways(client, stop="word", max_tokens=10) == {("the last w", "length")}


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 50])
async def test_row_4_markers_are_read_however_they_are_cut(connect: Connect, chunk: int) -> None:
    client = connect(says("hm</think>so", opening="<think>\n", chunk=chunk))
    (choice,) = (await client.chat(stop="</t!")).json["choices"]
    assert choice["message"]["reasoning_content"] == "hm" and choice["message"]["content"] == "so"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_rows_9_and_10_usage_once_complete_and_alone(connect: Connect, options: Any) -> None:
    answer = await connect().chat(stream=True, stream_options=options)
    told = [chunk for chunk in answer.chunks if "usage" in chunk]
    if not (options or {}).get("include_usage"):
        assert told == []
        return
    assert told == answer.chunks[-1:] and told[0]["choices"] == []
    usage = told[0]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("path, body", [(CHAT, chat_body()), ("/v1/completions", {"prompt": "hi"})])
async def test_row_10_running_usage_is_asked_for_and_never_on_the_last_of_a_choice(
    connect: Connect, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await connect().post(path, body | {"stream": True, "stream_options": options})
    *chunks, last = answer.chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
    for chunk in chunks:
        assert ("usage" in chunk) is (chunk["choices"][0]["finish_reason"] is None)
        if "usage" in chunk:
            assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]


@pytest.mark.parametrize("fields, reason", [({}, "stop"), ({"max_tokens": 2}, "length")])
async def test_rows_12_and_15_one_finish_reason_a_choice(
    connect: Connect, fields: dict[str, Any], reason: str
) -> None:
    client = connect(says("abcdef"))
    ((_, found),) = await four_ways(client, **fields)
    assert found == reason
    for choices in choices_of((await client.chat(n=3, **fields, **USAGE)).chunks, 3):
        assert choices[-1]["finish_reason"] == reason


async def test_row_12_a_call_is_a_reason_of_its_own(connect: Connect) -> None:
    client = connect(says(call("f", "{}")))
    assert (await client.chat(tools=TOOLS)).json["choices"][0]["finish_reason"] == "tool_calls"
    (choices,) = choices_of((await client.chat(tools=TOOLS, **USAGE)).chunks, 1)
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_rows_14_45_and_50_a_call_that_is_cut_anywhere(connect: Connect) -> None:
    text = "so " + call("f", '{"a": [1, "x"]}')
    client = connect(says(text, chunk=100))
    for limit in range(1, len(text)):
        fields = {"tools": TOOLS, "max_tokens": limit}
        (whole,) = (await client.chat(**fields)).json["choices"]
        (choices,) = choices_of((await client.chat(**fields, **USAGE)).chunks, 1)
        calls = whole["message"].get("tool_calls", [])
        assert whole["finish_reason"] == choices[-1]["finish_reason"] == "length"
        assert len(calls_of([choice["delta"] for choice in choices[1:]])) == len(calls)
        for made in calls:  # visibly incomplete, or whole because nothing but markup is missing
            arguments = made["function"]["arguments"]
            assert '{"a": [1, "x"]}'.startswith(arguments)
        if not calls:
            assert whole["message"]["content"]


async def test_row_22_half_a_character_is_refused_wherever_it_stands(connect: Connect) -> None:
    half = "\ud83d"
    client = connect()
    bodies: list[dict[str, Any]] = [
        chat_body(half),
        chat_body(stop=half),
        chat_body(model=half),
        chat_body(session_id=half),
        chat_body(tools=[{"type": "function", "function": {"name": "f", "description": half}}]),
        chat_body(guided_choice=[half]),
        chat_body(chat_template_kwargs={"a": [half]}),
        {"messages": [{"role": "tool", "content": half}]},
        {"messages": [{"role": "assistant", "reasoning_content": half}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": half}}],
                }
            ]
        },
    ]
    for body in bodies:
        for stream in (False, True):
            answer = await client.post(CHAT, body | {"stream": stream})
            assert answer.status == 400, body
            assert answer.error["type"] == "invalid_request_error"
    assert client.engine.seen == []


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
async def test_rows_23_to_26_empty_contents_keep_their_calls(
    connect: Connect, content: dict[str, Any]
) -> None:
    client = connect()
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [made]} | content,
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant"} | content,
        {"role": "user", "content": "and?"},
    ]
    assert (await client.post(CHAT, {"messages": messages})).status == 200
    seen = client.engine.seen[-1][1]
    assert [message["content"] for message in seen] == ["hi", "", "42", "", "and?"]
    assert seen[1]["tool_calls"] == [made] and seen[2]["tool_call_id"] == "c1"


ARGUMENTS = '{"b": {"c": [1, 2.50, "}\\"{"]}, "name": "x", "a":  null}'


@pytest.mark.parametrize("chunk", [*range(1, 40, 3), 1000])
async def test_rows_35_to_38_arguments_come_as_they_were_written(
    connect: Connect, chunk: int
) -> None:
    text = "first\n" + call("f", ARGUMENTS) + "\n" + call("g", "{}")
    client = connect(says(text, chunk=chunk))
    (whole,) = (await client.chat(tools=TOOLS)).json["choices"]
    (choices,) = choices_of((await client.chat(tools=TOOLS, **USAGE)).chunks, 1)
    calls = calls_of([choice["delta"] for choice in choices[1:]])
    assert [one["function"] for one in calls] == [
        {"name": "f", "arguments": ARGUMENTS},
        {"name": "g", "arguments": "{}"},
    ]
    assert [one["function"] for one in whole["message"]["tool_calls"]] == [
        one["function"] for one in calls
    ]
    assert whole["message"]["content"].strip() == "first"


async def test_rows_39_to_41_heads_first_and_indices_that_agree(connect: Connect) -> None:
    client = connect(says(call("f", '{"a": 1}') + call("g", '{"b": 2}')))
    (choices,) = choices_of((await client.chat(tools=TOOLS, **USAGE)).chunks, 1)
    deltas = [one for choice in choices for one in choice["delta"].get("tool_calls", ())]
    heads = [one for one in deltas if "id" in one]
    assert [head["index"] for head in heads] == [0, 1]
    assert len({head["id"] for head in heads}) == 2
    assert [one["index"] for one in deltas] == sorted(one["index"] for one in deltas)
    for one in deltas:
        assert None not in (*one.values(), *one["function"].values())
        assert ("name" in one["function"]) is ("type" in one) is ("id" in one)
    arguments = [
        "".join(d["function"]["arguments"] for d in deltas if d["index"] == i) for i in (0, 1)
    ]
    assert list(map(json.loads, arguments)) == [{"a": 1}, {"b": 2}]


async def test_row_44_arguments_that_are_no_json_are_given_as_they_are(connect: Connect) -> None:
    client = connect(says(call("f", '{"a": [1,, }')))
    (choice,) = (await client.chat(tools=TOOLS)).json["choices"]
    message = choice["message"]
    assert "<tool_call>" not in (message["content"] or "") or "tool_calls" not in message
    assert (choice["finish_reason"] == "tool_calls") is bool(message.get("tool_calls"))


async def test_row_46_a_reply_that_may_not_call_is_kept_from_it(connect: Connect) -> None:
    """What tells of tools stays in the prompt, whose cache and edits stay with it."""
    client = connect(says(call("f", "{}")))
    for choice, is_kept in (("none", True), ("auto", False)):
        (told,) = (await client.chat(tools=TOOLS, tool_choice=choice)).json["choices"]
        assert ("tool_calls" in told["message"]) is not is_kept
        assert len(client.engine.renderings[-1].tools) == 2
        constraint = client.engine.seen[-1][2][0].constraint
        assert (constraint is not None) is is_kept
        if is_kept:
            assert told["finish_reason"] == "stop"
            mask = constraint.allowed(list(map(ord, "<tool_call")))
            assert [bool(int(mask[ord(one) // 32]) >> ord(one) % 32 & 1) for one in ">x"] == [0, 1]


async def test_row_46_reasoning_is_counted_and_may_be_all_there_is(connect: Connect) -> None:
    client = connect(says("thinking</think>said", opening="<think>\n"))
    whole = (await client.chat()).json
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len("thinking") <= counted <= len("thinking</think>")
    cut = (await client.chat(max_tokens=5)).json
    (choice,) = cut["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "",
        "reasoning": "think",
        "reasoning_content": "think",
    }
    assert choice["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


async def test_row_155_tools_of_unknown_types_are_left_out(connect: Connect) -> None:
    client = connect()
    others = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [1]}]
    assert (await client.chat(tools=[others[0], *TOOLS, others[1]])).status == 200
    told = client.engine.renderings[-1].tools
    assert [tool["function"]["name"] for tool in told] == ["f", "g"]
    assert (await client.chat(tools=others)).status == 200
    assert client.engine.renderings[-1].tools == ()


async def test_row_135_keywords_that_are_null_are_as_if_not_said(connect: Connect) -> None:
    client = connect()
    said = {"type": "object", "properties": {"a": {"default": {"type": None}, "enum": [None]}}}
    nulls = {"required": None, "description": None, "additionalProperties": None}
    parameters = said | nulls
    parameters["properties"] = {"a": said["properties"]["a"] | {"items": None, "pattern": None}}  # type: ignore[index]
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert (await client.chat(tools=[tool])).status == 200
    assert client.engine.renderings[-1].tools[0]["function"]["parameters"] == said

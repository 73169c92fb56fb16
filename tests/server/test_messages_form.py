"""How answers are spelt, without any server: whole messages and their events."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from leyline.server.ask import Over, Said
from leyline.server.messages_blocks import proper
from leyline.server.messages_form import (
    INVALID,
    SIGNATURE,
    Events,
    Heading,
    content_of,
    opening,
    stop_reason,
    usage_of,
)
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, Reasoning
from leyline.server.usage import managed

from .messages_scripts import called, over, random_script

HEADING = Heading("msg-1", "m", 1000)


def events_of(pieces: list[Piece]) -> list[dict[str, Any]]:
    events = Events()
    told = [*events.said(pieces), *events.ended()]
    assert all(name == body["type"] for name, body in told)
    return [body for _, body in told]


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of a stream: the obvious reading, block by block."""
    blocks: list[dict[str, Any]] = []
    open_index = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(blocks)
            open_index = event["index"]
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            kind, _, _ = event["delta"].pop("type").rpartition("_")
            ((name, value),) = event["delta"].items()
            assert value and kind == name.removeprefix("partial_").replace("json", "input_json")
            key = "json" if name == "partial_json" else name
            blocks[-1][key] += value
        else:
            assert event == {"type": "content_block_stop", "index": open_index}
            open_index = None
    assert open_index is None
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use" and text:
            block["input"] = json.loads(text)
    return blocks


def test_every_kind_of_block_as_events() -> None:
    pieces = [
        Reasoning("th"),
        Reasoning("ink"),
        Content("hello"),
        *called(0, "f", '{"a":', " 1}"),
        *called(1, "g", "{}"),
        Content(" bye"),
    ]
    events = events_of(pieces)
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    use = {"type": "tool_use", "id": "call_0", "name": "f", "input": {}}
    assert events == [
        {
            "type": start,
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": delta, "index": 0, "delta": {"type": "thinking_delta", "thinking": "th"}},
        {"type": delta, "index": 0, "delta": {"type": "thinking_delta", "thinking": "ink"}},
        {"type": delta, "index": 0, "delta": {"type": "signature_delta", "signature": SIGNATURE}},
        {"type": stop, "index": 0},
        {"type": start, "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": delta, "index": 1, "delta": {"type": "text_delta", "text": "hello"}},
        {"type": stop, "index": 1},
        {"type": start, "index": 2, "content_block": use},
        {"type": delta, "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
        {"type": delta, "index": 2, "delta": {"type": "input_json_delta", "partial_json": " 1}"}},
        {"type": stop, "index": 2},
        {"type": start, "index": 3, "content_block": use | {"id": "call_1", "name": "g"}},
        {"type": delta, "index": 3, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": stop, "index": 3},
        {"type": start, "index": 4, "content_block": {"type": "text", "text": ""}},
        {"type": delta, "index": 4, "delta": {"type": "text_delta", "text": " bye"}},
        {"type": stop, "index": 4},
    ]


def test_the_same_as_a_whole_message() -> None:
    calls = [*called(0, "f", '{"a":', " 1}"), *called(1, "g", "{}")]
    pieces = [Reasoning("th"), Reasoning("ink"), *calls]
    assert HEADING.whole(pieces, over("tool_calls")) == {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "think", "signature": SIGNATURE},
            {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_1", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 15,
            "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 2},
            "spliced_tokens": 4,
            "recomputed_tokens": 5,
        },
    }


@pytest.mark.parametrize("seed", range(200))
def test_events_add_up_to_the_whole(seed: int) -> None:
    script = random_script(Random(seed))
    end = script[-1]
    assert isinstance(end, Over)
    pieces = [piece for one in script if isinstance(one, Said) for piece in one.pieces]
    assert accumulated(events_of(pieces)) == content_of(pieces, end)


def test_events_do_not_depend_on_how_pieces_come() -> None:
    pieces = [Reasoning("a"), *called(0, "f", "{", "}"), Content("b"), Content("")]
    events, one_by_one = Events(), Events()
    apart = [event for piece in pieces for event in one_by_one.said([piece])]
    together = list(events.said(pieces))
    assert apart == together and len(together) == 10


@pytest.mark.parametrize("arguments", ["", "{", '{"path": "/et', '{"a": 1', "[1", '"x'])
def test_a_call_that_a_limit_cut_short_is_not_there(arguments: str) -> None:
    pieces = [Content("x"), *called(0, "f", "{}"), *called(1, "rm", arguments)]
    blocks = content_of(pieces, over("length"))
    assert [block.get("name") for block in blocks] == [None, "f"]
    # the twin: a call that is complete stays, whatever ended the reply
    whole = [*pieces[:-1], CallArguments(1, '{"a": 1}')]
    assert content_of(whole, over("length"))[2]["input"] == {"a": 1}


def test_a_call_that_a_stop_sequence_cut_short_is_not_there() -> None:
    pieces = [Content("x"), *called(0, "rm", '{"a": 1')]
    assert content_of(pieces, over(stopped_by="X")) == [{"type": "text", "text": "x"}]
    # the twins: one that its model left open itself, and one that is complete
    assert content_of(pieces, over())[1]["input"] == {INVALID: '{"a": 1'}
    whole = [*pieces, CallArguments(0, "}")]
    assert content_of(whole, over(stopped_by="X"))[1]["input"] == {"a": 1}


def test_a_call_without_arguments_is_none() -> None:
    pieces: list[Piece] = [Content("x"), CallHead(0, "c", "rm"), CallArguments(0, "")]
    kinds = [event["type"] for event in events_of(pieces)]
    assert kinds == ["content_block_start", "content_block_delta", "content_block_stop"]
    for reason in ("length", "tool_calls"):
        assert content_of(pieces, over(reason)) == [{"type": "text", "text": "x"}]
    complete = [*pieces, CallArguments(0, "{}")]
    assert content_of(complete, over("tool_calls"))[1]["input"] == {}
    assert [event["type"] for event in events_of(complete)][3:] == kinds


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "1", "{'a': 1}", '{"a": NaN}', '{"a": 1e999}'])
def test_arguments_that_are_no_object_are_visibly_none(text: str) -> None:
    (block,) = content_of(called(0, "f", text), over("tool_calls"))
    assert block["input"] == {INVALID: text}


def test_arguments_too_deep_are_none() -> None:
    text = '{"a":' * 5000 + "1" + "}" * 5000
    (block,) = content_of(called(0, "f", text), over("tool_calls"))
    assert block["input"] == {INVALID: text}


def test_half_a_surrogate_pair_does_not_go_out() -> None:
    (block,) = content_of(called(0, "f", r'{"\udc00": "\ud83d", "é": "\ud83d\udc4b"}'), over())
    assert block["input"] == {"\ufffd": "\ufffd", "é": "👋"}
    assert proper({"a": "👋"}) == {"a": "👋"}


@pytest.mark.parametrize(
    "end, reason",
    [
        (over(), "end_turn"),
        (over(stopped_by=7), "end_turn"),
        (over(stopped_by="STOP"), "stop_sequence"),
        (over("tool_calls"), "tool_use"),
        (over("tool_calls", stopped_by="STOP"), "tool_use"),
        (over("length", completion_tokens=1000), "max_tokens"),
        (over("length", completion_tokens=999), "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(end: Over, reason: str) -> None:
    assert stop_reason(end, 1000) == reason
    told = HEADING.whole([], end)
    assert told["stop_reason"] == reason and told["content"] == []
    assert told["stop_sequence"] == ("STOP" if reason == "stop_sequence" else None)
    assert HEADING.closing(end)["delta"] == {
        "stop_reason": reason,
        "stop_sequence": told["stop_sequence"],
    }


def test_usage_adds_up_to_the_context() -> None:
    usage = usage_of(over(degraded=True, state="spliced", first_difference=3, session_id="s"))
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[kind] for kind in kinds) == 20
    assert usage["degraded"] is True and usage["state"] == "spliced"
    assert usage["first_difference"] == 3
    assert not {"degraded", "state", "first_difference"} & set(usage_of(over()))


def test_what_concerns_the_answer_stands_at_its_end() -> None:
    edits = [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2}]
    heading = Heading("msg-1", "m", 10, managed(None, edits))
    end = over(session_id="s1")
    for told in (heading.whole([], end), heading.closing(end)):
        assert told["context_management"] == {"applied_edits": edits}
        assert told["session"] == {"id": "s1", "version": 3}
    bare = HEADING.closing(over())
    assert set(bare) == {"type", "delta", "usage"}
    assert Heading("msg-1", "m", 10, managed({}, [])).closing(end)["context_management"] == {
        "applied_edits": []
    }


def test_the_first_event_has_an_empty_message() -> None:
    name, body = opening(HEADING)
    assert name == body["type"] == "message_start"
    assert body["message"] == {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }

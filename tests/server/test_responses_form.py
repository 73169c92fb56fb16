"""How responses are spelt: against the openai package's own types and reading of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import ValidationError

from leyline.errors import CapacityError
from leyline.events import Completion, TokenLogprob, Usage
from leyline.server.ask import EndReason, Over, Said
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, Reasoning
from leyline.server.responses_ask import Called, called
from leyline.server.responses_form import ResponseForm, heading_of, spelt_usage
from leyline.server.responses_schema import ResponsesRequest
from leyline.server.usage import usage

EVENTS: dict[str, Any] = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}
BODY: dict[str, Any] = {
    "input": "hi",
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True},
        {
            "type": "namespace",
            "name": "crm",
            "description": "customers",
            "tools": [{"type": "function", "name": "find"}, {"type": "custom", "name": "x"}],
        },
        {"type": "web_search", "parameters": 7},
    ],
}
COMPLETION = Completion(1, "", (), "stop", Usage(7, 5, 3, 1))


def form_of(**fields: Any) -> ResponseForm:
    body = ResponsesRequest.model_validate(BODY | fields)
    heading = heading_of(body, "resp_0", 12, "m")
    return ResponseForm(heading, called(body.tools), lambda told: [spelt(one) for one in told])


def spelt(one: TokenLogprob) -> dict[str, Any]:
    return {"token": "t", "bytes": [116], "logprob": one.logprob, "top_logprobs": []}


def told(
    said: Iterable[Said | Sequence[Piece]], reason: EndReason = "stop", **fields: Any
) -> list[dict[str, Any]]:
    """All events of a response."""
    form = form_of(**fields)
    events = [*form.begun()]
    for one in said:
        events += form.said(one if isinstance(one, Said) else Said(0, tuple(one)))
    ending = {"usage": spelt_usage(usage([COMPLETION], reasoning_tokens=2))}
    return [*events, *form.over(Over(0, reason, COMPLETION, 2), ending)]


def read(events: Iterable[dict[str, Any]]) -> Any:
    """What the openai package makes of a stream; every event must be of its types."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        last = EVENTS[event["type"]].model_validate(event)
        state.handle_event(last)
    return last.response


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_comes_in_the_order_that_clients_know() -> None:
    events = told([[Content("Hel")], [Content("lo")]])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    added, part, first, second, text, _, done, _ = events[2:]
    head = {"id": "msg_0_0", "type": "message", "role": "assistant"}
    assert added["item"] == {**head, "status": "in_progress", "content": []}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert part["part"] == empty
    assert (first["delta"], second["delta"], text["text"]) == ("Hel", "lo", "Hello")
    assert first["item_id"] == "msg_0_0" and (first["output_index"], first["content_index"]) == (
        0,
        0,
    )
    assert done["item"] == {**head, "status": "completed", "content": [{**empty, "text": "Hello"}]}
    response = read(events)
    assert response.output_text == "Hello" and response.status == "completed"


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = told(
        [
            [Reasoning("hm"), Content("\n")],
            [Content("ok"), Content("\n"), CallHead(0, "c0", "look"), CallArguments(0, '{"a"')],
            [CallArguments(0, ":1}"), Content("\n"), CallHead(1, "c1", "crm__find")],
            [Content("\n ")],
        ],
        "tool_calls",
    )
    thought = ["content_part.added", "reasoning_text.delta", "reasoning_text.done"]
    spoken = ["content_part.added", *["output_text.delta"] * 2, "output_text.done"]
    arguments = ["function_call_arguments.delta"] * 2
    assert kinds(events)[2:-1] == [
        *["output_item.added", *thought, "content_part.done", "output_item.done"],
        *["output_item.added", *spoken, "content_part.done", "output_item.done"],
        *["output_item.added", *arguments, "function_call_arguments.done", "output_item.done"],
        *["output_item.added", "function_call_arguments.done", "output_item.done"],
    ]
    reasoning, message, look, find = read(events).output
    assert reasoning.type == "reasoning" and reasoning.content
    assert reasoning.content[0].text == "hm" and reasoning.summary == []
    assert message.type == "message" and message.content[0].text == "\nok\n"
    assert look.type == "function_call" and find.type == "function_call"
    assert (look.call_id, look.name, look.namespace) == ("c0", "look", None)
    assert (find.call_id, find.name, find.namespace) == ("c1", "find", "crm")
    assert (look.arguments, find.arguments) == ('{"a":1}', "")
    assert [event["item"]["id"] for event in events if event["type"].endswith("item.added")] == [
        "rs_0_0",
        "msg_0_1",
        "fc_0_2",
        "fc_0_3",
    ]
    done = [event for event in events if event["type"].endswith("arguments.done")]
    assert done[0]["name"] == "look" and done[0]["arguments"] == '{"a":1}'


def test_space_alone_is_told_if_nothing_else_is() -> None:
    assert read(told([[Content(" ")], [Content("\n")]])).output_text == " \n"
    called = read(told([[Content(" \n"), CallHead(0, "c", "look")]], "tool_calls"))
    assert [item.type for item in called.output] == ["function_call"]


def test_a_response_without_anything_is_an_empty_message() -> None:
    events = told([])
    assert "output_text.delta" not in kinds(events)
    (message,) = read(events).output
    assert message.type == "message" and message.content[0].text == ""
    thought = read(told([[Reasoning("hm")]]))
    assert [item.type for item in thought.output] == ["reasoning", "message"]


@pytest.mark.parametrize("piece", [Content("ab"), Reasoning("ab"), CallHead(0, "c", "look")])
def test_a_cut_response_is_incomplete_and_says_why(piece: Piece) -> None:
    events = told([[Content("before"), piece]], "length")
    response = read(events)
    assert events[-1]["type"] == "response.incomplete" and response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"
    whole = read(told([[piece]]))
    assert whole.status == "completed" and whole.incomplete_details is None


def test_a_failed_response_ends_with_its_error_and_what_there_was() -> None:
    form = form_of()
    events = [*form.begun(), *form.said(Said(0, (Content("half"),)))]
    events.append(form.failed(CapacityError("No room.")))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
    assert response["error"]["code"] == "capacity_exceeded"
    assert response["error"]["message"] == "No room."
    assert response["output"][0]["content"][0]["text"] == "half"


def test_log_probabilities_go_with_the_text_that_their_tokens_make() -> None:
    one, two, three, four = (TokenLogprob(1, -float(n)) for n in range(1, 5))
    events = told(
        [
            Said(0, (Reasoning("hm"),), (1,), (one,)),
            Said(0, (), (1,), (two,)),  # half a character: its text comes with the next token
            Said(0, (Content("é"),), (1,), (three,)),
            Said(0, (CallHead(0, "c", "look"),), (1,), (four,)),
        ]
    )
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert [each["logprob"] for each in delta["logprobs"]] == [-2.0, -3.0]
    assert done["logprobs"] == delta["logprobs"]
    message = read(events).output[1]
    assert message.type == "message" and message.content[0].type == "output_text"
    assert [each.logprob for each in message.content[0].logprobs or []] == [-2.0, -3.0]


def test_usage_is_that_of_a_chat_in_other_words() -> None:
    usage = read(told([])).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 2
    details = told([])[-1]["response"]["usage"]["input_tokens_details"]
    assert (details["spliced_tokens"], details["recomputed_tokens"]) == (1, 4)


def test_a_degraded_answer_and_a_session_s_state_are_told_too() -> None:
    lost = Completion(1, "", (), "stop", Usage(7, 5, 3, 0, degraded=True), "s", 2)
    told = spelt_usage(usage([lost]))
    assert told["degraded"] is True and told["state"] == "exact"
    assert not {"prompt_tokens", "completion_tokens", "prompt_tokens_details"} & told.keys()


def test_what_was_asked_for_is_given_back() -> None:
    schema = {"type": "object"}
    asked = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
    }
    response = read(told([], **asked))
    assert response.instructions == "Be brief." and response.temperature == 0.5
    assert response.metadata == {"a": "b"} and response.model == "m" and response.top_p == 1.0
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    assert response.to_dict()["tool_choice"] == {"type": "function", "name": "look"}
    assert response.to_dict()["text"]["format"]["schema"] == schema


def test_the_oracle_sees_a_wrong_event() -> None:
    events = told([[Content("a")]])
    with pytest.raises(ValidationError):
        read([*events[:4], {**events[4], "output_index": None}])
    with pytest.raises(RuntimeError, match="before receiving its output item"):
        read([*events[:2], {**events[4], "sequence_number": 2}])


texts = st.text(alphabet="a \n{", max_size=4)
thoughts = st.lists(texts.map(Reasoning), max_size=2)
contents = st.lists(texts.map(Content), max_size=3)


@st.composite
def replies(draw: st.DrawFn) -> list[Piece]:
    """Pieces in an order in which a parser may give them."""
    pieces: list[Piece] = [*draw(thoughts), *draw(contents)]
    for index in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(["look", "crm__find", "unknown"]))
        pieces.append(CallHead(index, f"c{index}", name))
        pieces += [CallArguments(index, text) for text in draw(st.lists(texts, max_size=3))]
        pieces += draw(contents)
    return pieces


def cut(pieces: Sequence[Piece], ends: Sequence[int]) -> list[Sequence[Piece]]:
    bounds = [0, *sorted(end % (len(pieces) + 1) for end in ends), len(pieces)]
    return [pieces[start:end] for start, end in pairwise(bounds)]


@settings(max_examples=150, deadline=None)
@given(replies(), st.lists(st.integers(0, 20), max_size=4), st.sampled_from(["stop", "length"]))
def test_the_deltas_of_any_reply_add_up_to_its_response(
    pieces: list[Piece], ends: list[int], reason: EndReason
) -> None:
    events = told(cut(pieces, ends), reason)
    response = read(events)
    assert response.to_dict() == read(told([pieces], reason)).to_dict()
    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            grown[at] = grown.get(at, "") + event["delta"]
    for at, item in enumerate(response.output):
        whole = item.arguments if item.type == "function_call" else item.content[0].text
        assert grown.get(at, "") == whole
    heads = [piece for piece in pieces if isinstance(piece, CallHead)]
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.call_id for call in calls] == [head.call_id for head in heads]
    said = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert "".join(response.output_text.split()) == "".join(said.split())


def test_names_are_told_apart_by_their_namespaces() -> None:
    body = ResponsesRequest.model_validate(BODY)
    assert called(body.tools) == {"look": Called("look"), "crm__find": Called("find", "crm")}

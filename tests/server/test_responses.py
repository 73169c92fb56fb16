"""`/v1/responses` over the wire: whole, streamed, kept, gone on from, refused and given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline.errors import CapacityError
from leyline.server import responses
from leyline.server.responses_kept import KeptResponses
from leyline.server.settings import ServerConfig

from .client import Answer, Client
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

Connect = Callable[..., Client]
CODEX = Path(__file__).parent / "codex_request.json"
PATH = "/v1/responses"


async def create(client: Client, input: Any = "hi", **fields: Any) -> Answer:
    return await client.post(PATH, {"input": input, **fields})


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name, and nothing behind them."""
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.body.decode("ascii").split("\n\n")
    assert rest == ""
    bodies: list[dict[str, Any]] = []
    for event in events:
        name, data = event.split("\n")
        bodies.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {bodies[-1]['type']}"
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    return bodies


def text_of(body: Any) -> str:
    return "".join(
        part["text"]
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def said(answer: Answer) -> str:
    assert answer.status == 200, answer.json
    return text_of(answer.json)


async def test_a_whole_response(connect: Connect) -> None:
    client = connect()
    answer = (await create(client, "hi", instructions="Be brief.")).json
    assert answer["object"] == "response" and answer["status"] == "completed"
    assert text_of(answer) == "you said: system: Be brief.\nuser: hi\n"
    assert answer["error"] is None and answer["incomplete_details"] is None
    usage = answer["usage"]
    assert usage["input_tokens"] == 27 and usage["total_tokens"] == 27 + usage["output_tokens"]
    assert answer["id"].startswith("resp_") and answer["model"] == "fake-model"


async def test_usage_is_that_of_the_same_chat(connect: Connect) -> None:
    client = connect()
    chat = (await client.chat("hi")).json["usage"]
    usage = (await create(client, "hi")).json["usage"]
    assert usage["input_tokens"] == chat["prompt_tokens"] > 0
    assert usage["output_tokens"] == chat["completion_tokens"] > 0
    assert chat["prompt_tokens_details"].items() <= usage["input_tokens_details"].items()


async def test_a_stream_has_named_events_and_ends_with_the_whole(
    connect: Connect,
) -> None:
    client = connect(FakeEngine(reply=lambda _: "abcdefg"))
    events = events_of(await create(client, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["abc", "def", "g"]
    assert text_of(events[-1]["response"]) == "abcdefg"
    assert events[0]["response"]["id"] == events[-1]["response"]["id"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 1},
        {"max_output_tokens": 5},
        {"stop": "said"},
        {"top_logprobs": 2},
        {"session_id": "s"},
        {"context_management": {"edits": []}},
        {"metadata": {"a": "b"}, "store": False, "temperature": 0},
    ],
)
async def test_streamed_and_whole_responses_agree(
    connect: Connect, chunk: int, fields: dict[str, Any]
) -> None:
    whole = (await create(connect(FakeEngine(chunk=chunk)), "hé 👋\u2028 x", **fields)).json
    client = connect(FakeEngine(chunk=chunk))
    events = events_of(await create(client, "hé 👋\u2028 x", stream=True, **fields))
    assert anonymous(events[-1]["response"]) == anonymous(whole)
    deltas = "".join(event["delta"] for event in events if "delta" in event)
    assert deltas == text_of(whole)


def anonymous(response: Any) -> Any:
    """A response without what is different each time."""
    tail = response["id"].removeprefix("resp_")
    return json.loads(json.dumps({**response, "created_at": 0}).replace(tail, "id"))


async def test_a_cut_response_says_so(connect: Connect) -> None:
    answer = (await create(connect(), max_output_tokens=1)).json
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


async def test_a_body_from_codex_is_answered(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: "done"))
    body = json.loads(CODEX.read_text(encoding="utf-8"))
    headers = {"session-id": body["prompt_cache_key"], "thread-id": body["prompt_cache_key"]}
    answer = await client.post(PATH, body, headers=headers)
    assert text_of(events_of(answer)[-1]["response"]) == "done"
    assert client.engine.turns == [(body["prompt_cache_key"], None)]
    (rendering,) = client.engine.renderings
    names = [tool["function"]["name"] for tool in rendering.tools]
    assert names[0] == "exec_command" and "multi_agent_v1__spawn_agent" in names
    again = await client.post(PATH, {**body, "previous_response_id": "resp_0"}, headers=headers)
    assert again.error["code"] == "previous_response_not_found"


# -- going on -------------------------------------------------------------------------------------


async def test_a_response_is_gone_on_from_by_its_id(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda prompt: f"<{len(prompt)}>"))
    first = (await create(client, "one", instructions="old")).json
    fields = {"previous_response_id": first["id"], "instructions": "new"}
    second = (await create(client, "two", **fields)).json
    third = (await create(client, "three", previous_response_id=second["id"], stream=True)).body
    assert b"response.completed" in third
    prompts = [messages for _, messages, _ in client.engine.seen]
    assert prompts[1] == [
        {"role": "system", "content": "new"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "two"},
    ]
    assert prompts[2] == [
        *prompts[1][1:],
        {"role": "assistant", "content": text_of(second)},
        {"role": "user", "content": "three"},
    ]
    assert second["previous_response_id"] == first["id"]


async def test_a_conversation_gets_its_session_when_it_goes_on(
    connect: Connect,
) -> None:
    client = connect()
    first = (await create(client)).json
    second = (await create(client, previous_response_id=first["id"])).json
    third = (await create(client, previous_response_id=second["id"])).json
    assert "session" not in first
    assert second["session"]["id"] == third["session"]["id"] == first["id"]
    assert [session for session, _ in client.engine.turns] == [None, first["id"], first["id"]]


async def test_a_conversation_keeps_the_session_that_its_client_named(
    connect: Connect,
) -> None:
    client = connect()
    first = (await create(client, session_id="mine")).json
    await create(client, previous_response_id=first["id"], prompt_cache_key="other")
    assert [session for session, _ in client.engine.turns] == ["mine", "mine"]


async def test_a_conversation_can_do_without_its_session(connect: Connect) -> None:
    client = connect()
    first = (await create(client)).json
    client.engine.sessions[first["id"]] = FakeSession("", busy=True)
    second = await create(client, previous_response_id=first["id"])
    assert second.status == 200 and "session" not in second.json
    client.engine.sessions["mine"] = FakeSession("", busy=True)
    refused = await create(client, session_id="mine", previous_response_id=first["id"])
    assert refused.status == 409


async def test_a_cut_response_can_be_gone_on_from(connect: Connect) -> None:
    client = connect()
    first = (await create(client, max_output_tokens=4)).json
    assert (await create(client, previous_response_id=first["id"])).status == 200
    assert client.engine.seen[1][1][1] == {"role": "assistant", "content": "you "}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_stored_is_not_found(connect: Connect, stream: bool) -> None:
    client = connect()
    answer = await create(client, store=False, stream=stream)
    made = events_of(answer)[-1]["response"] if stream else answer.json
    assert made["store"] is False
    refused = await create(client, previous_response_id=made["id"])
    assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
    assert refused.error["param"] == "previous_response_id"
    assert (await client.get(f"{PATH}/{made['id']}")).status == 404
    assert len(client.engine.seen) == 1, "nothing runs for a refused request"


async def test_a_response_under_another_salt_is_unknown(connect: Connect) -> None:
    client = connect()
    made = (await create(client, cache_salt="ada")).json
    for fields in ({}, {"cache_salt": "bob"}):
        refused = await create(client, previous_response_id=made["id"], **fields)
        assert refused.status == 404
    assert (await client.get(f"{PATH}/{made['id']}")).status == 404
    found = await create(client, previous_response_id=made["id"], cache_salt="ada")
    assert found.status == 200
    assert (await client.get(f"{PATH}/{made['id']}?cache_salt=ada")).json == made


async def test_a_response_of_another_tenant_is_unknown(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=("ada's", "bob's")))
    ada, bob = ({"authorization": f"Bearer {name}'s"} for name in ("ada", "bob"))
    made = (await client.post(PATH, {"input": "hi"}, headers=ada)).json
    body = {"input": "and?", "previous_response_id": made["id"]}
    assert (await client.post(PATH, body, headers=bob)).status == 404
    assert (await client.get(f"{PATH}/{made['id']}", headers=bob)).status == 404
    assert (await client.open("DELETE", f"{PATH}/{made['id']}", headers=bob).finish()).status == 404
    assert (await client.get(f"{PATH}/{made['id']}", headers=ada)).json == made
    assert (await client.post(PATH, body, headers=ada)).status == 200
    salts = {salt for _, _, (_, salt) in client.engine.seen}
    assert len(client.engine.seen) == 2 and len(salts) == 1 and "" not in salts


async def test_a_kept_response_can_be_looked_at_and_forgotten(
    connect: Connect,
) -> None:
    client = connect()
    made = (await create(client)).json
    assert (await client.get(f"{PATH}/{made['id']}")).json == made
    gone = await client.delete(f"{PATH}/{made['id']}")
    assert gone.json == {"id": made["id"], "object": "response.deleted", "deleted": True}
    for answer in (
        await client.get(f"{PATH}/{made['id']}"),
        await client.delete(f"{PATH}/{made['id']}"),
    ):
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")


async def test_memory_for_kept_responses_is_bounded(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptResponses(max_kept=3, max_bytes=20_000)
    monkeypatch.setattr(responses, "KeptResponses", lambda: kept)
    client = connect()
    for number in range(8):
        assert (await create(client, f"{number}" * 500)).status == 200
    assert len(kept) == 3 and kept.num_bytes <= 20_000
    assert (await create(client, "x" * 1500)).status == 200
    assert kept.num_bytes <= 20_000


# -- refusals and failures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": 7}, 400, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input[0].content",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        ({"background": True}, 400, "background"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look"}}, 400, "tool_choice"),
        ({"context_management": [{"type": "compaction"}]}, 400, "context_management"),
        ({"previous_response_id": "resp_0"}, 404, "previous_response_id"),
        ({"input": "x" * 5000}, 400, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_done_is_refused_before_it_starts(
    connect: Connect,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    stream: bool,
) -> None:
    client = connect()
    answer = await client.post(PATH, {"input": "hi", "stream": stream, **fields})
    assert (answer.status, answer.error["param"]) == (status, param), answer.json
    assert await client.open_requests() == 0


async def test_a_response_that_breaks_off_says_why(connect: Connect) -> None:
    engine = FakeEngine(gated=True)
    client = connect(engine)
    exchange = client.open("POST", PATH, {"input": "hi", "stream": True})
    engine.allow()
    await exchange.first_bytes()
    await client.worker.call(lambda: engine.failures.update({1: CapacityError("No room.")}))
    engine.allow()
    events = events_of(await exchange.finish())
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "capacity_exceeded"
    refused = await create(client, previous_response_id=last["response"]["id"])
    assert refused.error["code"] == "previous_response_not_found"


async def test_a_whole_response_that_fails_is_an_error(connect: Connect) -> None:
    client = connect(FakeEngine(failures={1: CapacityError("No room.")}))
    answer = await create(client)
    assert (answer.status, answer.error["code"]) == (503, "capacity_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_ends_the_request_and_keeps_nothing(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    kept = KeptResponses()
    monkeypatch.setattr(responses, "KeptResponses", lambda: kept)
    client = connect(FakeEngine(gated=True))
    exchange = client.open("POST", PATH, {"input": "hi", "stream": stream})
    if stream:
        await exchange.first_bytes()
    await exchange.hang_up()
    assert await client.open_requests() == 0 and len(kept) == 0


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("name", ["resp_0", "..", "%00", "a" * 5000])
async def test_odd_ids_are_not_found(connect: Connect, method: str, name: str) -> None:
    answer = await connect().open(method, f"{PATH}/{name}").finish()
    assert answer.status == 404 and name not in answer.error["message"]


# -- tools ----------------------------------------------------------------------------------------

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CRM = {"type": "namespace", "name": "crm", "description": "", "tools": [{**LOOK, "name": "find"}]}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "crm__find", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("chunk", [1, 3, 7, 200])
async def test_calls_are_items_streamed_and_whole(connect: Connect, chunk: int) -> None:
    fields = {"tools": [LOOK, CRM]}
    client = connect(FakeEngine(reply=lambda _: CALLS, chunk=chunk))
    whole = (await create(client, **fields)).json
    message, look, find = whole["output"]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (look["type"], look["name"], json.loads(look["arguments"])) == (
        *("function_call", "look", {"at": "é"}),
    )
    assert (find["name"], find["namespace"], find["arguments"]) == ("find", "crm", "{}")
    assert look["call_id"] != find["call_id"] and whole["status"] == "completed"
    events = events_of(await create(client, stream=True, **fields))
    again = [{**item, "call_id": ""} for item in events[-1]["response"]["output"]]
    tail = events[-1]["response"]["id"].removeprefix("resp_")
    ours = whole["id"].removeprefix("resp_")
    expected = [{**item, "call_id": ""} for item in whole["output"]]
    assert json.dumps(again).replace(tail, "id") == json.dumps(expected).replace(ours, "id")


async def test_calls_and_their_outputs_go_on_by_id(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda prompt: "blue" if "17" in prompt else CALLS))
    first = (await create(client, tools=[LOOK, CRM])).json
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "17"}
        for item in first["output"][1:]
    ]
    second = (await create(client, outputs, previous_response_id=first["id"], tools=[LOOK])).json
    assert text_of(second) == "blue"
    _, messages, _ = client.engine.seen[-1]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    names = [call["function"]["name"] for call in messages[1]["tool_calls"]]
    assert names == ["look", "crm__find"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [
        message["tool_call_id"] for message in messages[2:]
    ]


async def test_without_tools_the_same_text_is_a_message(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: CALLS))
    assert said(await create(client)) == CALLS
    assert said(await create(client, tools=[LOOK], tool_choice="none")) == CALLS

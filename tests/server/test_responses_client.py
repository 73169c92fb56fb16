"""Responses over a real socket, read by the openai client, streamed and whole."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import openai
import pytest
import uvicorn
from pydantic import BaseModel

from leyline.errors import CapacityError
from leyline.events import Completion
from leyline.server import Worker, create_app
from leyline.server.ask import Ask, Over
from leyline.server.parsers.pieces import CallHead, Content

from .fake_engine import FakeEngine
from .messages_scripts import Scripted, called, over, random_script, said, script_answers

NUM_SCRIPTS = 40
LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Told(Scripted):
    """A scripted answer of the whole surface."""

    @property
    def completions(self) -> list[Completion]:
        return [one.completion for one in self._script if isinstance(one, Over)]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A client of a server on a thread, with an engine that says it back."""
    worker = Worker(FakeEngine())
    worker.start()
    app = create_app(worker)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        server.should_exit = True
        thread.join()
    worker.stop()


def same(response: Any) -> Any:
    """A response without what is each answer's own."""
    body = response.to_dict()
    tail = body["id"].removeprefix("resp_")
    own = ("created_at", "parsed", "parsed_arguments")
    return json.loads(
        json.dumps(body).replace(tail, "id"),
        object_hook=lambda each: {key: value for key, value in each.items() if key not in own},
    )


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake-model", input="héé 👋", instructions="Hi.")
    assert response.output_text == "you said: system: Hi.\nuser: héé 👋\n"
    assert response.status == "completed" and response.usage is not None
    assert response.usage.input_tokens == len("system: Hi.\nuser: héé 👋\n")


def test_a_conversation_by_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake-model", input="a")
    second = client.responses.create(
        model="fake-model", input="b", previous_response_id=first.id, extra_body={"seed": 1}
    )
    assert second.output_text.startswith("you said: user: a\nassistant: you said: user: a\n")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model="fake-model", input="c", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"


def test_a_conversation_by_items(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "a"}]
    first = client.responses.create(model="fake-model", input=items, store=False)
    items += [*first.output, {"role": "user", "content": "b"}]
    by_items = client.responses.create(model="fake-model", input=items, store=False)
    assert by_items.output_text == f"you said: user: a\nassistant: {first.output_text}\nuser: b\n"


def test_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake-model", input="a\u2028b\u0085c") as stream:
        snapshots = [event.snapshot for event in stream if event.type.endswith("text.delta")]  # type: ignore[union-attr]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "you said: user: a\u2028b\u0085c\n"
    whole = client.responses.create(model="fake-model", input="a\u2028b\u0085c")
    assert same(final)["output"] == same(whole)["output"]


def test_every_script_is_read_alike_in_both_forms(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events as they came, put together by the client, are what the whole response says."""
    script_answers(monkeypatch, lambda ask: Told(random_script(Random(seed_of(ask)))))
    kinds: set[str] = set()
    for seed in range(NUM_SCRIPTS):
        fields: Any = {"model": "fake-model", "input": str(seed), "tools": [LOOK]}
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            for event in stream:
                kinds.add(event.type)
                last: Any = event
        assert same(last.response) == same(whole)
    ended = {"response.completed", "response.incomplete"}
    assert kinds >= {"response.reasoning_text.delta", "response.output_text.delta", *ended}
    assert "response.function_call_arguments.delta" in kinds


def seed_of(ask: Ask) -> int:
    return int(ask.messages[-1]["content"])


def test_tools_in_a_loop(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def scripted(ask: Ask) -> Told:
        asked.append(ask)
        if len(asked) > 1:
            return Told([said(Content("It is blue.")), over()])
        return Told([said(*called(0, "look", '{"at":', '"sky"}')), over("tool_calls")])

    script_answers(monkeypatch, scripted)
    with client.responses.stream(model="fake-model", input="Sky?", tools=[LOOK]) as stream:
        response = stream.get_final_response()
    (call,) = response.output
    assert call.type == "function_call" and call.parsed_arguments == {"at": "sky"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
    final = client.responses.create(
        model="fake-model", input=[output], previous_response_id=response.id, tools=[LOOK]
    )
    assert final.output_text == "It is blue."
    user, assistant, tool = asked[1].messages
    assert user["content"] == "Sky?" and tool["content"] == "blue"
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == call.call_id


def test_whatever_a_model_writes_is_kept(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client would be refused, such as an id that is too long, is no reason to fail now."""
    script = [said(CallHead(0, "c" * 999, "look")), over("tool_calls")]
    script_answers(monkeypatch, lambda _: Told([*script]))
    response = client.responses.create(model="fake-model", input="Sky?", tools=[LOOK])
    assert client.responses.retrieve(response.id).output == response.output
    client.responses.create(model="fake-model", input="And?", previous_response_id=response.id)


class Colour(BaseModel):
    name: str


def test_a_form(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def scripted(ask: Ask) -> Told:
        asked.append(ask)
        return Told([said(Content('{"name":"blue"}')), over()])

    script_answers(monkeypatch, scripted)
    response = client.responses.parse(model="fake-model", input="Sky?", text_format=Colour)
    assert response.output_parsed == Colour(name="blue")
    form = asked[0].form
    assert form is not None and form.kind == "json_schema" and "name" in form.value["properties"]


def test_a_stream_that_breaks_off(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    script_answers(monkeypatch, lambda _: Told([said(Content("half")), CapacityError("No room.")]))
    events = list(client.responses.create(model="fake-model", input="a", stream=True))
    last: Any = events[-1]
    assert last.type == "response.failed" and last.response.error.message == "No room."
    with pytest.raises(openai.InternalServerError, match="No room"):
        client.responses.create(model="fake-model", input="a")


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="other", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.responses.create(model="fake-model", input="a", background=True, stream=True)
    assert invalid.value.param == "background" and invalid.value.code == "unsupported_value"

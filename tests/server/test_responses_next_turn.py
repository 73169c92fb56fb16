"""A conversation by id over a real engine: its prefix is cached, and edits of it hold."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

SECRET = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"


def respond(client: TestClient, text: str, previous: Any = None, **fields: Any) -> dict[str, Any]:
    """A greedy turn."""
    body = {"input": text, "temperature": 0, "max_output_tokens": 4, **fields}
    if previous is not None:
        body["previous_response_id"] = previous["id"]
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def details(response: dict[str, Any]) -> dict[str, Any]:
    return response["usage"]["input_tokens_details"]


def test_what_was_said_before_is_cached(client: TestClient) -> None:
    first = respond(client, f"look: ({SECRET}) what now?")
    second = respond(client, "and then?", first)
    third = respond(client, "and then?", second)
    assert details(second)["cached_tokens"] >= first["usage"]["input_tokens"]
    assert details(third)["cached_tokens"] >= second["usage"]["input_tokens"]
    assert second["session"]["id"] == third["session"]["id"] == first["id"]


def test_an_edit_holds_for_the_rest_of_the_conversation(client: TestClient) -> None:
    first = respond(client, f"look: ({SECRET}) what now?")
    second = respond(client, "and then?", first)
    edit = {"match": SECRET, "replacement": "[gone]", "mode": "amortize"}
    session = second["session"]["id"]
    done = client.post("/v1/directives", json={"session_id": session, "directives": [edit]}).json()
    assert done["receipts"][0]["mode_done"] == "amortize"
    third = respond(client, "and then?", second)
    assert third["session"] == {"id": session, "version": 1}
    assert details(third)["spliced_tokens"] > 0
    assert third["usage"]["input_tokens"] < second["usage"]["input_tokens"]
    text = client.get(f"/v1/sessions/{session}?tokens=true").json()["text"]
    assert SECRET not in text and "[gone]" in text
    other = respond(client, f"look: ({SECRET}) what now?")
    assert details(other)["spliced_tokens"] == 0

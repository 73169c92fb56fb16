"""Anything at all, sent to `/v1/responses`: an answer or a typed error, never a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.server import Worker, create_app

from .client import Client
from .fake_engine import FakeEngine
from .test_fuzz import MANAGEMENT, SALT, fields, json_values, send, without_end

PATH = "/v1/responses"
NAMES = st.sampled_from(["look", "find", "crm"])
PARTS = st.lists(
    fields(
        {"text": st.text(max_size=3), "refusal": st.just("no")},
        type=st.sampled_from(["input_text", "output_text", "refusal", "input_image"]),
    ),
    max_size=2,
)
TEXTS = st.text(max_size=3) | PARTS
ITEMS = st.lists(
    fields(
        {
            "role": st.sampled_from(["user", "developer", "assistant"]),
            "content": TEXTS,
            "summary": TEXTS,
            "output": TEXTS,
            "call_id": st.sampled_from(["a", "b"]),
            "name": NAMES,
            "namespace": NAMES,
            "arguments": st.sampled_from(["{}", "{", ""]),
        },
        type=st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
        ),
    ),
    max_size=4,
)
FUNCTION: dict[str, Any] = {
    "name": NAMES,
    "description": st.text(max_size=3),
    "parameters": st.just({"type": "object"}) | json_values,
    "strict": st.booleans(),
}
TYPES = st.sampled_from(["function", "namespace", "web_search"])
TOOLS = st.lists(
    fields(FUNCTION | {"tools": st.lists(fields(FUNCTION, type=TYPES), max_size=2)}, type=TYPES),
    max_size=3,
)
CHOICES = st.sampled_from(["auto", "none"]) | fields(
    {"name": NAMES, "tools": st.lists(fields({"name": NAMES}, type=TYPES), max_size=2)},
    type=st.sampled_from(["none", "allowed_tools"]),
)
RESPONSES = fields(
    SALT
    | {
        "instructions": st.text(max_size=3),
        "previous_response_id": st.sampled_from(["resp_0", ""]),
        "session_id": st.sampled_from(["s1", "s9"]),
        "stream": st.booleans(),
        "store": st.booleans(),
        "tools": TOOLS,
        "tool_choice": CHOICES,
        "text": fields({"format": fields({}, type=st.just("text"))}),
        "reasoning": fields({"effort": st.sampled_from(["none", "low"])}),
        "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        "max_output_tokens": st.integers(0, 9),
        "top_logprobs": st.integers(-1, 3),
        "context_management": MANAGEMENT,
    },
    input=st.text(max_size=3) | ITEMS,
)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine()
    worker = Worker(engine)
    worker.start()
    yield Client(create_app(worker), worker, engine)
    worker.stop()


@given(body=RESPONSES)
@settings(parent=without_end)
def test_bodies(client: Client, body: Any) -> None:
    send(client, "POST", PATH, body)


def test_the_fuzz_reaches_more_than_the_door(client: Client) -> None:
    """Most of what it sends would prove nothing if it were all refused for the same reason."""
    statuses: list[int] = []

    @given(body=RESPONSES)
    @settings(parent=without_end, derandomize=True)
    def collect(body: Any) -> None:
        statuses.append(send(client, "POST", PATH, body).status)

    collect()
    assert {200, 400, 404} <= set(statuses) and statuses.count(200) > len(statuses) / 10

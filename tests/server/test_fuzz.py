"""Anything at all, sent to the routes that edit: an answer or a typed error, never a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyline.marks import MessageSpan
from leyline.server import Worker, create_app

from .client import Answer, Client
from .fake_engine import FakeEngine, FakeSession

TEXT = "the old, the new, the end"
POINTERS: dict[str, Any] = {
    "start": st.integers(-1, 30),
    "end": st.integers(-1, 30),
    "message": st.integers(-3, 3),
    "tool_call_id": st.sampled_from(["c1", "c2"]),
    "match": st.sampled_from(["the", "old", "nowhere"]),
    "occurrence": st.integers(-3, 3),
}
CONTENTS: dict[str, Any] = {
    "replacement": st.sampled_from(["", "X", [88], [0x110000]]),
    "mode": st.sampled_from(["amortize", "forget", "heal", "none"]),
}
SALT: dict[str, Any] = {"cache_salt": st.sampled_from(["t", "u", None])}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@st.composite
def fields(draw: st.DrawFn, plausible: dict[str, Any], **required: Any) -> Any:
    """An object with some of the plausible fields; now and then something else."""
    chance = draw(st.integers(0, 15))
    if chance == 15:
        return draw(json_values)
    body = draw(st.fixed_dictionaries(required, optional=plausible))
    if chance >= 13:
        name = draw(st.sampled_from([*plausible, *required, "other"]) | st.text(max_size=9))
        body[name] = draw(json_values)
    return body


@st.composite
def pointers(draw: st.DrawFn) -> dict[str, Any]:
    """A way to point, most often one that is whole."""
    ways = [["start", "end"], ["message"], ["tool_call_id", "match"], ["match", "occurrence"]]
    names = draw(st.sampled_from([*ways, [], [*POINTERS]]))
    return {name: draw(POINTERS[name]) for name in names}


def pointing(plausible: dict[str, Any], **required: Any) -> st.SearchStrategy[Any]:
    """An object that points somewhere, besides its fields."""
    rest = fields(plausible, **required)
    return st.builds(lambda a, b: a | b if isinstance(b, dict) else b, pointers(), rest)


items = pointing(
    CONTENTS
    | {
        "scope": st.sampled_from(["context", "cache"]),
        "source": pointing({}, session_id=st.sampled_from(["s1", "s2", "s3"])),
    }
)
BODIES: dict[str, st.SearchStrategy[Any]] = {
    "/v1/directives": fields(
        SALT
        | {
            "expected_version": st.integers(0, 2),
            "idempotency_key": st.sampled_from(["a", "b"]),
            "dry_run": st.booleans(),
        },
        session_id=st.sampled_from(["s1", "s1", "s3"]),
        directives=st.lists(items, min_size=1, max_size=3),
    ),
    "/v1/sessions/s1/marks": pointing(
        CONTENTS
        | SALT
        | {
            "of": st.sampled_from(["span", "reasoning", "tool_output"]),
            "ttl_s": st.floats(1e-9, 1e9),
            "turns": st.integers(1, 9),
        },
        verb=st.sampled_from(["pin", "decay", "scratch"]),
    ),
    "/v1/sessions/s1/revert": fields(SALT | {"version": st.integers(0, 2)}),
    "/v1/sessions:save": fields({}),
    "/v1/cache/find": fields(
        SALT | {"text": st.just("the"), "tokens": st.lists(st.integers(0, 200), max_size=3)}
    ),
}
MANAGEMENT = fields(
    {},
    edits=st.lists(
        fields(
            {
                "n": st.integers(0, 3),
                "max_chars": st.integers(0, 9),
                "keep": st.just({"type": "tool_uses", "value": 1}),
                "trigger": st.just({"type": "input_tokens", "value": 1}),
            },
            type=st.sampled_from(
                ["truncate_older_than", "clear_tool_uses_20250919", "clear_thinking_20251015"]
            ),
        ),
        max_size=3,
    ),
)
CHATS = fields(
    SALT
    | {
        "session_id": st.sampled_from(["s1", "s9"]),
        "prompt_cache_key": st.text(max_size=9),
        "edit_mode": st.sampled_from(["forget", "amortize", "heal"]),
        "context_management": MANAGEMENT,
        "stream": st.booleans(),
    },
    messages=st.just([{"role": "user", "content": "x"}]),
)
without_end = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine()
    worker = Worker(engine)
    worker.start()
    yield Client(create_app(worker), worker, engine)
    worker.stop()


def send(client: Client, method: str, path: str, body: Any = None, **more: Any) -> Answer:
    """Answer to one request to a server in which two sessions are."""
    messages = [MessageSpan("user", None, 0, 7), MessageSpan("tool", "c1", 9, 16)]
    session = FakeSession(TEXT, messages=messages, old={0: "old"})
    client.engine.sessions = {"s1": session, "s2": FakeSession("other")}
    raw = None if method != "POST" else json.dumps(body).encode()

    async def exchange() -> Answer:
        return await client.open(method, path, raw=raw, **more).finish()

    answer = asyncio.run(exchange())
    assert answer.status < 500, (path, body, answer.body)
    if answer.status >= 400:
        assert answer.error["code"] != "internal_error"
        assert (session.text, session.version, session.marks) == (TEXT, 1, [])
        assert client.engine.open == {}
    return answer


@given(data=st.data())
@settings(parent=without_end)
@pytest.mark.parametrize("path", BODIES)
def test_bodies(client: Client, path: str, data: st.DataObject) -> None:
    send(client, "POST", path, data.draw(BODIES[path]))


@given(body=CHATS, header=st.text(st.characters(codec="latin-1"), max_size=9))
@settings(parent=without_end)
def test_chats(client: Client, body: Any, header: str) -> None:
    send(client, "POST", "/v1/chat/completions", body, headers={"x-session-id": header})


names = st.text(st.characters(codec="ascii"), max_size=9) | st.sampled_from(["s1", "..", "%ff"])


@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
    st.sampled_from(["", "/", "/revert", "/marks", "/marks/{}", ":save", "/{}/{}"]),
    names,
    names,
)
@settings(parent=without_end)
def test_paths(client: Client, method: str, path: str, session: str, rest: str) -> None:
    send(client, method, f"/v1/sessions/{session}{path.format(rest, rest)}", {})


def test_the_fuzz_reaches_more_than_the_door(client: Client) -> None:
    """Most of what it sends would prove nothing if it were all refused for the same reason."""
    reached: dict[str, set[int]] = {path: set() for path in BODIES}

    @given(data=st.data())
    @settings(parent=without_end, derandomize=True)
    def collect(data: st.DataObject) -> None:
        for path, bodies in BODIES.items():
            reached[path].add(send(client, "POST", path, data.draw(bodies)).status)

    collect()
    assert reached["/v1/directives"] >= {200, 400, 422}
    assert reached["/v1/sessions/s1/marks"] >= {200, 400, 422}
    assert reached["/v1/sessions/s1/revert"] >= {200, 400, 404}
    assert reached["/v1/cache/find"] >= {200, 400}

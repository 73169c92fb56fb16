"""Clients that vanish: at every stage, what they asked for is given up and nothing else is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from .client import Client, Exchange, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, DIRECTIVES = "/v1/chat/completions", "/v1/completions", "/v1/directives"
EDIT = {"session_id": "s1", "directives": [{"start": 0, "end": 1}]}


def gated(connect: Connect) -> Client:
    return connect(FakeEngine(gated=True, sessions={"s1": FakeSession("0123")}))


async def submitted(client: Client) -> None:
    """Wait until the engine has taken a request."""
    while not await client.open_requests():
        pass


async def vanish(client: Client, exchange: Exchange) -> None:
    """Hang up, and see that the one request was given up."""
    await exchange.hang_up()
    assert await client.open_requests() == 0
    assert len(client.engine.cancelled) == 1


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, chat_body()),
        (CHAT, chat_body(stream=True)),
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": "x", "stream": True}),
        (DIRECTIVES, EDIT),
    ],
    ids=["chat", "chat-stream", "completion", "completion-stream", "directives"],
)
async def test_before_the_first_token(connect: Connect, path: str, body: Any) -> None:
    client = gated(connect)
    exchange = client.open("POST", path, body)
    await submitted(client)
    await vanish(client, exchange)
    assert client.engine.sessions["s1"].text == "0123"


async def test_in_the_middle_of_a_stream(connect: Connect) -> None:
    client = gated(connect)
    exchange = client.open("POST", CHAT, chat_body(stream=True))
    client.engine.allow(1)
    await exchange.first_bytes()
    await submitted(client)
    await vanish(client, exchange)
    assert b"[DONE]" not in exchange.answer.body


async def test_in_the_middle_of_a_session_turn_frees_the_session(connect: Connect) -> None:
    client = gated(connect)
    exchange = client.open("POST", CHAT, chat_body(session_id="s2"))
    await submitted(client)
    await vanish(client, exchange)
    client.engine.allow(99)
    assert (await client.chat(session_id="s2")).status == 200


async def test_several_prompts_are_given_up_together(connect: Connect) -> None:
    client = gated(connect)
    exchange = client.open("POST", COMPLETIONS, {"prompt": ["a", "b", "c"]})
    await submitted(client)
    await exchange.hang_up()
    assert await client.open_requests() == 0
    assert sorted(client.engine.cancelled) == [1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_request_is_even_submitted(connect: Connect, stream: bool) -> None:
    client = gated(connect)
    exchange = client.open("POST", CHAT, chat_body(stream=stream))
    await exchange.hang_up()
    assert await client.open_requests() == 0


async def test_after_the_last_token_cancels_nothing(connect: Connect) -> None:
    client = connect()
    exchange = client.open("POST", CHAT, chat_body(stream=True))
    await exchange.finish()
    await exchange.hang_up()
    assert await client.open_requests() == 0
    assert client.engine.cancelled == []


async def test_a_socket_that_breaks_in_the_middle_of_a_send(connect: Connect) -> None:
    client = gated(connect)
    exchange = client.open("POST", CHAT, chat_body(stream=True), broken=True)
    await exchange.finish()
    assert await client.open_requests() == 0
    assert client.engine.cancelled == [1]


async def test_others_go_on(connect: Connect) -> None:
    client = gated(connect)
    stays = client.open("POST", CHAT, chat_body("stays"))
    leaves = client.open("POST", CHAT, chat_body("leaves"))
    await submitted(client)
    await leaves.hang_up()
    client.engine.allow(99)
    answer = await stays.finish()
    assert answer.json["choices"][0]["message"]["content"] == "you said: user: stays\n"


async def test_a_thousand_ordinary_requests_leave_nothing_behind(connect: Connect) -> None:
    client = connect(FakeEngine(chunk=100))
    for _ in range(20):
        await asyncio.gather(*(client.complete("x") for _ in range(50)))
    assert await client.open_requests() == 0
    assert client.engine.cancelled == []
    assert client.worker._subscribers == {}


async def entering(client: Client, inside: threading.Event) -> None:
    """Wait until the engine's thread is inside something."""
    while not inside.is_set():
        await asyncio.sleep(0)


async def test_while_a_directive_waits_its_turn_it_is_never_submitted(connect: Connect) -> None:
    client = gated(connect)
    release = threading.Event()
    blocker = asyncio.ensure_future(client.worker.call(release.wait))
    exchange = client.open("POST", DIRECTIVES, EDIT | {"idempotency_key": "k"})
    await exchange.hang_up()
    release.set()
    await blocker
    client.engine.allow(9)
    assert await client.open_requests() == 0
    session = client.engine.sessions["s1"]
    assert session.text == "0123" and session.results == {}


async def test_an_abandoned_directive_frees_its_key_and_a_retry_does_it_once(
    connect: Connect,
) -> None:
    client = gated(connect)
    body = EDIT | {"idempotency_key": "k"}
    exchange = client.open("POST", DIRECTIVES, body)
    await submitted(client)
    await vanish(client, exchange)
    assert client.engine.sessions["s1"].text == "0123"
    client.engine.allow(99)
    for _ in range(2):
        answer = await client.post(DIRECTIVES, body)
        assert answer.status == 200 and answer.json["version"] == 2
    assert client.engine.sessions["s1"].text == "123"


async def test_a_directive_that_was_done_before_the_hang_up_stays_done(connect: Connect) -> None:
    client = gated(connect)
    body = EDIT | {"idempotency_key": "k"}
    exchange = client.open("POST", DIRECTIVES, body)
    await submitted(client)
    client.engine.allow(1)
    while await client.open_requests():
        pass
    await exchange.hang_up()
    assert client.engine.sessions["s1"].text == "123" and client.engine.cancelled == []
    client.engine.allow(9)
    assert (await client.post(DIRECTIVES, body)).json["version"] == 2
    assert client.engine.sessions["s1"].text == "123"


async def test_during_a_dry_run(connect: Connect) -> None:
    client = gated(connect)
    inside, release = threading.Event(), threading.Event()

    def plan_slowly() -> None:
        inside.set()
        release.wait()

    client.engine.planning = plan_slowly
    exchange = client.open("POST", DIRECTIVES, EDIT | {"dry_run": True})
    await entering(client, inside)
    await exchange.hang_up()
    release.set()
    assert await client.open_requests() == 0
    assert client.engine.sessions["s1"] == FakeSession("0123")
    client.engine.planning = None
    assert (await client.post(DIRECTIVES, EDIT | {"dry_run": True})).status == 200


async def test_a_dry_run_nobody_waits_for_is_not_made(connect: Connect) -> None:
    client = gated(connect)
    client.engine.planning = lambda: pytest.fail("planned for nobody")
    release = threading.Event()
    blocker = asyncio.ensure_future(client.worker.call(release.wait))
    exchange = client.open("POST", DIRECTIVES, EDIT | {"dry_run": True})
    await exchange.hang_up()
    release.set()
    await blocker
    assert await client.open_requests() == 0


@pytest.mark.parametrize("moment", range(12))
async def test_at_every_await_of_a_directive_it_is_done_or_not_done(
    connect: Connect, moment: int
) -> None:
    client = connect(FakeEngine(sessions={"s1": FakeSession("0123")}))
    exchange = client.open("POST", DIRECTIVES, EDIT | {"idempotency_key": "k"})
    for _ in range(moment):
        await asyncio.sleep(0)
    await exchange.hang_up()
    assert await client.open_requests() == 0
    session = client.engine.sessions["s1"]
    assert (session.text, session.version) in [("0123", 1), ("123", 2)]
    assert (await client.post(DIRECTIVES, EDIT | {"idempotency_key": "k"})).status == 200
    assert (session.text, session.version) == ("123", 2)

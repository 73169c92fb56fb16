"""Clients that vanish: at every stage, what they asked for is given up and nothing else is."""

from __future__ import annotations

import asyncio
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

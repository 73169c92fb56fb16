"""What a server takes on: how many requests wait, how long they may take, how they come in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline.engine import Engine
from leyline.errors import DrainingError
from leyline.server import ServerConfig, Worker, create_app
from leyline.server.doors import WholeBody

from .client import Answer, Client, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Served = Callable[..., Client]


@pytest.fixture
def real(tiny_folder: Callable[[str], Path]) -> Iterator[Served]:
    """A server over a small engine in which one request runs at a time."""
    engine = Engine(
        model=str(tiny_folder("v3")),
        dtype="float32",
        kv_cache_tokens=2000,
        max_num_seqs=1,
        progress=False,
    )
    workers: list[Worker] = []

    def start(**options: Any) -> Client:
        worker = Worker(engine)
        workers.append(worker)
        app = create_app(worker, ServerConfig(**options))
        return Client(app, worker, engine)  # type: ignore[arg-type]

    yield start
    for worker in workers:
        worker.stop()
    engine.close()


def prompts(count: int) -> dict[str, Any]:
    return {"prompt": [f"in the land {number}" for number in range(count)], "max_tokens": 2}


def told_to_wait(answer: Answer) -> None:
    assert answer.status == 429 and answer.error["type"] == "rate_limit_error"
    assert answer.error["code"] == "queue_full" and int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(("queued", "fits"), [(0, 1), (1, 2), (3, 4)])
async def test_so_many_wait_beside_those_that_run(real: Served, queued: int, fits: int) -> None:
    client = real(max_queued_requests=queued)
    client.worker.start()
    assert (await client.post(COMPLETIONS, prompts(fits))).status == 200
    told_to_wait(await client.post(COMPLETIONS, prompts(fits + 1)))
    assert (await client.post(COMPLETIONS, prompts(fits))).status == 200


async def test_requests_that_came_apart_are_counted_together(real: Served) -> None:
    client = real(max_queued_requests=1)
    # Nobody works on them yet, so that all are there before any is done.
    exchanges = [client.open("POST", COMPLETIONS, prompts(1)) for _ in range(4)]
    while client.worker._inbox.qsize() < len(exchanges):
        await asyncio.sleep(0)
    client.worker.start()
    answers = [await exchange.finish() for exchange in exchanges]
    assert [answer.status for answer in answers] == [200, 200, 429, 429]
    told_to_wait(answers[3])


async def test_a_stream_that_finds_no_place_is_refused_before_it_begins(connect: Connect) -> None:
    client = connect(config=ServerConfig(max_queued_requests=0))
    told_to_wait(await client.chat(stream=True))
    assert client.engine.seen == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_ends(connect: Connect, stream: bool) -> None:
    client = connect(FakeEngine(gated=True), ServerConfig(request_timeout_s=0.05))
    answer = await client.chat(stream=stream)
    if stream:
        error = answer.chunks[-1]["error"]
        assert answer.status == 200
    else:
        error = answer.error
        assert answer.status == 504
    assert error["code"] == "request_timeout" and error["type"] == "server_error"
    assert await client.open_requests() == 0
    assert client.worker.num_open == 0 and not client.worker._deadlines


async def test_a_request_that_is_in_time_is_not_ended(connect: Connect) -> None:
    client = connect(config=ServerConfig(request_timeout_s=600))
    assert (await client.chat()).status == 200
    assert not client.worker._deadlines
    untimed = connect(config=ServerConfig(request_timeout_s=0))
    assert untimed.worker.max_seconds is None and (await untimed.chat()).status == 200


async def test_only_what_is_late_is_ended(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True), ServerConfig(request_timeout_s=0.05))
    late = await client.chat()
    client.worker.max_seconds = None
    exchange = client.open("POST", CHAT, chat_body("later"))
    client.engine.allow(100)
    answer = await exchange.finish()
    assert (late.status, answer.status) == (504, 200)


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_is_open(
    connect: Connect,
) -> None:
    client = connect(FakeEngine(gated=True))
    client.engine.allow(1)
    exchange = client.open("POST", CHAT, chat_body(stream=True))
    await exchange.first_bytes()
    client.worker.drain()
    with pytest.raises(DrainingError):
        await client.worker.submit([lambda: 1])
    refused = await client.chat()
    assert refused.status == 503 and refused.error["code"] == "draining"
    assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
    assert (await client.get("/health")).error["code"] == "draining"
    assert (await client.get("/live")).status == 200
    assert (await client.get("/v1/sessions")).status == 200
    client.engine.allow(1000)
    answer = await exchange.finish()
    assert answer.chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert client.worker.num_open == 0


async def test_who_is_not_done_when_a_draining_server_ends_is_told_so(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    exchange = client.open("POST", CHAT, chat_body())
    while not await client.open_requests():
        await asyncio.sleep(0)
    client.worker.drain()
    exchange._task.cancel()  # as uvicorn does in the end
    answer = await exchange.finish()
    assert answer.status == 503 and answer.error["code"] == "draining"


async def test_a_request_that_is_cancelled_otherwise_is_just_cancelled(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    exchange = client.open("POST", CHAT, chat_body())
    while not await client.open_requests():
        await asyncio.sleep(0)
    exchange._task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.finish()
    assert exchange.answer.status == 0


async def test_health_and_liveness_of_a_dead_engine(connect: Connect) -> None:
    client = connect()
    client.engine.fault = RuntimeError("dead")
    await client.chat()
    await asyncio.to_thread(client.worker.stop)
    for path in ("/health", "/live"):
        answer = await client.get(path)
        assert answer.status == 503 and answer.error["code"] == "engine_closed"


@pytest.mark.parametrize("path", ["/health", "/live", "/version", "/"])
async def test_probes_may_ask_for_the_head_alone(connect: Connect, path: str) -> None:
    client = connect()
    assert (await client.open("HEAD", path).finish()).status == 200
    assert (await client.get(path)).status == 200


# -- bodies ---------------------------------------------------------------------------------------


def deep(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ("[", ""), ("{", "")])
@pytest.mark.parametrize("depth", [1000, 100_000, 1_000_000])
async def test_deep_json_is_a_refusal(
    connect: Connect, opening: str, closing: str, depth: int
) -> None:
    client = connect()
    nested = deep(depth, opening, closing)
    inside = b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + nested + b"}"
    for path in (CHAT, "/v1/messages", "/v1/responses", "/v1/directives"):
        for raw in (nested, inside):
            answer = await client.post(path, raw=raw)
            assert 400 <= answer.status < 500, (path, answer.body)
    assert (await client.chat()).status == 200


async def test_a_body_that_trickles_in_is_cut_off() -> None:
    pieces, sent = [b"{", b'"a"'], list[Any]()

    async def receive() -> Any:
        if not pieces:
            await asyncio.Event().wait()  # the rest never comes
        return {"type": "http.request", "body": pieces.pop(0), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*_: Any) -> None:
        pytest.fail("a route saw half a body")

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await WholeBody(never, max_bytes=100, max_seconds=0.05)(scope, receive, send)
    start, body = sent
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "body_timeout"


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(
    connect: Connect,
) -> None:
    client = connect()
    exchange = client.open("POST", CHAT, chat_body())
    exchange._body[:] = []
    answer = await exchange.hang_up()
    assert answer.status == 0 and client.engine.seen == []


async def test_a_body_in_many_pieces_is_read_whole(connect: Connect) -> None:
    raw = json.dumps(chat_body("piecemeal")).encode()
    client = connect()
    answer = await client.post(CHAT, raw=[raw[i : i + 1] for i in range(len(raw))])
    assert "piecemeal" in answer.json["choices"][0]["message"]["content"]


# -- origins and hosts ----------------------------------------------------------------------------

ORIGIN = {"origin": "https://chat.example"}
PREFLIGHT = ORIGIN | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


async def test_an_origin_that_is_named_may_call_and_is_asked_for_its_key(
    connect: Connect,
) -> None:
    client = connect(config=ServerConfig(allowed_origins=("https://chat.example",), api_key=("k",)))
    preflight = await client.open("OPTIONS", CHAT, headers=PREFLIGHT).finish()
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    stranger = await client.post(CHAT, chat_body(), headers=ORIGIN)
    assert stranger.status == 401 and "access-control-allow-origin" in stranger.headers
    let_in = await client.post(CHAT, chat_body(), headers=ORIGIN | {"x-api-key": "k"})
    assert let_in.status == 200
    assert let_in.headers["access-control-expose-headers"] == "x-request-id"
    other = await client.post(CHAT, chat_body(), headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_hosts_that_are_named_are_let_in_and_no_other(connect: Connect) -> None:
    config = ServerConfig(host="0.0.0.0", allowed_hosts=("LLM.example",))
    client = connect(config=config)
    for host, status in (
        ("llm.example:8000", 200),
        ("LLM.EXAMPLE", 200),
        ("localhost", 403),
        ("llm.example.evil", 403),
    ):
        assert (await client.get("/version", headers={"host": host})).status == status
        assert (await client.get("/health", headers={"host": host})).status == 200  # a probe
        assert (await client.open("POST", "/health", headers={"host": host}).finish()).status >= 400
    local = connect(config=ServerConfig(allowed_hosts=("llm.example",)))
    for host in ("llm.example", "localhost"):
        assert (await local.get("/version", headers={"host": host})).status == 200
    anybody = connect(config=ServerConfig(allowed_hosts=("*",)))
    assert (await anybody.get("/version", headers={"host": "any.example"})).status == 200

from __future__ import annotations

import asyncio

import pytest

from leyline.server import ServerConfig

from .client import chat_body
from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def test_health(connect: Connect) -> None:
    answer = await connect().get("/health")
    assert answer.status == 200 and answer.json == {"status": "ok"}


async def test_health_of_an_engine_that_died(connect: Connect) -> None:
    client = connect()
    client.engine.fault = RuntimeError("secret cause")
    answer = await client.chat()
    assert answer.status == 503 and answer.error["code"] == "engine_closed"
    await asyncio.to_thread(client.worker.stop)
    for answer in (await client.get("/health"), await client.chat(), await client.complete()):
        assert answer.status == 503
        assert answer.error["type"] == "server_error" and b"secret" not in answer.body


async def test_a_stream_over_an_engine_that_dies_ends_with_an_error(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    client.engine.allow(1)
    exchange = client.open("POST", CHAT, chat_body(stream=True))
    await exchange.first_bytes()
    client.engine.fault = RuntimeError("secret cause")
    client.engine.allow(1)
    answer = await exchange.finish()
    assert answer.chunks[-1]["error"]["code"] == "engine_closed"


async def test_models(connect: Connect) -> None:
    client = connect()
    listed = (await client.get("/v1/models")).json
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == "fake-model" and card["object"] == "model"
    assert card["max_model_len"] == 4096 and card["owned_by"] == "leyline"
    assert set(card) == {"id", "object", "created", "owned_by", "max_model_len"}
    assert (await client.get("/v1/models/fake-model")).json == card
    missing = await client.get("/v1/models/other")
    assert missing.status == 404 and missing.error["code"] == "model_not_found"


async def test_a_model_name_with_a_slash_can_be_retrieved(connect: Connect) -> None:
    client = connect(config=ServerConfig(served_model_name="org/name"))
    assert (await client.get("/v1/models/org/name")).status == 200


@pytest.mark.parametrize(
    "path",
    ["/nowhere", "/v1", "/v1/chat", "/v1/sessions/", "/V1/models", "/health/", "//health"],
)
async def test_unknown_routes_have_the_one_shape(connect: Connect, path: str) -> None:
    answer = await connect().get(path)
    assert answer.status == 404
    assert answer.error["type"] == "not_found_error" and answer.error["code"] == "unknown_route"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/directives"])
async def test_a_wrong_method_has_the_one_shape(connect: Connect, path: str) -> None:
    answer = await connect().get(path)
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert answer.error["code"] == "method_not_allowed"


async def test_an_unforeseen_exception_has_the_one_shape_and_stays_in_the_log(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(FakeEngine(reply=lambda _: 1 // 0 * ""))
    answer = await client.chat()
    assert answer.status == 500 and answer.error["code"] == "internal_error"
    assert b"division" not in answer.body
    assert "ZeroDivisionError" in caplog.text
    assert (await client.get("/health")).status == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "LOCALHOST"]
)
async def test_loopback_names_are_let_in(connect: Connect, host: str) -> None:
    assert (await connect().get("/version", headers={"host": host})).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a\x00b"]
)
async def test_other_names_are_not_let_in_on_loopback(connect: Connect, host: str) -> None:
    client = connect()
    answer = await client.post(CHAT, chat_body(), headers={"host": host})
    assert answer.status == 403 and answer.error["type"] == "permission_error"
    assert client.engine.seen == []


async def test_elsewhere_any_name_is_let_in(connect: Connect) -> None:
    client = connect(config=ServerConfig(host="0.0.0.0"))
    assert (await client.get("/version", headers={"host": "box.example"})).status == 200


async def test_no_other_origin_is_allowed(connect: Connect) -> None:
    client = connect()
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight = await client.open("OPTIONS", CHAT, headers=headers).finish()
    assert preflight.status == 405
    answer = await client.post(CHAT, chat_body(), headers=headers)
    for name in (*preflight.headers, *answer.headers):
        assert not name.startswith("access-control")


async def test_a_body_announced_too_large(connect: Connect) -> None:
    client = connect(config=ServerConfig(max_body_bytes=1000))
    answer = await client.post(CHAT, raw=b"{}", headers={"content-length": "1001"})
    assert answer.status == 413 and answer.error["code"] == "body_too_large"


@pytest.mark.parametrize("announced", ["10", "-1", "²", "9" * 50, ""])
async def test_a_body_larger_than_announced(connect: Connect, announced: str) -> None:
    client = connect(config=ServerConfig(max_body_bytes=1000))
    raw = [b" " * 400] * 3
    answer = await client.post(CHAT, raw=raw, headers={"content-length": announced})
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    assert client.engine.seen == []


async def test_a_body_of_the_largest_size_is_let_in(connect: Connect) -> None:
    client = connect(config=ServerConfig(max_body_bytes=1000))
    raw = b'{"messages": [{"role": "user", "content": "x"}]}'.ljust(1000)
    headers = {"content-length": "1000"}
    assert (await client.post(CHAT, raw=[raw[:500], raw[500:]], headers=headers)).status == 200
    assert (await client.post(CHAT, raw=[raw, b" "])).status == 413


async def test_the_schema_can_be_read(connect: Connect) -> None:
    schema = (await connect().get("/openapi.json")).json
    assert schema["paths"].keys() >= {
        CHAT,
        "/v1/directives",
        "/v1/sessions",
        "/v1/sessions:save",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/revert",
        "/v1/sessions/{session_id}/marks",
        "/v1/sessions/{session_id}/marks/{mark_id}",
        "/v1/cache/find",
    }

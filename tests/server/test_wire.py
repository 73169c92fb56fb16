"""Streams that are quiet for a while, and what the fields say of themselves."""

from __future__ import annotations

import pytest

from leyline.server import ServerConfig
from leyline.server.schema import ChatRequest, CompletionRequest
from leyline.server.schema_generation import IGNORED
from leyline.server.schema_texts import DetokenizeRequest, TokenizeRequest
from leyline.server.wire import KEEP_ALIVE

from .client import chat_body
from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def test_a_quiet_stream_is_kept_open_by_comments(connect: Connect) -> None:
    config = ServerConfig(sse_keep_alive_interval_s=0.001)
    client = connect(FakeEngine(gated=True, reply=lambda _: "abc"), config)
    exchange = client.open("POST", CHAT, chat_body(stream=True))
    while exchange.answer.body.count(KEEP_ALIVE) < 3:
        await client.open_requests()
    client.engine.allow(9)
    answer = await exchange.finish()
    assert answer.body.endswith(b"data: [DONE]\n\n")
    answer.body = answer.body.replace(KEEP_ALIVE, b"")
    assert answer.chunks[1]["choices"][0]["delta"] == {"content": "abc"}


async def test_without_an_interval_there_are_no_comments(connect: Connect) -> None:
    config = ServerConfig(sse_keep_alive_interval_s=0)
    client = connect(FakeEngine(gated=True), config)
    exchange = client.open("POST", CHAT, chat_body(stream=True))
    await exchange.first_bytes()
    client.engine.allow(99)
    assert KEEP_ALIVE not in (await exchange.finish()).body


async def test_hanging_up_on_a_quiet_stream_ends_it(connect: Connect) -> None:
    config = ServerConfig(sse_keep_alive_interval_s=0.001)
    client = connect(FakeEngine(gated=True), config)
    for broken in (False, True):
        exchange = client.open("POST", CHAT, chat_body(stream=True), broken=broken)
        while not (exchange.answer.body.count(KEEP_ALIVE) or broken):
            await client.open_requests()
        await exchange.hang_up()
        assert await client.open_requests() == 0


async def test_usage_may_be_forced_on_every_stream(connect: Connect) -> None:
    client = connect(config=ServerConfig(force_usage=True))
    for answer in (await client.chat(stream=True), await client.complete(stream=True)):
        assert answer.chunks[-1]["usage"]["completion_tokens"] > 0


async def test_a_request_names_its_answer(connect: Connect) -> None:
    client = connect()
    assert (await client.chat(request_id="my.id-1")).json["id"] == "chatcmpl-my.id-1"
    chunks = (await client.complete(request_id="x", stream=True)).chunks
    assert {chunk["id"] for chunk in chunks} == {"cmpl-x"}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_row_32_ignored_fields_may_be_anything(connect: Connect, path: str) -> None:
    client = connect()
    for name in IGNORED:
        for value in (1, "x", [], {"a": "\ud83d"}, None, True):
            answer = await client.post(path, chat_body(prompt="x") | {name: value})
            assert answer.status == 200, (name, value)
    assert len({repr(seen) for seen in client.engine.seen}) == 1


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_row_32_every_field_says_what_it_does_and_whether_it_is_supported(model: type) -> None:
    properties = model.model_json_schema()["properties"]
    assert properties.keys().isdisjoint(IGNORED)
    for name, field in properties.items():
        assert field["description"].endswith("."), name
        assert field["support"] in ("supported", "refused"), name
        assert field["description"].startswith("Refused") is (field["support"] == "refused"), name


@pytest.mark.parametrize(
    "method, path, status, code",
    [
        ("GET", "/v1/nothing", 404, "unknown_route"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/tokenize", 405, "method_not_allowed"),
    ],
)
async def test_errors_of_routes_have_the_one_shape(
    connect: Connect, method: str, path: str, status: int, code: str
) -> None:
    answer = await connect().open(method, path).finish()
    assert (answer.status, answer.error["code"]) == (status, code)
    if status == 405:
        assert answer.headers["allow"]


async def test_errors_of_bodies_have_the_one_shape(connect: Connect) -> None:
    client = connect(config=ServerConfig(max_body_bytes=100))
    large = await client.chat("x" * 100)
    assert (large.status, large.error["code"]) == (413, "body_too_large")
    text = await client.post(CHAT, raw=b"{}", headers={"content-type": "text/plain"})
    assert (text.status, text.error["code"]) == (415, "unsupported_media_type")

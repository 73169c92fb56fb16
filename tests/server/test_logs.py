"""Request ids and the log: a line a request, nobody's texts, and no line that a client forged."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from leyline.server import ServerConfig, logs

from .client import Client, chat_body
from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR) [\w.]+: .*|  .*"
)
NASTY = "x\r\n2026-11-30T00:00:00.000 INFO leyline: forged\x1b[2J\u2028\x85"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the server's log would be."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    logs.configure("info")
    try:
        yield stream
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("uvicorn").setLevel(logging.NOTSET)


def lines(log: io.StringIO) -> list[str]:
    """The log's lines, of which each is one of ours."""
    found = log.getvalue().splitlines()
    for line in found:
        assert LINE.fullmatch(line), line
    return found


@pytest.mark.parametrize("asked", ["a", "req_1.2-3", "A" * 128])
async def test_a_harmless_request_id_is_echoed(connect: Connect, asked: str) -> None:
    answer = await connect().get("/health", headers={"x-request-id": asked})
    assert answer.headers["x-request-id"] == asked


@pytest.mark.parametrize(
    "asked", ["", " ", "a b", "A" * 129, "a\r\nset-cookie: x", "a\n", "\xe9", "<a>", "a/b"]
)
async def test_any_other_id_is_replaced(connect: Connect, asked: str) -> None:
    client = connect()
    answers = [await client.get("/health", headers={"x-request-id": asked}) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2 and all(re.fullmatch(r"req-[0-9a-f]{32}", one) for one in ids)


@pytest.mark.parametrize("kind", ["refused", "unknown", "stream", "host", "key", "body", "broken"])
async def test_every_answer_has_an_id(connect: Connect, kind: str) -> None:
    engine = FakeEngine(reply=lambda _: str(1 // 0)) if kind == "broken" else None
    keys = ("k",) if kind == "key" else ()
    client = connect(engine, ServerConfig(api_key=keys, max_body_bytes=100))
    answer = await {
        "refused": lambda: client.chat(temperature=-1),
        "unknown": lambda: client.get("/nowhere"),
        "stream": lambda: client.chat(stream=True),
        "host": lambda: client.get("/version", headers={"host": "evil.example"}),
        "key": lambda: client.chat(),
        "body": lambda: client.chat("x" * 200),
        "broken": lambda: client.chat(),
    }[kind]()
    assert answer.headers["x-request-id"].startswith("req-")


async def test_a_request_is_a_line_with_its_route_status_time_and_tokens(
    connect: Connect, log: io.StringIO
) -> None:
    client = connect()
    headers = {"x-request-id": "mine"}
    await client.post("/v1/chat/completions", chat_body("hi"), headers=headers)
    await client.post("/v1/chat/completions", chat_body("hi", stream=True), headers=headers)
    await client.get("/v1/sessions/private-name", headers=headers)
    one, streamed, session = lines(log)
    told = r"status=200 ms=\d+\.\d prompt_tokens=\d+ cached_tokens=2 completion_tokens=\d+"
    for line in (one, streamed):
        assert re.search(rf"POST /v1/chat/completions {told} request_id=mine$", line)
    assert "GET /v1/sessions/{session_id} status=404" in session and "private" not in session


async def test_a_client_that_hangs_up_is_a_line_too(connect: Connect, log: io.StringIO) -> None:
    client = connect(FakeEngine(gated=True))
    exchange = client.open("POST", "/v1/chat/completions", chat_body())
    client.engine.allow(1)
    await exchange.hang_up()
    assert "status=499" in lines(log)[-1]


async def everything_nasty(client: Client) -> None:
    """Requests with an attack on the log in every place where text may stand."""
    headers = {"x-request-id": "a b", "x-session-id": "s", "user-agent": "secret agent"}
    texts = {"user": NASTY, "model": NASTY}
    await client.post("/v1/chat/completions", chat_body(NASTY, **texts), headers=headers)
    await client.post("/v1/chat/completions", chat_body(NASTY, stop=[NASTY]), headers=headers)
    await client.post("/v1/chat/completions", chat_body(session_id=NASTY), headers=headers)
    await client.open(NASTY, "/" + NASTY, headers={"host": "localhost"}).finish()
    await client.get("/v1/models/" + NASTY + "?" + NASTY)
    await client.get("/v1/sessions/" + NASTY)
    await client.get("/version", headers={"host": "evil\r\nforged"})
    await client.post("/v1/chat/completions", raw=NASTY.encode())


async def test_no_line_is_forged_and_no_text_is_told(connect: Connect, log: io.StringIO) -> None:
    client = connect()
    await everything_nasty(client)
    found = lines(log)
    assert len(found) == 8
    for line in found:
        assert "forged" not in line and "secret" not in line and line.isascii()


async def test_an_error_is_logged_with_its_requests_id_in_lines_of_its_own(
    connect: Connect, log: io.StringIO
) -> None:
    def fail(_: str) -> str:
        raise RuntimeError(NASTY)

    client = connect(FakeEngine(reply=fail))
    headers = {"x-request-id": "mine"}
    answer = await client.post("/v1/chat/completions", chat_body(), headers=headers)
    assert answer.status == 500
    found = lines(log)
    assert found[0].endswith("request_id=mine") and " ERROR " in found[0]
    (forged,) = [line for line in found if "forged" in line]
    assert forged.startswith("  2026") and "\\x1b" in forged  # indented: no line of ours is


def test_a_message_with_control_characters_is_one_line(log: io.StringIO) -> None:
    logging.getLogger("leyline.x").warning("said %s", NASTY)
    (line,) = lines(log)
    assert "said x\\x0d\\x0a2026" in line and "\\x1b[2J\\u2028\\x85" in line


async def test_the_lines_of_requests_can_be_left_out(connect: Connect, log: io.StringIO) -> None:
    await connect(config=ServerConfig(access_log=False)).chat()
    assert lines(log) == []


async def test_what_probes_ask_is_no_news(connect: Connect, log: io.StringIO) -> None:
    client = connect()
    for path in ("/health", "/live", "/metrics"):
        await client.get(path)
    assert lines(log) == []
    await client.get("/version")
    assert len(lines(log)) == 1

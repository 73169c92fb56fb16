"""Real sockets: what hostile and clumsy clients do, while others are served as ever."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyline.errors import ConfigError
from leyline.server import ServerConfig, serve, sockets
from leyline.server.connection import MAX_HEADER_BYTES

from .client import chat_body
from .fake_engine import FakeEngine
from .running import GET, Running, answer_of, first_answer, running

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def patient() -> Iterator[Running]:
    """A server that waits for everybody."""
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server that waits for nobody."""
    with running(idle_timeout_s=0.2, body_timeout_s=0.2) as server:
        yield server


def post(body: bytes, path: str = "/v1/chat/completions", length: int | None = None) -> bytes:
    """A request as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def chat(**fields: Any) -> bytes:
    return post(json.dumps(chat_body(**fields)).encode())


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def send_all(client: socket.socket, parts: Iterator[bytes]) -> None:
    """Send until the other side has had enough."""
    try:
        for part in parts:
            client.sendall(part)
    except (ConnectionError, TimeoutError):
        pass


# -- heads ----------------------------------------------------------------------------------------


def test_a_head_of_ten_megabytes(patient: Running) -> None:
    with patient.connect() as client:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: ")
        send_all(client, (b"a" * 100_000 for _ in range(100)))
        assert patient.serves()
        status, body = answer_of(client)
        assert status == 431 and error_of(body)["code"] == "headers_too_large"


def test_ten_thousand_headers(patient: Running) -> None:
    with patient.connect() as client:
        client.sendall(GET[:-2])
        send_all(client, (b"x%d: y\r\n" % number for number in range(10_000)))
        assert patient.serves()
        status, body = answer_of(client)
        assert status == 431 and error_of(body)["type"] == "invalid_request_error"


@pytest.mark.parametrize("num_bytes", [60_000, 75_000, 200_000])
def test_a_head_that_comes_at_once_may_be_no_larger(patient: Running, num_bytes: int) -> None:
    headers = b"".join(b"x%05d: %s\r\n" % (i, b"y" * 90) for i in range(num_bytes // 100))
    connection = b"connection: close\r\n"
    with patient.connect() as client:
        client.sendall(GET[:-2] + connection + headers + b"\r\n")
        assert answer_of(client)[0] == (200 if num_bytes < MAX_HEADER_BYTES else 431)


def test_small_writes_are_sent_at_once() -> None:
    """asyncio sees to it only for sockets that it made itself; without, each answer waits 40 ms."""
    with (
        sockets.listening(ServerConfig(port=0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_that_come_together_are_answered_one_by_one(patient: Running) -> None:
    last = GET[:-2] + b"connection: close\r\n\r\n"
    with patient.connect() as client:
        client.sendall((GET + chat()) * 20 + last)
        status, body = answer_of(client)
        assert status == 200 and body.count(b"HTTP/1.1 200 OK") == 40


def test_a_body_where_none_belongs_is_not_waited_for(patient: Running) -> None:
    with patient.connect() as client:
        client.sendall(GET[:-2] + b"content-length: 10\r\n\r\n" + b"four")
        assert first_answer(client)[0] == 200
        client.sendall(b"sixsix" + GET)
        assert first_answer(client)[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        GET[:-2] + b"content-length: -1\r\n\r\n",
        GET[:-2] + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"GET /v\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_in_the_one_shape(patient: Running, sent: bytes) -> None:
    with patient.connect() as client:
        client.sendall(sent)
        status, body = answer_of(client)
        assert status == 400 and error_of(body)["code"] == "invalid_http"


@pytest.mark.parametrize("sent", [b"", GET[:20], GET[:-2]])
def test_a_request_that_does_not_come_is_not_waited_for(hasty: Running, sent: bytes) -> None:
    with hasty.connect() as client:
        client.sendall(sent)
        status, body = answer_of(client)
        assert status == (408 if sent else 0)
        assert not sent or error_of(body)["code"] == "headers_timeout"


def test_a_connection_is_closed_when_it_was_not_used_for_a_while(hasty: Running) -> None:
    with hasty.connect() as client:
        client.sendall(GET + GET)  # pipelined
        status, body = answer_of(client)
        assert status == 200 and body.count(b"HTTP/1.1 200") == 1


def test_an_answer_that_takes_longer_than_that_is_waited_for() -> None:
    with running(FakeEngine(gated=True), idle_timeout_s=0.2) as server, server.connect() as client:
        client.sendall(chat())
        with server.connect() as idle:
            assert answer_of(idle) == (0, b"")  # so the time is over
        server.engine.allow(1000)
        status, body = answer_of(client)
        assert status == 200 and b"you said" in body


def test_so_many_connections_and_no_more() -> None:
    with running(max_connections=3) as server:
        clients = [server.connect() for _ in range(3)]
        for client in clients:
            client.sendall(GET)
            assert first_answer(client)[0] == 200
        with server.connect() as client:
            status, body = answer_of(client)
            assert status == 503 and error_of(body)["code"] == "too_many_connections"
        for client in clients:
            client.close()
        assert server.settles()


def test_five_thousand_idle_connections(patient: Running) -> None:
    sockets.allow_connections(11_000)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 11_000:
        pytest.skip("this system does not allow enough open files")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clients = [patient.connect() for _ in range(5000)]
    try:
        assert patient.serves()
        assert len(patient.server.server_state.connections) >= 5000
        answer = httpx.post(patient.url + "/v1/chat/completions", json=chat_body(), timeout=30)
        assert answer.status_code == 200
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
        assert grown_mb < 200, "more than 40 kB for each, both ends together"
    finally:
        for client in clients:
            client.close()
    assert patient.settles()


# -- bodies ---------------------------------------------------------------------------------------


def test_a_body_of_a_gigabyte_that_is_announced(patient: Running) -> None:
    with patient.connect() as client:
        client.sendall(post(b"{", length=1_000_000_000))
        status, body = first_answer(client)
        assert status == 413 and error_of(body)["code"] == "body_too_large"
        assert patient.serves()


def test_a_body_of_a_gigabyte_that_is_not(patient: Running) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n%s\r\n" % (MEGABYTE, b" " * MEGABYTE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with patient.connect() as client:
        client.sendall(head)
        for number in range(1000):
            client.sendall(chunk)
            if number % 250 == 0:
                assert patient.serves()
        status, body = first_answer(client)
        assert status == 413 and error_of(body)["code"] == "body_too_large"
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    assert grown_mb < 100


def test_a_body_that_stops_in_the_middle(hasty: Running) -> None:
    with hasty.connect() as client:
        client.sendall(post(b'{"messages": [', length=1000))
        status, body = answer_of(client)
        assert status == 408 and error_of(body)["code"] == "body_timeout"


# -- readers, and those that leave ----------------------------------------------------------------


def test_a_reader_that_does_not_read_is_let_go() -> None:
    engine = FakeEngine(reply=lambda _: "x" * 20 * MEGABYTE, chunk=MEGABYTE)
    with running(engine, idle_timeout_s=0.2) as server:
        with server.connect(buffer_bytes=4096) as client:
            client.sendall(chat(stream=True))
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            assert server.settles()
        assert server.serves()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 1000])
def test_a_client_that_vanishes_at_any_stage_of_its_answer(stream: bool, steps: int) -> None:
    with running(FakeEngine(gated=True)) as server:
        for _ in range(20):
            with server.connect() as client:
                client.sendall(chat(stream=stream))
                if steps:
                    server.engine.allow(steps)
                if stream and steps:
                    client.recv(100)
        assert server.settles()
        assert not server.engine.open


@pytest.mark.parametrize(
    "sent", [b"", b"PO", post(b"", length=100), chat()[:-10], chat() + chat()[:50]]
)
def test_a_client_that_vanishes_at_any_stage_of_its_request(patient: Running, sent: bytes) -> None:
    for _ in range(20):
        with patient.connect() as client:
            client.sendall(sent)
    assert patient.settles() and not patient.engine.open


def test_a_connection_that_is_reset(patient: Running) -> None:
    for _ in range(20):
        with patient.connect() as client:
            client.sendall(chat(stream=True))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    assert patient.settles()


def test_thousands_of_streams_that_are_opened_and_dropped_leave_nothing() -> None:
    with running(FakeEngine(gated=True)) as server:
        server.engine.allow(100_000)
        for _ in range(20):
            clients = [server.connect() for _ in range(100)]
            for client in clients:
                client.sendall(chat(stream=True))
            for client in clients:
                client.close()
        assert server.settles()
        assert not server.engine.open and not server.worker._deadlines
        meter: Any = server.worker.observer
        assert not meter._open and not meter._waiting


# -- addresses ------------------------------------------------------------------------------------


def test_a_unix_socket_and_what_is_left_of_it(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with running(uds=path, root_path="/llm") as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            answer = client.get("http://any.example/v1/models")
            assert answer.status_code == 200
            schema = client.get("http://any.example/openapi.json").json()
            assert schema["servers"] == [{"url": "/llm"}]
        with pytest.raises(ConfigError, match="in use") as error:
            serve(FakeEngine(), ServerConfig(uds=path))
        assert error.value.param == "uds"
    assert not Path(path).exists()
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    with running(uds=path):
        pass
    Path(path).write_text("a file")
    with pytest.raises(ConfigError):
        serve(FakeEngine(), ServerConfig(uds=path))
    assert Path(path).read_text() == "a file"


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    with running(ssl_keyfile=key, ssl_certfile=certificate) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate)
        assert httpx.get(server.url + "/health", verify=context).status_code == 200
        with server.connect() as plain:
            plain.sendall(GET)
            assert b"200" not in answer_of(plain)[1]
    with pytest.raises(ConfigError, match="TLS") as error:
        serve(FakeEngine(), ServerConfig(port=0, ssl_keyfile=certificate, ssl_certfile=key))
    assert error.value.param == "ssl_certfile"


def test_strangers_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for config in (
        ServerConfig(),
        ServerConfig(host="::1"),
        ServerConfig(host="0.0.0.0", uds="/x"),
    ):
        sockets.warn_of_strangers(config, has_keys=False)
    sockets.warn_of_strangers(ServerConfig(host="0.0.0.0"), has_keys=True)
    assert not caplog.records
    sockets.warn_of_strangers(ServerConfig(host="0.0.0.0"), has_keys=False)
    assert "without a key" in caplog.text

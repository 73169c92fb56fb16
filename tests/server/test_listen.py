"""The server as a process of its own, on a real socket, with the client that most people use."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from leyline.errors import ConfigError
from leyline.server import ServerConfig, serve

from .fake_engine import FakeEngine

HERE = Path(__file__).parent
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine
from leyline.server import ServerConfig, serve
options = {"port": 0, "access_log": False, **json.loads(sys.argv[3])}
engine = FakeEngine(gated=sys.argv[2] == "gated", max_model_len=100_000)
serve(engine, ServerConfig(**options))
print("stopped", flush=True)
"""


@contextmanager
def served(kind: str = "free", **options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and URL; it must end by itself if it was told to."""
    command = [sys.executable, "-c", SCRIPT, str(HERE), kind, json.dumps(options)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Leyline is ready: http://127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, content: str = "x") -> openai.Stream[ChatCompletionChunk]:
    return client.chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": content}], stream=True
    )


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with served() as (_, url), client_of(url) as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": "héé 👋"}], temperature=0
    )
    assert answer.choices[0].message.content == "you said: user: héé 👋\n"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "a\u2028b\u0085c"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "you said: user: a\u2028b\u0085c\n"
    assert chunks[-1].usage is not None and chunks[-1].choices == []


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt=["a", "b"])
    assert [choice.text for choice in answer.choices] == ["you said: a", "you said: b"]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").owned_by == "leyline"


def test_directives_through_the_clients_own_door(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "user", "content": "remember"}],
        extra_body={"session_id": "s1"},
    )
    body = {"session_id": "s1", "directives": [{"start": 0, "end": 4, "replacement": "me"}]}
    result = client.post("/directives", body=body, cast_to=dict[str, object])
    assert result["context_length"] == {"before": 40, "after": 38}
    shown = client.get("/sessions/s1?tokens=true", cast_to=dict[str, object])
    assert str(shown["text"]).startswith("me: remember")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.completions.create(model="fake-model", prompt="x", temperature=-1)
    assert invalid.value.param == "temperature"


def test_a_stream_given_up_in_the_middle_frees_its_request() -> None:
    with served("gated") as (_, url), client_of(url) as client:
        body = {"session_id": "s1"}
        messages = [{"role": "user", "content": "x"}]
        stream = client.chat.completions.create(
            model="fake-model",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            extra_body=body,
        )
        next(stream)
        assert client.get("/sessions/s1", cast_to=dict[str, object])["busy"]
        stream.close()
        # Each look is a whole exchange with the server, so this ends as soon as it has noticed.
        while client.get("/sessions/s1", cast_to=dict[str, object])["busy"]:
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_and_then_the_process(number: signal.Signals) -> None:
    with served("gated", shutdown_timeout_s=0) as (process, url), client_of(url) as client:
        stream = streamed(client)
        next(stream)
        process.send_signal(number)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        output, errors = process.communicate()
        assert (process.returncode, output, errors) == (0, "stopped\n", "")


def test_a_signal_lets_running_requests_end() -> None:
    with served() as (process, url), client_of(url) as client:
        stream = streamed(client, "long " * 5000)
        text = next(stream).choices[0].delta.content or ""
        process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "you said: user: " + "long " * 5000 + "\n"
        assert process.wait() == 0


def test_a_draining_server_refuses_what_is_new_and_a_second_signal_forces_the_end() -> None:
    with served("gated") as (process, url), client_of(url) as client:
        stream = streamed(client)
        next(stream)
        assert httpx.get(url + "/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        while (health := httpx.get(url + "/health")).status_code == 200:
            pass  # each look is an exchange with the server
        assert health.status_code == 503 and health.json()["error"]["code"] == "draining"
        assert httpx.get(url + "/live").status_code == 200
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="fake-model", prompt="x")
        assert refused.value.status_code == 503 and refused.value.code == "draining"
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert refused.value.response.headers["connection"] == "close"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.wait() == 0


def test_a_header_that_is_too_large_is_refused() -> None:
    with served() as (_, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000)
            assert connection.recv(1000).startswith(b"HTTP/1.1 4")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}") as error:
            serve(FakeEngine(), ServerConfig(port=port))
    assert error.value.param == "port" and error.value.message.count(str(port)) == 1


@pytest.mark.parametrize("host", ["a" * 70, "192.0.2.1"])
def test_an_address_that_is_not_ours_is_a_clear_error(host: str) -> None:
    with pytest.raises(ConfigError):
        serve(FakeEngine(), ServerConfig(host=host, port=1))


@pytest.mark.parametrize(
    "fields",
    [
        {"port": -1},
        {"port": 65536},
        {"port": "1"},
        {"port": True},
        {"host": ""},
        {"max_body_bytes": 0},
        {"max_connections": 0},
        {"max_queued_requests": -1},
        {"body_timeout_s": 0},
        {"idle_timeout_s": float("inf")},
        {"request_timeout_s": -1},
        {"shutdown_timeout_s": float("nan")},
        {"sse_keep_alive_interval_s": "15"},
        {"metrics": 1},
        {"api_key": "sk-1"},
        {"api_key": ("sk-1", 2)},
        {"allowed_hosts": ["a"]},
        {"allowed_origins": (" ",)},
        {"log_level": "loud"},
        {"root_path": "llm"},
        {"root_path": "/llm/"},
        {"root_path": "/a b"},
        {"ssl_certfile": "cert.pem"},
        {"ssl_certfile": ""},
        {"api_key_file": ""},
        {"served_model_name": 3},
    ],
)
def test_options_out_of_range(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**fields)  # type: ignore[arg-type]
    assert error.value.param in {*fields, "ssl_keyfile"}
    assert "sk-1" not in error.value.message


def test_options_that_are_let_through() -> None:
    ServerConfig(
        request_timeout_s=0,
        shutdown_timeout_s=0,
        sse_keep_alive_interval_s=0,
        max_queued_requests=0,
        root_path="/a/b",
        idle_timeout_s=1,
    )

"""The server answers while the model loads, and ends cleanly if that fails or is broken off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyline.errors import ModelError
from leyline.server import ServerConfig, Worker, create_app
from leyline.server.front import Front
from leyline.server.listen import serve_loading

from .client import Client, chat_body
from .fake_engine import FakeEngine

HERE = Path(__file__).parent
SCRIPT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from contextlib import contextmanager
from fake_engine import FakeEngine
from leyline.server import ServerConfig
from leyline.server.listen import serve_loading

@contextmanager
def load():
    print("loading", flush=True)
    if not sys.stdin.readline():
        raise RuntimeError("no line")
    yield FakeEngine()
    print("closed", flush=True)

try:
    serve_loading(load, ServerConfig(uds=sys.argv[2], access_log=False))
except KeyboardInterrupt:
    print("broken off", flush=True)
"""


@contextmanager
def loading(socket_path: Path) -> Iterator[tuple[Any, httpx.Client]]:
    """A server whose model has loaded once it is sent a line, and a client of it."""
    command = [sys.executable, "-c", SCRIPT, str(HERE), str(socket_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    transport = httpx.HTTPTransport(uds=str(socket_path))
    with (
        subprocess.Popen(command, text=True, cwd=HERE.parents[1], **pipes) as process,  # type: ignore[call-overload]
        httpx.Client(transport=transport, base_url="http://localhost") as client,
    ):
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            yield process, client
        finally:
            process.kill()


def test_a_server_answers_from_the_start(tmp_path: Path) -> None:
    with loading(tmp_path / "s") as (process, client):
        for path in ("/health", "/v1/models", "/docs", "/nowhere", "//live"):
            answer = client.get(path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            assert int(answer.headers["retry-after"]) > 0
        assert client.post("/v1/chat/completions", json=chat_body()).status_code == 503
        assert client.get("/live").json() == {"status": "loading"}
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("Leyline is ready: unix:")
        assert client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
        assert (process.returncode, output, errors) == (0, "closed\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_breaks_loading_off(tmp_path: Path, number: signal.Signals) -> None:
    with loading(tmp_path / "s") as (process, client):
        assert client.get("/live").status_code == 200
        process.send_signal(number)
        output, errors = process.communicate()
        assert (process.returncode, output, errors) == (0, "broken off\n", "")
        assert not (tmp_path / "s").exists()


def test_a_model_that_does_not_load_ends_the_server(tmp_path: Path) -> None:
    def load() -> FakeEngine:
        raise ModelError("There is no model.")

    with pytest.raises(ModelError, match="no model"):
        serve_loading(load, ServerConfig(uds=str(tmp_path / "s")))  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_a_key_that_is_none_is_told_before_anything_loads(tmp_path: Path) -> None:
    from leyline.errors import ConfigError

    config = ServerConfig(uds=str(tmp_path / "s"), api_key_file=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        serve_loading(lambda: pytest.fail("it loads"), config)


@pytest.mark.anyio
async def test_the_front_passes_on_what_comes_later() -> None:
    front, worker = Front(), Worker(FakeEngine())
    client = Client(front, worker, FakeEngine())  # type: ignore[arg-type]
    assert (await client.get("/version")).error["code"] == "loading"
    front.app = create_app(worker)
    assert json.loads((await client.get("/version")).body)["name"] == "leyline"


def test_the_command_serves_a_model_to_those_with_a_key(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("alice sk-alice\n")
    flags = ["--port", "0", "--no-progress", "--kv-cache-tokens", "300"]
    command = [sys.executable, "-m", "leyline", "serve", str(tiny_folder("v3")), *flags]
    environment = {**os.environ, "LEYLINE_API_KEY_FILE": str(tmp_path / "keys")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("Leyline is ready at "):
                assert process.poll() is None
            url, body = line.split()[-1], chat_body("the secret", max_tokens=2)
            headers = {"x-api-key": "sk-alice", "x-request-id": "mine"}
            assert httpx.get(url + "/v1/models").status_code == 401
            answer = httpx.post(url + "/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate()
            assert process.returncode == 0
        finally:
            process.kill()
    told = [line for line in errors.splitlines() if "request_id=mine" in line]
    assert len(told) == 1 and "completion_tokens=2" in told[0]
    assert "secret" not in errors and "sk-alice" not in errors and "Traceback" not in errors

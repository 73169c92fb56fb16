"""What a server must never do, read off its source, and what its schema promises."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import leyline
from leyline.server import ServerConfig

from .conftest import Connect

PACKAGE = Path(leyline.__file__).parent
# Whatever runs code that came as data.
CODE_FROM_DATA = {"eval", "exec", "compile", "__import__"}
UNPICKLED = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Only the hub's own library fetches anything, and only what the operator names.
CLIENTS = {"requests", "httpx", "urllib3", "aiohttp", "http.client", "urllib.request", "ftplib"}
IPC = {"zmq", "multiprocessing", "xmlrpc", "socketserver", "torch.distributed"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree: ast.AST) -> Iterator[str]:
    """Names of functions that are called: `f` and `module.f`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}"


def is_of(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def offences(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [name for name in imported(tree) if is_of(name, UNPICKLED | CLIENTS | IPC)]
    return found + [name for name in called(tree) if name in CODE_FROM_DATA | {"torch.load"}]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_data_is_run_as_code_and_nothing_is_fetched_for_a_request(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "import requests",
        "from urllib.request import urlopen",
        "import zmq",
        "from multiprocessing import connection",
    ],
)
def test_an_offence_is_caught(source: str) -> None:
    assert len(offences(source)) == 1


@pytest.mark.anyio
async def test_every_route_tells_of_its_errors(connect: Connect) -> None:
    schema = (await connect().get("/openapi.json")).json
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert {"4XX", "5XX"} <= operation["responses"].keys(), (method, path)
            assert "422" not in operation["responses"], (method, path)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..%2f..", "a\nINFO fake"])
async def test_a_model_is_a_name_and_no_path(connect: Connect, name: str) -> None:
    client = connect(config=ServerConfig(served_model_name="mine"))
    for answer in (await client.chat(model=name), await client.get(f"/v1/models/{name}")):
        assert answer.status == 404 and "root:" not in answer.body.decode()


PARTS = [
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/secret"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "input_image", "image_url": "file:///etc/passwd"},
    {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/secret"}},
]


@pytest.mark.anyio
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["type"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_parts_that_point_elsewhere_are_refused_on_every_api(
    connect: Connect, path: str, part: dict[str, object]
) -> None:
    client = connect()
    turn = {"role": "user", "content": [part]}
    key = "input" if path.endswith("responses") else "messages"
    answer = await client.post(path, {key: [turn], "max_tokens": 5, "max_output_tokens": 5})
    assert answer.status == 400 and client.engine.seen == []

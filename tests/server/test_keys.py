"""API keys and tenants: who is let in where, and what a key keeps apart."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route

from leyline.errors import ConfigError
from leyline.server import ServerConfig, tenants
from leyline.server.keys import Keyring

from .client import Client, chat_body
from .conftest import Connect

KEY = "sk-secret-1"
OTHER = "sk-secret-2"
BEARER = {"authorization": f"Bearer {KEY}"}
OPEN = {"/health", "/live"}


def keyring(tmp_path: Path, text: str, **options: Any) -> Keyring:
    file = tmp_path / "keys"
    file.write_text(text)
    return Keyring.of(ServerConfig(api_key_file=str(file), **options))


def tenant(ring: Keyring, **headers: str) -> str | None:
    return ring.tenant_of(
        Headers({name.replace("_", "-"): value for name, value in headers.items()})
    )


# -- the keyring ----------------------------------------------------------------------------------


def test_a_key_is_a_tenant_of_its_own() -> None:
    ring = Keyring.of(ServerConfig(api_key=(KEY, OTHER)))
    one, two = tenant(ring, authorization=f"Bearer {KEY}"), tenant(ring, x_api_key=OTHER)
    assert one and two and one != two and ring.num_tenants == 2
    assert KEY not in one and hashlib.sha256(KEY.encode()).hexdigest() in one


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY} {KEY}"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"x_api_key": ""},
        {"x_api_key": "\xe9"},
    ],
)
def test_whatever_is_not_the_key_is_a_strangers(headers: dict[str, str]) -> None:
    assert tenant(Keyring.of(ServerConfig(api_key=(KEY,))), **headers) is None


def test_either_header_will_do_and_so_will_one_that_is_right() -> None:
    ring = Keyring.of(ServerConfig(api_key=(KEY,)))
    right = tenant(ring, x_api_key=KEY)
    assert right is not None
    assert tenant(ring, authorization=f"bearer  {KEY}") == right
    assert tenant(ring, authorization="Bearer other", x_api_key=KEY) == right
    assert tenant(ring, authorization=f"Bearer {KEY}", x_api_key="other") == right


def test_every_key_is_compared_in_constant_time_even_after_one_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def watched(given: bytes, known: bytes) -> bool:
        assert given == hashlib.sha256(KEY.encode()).digest() and len(known) == len(given)
        compared.append(known)
        return real(given, known)

    ring = Keyring.of(ServerConfig(api_key=(KEY, OTHER, "third")))
    monkeypatch.setattr(hmac, "compare_digest", watched)
    assert tenant(ring, x_api_key=KEY)
    assert compared == [hashlib.sha256(key.encode()).digest() for key in (KEY, OTHER, "third")]


def test_a_file_of_keys_names_tenants_who_may_have_several(tmp_path: Path) -> None:
    text = f"# who\n\nalice {KEY}\n  alice   {OTHER}  \r\nbob third\nfourth\n"
    ring = keyring(tmp_path, text)
    assert [tenant(ring, x_api_key=key) for key in (KEY, OTHER, "third")] == [
        "alice",
        "alice",
        "bob",
    ]
    unnamed = tenant(ring, x_api_key="fourth")
    assert unnamed is not None and unnamed.startswith("sha256:") and ring.num_tenants == 3
    assert tenant(ring, x_api_key="alice") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only this\n",
        "a b c",
        "al:ice sekret",
        "kéy",
        "alice kéy",
        "x" * 513,
        f"{'a' * 65} xyz",
    ],
)
def test_a_file_that_is_none_of_keys_is_refused_and_never_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        keyring(tmp_path, text)
    assert error.value.param == "api_key_file"
    assert all(word not in error.value.message for word in text.split() if len(word) > 2)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("nowhere", "bytes", "."):
        with pytest.raises(ConfigError, match="keys"):
            Keyring.of(ServerConfig(api_key_file=str(tmp_path / name)))


def test_one_key_is_not_two_tenants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="alice and bob") as error:
        keyring(tmp_path, f"alice {KEY}\nbob {KEY}\n")
    assert KEY not in error.value.message
    with pytest.raises(ConfigError):
        keyring(tmp_path, f"alice {KEY}\n", api_key=(KEY,))
    assert keyring(tmp_path, f"alice {KEY}\nalice {KEY}\n").num_tenants == 1


@pytest.mark.parametrize("key", ["", " ", "a b", "kéy", "a\n", "x" * 513])
def test_a_malformed_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Keyring.of(ServerConfig(api_key=(key,)))
    assert error.value.param == "api_key"


def test_keys_are_in_no_repr() -> None:
    config = ServerConfig(api_key=(KEY,))
    ring = Keyring.of(config)
    assert KEY not in repr(config) and "digest=" not in repr(vars(ring))


# -- salts ----------------------------------------------------------------------------------------


def salt(name: str | None, cache_salt: str | None) -> str:
    scope: dict[str, Any] = {"type": "http"}
    if name is not None:
        tenants.enter(scope, Keyring(), name)
    return tenants.salt_of(Request(scope), cache_salt)


TEXTS = st.text(st.sampled_from("ab:0123tenant"), max_size=12)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_no_two_tenants_share_a_salt(one: str, first: str, two: str, second: str) -> None:
    same = salt(one, first) == salt(two, second)
    assert same == ((one, first) == (two, second))


@given(TEXTS)
def test_without_keys_a_salt_is_the_clients_own(cache_salt: str) -> None:
    assert salt(None, cache_salt) == cache_salt
    assert salt(None, None) == "" != salt("a", None)


# -- the walk over all routes ---------------------------------------------------------------------


def spellings(path: str) -> Iterator[str]:
    """Ways in which somebody may hope that a path slips past a check."""
    yield path
    yield "/" + path
    yield path + "/"
    yield path.upper()
    yield path.replace("/v1", "/V1")
    yield "/." + path
    yield path + "/."
    yield "/x/.." + path
    yield path.replace("/", "//")
    yield path + "%2f"
    yield path.replace("v1", "%76%31")
    yield path + ";x"
    yield path + "?api_key=" + KEY
    yield "/health/.." + path
    yield "/health" + path
    yield path + "/health"
    yield "\\" + path


def walked(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path of an application, its documentation included."""
    found: list[tuple[str, str]] = []

    def visit(routes: list[BaseRoute]) -> None:
        for route in routes:
            if isinstance(route, Route | APIRoute):
                path = re.sub(r"\{[^}]*\}", "s1", route.path)
                found.extend((method, path) for method in route.methods or ())
            inner = getattr(route, "original_router", None)
            visit([] if inner is None else inner.routes)

    visit(app.routes)
    return found


@pytest.mark.anyio
async def test_no_route_is_open_to_strangers_however_it_is_spelt(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=(KEY,)))
    routes = walked(client.app)
    schema = await client.get("/openapi.json", headers=BEARER)
    paths = {path for _, path in routes}
    assert paths >= {re.sub(r"\{.*?\}", "s1", path) for path in schema.json["paths"]}
    assert paths >= {"/docs", "/openapi.json", "/metrics", "/v1/models/s1"}
    for method, path in {*routes, *((m, p) for _, p in routes for m in ("OPTIONS", "PUT"))}:
        for spelt in spellings(path):
            answer = await client.open(method, spelt, chat_body()).finish()
            if spelt.partition("?")[0] in OPEN and method in ("GET", "HEAD"):
                assert answer.status == 200
            else:
                assert answer.status == 401, (method, spelt)
    assert client.engine.seen == []


@pytest.mark.anyio
async def test_with_the_key_the_same_walk_meets_no_401(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=(KEY,)))
    for method, path in walked(client.app):
        answer = await client.open(method, path, chat_body(), headers=BEARER).finish()
        assert answer.status not in (401, 403, 500), (method, path)


@pytest.mark.anyio
async def test_a_stranger_is_told_how_to_come_in_but_no_key(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=(KEY,)))
    answer = await client.chat()
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["type"] == "authentication_error"
    assert answer.error["code"] == "invalid_api_key"
    wrong = await client.get("/v1/models", headers={"x-api-key": "sk-mistyped"})
    assert b"mistyped" not in wrong.body and KEY.encode() not in wrong.body
    assert (await client.post("/v1/chat/completions", chat_body(), headers=BEARER)).status == 200


@pytest.mark.anyio
async def test_metrics_need_a_key_unless_they_are_opened(connect: Connect) -> None:
    shut = connect(config=ServerConfig(api_key=(KEY,)))
    assert (await shut.get("/metrics")).status == 401
    assert (await shut.get("/metrics", headers=BEARER)).status == 200
    opened = connect(config=ServerConfig(api_key=(KEY,), metrics_open=True))
    assert (await opened.get("/metrics")).status == 200
    assert (await opened.open("POST", "/metrics").finish()).status == 401
    assert (await opened.get("/v1/models")).status == 401


@pytest.mark.anyio
async def test_what_is_open_stays_open_below_a_root_path(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=(KEY,), root_path="/llm"))
    inner = client.app

    async def below(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope | {"root_path": "/llm"}, receive, send)

    client.app = below  # type: ignore[assignment]
    for path, status in (("/llm/health", 200), ("/llm/v1/models", 401), ("/llm/llm/health", 401)):
        assert (await client.get(path)).status == status


@pytest.mark.anyio
@pytest.mark.parametrize("headers", [{}, BEARER])
async def test_a_websocket_is_never_let_in(connect: Connect, headers: dict[str, str]) -> None:
    client = connect(config=ServerConfig(api_key=(KEY,)))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": "/v1/models",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await client.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


# -- tenants over HTTP ----------------------------------------------------------------------------


def of(key: str) -> dict[str, str]:
    return {"x-api-key": key}


async def turn(client: Client, key: str, **fields: Any) -> Any:
    body = chat_body("remember", session_id="s1", **fields)
    return await client.post("/v1/chat/completions", body, headers=of(key))


@pytest.mark.anyio
async def test_sessions_are_a_tenants_own(connect: Connect) -> None:
    client = connect(config=ServerConfig(api_key=(KEY, OTHER)))
    assert (await turn(client, KEY)).status == 200
    mine = await client.get("/v1/sessions", headers=of(KEY))
    assert [one["id"] for one in mine.json["data"]] == ["s1"]
    forged = f"tenant:{len(KEY)}:{KEY}:"
    (session,) = client.engine.sessions.values()
    for cache_salt in ("", forged, session.salt):
        query = f"cache_salt={cache_salt}"
        others = await client.get(f"/v1/sessions?{query}", headers=of(OTHER))
        assert others.json["data"] == []
        for path in ("/v1/sessions/s1?tokens=true&", "/v1/cache/find?text=remember&"):
            answer = await client.get(path + query, headers=of(OTHER))
            assert answer.status == 404 or answer.json["found"] is False
        edit = {"session_id": "s1", "directives": [{"start": 1, "end": 2}]}
        for method, path, body in (
            ("DELETE", f"/v1/sessions/s1?{query}", None),
            ("POST", "/v1/sessions/s1/revert", {}),
            ("POST", "/v1/sessions/s1/marks", {"verb": "pin", "start": 0, "end": 1}),
            ("DELETE", f"/v1/sessions/s1/marks/m1?{query}", None),
            ("POST", "/v1/directives", edit),
            ("POST", "/v1/directives", edit | {"dry_run": True}),
        ):
            if body is not None and cache_salt:
                body = body | {"cache_salt": cache_salt}
            answer = await client.open(method, path, body, headers=of(OTHER)).finish()
            assert answer.status == 404, (method, path, answer.body)
    assert (await client.get("/v1/sessions/s1", headers=of(KEY))).status == 200


@pytest.mark.anyio
async def test_nobody_saves_the_sessions_of_all_unless_they_are_all_theirs(
    connect: Connect,
) -> None:
    shared = connect(config=ServerConfig(api_key=(KEY, OTHER)))
    shared.engine.sessions_file = True
    answer = await shared.post("/v1/sessions:save", {}, headers=of(KEY))
    assert answer.status == 403 and answer.error["code"] == "shared_server"
    alone = connect(config=ServerConfig(api_key=(KEY,)))
    alone.engine.sessions_file = True
    assert (await alone.post("/v1/sessions:save", {}, headers=of(KEY))).status == 200

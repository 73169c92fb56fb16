"""Two keys, one server, one real engine: neither meets what the other one cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline.server import ServerConfig

from .client import Client, chat_body, over_engine

pytestmark = pytest.mark.anyio

ALICE, BOB = {"x-api-key": "key-of-alice"}, {"authorization": "Bearer key-of-bob"}
KEYS = ("key-of-alice", "key-of-bob")
WORDS = "in the land of the rain and the wind in the land"


@pytest.fixture
def client(tiny_folder: Callable[[str], Path]) -> Iterator[Client]:
    keyed = ServerConfig(api_key=KEYS)
    with over_engine(tiny_folder("v3"), keyed, kv_cache_tokens=2000) as client:
        yield client


async def cached(client: Client, key: dict[str, str], path: str, **fields: Any) -> int:
    """Tokens of a prompt that did not have to be computed for its sender."""
    body = {"max_tokens": 2, "temperature": 0, "prompt": WORDS, **fields}
    if path.endswith("chat/completions"):
        body |= chat_body(WORDS)
    answer = await client.post(path, body, headers=key)
    assert answer.status == 200, answer.body
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{}, {"cache_salt": "same"}])
async def test_the_same_prompt_is_cached_for_each_key_alone(
    client: Client, path: str, fields: dict[str, Any]
) -> None:
    assert await cached(client, ALICE, path, **fields) == 0
    assert await cached(client, ALICE, path, **fields) > 0
    assert await cached(client, BOB, path, **fields) == 0
    assert await cached(client, BOB, path, **fields) > 0


async def test_a_salt_divides_a_tenants_cache_and_leads_into_no_other(client: Client) -> None:
    path = "/v1/completions"
    assert await cached(client, ALICE, path) == 0
    assert await cached(client, ALICE, path, cache_salt="mine") == 0
    for forged in ("mine", "tenant:71:sha256:", ":mine", ""):
        assert await cached(client, BOB, path, **({"cache_salt": forged} if forged else {})) == 0


async def test_the_same_session_id_is_two_sessions(client: Client) -> None:
    path = "/v1/chat/completions"
    assert await cached(client, ALICE, path, session_id="s") == 0
    assert await cached(client, BOB, path, session_id="s") == 0
    edit = {"session_id": "s", "directives": [{"start": 4, "end": 6, "mode": "amortize"}]}
    assert (await client.post("/v1/directives", edit, headers=ALICE)).status == 200
    versions = [
        (await client.get("/v1/sessions/s", headers=key)).json["version"] for key in (ALICE, BOB)
    ]
    assert versions == [1, 0]


async def test_a_search_finds_only_what_is_the_searchers_own(client: Client) -> None:
    await cached(client, ALICE, "/v1/chat/completions", session_id="s")
    body = {"text": "rain"}
    mine = await client.post("/v1/cache/find", body, headers=ALICE)
    theirs = await client.post("/v1/cache/find", body, headers=BOB)
    assert mine.json["found"] and mine.json["sessions"] == ["s"]
    assert not theirs.json["found"] and theirs.json["sessions"] == []


async def test_a_purge_reaches_only_the_purgers_own(client: Client) -> None:
    for key in (ALICE, BOB):
        await cached(client, key, "/v1/chat/completions", session_id="s")
        await cached(client, key, "/v1/completions")
    span = {"match": "rain", "mode": "forget", "scope": "cache"}
    edit = {"session_id": "s", "directives": [span]}
    answer = await client.post("/v1/directives", edit, headers=ALICE)
    assert answer.status == 200 and answer.json["purged"]["rows"] > 0
    full = await cached(client, BOB, "/v1/completions")
    assert await cached(client, ALICE, "/v1/completions") < full


async def test_a_kept_response_is_its_tenants_own(client: Client) -> None:
    body = {"input": WORDS, "max_output_tokens": 2, "temperature": 0}
    answer = await client.post("/v1/responses", body, headers=ALICE)
    assert answer.status == 200, answer.body
    path = f"/v1/responses/{answer.json['id']}"
    assert (await client.get(path, headers=ALICE)).status == 200
    assert (await client.get(path, headers=BOB)).status == 404
    follow = body | {"previous_response_id": answer.json["id"]}
    assert (await client.post("/v1/responses", follow, headers=BOB)).status == 404

from __future__ import annotations

from typing import Any

import pytest

from .client import Client
from .conftest import Connect
from .fake_engine import FakeEngine, FakeSession

pytestmark = pytest.mark.anyio

FIND = "/v1/cache/find"


def with_secret(connect: Connect) -> Client:
    sessions = {
        "s1": FakeSession("a secret here"),
        "s2": FakeSession("nothing"),
        "ts3": FakeSession("their secret", salt="t"),
    }
    return connect(FakeEngine(sessions=sessions))


FOUND = {"object": "cache.found", "found": True, "rows": 11, "sessions": ["s1"]}
TOKENS = [ord(character) for character in "secret"]


async def test_by_link_and_by_body(connect: Connect) -> None:
    client = with_secret(connect)
    listed = ",".join(map(str, TOKENS))
    for answer in (
        await client.get(f"{FIND}?text=secret"),
        await client.get(f"{FIND}?tokens={listed}"),
        await client.post(FIND, {"text": "secret"}),
        await client.post(FIND, {"tokens": TOKENS}),
        await client.post(FIND, {"text": "secret", "tokens": None, "cache_salt": None}),
    ):
        assert answer.status == 200 and answer.json == FOUND


async def test_only_in_ones_own_tenant(connect: Connect) -> None:
    client = with_secret(connect)
    for answer in (
        await client.get(f"{FIND}?text=secret&cache_salt=t"),
        await client.post(FIND, {"text": "secret", "cache_salt": "t"}),
    ):
        assert answer.json["sessions"] == ["s3"]


async def test_what_is_not_there(connect: Connect) -> None:
    client = with_secret(connect)
    for body in ({"text": "public"}, {"tokens": [2**31 - 1]}):
        answer = await client.post(FIND, body)
        assert answer.json == {"object": "cache.found", "found": False, "rows": 0, "sessions": []}


@pytest.mark.parametrize(
    "query, param",
    [
        ("", "text"),
        ("text=", "text"),
        ("text=a&tokens=1", "text"),
        ("tokens=", "tokens"),
        ("tokens=a", "tokens"),
        ("tokens=1,", "tokens"),
        ("tokens=,1", "tokens"),
        ("tokens=-1", "tokens"),
        ("tokens=1.0", "tokens"),
        ("tokens=1_0", "tokens"),
        ("tokens=%C2%B2", "tokens"),
        ("tokens=2147483648", "tokens"),
        ("tokens=" + "9" * 5000, "tokens"),
        ("tokens=1,%202", "tokens"),
    ],
)
async def test_links_that_say_nothing(connect: Connect, query: str, param: str) -> None:
    answer = await with_secret(connect).get(f"{FIND}?{query}")
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (param, "invalid_value")


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": 1}, "text"),
        ({"text": "\ud83d"}, "text"),
        ({"text": "a", "tokens": [1]}, "text"),
        ({"tokens": []}, "tokens"),
        ({"tokens": "1,2"}, "tokens"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [1, True]}, "tokens[1]"),
        ({"tokens": [2**31]}, "tokens[0]"),
        ({"tokens": [float("nan")]}, "tokens[0]"),
        ({"text": "a", "cache_salt": ""}, "cache_salt"),
        ({"text": "a", "txet": "b"}, "txet"),
    ],
)
async def test_bodies_that_say_nothing(connect: Connect, body: Any, param: str) -> None:
    answer = await with_secret(connect).post(FIND, body)
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (param, "invalid_value")

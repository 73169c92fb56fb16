"""Request bodies, read strictly: a key that stands twice in an object is refused.

JSON leaves open which of the two counts. Two readers that choose differently, such as a proxy
that checks requests and this server, would disagree about what an edit does.

A body of the largest size can have millions of lists in it. Reading and checking them takes many
seconds, in which nobody else is served, so they are counted first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

MAX_CONTAINERS = 100_000
_STRING = re.compile(rb'"[^"]*"')


class RepeatedKeyError(HTTPException):
    """A body says the same key twice; FastAPI lets no other kind of exception out of a parse."""

    def __init__(self, key: str) -> None:
        super().__init__(400, key)


class StrictRoute(APIRoute):
    """A route whose body may not repeat a key."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, given a request that parses strictly."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        _check_containers(body)
        return json.loads(body, object_pairs_hook=_without_repeats)


def _check_containers(body: bytes) -> None:
    """Refuse more lists and objects than any conversation has; brackets in texts are none."""
    if _num_brackets(body) <= MAX_CONTAINERS:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _num_brackets(_STRING.sub(b"", unescaped)) > MAX_CONTAINERS:
        raise HTTPException(
            413,
            f"The body has more than the {MAX_CONTAINERS} lists and objects allowed; send fewer.",
        )


def _num_brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) < len(pairs):
        seen: set[str] = set()
        raise RepeatedKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return known

"""`/v1/cache/find`: whether any row in the cache still depends on a text or on tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from leyline.errors import InvalidRequestError
from leyline.sampling import INT32_MAX
from leyline.server.bodies import StrictRoute
from leyline.server.schema_edits import FindRequest
from leyline.server.serving import Serving
from leyline.server.sessions import QuerySalt
from leyline.server.tenants import salt_of
from leyline.server.wire import Json

_TOKENS = re.compile(r"[0-9]{1,10}(,[0-9]{1,10})*")


def sought(text: str | None, tokens: Sequence[int] | None) -> str | Sequence[int]:
    """What to look for.

    Raises:
        InvalidRequestError: if it is not exactly one of the two.
    """
    if text is not None and tokens is None:
        return text
    if tokens is not None and text is None:
        return tokens
    raise InvalidRequestError("Give either text or tokens.", param="text")


def token_list(written: str) -> list[int]:
    """Token ids from the form that they have in a URL: `1,2,3`.

    Raises:
        InvalidRequestError: if it is another form.
    """
    ids = [int(token) for token in written.split(",")] if _TOKENS.fullmatch(written) else []
    if not ids or max(ids) > INT32_MAX:
        raise InvalidRequestError(
            "tokens must be token ids with commas between them, such as 1,2,3.", param="tokens"
        )
    return ids


def routes(serving: Serving) -> APIRouter:
    """The search, as a link and as a body: texts in links end up in logs."""
    router = APIRouter(route_class=StrictRoute)
    worker, engine = serving.worker, serving.worker.engine

    async def answer(what: str | Sequence[int], salt: str) -> Response:
        found = await worker.call(engine.find_in_cache, what, salt=salt)
        sessions = list(found.sessions)
        return Json(
            {
                "object": "cache.found",
                "found": bool(found.rows or sessions),
                "rows": found.rows,
                "sessions": sessions,
            }
        )

    @router.get("/v1/cache/find")
    async def find_by_link(
        request: Request,
        text: Annotated[str | None, Query(min_length=1)] = None,
        tokens: str | None = None,
        cache_salt: QuerySalt = "",
    ) -> Response:
        """Look for a short text, or a few tokens."""
        what = sought(text, None if tokens is None else token_list(tokens))
        return await answer(what, salt_of(request, cache_salt))

    @router.post("/v1/cache/find")
    async def find_by_body(body: FindRequest, request: Request) -> Response:
        """Look for a text of any length, without its standing in a link."""
        return await answer(sought(body.text, body.tokens), salt_of(request, body.cache_salt))

    return router

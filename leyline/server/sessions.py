"""The routes under `/v1/sessions`: look at sessions, mark spans in them, go back, forget.

Saving is `POST /v1/sessions:save`, without a slash, since whatever stands behind
`/v1/sessions/` may be a session's name.
"""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from leyline.events import Reverted, SessionInfo
from leyline.marks import Mark
from leyline.server.bodies import StrictRoute
from leyline.server.failures import refusal
from leyline.server.fields import MAX_NAME_CHARS
from leyline.server.lengths import check_fits, strings_in
from leyline.server.pointed import mark_request
from leyline.server.schema_edits import MarkBody, RevertRequest, SaveRequest
from leyline.server.serving import Serving
from leyline.server.tenants import is_shared, salt_of
from leyline.server.usage import Body
from leyline.server.wire import Json

_SHARED = (
    "Several tenants share this server, and this would write the sessions of all of them; they are "
    "saved when the server stops."
)
QuerySalt = Annotated[str, Query(max_length=MAX_NAME_CHARS)]


def session_body(info: SessionInfo, *, tokens: bool) -> Body:
    """What a session looks like, with its tokens and their text if asked for."""
    body = listed_body(info) | {
        "pieces": [
            {"start": start, "end": end, "exact": exact} for start, end, exact in info.pieces
        ],
        "versions": [
            {"version": number, "context_length": length, "rows_kept": kept}
            for number, length, kept in info.versions
        ],
        "marks": [mark_body(mark) for mark in info.marks],
        "messages": [
            {
                "role": message.role,
                "tool_call_id": message.tool_call_id,
                "start": message.start,
                "end": message.end,
            }
            for message in info.messages
        ],
    }
    if tokens:
        body |= {"token_ids": list(info.token_ids), "text": info.text}
    return body


def listed_body(info: SessionInfo) -> Body:
    """What a list says of each session."""
    return {
        "object": "session",
        "id": info.session_id,
        "version": info.version,
        "state": info.state,
        "context_length": info.context_length,
        "busy": info.busy,
    }


def mark_body(mark: Mark) -> Body:
    """A mark; what is left of a pin's time is told, since no client knows the engine's clock."""
    left = None if mark.until is None else round(max(0.0, mark.until - time.monotonic()), 3)
    return {
        "object": "session.mark",
        "id": mark.mark_id,
        "verb": mark.verb,
        "of": mark.of,
        "start": mark.start,
        "end": mark.end,
        "seconds_left": left,
        "turns_left": mark.turns_left,
        "replacement": list(mark.replacement),
        "mode": mark.mode,
    }


def reverted_body(reverted: Reverted) -> Body:
    """What going back did, and what the next turn will have to compute."""
    return {
        "object": "session.reverted",
        "session_id": reverted.session_id,
        "version": reverted.version,
        "restored": reverted.restored,
        "context_length": {"before": reverted.length_before, "after": reverted.length_after},
        "kept": reverted.kept,
        "recomputed": reverted.recomputed,
        "state": reverted.state,
    }


def routes(serving: Serving) -> APIRouter:
    """The session routes."""
    router = APIRouter(route_class=StrictRoute)
    _add_looks(router, serving)
    _add_changes(router, serving)
    _add_marks(router, serving)
    return router


def _add_looks(router: APIRouter, serving: Serving) -> None:
    worker, engine = serving.worker, serving.worker.engine

    @router.get("/v1/sessions")
    async def list_sessions(request: Request, cache_salt: QuerySalt = "") -> Response:
        """The resident sessions of one tenant."""
        infos = await worker.call(engine.sessions_info, salt=salt_of(request, cache_salt))
        return Json({"object": "list", "data": [listed_body(info) for info in infos]})

    @router.get("/v1/sessions/{session_id}")
    async def retrieve_session(
        session_id: str, request: Request, tokens: bool = False, cache_salt: QuerySalt = ""
    ) -> Response:
        """The session's context: its length, its pieces and, if asked for, its tokens."""
        salt = salt_of(request, cache_salt)
        info = await worker.call(engine.session_info, session_id, salt=salt)
        return Json(session_body(info, tokens=tokens))


def _add_changes(router: APIRouter, serving: Serving) -> None:
    worker, engine = serving.worker, serving.worker.engine

    @router.delete("/v1/sessions/{session_id}")
    async def delete_session(
        session_id: str, request: Request, cache_salt: QuerySalt = ""
    ) -> Response:
        """Forget the session. Rows that others use stay."""
        salt = salt_of(request, cache_salt)
        await worker.call(engine.delete_session, session_id, salt=salt)
        return Json({"object": "session.deleted", "id": session_id, "deleted": True})

    @router.post("/v1/sessions/{session_id}/revert")
    async def revert_session(session_id: str, body: RevertRequest, request: Request) -> Response:
        """Go back to a kept version: the one named, or the one before."""
        salt = salt_of(request, body.cache_salt)
        reverted = await worker.call(engine.revert, session_id, body.version, salt=salt)
        return Json(reverted_body(reverted))

    @router.post("/v1/sessions:save")
    async def save_sessions(_: SaveRequest, request: Request) -> Response:
        """Write all sessions to the file that the server was started with."""
        if is_shared(request):
            return refusal(403, _SHARED, code="shared_server")
        return Json(
            {"object": "sessions.saved", "sessions": await worker.call(engine.save_sessions)}
        )


def _add_marks(router: APIRouter, serving: Serving) -> None:
    worker, engine = serving.worker, serving.worker.engine

    @router.post("/v1/sessions/{session_id}/marks")
    async def create_mark(session_id: str, body: MarkBody, request: Request) -> Response:
        """Pin a span, let it decay, or have it taken out when the turn ends."""
        asked, salt = mark_request(body), salt_of(request, body.cache_salt)
        await check_fits(serving, strings_in(body.replacement), "replacement")
        mark = await worker.call(engine.mark, session_id, asked, salt=salt)
        return Json(mark_body(mark))

    @router.delete("/v1/sessions/{session_id}/marks/{mark_id}")
    async def delete_mark(
        session_id: str, mark_id: str, request: Request, cache_salt: QuerySalt = ""
    ) -> Response:
        """Take a mark back; nothing happens to its span."""
        await worker.call(engine.unmark, session_id, mark_id, salt=salt_of(request, cache_salt))
        return Json({"object": "session.mark.deleted", "id": mark_id, "deleted": True})

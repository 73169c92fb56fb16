"""`POST /v1/directives`, and `GET` and `DELETE /v1/sessions/{id}`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from leyline.directive import Directive, Mode
from leyline.errors import DirectiveError
from leyline.events import EditResult, Failure, SessionInfo
from leyline.server.failures import quoted
from leyline.server.reply import Body
from leyline.server.schema import DirectiveItem, DirectivesRequest
from leyline.server.serving import Serving
from leyline.server.surface import PlainEncoder
from leyline.server.wire import Json, while_connected
from leyline.server.worker import Submit, Worker


def compiled(items: Sequence[DirectiveItem], tokenizer: PlainEncoder) -> list[Directive]:
    """Directives from their wire form; replacement texts become token ids.

    Raises:
        DirectiveError: for a mode that does not exist.
    """
    return [
        Directive(
            item.start,
            item.end,
            tuple(_ids(item.replacement, tokenizer)),
            _mode(item.mode, f"directives[{index}].mode"),
        )
        for index, item in enumerate(items)
    ]


def result_body(result: EditResult) -> Body:
    """What became of a set of directives."""
    return {
        "object": "directive.result",
        "session_id": result.session_id,
        "version": result.version,
        "context_length": {"before": result.length_before, "after": result.length_after},
        "receipts": [asdict(receipt) for receipt in result.receipts],
        "elapsed_ms": round(result.elapsed_ms, 3),
    }


def session_body(info: SessionInfo, *, tokens: bool) -> Body:
    """What a session looks like, with its tokens and their text if asked for."""
    body: Body = {
        "object": "session",
        "id": info.session_id,
        "version": info.version,
        "context_length": info.context_length,
        "pieces": [
            {"start": start, "end": end, "exact": exact} for start, end, exact in info.pieces
        ],
        "busy": info.busy,
    }
    if tokens:
        body |= {"token_ids": list(info.token_ids), "text": info.text}
    return body


def routes(serving: Serving) -> APIRouter:
    """The routes that look into sessions and edit them."""
    router = APIRouter()
    worker, engine = serving.worker, serving.worker.engine

    @router.post("/v1/directives")
    async def apply_directives(body: DirectivesRequest, request: Request) -> Response:
        """Edit a session's context: all of the directives, or none of them."""
        directives = compiled(body.directives, engine.tokenizer)

        def submit() -> int:
            return engine.submit_directives(body.session_id, directives, salt=body.cache_salt or "")

        result = await while_connected(request.receive, _result(worker, submit))
        return Json(result_body(result))

    @router.get("/v1/sessions/{session_id}")
    async def retrieve_session(
        session_id: str, tokens: bool = False, cache_salt: str = ""
    ) -> Response:
        """The session's context: its length, its pieces and, if asked for, its tokens."""
        info = await worker.call(engine.session_info, session_id, salt=cache_salt)
        return Json(session_body(info, tokens=tokens))

    @router.delete("/v1/sessions/{session_id}")
    async def delete_session(session_id: str, cache_salt: str = "") -> Response:
        """Forget the session. Rows that others use stay."""
        await worker.call(engine.delete_session, session_id, salt=cache_salt)
        return Json({"object": "session.deleted", "id": session_id, "deleted": True})

    return router


def _ids(replacement: str | list[int], tokenizer: PlainEncoder) -> Sequence[int]:
    return tokenizer.encode_plain(replacement) if isinstance(replacement, str) else replacement


def _mode(name: str, param: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        modes = ", ".join(mode.value for mode in Mode)
        raise DirectiveError(
            f"There is no mode {quoted(name)}; the modes are: {modes}.", param=param
        ) from None


async def _result(worker: Worker, submit: Submit) -> EditResult:
    """Submit a set of directives and wait for what becomes of it."""
    async with aclosing(worker.run(submit)) as events:
        async for happened in events:
            if isinstance(happened, Failure):
                raise happened.error
            if isinstance(happened, EditResult):
                return happened
    raise AssertionError("a request ended without a terminal event")

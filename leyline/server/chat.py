"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from leyline.events import Completion
from leyline.server.answer import in_session
from leyline.server.bodies import StrictRoute
from leyline.server.reply import Body, respond
from leyline.server.schema import ChatRequest
from leyline.server.serving import Serving
from leyline.server.session_names import session_name
from leyline.server.wire import while_connected
from leyline.trimming import from_wire


class ChatForm:
    """How a chat answer is spelt."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, completion: Completion) -> Body:
        """A complete message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }

    def opening(self, index: int) -> Body:
        """Who speaks, before anything is said."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def text(self, index: int, text: str) -> Body:
        """A piece of the message."""
        return self._chunk(index, {"content": text})

    def closing(self, index: int, completion: Completion) -> Body:
        """Why it ended."""
        return self._chunk(index, {}, completion.finish_reason)

    def _chunk(self, index: int, delta: Body, finish_reason: str | None = None) -> Body:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def routes(serving: Serving) -> APIRouter:
    """The chat route."""
    router = APIRouter(route_class=StrictRoute)
    engine = serving.worker.engine

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        serving.check_model(body.model)
        from_wire(body.context_management)  # what is malformed is refused before anything runs
        name = session_name(body.session_id, body.prompt_cache_key, request.headers)
        trimming = serving.trimmed(body.rendered(), body.context_management)
        messages, edits = await while_connected(request.receive, trimming)
        params = body.sampling()

        def submit(session_id: str | None) -> int:
            return engine.submit_chat(
                messages,
                params,
                session_id=session_id,
                salt=body.salt,
                edit_mode=body.edit_mode,
                tentative=not name.required,
            )

        return await respond(
            serving,
            request,
            [in_session(name, submit)],
            ChatForm(),
            stream=bool(body.stream),
            include_usage=body.wants_usage,
            ending=_applied(body.context_management, edits),
        )

    return router


def _applied(asked: Any, edits: Sequence[Mapping[str, Any]]) -> Body:
    """What policies did, if there were any to do something."""
    if asked is None and not edits:
        return {}
    return {"context_management": {"applied_edits": list(edits)}}

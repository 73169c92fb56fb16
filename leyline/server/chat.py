"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from leyline.events import Completion
from leyline.server.reply import Body, respond
from leyline.server.schema import ChatRequest
from leyline.server.serving import Serving


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
    router = APIRouter()
    engine = serving.worker.engine

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        serving.check_model(body.model)

        def submit() -> int:
            return engine.submit_chat(
                body.rendered(), body.sampling(), session_id=body.session_id, salt=body.salt
            )

        return await respond(
            serving,
            request,
            [submit],
            ChatForm(),
            stream=bool(body.stream),
            include_usage=body.wants_usage,
        )

    return router

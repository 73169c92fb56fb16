"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from leyline.events import Completion
from leyline.server.bodies import StrictRoute
from leyline.server.reply import Body, respond
from leyline.server.schema import CompletionRequest
from leyline.server.serving import Serving


class CompletionForm:
    """How a completion is spelt: the same choice in every chunk, with text in it."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, index: int, completion: Completion) -> Body:
        """A complete text."""
        return self._choice(index, completion.text, completion.finish_reason)

    def opening(self, index: int) -> None:
        """A completion has no opening."""
        return None

    def text(self, index: int, text: str) -> Body:
        """A piece of the text."""
        return self._choice(index, text)

    def closing(self, index: int, completion: Completion) -> Body:
        """Why it ended."""
        return self._choice(index, "", completion.finish_reason)

    def _choice(self, index: int, text: str, finish_reason: str | None = None) -> Body:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def routes(serving: Serving) -> APIRouter:
    """The completions route."""
    router = APIRouter(route_class=StrictRoute)
    engine = serving.worker.engine

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream."""
        serving.check_model(body.model)
        params = body.sampling()
        submits = [
            partial(engine.submit_prompt, prompt, params, salt=body.salt) for prompt in body.prompt
        ]
        return await respond(
            serving,
            request,
            submits,
            CompletionForm(),
            stream=bool(body.stream),
            include_usage=body.wants_usage,
        )

    return router

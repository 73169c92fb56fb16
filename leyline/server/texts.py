"""`/tokenize`, `/detokenize` and `/v1/chat/completions/render`: texts, tokens and prompts.

The first two stand where vLLM has them, and under `/v1` too. Nothing here runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from leyline.errors import InvalidRequestError
from leyline.server.answer import Prompt, prompt_of
from leyline.server.bodies import StrictRoute
from leyline.server.chat import asked_of
from leyline.server.logprobs import token_name
from leyline.server.schema import ChatRequest
from leyline.server.schema_texts import DetokenizeRequest, TokenizeRequest
from leyline.server.serving import Serving
from leyline.server.usage import Body
from leyline.server.wire import Json, while_connected
from leyline.tokenizer import Tokenizer


def routes(serving: Serving) -> APIRouter:
    """The routes of texts."""
    router = APIRouter(route_class=StrictRoute)
    tokenizer = serving.worker.engine.tokenizer

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Turn a text, or the prompt of a conversation, into token ids."""
        serving.check_model(body.model)
        body.check()
        ids = (await while_connected(request.receive, _tokenized(serving, body))).ids
        names = [token_name(tokenizer, one) for one in ids] if body.return_token_strs else None
        return Json(_counted(serving, ids) | {"tokens": list(ids), "token_strs": names})

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Turn token ids into their text."""
        serving.check_model(body.model)
        _check_ids(tokenizer, body.tokens)
        decoding = serving.beside(tokenizer.decode, body.tokens, skip_special=False)
        return Json({"prompt": await while_connected(request.receive, decoding)})

    @router.post("/v1/chat/completions/render")
    async def render_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Show the prompt that a conversation would be answered from, outside of any session."""
        serving.check_model(body.model)
        asked = asked_of(serving, body, request)
        prompt = await while_connected(request.receive, prompt_of(serving, asked))
        shown = {"prompt": prompt.text, "token_ids": list(prompt.ids)}
        return Json(_counted(serving, prompt.ids) | shown)

    return router


async def _tokenized(serving: Serving, body: TokenizeRequest) -> Prompt:
    if body.prompt is None:
        return await prompt_of(serving, body.asked())
    encode = serving.worker.engine.tokenizer.encode
    bos = body.add_special_tokens is not False
    return Prompt(body.prompt, await serving.beside(encode, body.prompt, bos=bos))


def _counted(serving: Serving, ids: Sequence[int]) -> Body:
    return {"count": len(ids), "max_model_len": serving.worker.engine.max_model_len}


def _check_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    largest = max(ids, default=0)
    if largest >= tokenizer.vocab_size:
        raise InvalidRequestError(
            f"The token id {largest} has no text; ids run from 0 to {tokenizer.vocab_size - 1}.",
            param="tokens",
        )

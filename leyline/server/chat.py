"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request, Response

from leyline.events import Completion, TokenLogprob
from leyline.server.answer import ask, count
from leyline.server.ask import Ask, Call, Over, Reply, Said
from leyline.server.bodies import StrictRoute
from leyline.server.logprobs import chat_logprobs, prompt_logprobs
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, Reasoning
from leyline.server.reply import Manner, respond
from leyline.server.schema import ChatRequest
from leyline.server.serving import Serving
from leyline.server.session_names import session_name
from leyline.server.tenants import salt_of
from leyline.server.usage import Body, managed, session_of
from leyline.server.wire import while_connected
from leyline.tokenizer import Tokenizer


class ChatForm:
    """How a chat answer is spelt.

    Args:
        tokenizer: Knows the tokens' texts.
        body: What was asked for.
    """

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._tells_logprobs = bool(body.logprobs)
        self._tells_ids = bool(body.return_token_ids)

    def whole(self, reply: Reply) -> Body:
        """A complete message."""
        completion = reply.over.completion
        choice = {
            "index": reply.over.index,
            "message": message_of(reply),
            "logprobs": self._logprobs(reply.logprobs),
            "finish_reason": reply.over.reason,
        }
        ids = {"token_ids": list(completion.token_ids)} if self._tells_ids else {}
        return choice | stop_reason(completion) | ids

    def opening(self, index: int) -> Body:
        """Who speaks, before anything is said."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def said(self, said: Said) -> Iterable[Body]:
        """Pieces of the message, a chunk each; tokens are told with the first of them."""
        told: Body = {}
        if self._tells_logprobs and said.logprobs:
            told["logprobs"] = self._logprobs(said.logprobs)
        if self._tells_ids and said.token_ids:
            told["token_ids"] = list(said.token_ids)
        deltas = [_delta(piece) for piece in said.pieces] or ([{}] if told else [])
        for at, delta in enumerate(deltas):
            yield self._chunk(said.index, delta) | (told if at == 0 else {})

    def closing(self, over: Over) -> Iterable[Body]:
        """Why it ended."""
        yield self._chunk(over.index, {}, over.reason) | stop_reason(over.completion)

    def beside(self, completion: Completion) -> Body:
        """The session, and what is told of the prompt."""
        told = session_of([completion])
        if self._tells_ids:
            told["prompt_token_ids"] = list(completion.prompt_token_ids)
        if completion.prompt_logprobs:
            told["prompt_logprobs"] = prompt_logprobs(self._tokenizer, completion.prompt_logprobs)
        return told

    def _logprobs(self, told: Sequence[TokenLogprob]) -> Body | None:
        return chat_logprobs(self._tokenizer, told) if self._tells_logprobs else None

    def _chunk(self, index: int, delta: Body, finish_reason: str | None = None) -> Body:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def message_of(reply: Reply) -> Body:
    """A whole choice as a message; reasoning has both names that clients look for."""
    content = None if reply.calls and not reply.content else reply.content
    message: Body = {"role": "assistant", "content": content}
    if reply.reasoning:
        message |= _thought(reply.reasoning)
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def stop_reason(completion: Completion) -> Body:
    """The stop string or token that ended a choice, if the client had asked for it to."""
    stopped_by = completion.stopped_by
    return {} if stopped_by is None else {"stop_reason": stopped_by}


def routes(serving: Serving) -> APIRouter:
    """The chat route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        serving.check_model(body.model)
        asked = asked_of(serving, body, request)
        form = ChatForm(serving.worker.engine.tokenizer, body)
        running = None
        if body.wants_running_usage:
            running = await while_connected(request.receive, count(serving, asked))
        answer = await ask(serving, request, asked)
        manner = Manner(
            stream=bool(body.stream),
            include_usage=body.wants_usage or serving.config.force_usage,
            running_from=running,
            num_choices=body.num_choices,
            request_id=body.request_id,
            ending=managed(body.context_management, answer.applied_edits),
        )
        return await respond(serving, request, answer, form, manner)

    return router


def asked_of(serving: Serving, body: ChatRequest, request: Request) -> Ask:
    """What a body asks for.

    Raises:
        InvalidRequestError: If its fields exclude each other.
    """
    body.check()
    headers = request.headers if serving.config.session_headers else {}
    return Ask(
        messages=body.rendered(),
        params=body.sampling(),
        salt=salt_of(request, body.cache_salt),
        use=body.use(),
        form=body.form(),
        num_choices=body.num_choices,
        session=session_name(body.session_id, body.prompt_cache_key, headers),
        edit_mode=body.edit_mode,
        context_management=body.context_management,
        variables=body.variables(),
        opens_reply=body.add_generation_prompt is not False,
        continues_reply=bool(body.continue_final_message),
    )


def _delta(piece: Piece) -> Body:
    """A piece as the part of a message that it adds."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return _thought(piece.text)
    if isinstance(piece, CallHead):
        return {"tool_calls": [{"index": piece.index, **_call(_head(piece))}]}
    assert isinstance(piece, CallArguments)
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _head(piece: CallHead) -> Call:
    return Call(piece.call_id, piece.name, "")


def _call(call: Call) -> Body:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _thought(text: str) -> Body:
    return {"reasoning_content": text, "reasoning": text}

"""`POST /v1/responses`, and what is kept of it.

A response is told to go on from by its id, or by sending its items back as input; either way it
is the same conversation, and the same turn of a chat. A conversation that goes on by id has a
session as soon as it does, named like its first response unless the client named one: before, it
might be a single question, and would push somebody else's session out.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from functools import partial

from fastapi import APIRouter, Request, Response

from leyline.errors import LeylineError
from leyline.server import answer as answers
from leyline.server.answer import Answer
from leyline.server.ask import Message, Over
from leyline.server.bodies import StrictRoute
from leyline.server.failures import unforeseen
from leyline.server.logprobs import chat_logprobs
from leyline.server.named_events import named_event
from leyline.server.responses_ask import Past, asked_of, called, messages_of
from leyline.server.responses_form import ResponseForm, heading_of, spelt_usage
from leyline.server.responses_items import Body
from leyline.server.responses_kept import KeptResponses, Owner
from leyline.server.responses_schema import InputItem, ResponsesRequest
from leyline.server.serving import Serving
from leyline.server.session_names import session_name
from leyline.server.sessions import QuerySalt
from leyline.server.tenants import salt_of
from leyline.server.usage import managed, session_of, usage
from leyline.server.wire import EventStream, Json, while_connected

logger = logging.getLogger(__name__)


def routes(serving: Serving) -> APIRouter:
    """The routes of the Responses API."""
    router = APIRouter(route_class=StrictRoute)
    kept = KeptResponses()

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        serving.check_model(body.model)
        owner = _owner(request, body.cache_salt)
        past = _past(kept, owner, body)
        named = session_name(body.session_id, body.prompt_cache_key, request.headers)
        asked = asked_of(body, past, owner.salt, named)
        turn = _Turn(serving, body, past, asked.session.session_id)
        keep = partial(_keep, kept, owner, turn) if body.is_stored else _pass
        answer = await answers.ask(serving, request, asked)
        if body.stream:
            return EventStream(_lines(turn, answer, keep), answer, serving.keep_alive_s)
        with answer:
            return Json(await while_connected(request.receive, _whole(turn, answer, keep)))

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(
        response_id: str, request: Request, cache_salt: QuerySalt = ""
    ) -> Response:
        """A kept response, as it was answered."""
        body = kept.body(_owner(request, cache_salt), response_id)
        return Response(body, media_type=Json.media_type)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(
        response_id: str, request: Request, cache_salt: QuerySalt = ""
    ) -> Response:
        """Let go of a kept response; its session stays."""
        kept.forget(_owner(request, cache_salt), response_id)
        return Json({"id": response_id, "object": "response.deleted", "deleted": True})

    return router


Keep = Callable[[Body], None]
"""Does with a response what is to be done before its client has it."""


class _Turn:
    """One response: what it goes on from, and how it is spelt."""

    def __init__(
        self, serving: Serving, body: ResponsesRequest, past: Past, session_id: str | None
    ) -> None:
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self.session_id = session_id
        self._body = body
        self._past = past
        heading = heading_of(body, self.response_id, int(time.time()), serving.model_name)
        tokenizer = serving.worker.engine.tokenizer
        self.form = ResponseForm(
            heading, called(body.tools), lambda told: chat_logprobs(tokenizer, told)["content"]
        )

    async def events(self, answer: Answer, keep: Keep) -> AsyncIterator[Body]:
        """All events, the last of which carries the whole response."""
        for event in self.form.begun():
            yield event
        async for one in answer:
            if isinstance(one, Over):
                for event in self.form.over(one, self._ending(answer, one)):
                    if "response" in event:
                        keep(event["response"])
                    yield event
            else:
                for event in self.form.said(one):
                    yield event

    def conversation(self, output: Iterable[Body]) -> list[Message]:
        """The conversation up to the end of this response, as if its client sent it back."""
        return [*self._past.messages, *messages_of([*self._body.input, *map(_sent_back, output)])]

    def _ending(self, answer: Answer, over: Over) -> Body:
        """What is known at the end alone."""
        completions = answer.completions
        return {
            "usage": spelt_usage(usage(completions, reasoning_tokens=over.reasoning_tokens)),
            **session_of(completions),
            **managed(self._body.context_management, answer.applied_edits),
        }


def _sent_back(item: Body) -> InputItem:
    """An item of the output as one of an input; what the model wrote is not checked again."""
    text = "".join(part["text"] for part in item.get("content", ()))
    return InputItem.model_construct(**{**item, "content": text})


async def _whole(turn: _Turn, answer: Answer, keep: Keep) -> Body:
    """The response, once it is over."""
    last: Body = {}
    async for event in turn.events(answer, keep):
        last = event
    return last["response"]


async def _lines(turn: _Turn, answer: Answer, keep: Keep) -> AsyncGenerator[bytes, None]:
    """The stream, event by event; whatever goes wrong in it becomes its last."""
    try:
        async for event in turn.events(answer, keep):
            yield named_event(event["type"], event)
    except LeylineError as error:
        yield _failed(turn, error)
    except Exception:
        logger.exception("A stream broke off.")
        yield _failed(turn, unforeseen())


def _failed(turn: _Turn, error: LeylineError) -> bytes:
    event = turn.form.failed(error)
    return named_event(event["type"], event)


def _keep(kept: KeptResponses, owner: Owner, turn: _Turn, response: Body) -> None:
    session_id = turn.session_id or turn.response_id
    kept.keep(owner, response, turn.conversation(response["output"]), session_id)


def _pass(_: Body) -> None:
    """Keep nothing."""


def _past(kept: KeptResponses, owner: Owner, body: ResponsesRequest) -> Past:
    """What a body goes on from, if from anything."""
    previous = body.previous_response_id
    return Past() if previous is None else kept.past(owner, previous)


def _owner(request: Request, cache_salt: str | None) -> Owner:
    return Owner(salt_of(request, None), salt_of(request, cache_salt))

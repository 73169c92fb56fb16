"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic's clients send them.

Their `anthropic-beta` header and the query `?beta=true` change nothing: what they stand for is
told from the body. Their errors get Anthropic's shape on the way out; see `messages_errors`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from leyline.errors import LeylineError
from leyline.sampling import SamplingParams
from leyline.server import answer as answers
from leyline.server.answer import Answer
from leyline.server.ask import Ask, Over
from leyline.server.bodies import StrictRoute
from leyline.server.failures import error_body, unforeseen
from leyline.server.messages_errors import ERRORS, PATH, anthropic_error
from leyline.server.messages_form import Events, Heading, opening
from leyline.server.messages_history import begun, converted
from leyline.server.messages_schema import CountTokensRequest, MessagesRequest
from leyline.server.named_events import named_event
from leyline.server.parsers.pieces import Piece
from leyline.server.serving import Serving
from leyline.server.session_names import session_name
from leyline.server.tenants import salt_of
from leyline.server.usage import managed
from leyline.server.wire import EventStream, Json, while_connected

logger = logging.getLogger(__name__)

PING = named_event("ping", {"type": "ping"})


class MessagesRoute(StrictRoute):
    """A route whose errors can be given another shape on their way out.

    What nobody foresaw is answered here and not outside of the application, where no shape
    reaches.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The strict handler, with errors that are all known ones."""
        handler = super().get_route_handler()

        async def known(request: Request) -> Response:
            try:
                return await handler(request)
            except (LeylineError, HTTPException, RequestValidationError):
                raise
            except Exception:
                logger.exception("A request broke off.")
                raise unforeseen() from None

        return known


def routes(serving: Serving) -> APIRouter:
    """The routes of the Messages API."""
    router = APIRouter(route_class=MessagesRoute)

    @router.post(PATH, responses=ERRORS)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        serving.check_model(body.model)
        asked = replace(
            _asked(body, body.sampling()),
            salt=salt_of(request, body.cache_salt),
            session=session_name(body.session_id, None, request.headers),
            edit_mode=body.edit_mode,
        )
        answer = await answers.ask(serving, request, asked)
        told = managed(body.context_management, answer.applied_edits)
        heading = Heading(f"msg_{uuid.uuid4().hex}", serving.model_name, body.max_tokens, told)
        if body.stream:
            return EventStream(_events(answer, heading), answer, serving.keep_alive_s)
        with answer:
            pieces, over = await while_connected(request.receive, _said(answer))
        return Json(heading.whole(pieces, over))

    @router.post(PATH + "/count_tokens", responses=ERRORS)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation's prompt, and before it is shortened, if it is."""
        serving.check_model(body.model)
        asked = _asked(body, SamplingParams())
        counted = await while_connected(request.receive, answers.count(serving, asked))
        counts: dict[str, Any] = {"input_tokens": counted}
        if body.context_management is not None:
            untouched = replace(asked, context_management={"edits": []})
            before = await while_connected(request.receive, answers.count(serving, untouched))
            counts["context_management"] = {"original_input_tokens": before}
        return Json(counts)

    return router


def _asked(body: CountTokensRequest, params: SamplingParams) -> Ask:
    """What a body asks for, apart from whose it is.

    Raises:
        LeylineError: If the conversation ends with something that cannot be gone on with.
    """
    messages, continues = begun(body.messages)
    return Ask(
        messages=[*converted(body.system, messages)],
        params=params,
        use=body.use(),
        form=body.form(),
        context_management=body.context_management,
        variables=body.variables(),
        opens_reply=not continues,
        continues_reply=continues,
    )


async def _said(answer: Answer) -> tuple[Sequence[Piece], Over]:
    """All that was said, in its order, and how it ended."""
    pieces: list[Piece] = []
    over: Over | None = None
    async for one in answer:
        if isinstance(one, Over):
            over = one
        else:
            pieces += one.pieces
    assert over is not None, "an answer ends or fails"
    return pieces, over


async def _events(answer: Answer, heading: Heading) -> AsyncGenerator[bytes, None]:
    """The stream, event by event; whatever goes wrong in it becomes its last."""
    yield named_event(*opening(heading))
    yield PING
    try:
        events = Events()
        async for one in answer:
            if isinstance(one, Over):
                for event in events.ended():
                    yield named_event(*event)
                yield named_event("message_delta", heading.closing(one))
                yield named_event("message_stop", {"type": "message_stop"})
            else:
                for event in events.said(one.pieces):
                    yield named_event(*event)
    except LeylineError as error:
        yield _failed(error)
    except Exception:
        logger.exception("A stream broke off.")
        yield _failed(unforeseen())


def _failed(error: LeylineError) -> bytes:
    return named_event("error", anthropic_error(error.status, error_body(error)["error"]))

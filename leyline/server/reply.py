"""From engine events to an answer, whole or streamed: one path for chat and completions.

A stream follows conventions.md section 3: for every choice an opening chunk where the form has
one, then its text, then exactly one chunk with a finish reason; then, if asked for, one chunk
with usage and no choices; then `[DONE]`. An error after the start is a line of its own before it.
What concerns the answer as a whole, its `ending`, stands in the last chunk before `[DONE]`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fastapi import Request, Response

from leyline.errors import LeylineError
from leyline.events import Completion, Delta, EngineEvent, Failure
from leyline.server.failures import error_body, unforeseen
from leyline.server.serving import Serving, new_id
from leyline.server.wire import DONE, EventStream, Json, event, while_connected
from leyline.server.worker import Submit, Subscription

logger = logging.getLogger(__name__)

Body = dict[str, Any]


class Form(Protocol):
    """How one endpoint spells its answers; `index` is the choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, completion: Completion) -> Body:
        """The choice of an answer that is not streamed."""
        ...

    def opening(self, index: int) -> Body | None:
        """The first chunk's choice, if the form has one."""
        ...

    def text(self, index: int, text: str) -> Body:
        """A chunk's choice that carries text."""
        ...

    def closing(self, index: int, completion: Completion) -> Body:
        """The last chunk's choice, the one with the finish reason."""
        ...


@dataclass(frozen=True, slots=True)
class Heading:
    """What all chunks of an answer have in common."""

    answer_id: str
    created: int
    model: str

    def over(self, kind: str, choices: Sequence[Body], **more: Any) -> Body:
        """A JSON object under this heading."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


async def respond(
    serving: Serving,
    request: Request,
    submits: Sequence[Submit],
    form: Form,
    *,
    stream: bool,
    include_usage: bool,
    ending: Mapping[str, Any] | None = None,
) -> Response:
    """Submit one request a choice and answer with what becomes of them.

    Args:
        serving: The server.
        request: Whom to answer.
        submits: What to submit.
        form: How the endpoint spells it.
        stream: Whether the answer comes in chunks.
        include_usage: Whether a stream ends in a chunk with usage.
        ending: More entries for the answer, or for the last chunk of a stream.

    Raises:
        LeylineError: if a request is refused, or fails before a stream has begun.
    """
    heading = Heading(new_id(form.id_prefix), int(time.time()), serving.model_name)
    ending = dict(ending or {})
    subscription = await serving.worker.submit(submits)
    if stream:
        chunks = _chunks(subscription, heading, form, include_usage, ending)
        return EventStream(_lines(chunks), subscription)
    with subscription:
        completions = await while_connected(request.receive, _collect(subscription))
    return Json(_whole(heading, form, completions) | ending)


def usage(completions: Iterable[Completion]) -> Body:
    """The usage of an answer: the one builder for all endpoints.

    `prompt_tokens` is the length of the context; `cached_tokens` of them were not computed,
    `spliced_tokens` of those were computed in an earlier context, and `recomputed_tokens` are the
    rest. `first_difference` stands there only if the client edited its history, `degraded` only
    if a spliced part was lost and computed anew, and `state` only for a session.
    """
    completions = list(completions)
    parts = [completion.usage for completion in completions]
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    details = {
        "cached_tokens": sum(part.cached_tokens for part in parts),
        "spliced_tokens": sum(part.spliced_tokens for part in parts),
        "recomputed_tokens": sum(part.recomputed_tokens for part in parts),
    }
    body: Body = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    if any(part.degraded for part in parts):
        body["degraded"] = True
    for one in completions:  # a session's answer is the only one of its request
        if one.usage.first_difference is not None:
            details["first_difference"] = one.usage.first_difference
        if one.session_id is not None:
            body["state"] = one.usage.state
    return body


def session_of(completions: Iterable[Completion]) -> Body:
    """The `session` entry of an answer that belongs to one; empty for any other.

    It has `receipts` if the client edited its history and rows were carried over.
    """
    for completion in completions:
        if completion.session_id is not None:
            session: Body = {"id": completion.session_id, "version": completion.version}
            if completion.receipts:
                session["receipts"] = [asdict(receipt) for receipt in completion.receipts]
            return {"session": session}
    return {}


def _whole(heading: Heading, form: Form, completions: Sequence[Completion]) -> Body:
    choices = [form.whole(index, completion) for index, completion in enumerate(completions)]
    more = session_of(completions)
    return heading.over(form.whole_object, choices, usage=usage(completions), **more)


async def _collect(subscription: Subscription) -> list[Completion]:
    """Wait for all requests; their completions in the order in which they were submitted."""
    done: dict[int, Completion] = {}
    async for happened in subscription:
        _raise_failure(happened)
        if isinstance(happened, Completion):
            done[happened.request_id] = happened
    return [done[request_id] for request_id in subscription.request_ids]


def _raise_failure(happened: EngineEvent) -> None:
    if isinstance(happened, Failure):
        raise happened.error


async def _lines(chunks: AsyncIterator[Body]) -> AsyncGenerator[bytes, None]:
    """The stream, line by line; whatever goes wrong in it becomes its last line but one."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except LeylineError as error:
        yield event(error_body(error))
    except Exception:
        logger.exception("A stream broke off.")
        yield event(error_body(unforeseen()))
    yield DONE


async def _chunks(
    subscription: Subscription, heading: Heading, form: Form, include_usage: bool, ending: Body
) -> AsyncIterator[Body]:
    index_of = {request_id: index for index, request_id in enumerate(subscription.request_ids)}
    completions: list[Completion] = []
    for index in index_of.values():
        opening = form.opening(index)
        if opening is not None:
            yield heading.over(form.chunk_object, [opening])
    async for happened in subscription:
        _raise_failure(happened)
        if isinstance(happened, Completion):
            completions.append(happened)
        last = ending if subscription.is_over and not include_usage else {}
        for choice, more in _choice(form, index_of[happened.request_id], happened):
            yield heading.over(form.chunk_object, [choice], **more, **last)
    if include_usage:
        yield heading.over(form.chunk_object, [], usage=usage(completions), **ending)


def _choice(form: Form, index: int, happened: EngineEvent) -> Iterable[tuple[Body, Body]]:
    """The choice that an event puts into the stream, if any, and what stands beside it."""
    if isinstance(happened, Delta) and happened.text:
        yield form.text(index, happened.text), {}
    elif isinstance(happened, Completion):
        yield form.closing(index, happened), session_of([happened])

"""From engine events to an answer, whole or streamed: one path for chat and completions.

A stream follows conventions.md section 3: for every choice an opening chunk where the form has
one, then its text, then exactly one chunk with a finish reason; then, if asked for, one chunk
with usage and no choices; then `[DONE]`. An error after the start is a line of its own before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request, Response

from leyline.errors import LeylineError
from leyline.events import Completion, Delta, EngineEvent, Failure, Usage
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
) -> Response:
    """Submit one request a choice and answer with what becomes of them.

    Raises:
        LeylineError: if a request is refused, or fails before a stream has begun.
    """
    heading = Heading(new_id(form.id_prefix), int(time.time()), serving.model_name)
    subscription = await serving.worker.submit(submits)
    if stream:
        return EventStream(_lines(subscription, heading, form, include_usage), subscription)
    with subscription:
        completions = await while_connected(request.receive, _collect(subscription))
    return Json(_whole(heading, form, completions))


def usage(parts: Iterable[Usage]) -> Body:
    """The usage of an answer: the one builder for all endpoints.

    `prompt_tokens` is the length of the context; `cached_tokens` of them were not computed, and
    `spliced_tokens` of those were computed in an earlier context. `degraded` stands there only if
    a spliced part was lost and computed anew.
    """
    parts = list(parts)
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    body: Body = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(part.cached_tokens for part in parts),
            "spliced_tokens": sum(part.spliced_tokens for part in parts),
        },
    }
    if any(part.degraded for part in parts):
        body["degraded"] = True
    return body


def session_of(completions: Iterable[Completion]) -> Body:
    """The `session` entry of an answer that belongs to one; empty for any other."""
    for completion in completions:
        if completion.session_id is not None:
            return {"session": {"id": completion.session_id, "version": completion.version}}
    return {}


def _whole(heading: Heading, form: Form, completions: Sequence[Completion]) -> Body:
    choices = [form.whole(index, completion) for index, completion in enumerate(completions)]
    counts = usage(completion.usage for completion in completions)
    return heading.over(form.whole_object, choices, usage=counts, **session_of(completions))


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


async def _lines(
    subscription: Subscription, heading: Heading, form: Form, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream, line by line; whatever goes wrong in it becomes its last line but one."""
    try:
        async for chunk in _chunks(subscription, heading, form, include_usage):
            yield event(chunk)
    except LeylineError as error:
        yield event(error_body(error))
    except Exception:
        logger.exception("A stream broke off.")
        yield event(error_body(unforeseen()))
    yield DONE


async def _chunks(
    subscription: Subscription, heading: Heading, form: Form, include_usage: bool
) -> AsyncIterator[Body]:
    index_of = {request_id: index for index, request_id in enumerate(subscription.request_ids)}
    counts: list[Usage] = []
    for index in index_of.values():
        opening = form.opening(index)
        if opening is not None:
            yield heading.over(form.chunk_object, [opening])
    async for happened in subscription:
        _raise_failure(happened)
        if isinstance(happened, Completion):
            counts.append(happened.usage)
        for choice, more in _choice(form, index_of[happened.request_id], happened):
            yield heading.over(form.chunk_object, [choice], **more)
    if include_usage:
        yield heading.over(form.chunk_object, [], usage=usage(counts))


def _choice(form: Form, index: int, happened: EngineEvent) -> Iterable[tuple[Body, Body]]:
    """The choice that an event puts into the stream, if any, and what stands beside it."""
    if isinstance(happened, Delta) and happened.text:
        yield form.text(index, happened.text), {}
    elif isinstance(happened, Completion):
        yield form.closing(index, happened), session_of([happened])

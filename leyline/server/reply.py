"""From an `Answer` to what is sent, whole or streamed: one path for chat and completions.

A stream follows conventions.md section 3: for every choice an opening chunk where the form has
one, then what is said, then exactly one chunk with a finish reason; then, if asked for, one chunk
with usage and no choices; then `[DONE]`. An error after the start is a line of its own before it.
What concerns the answer as a whole, its `ending`, stands in the last chunk before `[DONE]`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request, Response

from leyline.errors import LeylineError
from leyline.events import Completion
from leyline.server.answer import Answer, whole
from leyline.server.ask import Over, Reply, Said
from leyline.server.failures import error_body, unforeseen
from leyline.server.serving import Serving, new_id
from leyline.server.usage import Body, usage
from leyline.server.wire import DONE, EventStream, Json, event

logger = logging.getLogger(__name__)


class Form(Protocol):
    """How one endpoint spells its answers; made for one answer, so that it may remember."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, reply: Reply) -> Body:
        """The choice of an answer that is not streamed."""
        ...

    def opening(self, index: int) -> Body | None:
        """The first chunk's choice, if the form has one."""
        ...

    def said(self, said: Said) -> Iterable[Body]:
        """The choices of the chunks that carry what was said, one each."""
        ...

    def closing(self, over: Over) -> Iterable[Body]:
        """Those of the last chunks, the very last of which has the finish reason."""
        ...

    def beside(self, completion: Completion) -> Body:
        """What a choice that is over adds to the answer, or to its last chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Manner:
    """How an answer is wanted.

    Attributes:
        stream: In chunks.
        include_usage: Whether a stream ends in a chunk with usage.
        running_from: The prompt's tokens, if the chunks are to tell the usage so far.
        num_choices: Choices a prompt.
        request_id: What the client calls the answer.
        ending: More entries for the answer, or for the last chunk of a stream.
    """

    stream: bool = False
    include_usage: bool = False
    running_from: int | None = None
    num_choices: int = 1
    request_id: str | None = None
    ending: Mapping[str, Any] = field(default_factory=dict[str, Any])


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
    serving: Serving, request: Request, answer: Answer, form: Form, manner: Manner
) -> Response:
    """Send an answer.

    Raises:
        LeylineError: If it fails before a stream has begun.
    """
    heading = Heading(
        new_id(form.id_prefix, manner.request_id), int(time.time()), serving.model_name
    )
    if manner.stream:
        lines = _lines(_Chunks(answer, heading, form, manner))
        return EventStream(lines, answer, serving.keep_alive_s)
    replies = await whole(request, answer)
    completions = [reply.over.completion for reply in replies]
    more = {name: value for one in completions for name, value in form.beside(one).items()}
    choices = [form.whole(reply) for reply in replies]
    counts = usage_of([reply.over for reply in replies], manner.num_choices)
    return Json(heading.over(form.whole_object, choices, usage=counts, **more, **manner.ending))


def usage_of(overs: Iterable[Over], num_choices: int = 1) -> Body:
    """The usage of choices that are over, in whatever order."""
    ordered = sorted(overs, key=lambda over: over.index)
    return usage(
        [over.completion for over in ordered],
        reasoning_tokens=sum(over.reasoning_tokens for over in ordered),
        num_choices=num_choices,
    )


async def _lines(chunks: _Chunks) -> AsyncGenerator[bytes, None]:
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


class _Chunks:
    """The chunks of a streamed answer, in their order."""

    def __init__(self, answer: Answer, heading: Heading, form: Form, manner: Manner) -> None:
        self._answer = answer
        self._heading = heading
        self._form = form
        self._manner = manner
        self._overs: list[Over] = []
        self._num_tokens = 0

    async def __aiter__(self) -> AsyncIterator[Body]:
        for index in range(self._answer.num_choices):
            opening = self._form.opening(index)
            if opening is not None:
                yield self._chunk(opening, self._so_far())
        async for one in self._answer:
            for chunk in self._said(one) if isinstance(one, Said) else self._over(one):
                yield chunk
        if self._manner.include_usage:
            counts = usage_of(self._overs, self._manner.num_choices)
            more = {"usage": counts, **self._manner.ending}
            yield self._heading.over(self._form.chunk_object, [], **more)

    def _said(self, said: Said) -> Iterator[Body]:
        self._num_tokens += len(said.token_ids)
        for choice in self._form.said(said):
            yield self._chunk(choice, self._so_far())

    def _over(self, over: Over) -> Iterator[Body]:
        self._overs.append(over)
        *others, last = self._form.closing(over)
        for choice in others:
            yield self._chunk(choice, self._so_far())
        is_last = self._answer.is_over and not self._manner.include_usage
        ending = self._manner.ending if is_last else {}
        yield self._chunk(last, {**self._form.beside(over.completion), **ending})

    def _chunk(self, choice: Body, more: Mapping[str, Any]) -> Body:
        return self._heading.over(self._form.chunk_object, [choice], **more)

    def _so_far(self) -> Body:
        """The running usage, if it is wanted; a chunk with a finish reason never has it."""
        prompt = self._manner.running_from
        if prompt is None:
            return {}
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
        }
        return {"usage": counts}

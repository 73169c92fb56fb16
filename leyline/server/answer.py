"""From an `Ask` to its answer: submit it, read its markup, put it together.

The one path of all chat APIs; what differs between them is how they spell an `Ask` and an `Answer`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from leyline.errors import CapacityError, InvalidRequestError, QuotaError, SessionBusyError
from leyline.events import Completion, Delta, EngineEvent, Failure
from leyline.rendering import Rendering, rendered
from leyline.sampling import SamplingParams
from leyline.server.ask import NO_SESSION, Ask, Call, Message, Over, Reply, Said
from leyline.server.constraints import Start
from leyline.server.lengths import check_count, check_fits, strings_in
from leyline.server.parsers.formats import ToolFormat
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Reasoning
from leyline.server.reading import Reading
from leyline.server.serving import Serving
from leyline.server.session_names import SessionName
from leyline.server.wire import while_connected
from leyline.server.worker import Submit, Subscription
from leyline.tokenizer import Tokenizer
from leyline.trimming import from_wire

MAX_CHOICES = 16
TAIL_CHARS = 100
_SEEDS = 2**64


class Answer:
    """An answer under way: iterate it, inside a `with` block; leaving the block cancels the rest.

    Attributes:
        applied_edits: What the server's policies did to the messages, as they report it.
        completions: Those of the choices that are over.
    """

    def __init__(
        self,
        subscription: Subscription,
        readings: Sequence[Reading],
        applied_edits: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.applied_edits = applied_edits
        self.completions: list[Completion] = []
        self._subscription = subscription
        self._readings = dict(zip(subscription.request_ids, readings, strict=True))

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._subscription.__exit__(*exc_info)

    @property
    def num_choices(self) -> int:
        """How many choices it has."""
        return len(self._readings)

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return self._subscription.is_over

    async def __aiter__(self) -> AsyncIterator[Said | Over]:
        async for happened in self._subscription:
            for one in self._read(happened):
                yield one

    def _read(self, happened: EngineEvent) -> list[Said | Over]:
        """What an event says of its choice.

        Raises:
            LeylineError: If the choice failed; the whole answer has then.
        """
        reading = self._readings[happened.request_id]
        if isinstance(happened, Failure):
            raise happened.error
        if isinstance(happened, Delta):
            return [reading.said(happened)]
        assert isinstance(happened, Completion), "a turn has no other events"
        self.completions.append(happened)
        return reading.ended(happened)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is submitted of an ask, once everything that takes time has been done."""

    messages: Sequence[Message]
    applied_edits: Sequence[Mapping[str, Any]]
    rendering: Rendering
    prompt: Sequence[int] | None
    params: Sequence[SamplingParams]
    readings: Sequence[Reading]


async def ask(serving: Serving, request: Request, asked: Ask) -> Answer:
    """Trim, check, compile and submit; the answer has not begun when this returns.

    Raises:
        LeylineError: If anything is refused; nothing runs then.
    """
    _check(asked)
    from_wire(asked.context_management)  # what is malformed is refused before anything runs
    if asked.num_choices > 1:
        asked = replace(asked, session=NO_SESSION)
    prepared = await while_connected(request.receive, _prepared(serving, asked))
    submits = [
        in_session(asked.session, _submit(serving, asked, prepared, params))
        for params in prepared.params
    ]
    subscription = await serving.worker.submit(submits)
    return Answer(subscription, prepared.readings, prepared.applied_edits)


async def whole(request: Request, answer: Answer) -> list[Reply]:
    """Wait for all choices, in their order; cancels them if the client hangs up.

    Raises:
        LeylineError: If one fails.
    """
    with answer:
        return await while_connected(request.receive, _collected(answer))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads: its text, and its token ids [T]."""

    text: str
    ids: Sequence[int]


async def prompt_of(serving: Serving, asked: Ask) -> Prompt:
    """The prompt of an ask outside of any session: after trimming, tools included.

    Raises:
        LeylineError: If the messages do not render.
    """
    rendering = _rendering(asked, serving.chosen.tool)
    messages, _ = await serving.trimmed(asked.messages, asked.context_management, rendering)
    return await serving.beside(_prompt, serving.worker.engine.tokenizer, messages, rendering)


async def count(serving: Serving, asked: Ask) -> int:
    """Tokens of that prompt; it raises the same."""
    return len((await prompt_of(serving, asked)).ids)


def in_session(name: SessionName, submit: Callable[[str | None], int]) -> Submit:
    """Submit in a session, or without one that the request can do without and cannot have now.

    Both happen in one call on the engine's thread, so nobody comes in between.
    """

    def chosen() -> int:
        try:
            return submit(name.session_id)
        except (SessionBusyError, CapacityError, QuotaError):
            if name.required or name.session_id is None:
                raise
        return submit(None)

    return chosen


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several choices: they would all be the same with one seed."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2)


def _check(asked: Ask) -> None:
    """Refuse what cannot be had together."""
    if not 1 <= asked.num_choices <= MAX_CHOICES:
        raise InvalidRequestError(f"n must be an integer from 1 to {MAX_CHOICES}.", param="n")
    if asked.num_choices > 1 and asked.session.required:
        raise InvalidRequestError(
            "A session goes on with one answer, so n must be 1 where session_id is given.",
            param="n",
        )
    if asked.use.choice == "required" and not asked.use.tools:
        raise InvalidRequestError(
            "tool_choice demands a call, but there are no tools.", param="tool_choice"
        )
    if asked.use.name is not None and asked.use.name not in asked.use.names:
        raise InvalidRequestError(
            "tool_choice names a tool that is not among the tools.", param="tool_choice"
        )


def _rendering(asked: Ask, tool: ToolFormat) -> Rendering:
    return Rendering(
        tools=asked.use.tools if tool.native else (),
        variables=asked.variables,
        opens_reply=asked.opens_reply,
        continues_reply=asked.continues_reply,
        told=tool.telling(asked.use),
    )


def _prompt(tokenizer: Tokenizer, messages: Sequence[Message], rendering: Rendering) -> Prompt:
    text = rendered(tokenizer, messages, rendering)
    return Prompt(text, tokenizer.encode(text))


async def _prepared(serving: Serving, asked: Ask) -> _Prepared:
    """Do what takes time: trim, look at the prompt's end, compile."""
    chosen, use = serving.chosen, asked.use
    rendering = _rendering(asked, chosen.tool)
    messages, edits = await serving.trimmed(asked.messages, asked.context_management, rendering)
    prompt, tail = await _looked_at(serving, asked, messages, rendering)
    if asked.continues_reply and chosen.reasoning.is_open_in(_text_of(messages[-1])):
        tail = chosen.reasoning.begin  # however long ago that was
    start = await serving.constraints.of_reply(asked.form, use, tail)
    if start is None and not asked.params.ignore_eos:
        start = await serving.constraints.without_calls(use)
    params = replace(asked.params, shown=(*asked.params.shown, *chosen.markers(use)))
    choices = range(asked.num_choices)
    return _Prepared(
        messages,
        edits,
        rendering,
        prompt,
        [
            _ended(constrained(seeded(params, index), start), chosen.ending(use, tail))
            for index in choices
        ],
        [Reading(index, chosen.parser(use, tail)) for index in choices],
    )


def _text_of(message: Message) -> str:
    return "".join(strings_in(message.get("content")))


async def _looked_at(
    serving: Serving, asked: Ask, messages: Sequence[Message], rendering: Rendering
) -> tuple[Sequence[int] | None, str]:
    """The prompt's tokens, if the messages alone tell them, and the end of its text.

    In a session, edits may have taken much of the history away, so only each text of it must fit
    the model's window; and the engine encodes only what is new.
    """
    tokenizer = serving.worker.engine.tokenizer
    if asked.session.session_id is None:
        prompt = await serving.beside(_prompt, tokenizer, messages, rendering)
        check_count(serving, len(prompt.ids))
        return prompt.ids, prompt.text[-TAIL_CHARS:]
    await check_fits(serving, strings_in(messages), "messages")
    if not serving.chosen.reasoning.begin:
        return None, ""
    return None, await serving.beside(_tail, tokenizer, messages, rendering)


def constrained(params: SamplingParams, start: Start | None) -> SamplingParams:
    """The parameters of one choice, which has a constraint of its own."""
    return params if start is None else replace(params, constraint=start())


def _ended(params: SamplingParams, enough: Callable[[str], bool] | None) -> SamplingParams:
    """The parameters of a choice that may end early; one that has a form ends with that."""
    return params if params.constraint is not None else replace(params, enough=enough)


def _tail(tokenizer: Tokenizer, messages: Sequence[Message], rendering: Rendering) -> str:
    """The end of the prompt: what stands in front of the last question has no part in it.

    So only that is rendered, unless the template wants more.
    """
    asked = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    for first in dict.fromkeys((asked[-1] if asked else 0, 0)):
        with suppress(InvalidRequestError):
            return rendered(tokenizer, messages[first:], rendering)[-TAIL_CHARS:]
    return ""  # the engine says what is wrong


def _submit(
    serving: Serving, asked: Ask, prepared: _Prepared, params: SamplingParams
) -> Callable[[str | None], int]:
    engine = serving.worker.engine

    def submit(session_id: str | None) -> int:
        return engine.submit_chat(
            prepared.messages,
            params,
            session_id=session_id,
            salt=asked.salt,
            edit_mode=asked.edit_mode,
            tentative=not asked.session.required,
            rendering=prepared.rendering,
            prompt=prepared.prompt,
        )

    return submit


async def _collected(answer: Answer) -> list[Reply]:
    said: dict[int, list[Said]] = {}
    over: dict[int, Over] = {}
    async for one in answer:
        if isinstance(one, Over):
            over[one.index] = one
        else:
            said.setdefault(one.index, []).append(one)
    return [reply_of(said.get(index, []), over[index]) for index in sorted(over)]


def reply_of(said: Sequence[Said], over: Over) -> Reply:
    """A whole choice, put together from what was said of it."""
    pieces = [piece for one in said for piece in one.pieces]
    heads = [piece for piece in pieces if isinstance(piece, CallHead)]
    arguments = {head.index: "" for head in heads}
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    return Reply(
        over,
        content="".join(piece.text for piece in pieces if isinstance(piece, Content)),
        reasoning="".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        calls=tuple(Call(head.call_id, head.name, arguments[head.index]) for head in heads),
        logprobs=tuple(logprob for one in said for logprob in one.logprobs),
    )

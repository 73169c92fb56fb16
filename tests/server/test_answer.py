"""The one path from an `Ask` to what a choice says, without any API around it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from leyline.errors import InvalidRequestError, LeylineError
from leyline.events import Failure
from leyline.sampling import SamplingParams
from leyline.server import ServerConfig
from leyline.server.answer import ask, count, seeded, whole
from leyline.server.ask import Ask, Over, Said
from leyline.server.parsers.pieces import Content, ToolUse
from leyline.server.serving import Serving
from leyline.server.session_names import SessionName

from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}


def request_of() -> Request:
    """A request whose client stays."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    return Request({"type": "http", "headers": []}, receive)


def serving_of(connect: Connect, engine: FakeEngine | None = None) -> Serving:
    return Serving(connect(engine).worker, ServerConfig())


async def test_what_is_said_and_what_is_whole_agree(connect: Connect) -> None:
    serving = serving_of(connect)
    asked = Ask(HI, SamplingParams())
    with await ask(serving, request_of(), asked) as answer:
        happened = [one async for one in answer]
    *said, over = happened
    assert isinstance(over, Over) and over.reason == "stop"
    text = "".join(p.text for one in said for p in one.pieces if isinstance(p, Content))  # type: ignore[union-attr]
    assert all(isinstance(one, Said) for one in said) and text == "you said: user: hi\n"
    (reply,) = await whole(request_of(), await ask(serving, request_of(), asked))
    assert reply.content == text and reply.over.completion.text == text
    assert answer.is_over and answer.completions == [over.completion]


async def test_several_choices_have_seeds_of_their_own(connect: Connect) -> None:
    engine = FakeEngine()
    asked = Ask(HI, SamplingParams(seed=2**63 - 2), num_choices=3)
    replies = await whole(request_of(), await ask(serving_of(connect, engine), request_of(), asked))
    assert [reply.over.index for reply in replies] == [0, 1, 2]
    seeds = [params.seed for _, _, (params, _) in engine.seen]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert seeded(SamplingParams(), 3).seed is None


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"num_choices": 17}, "n"),
        ({"num_choices": 0}, "n"),
        ({"num_choices": 2, "session": SessionName("s1", required=True)}, "n"),
        ({"use": ToolUse(choice="required")}, "tool_choice"),
        ({"use": ToolUse((TOOL,), "required", "g")}, "tool_choice"),
    ],
)
async def test_what_cannot_be_had_together(connect: Connect, fields: Any, param: str) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError) as error:
        await ask(serving_of(connect, engine), request_of(), Ask(HI, SamplingParams(), **fields))
    assert error.value.param == param and engine.seen == []


async def test_a_guessed_session_is_not_for_several_choices(connect: Connect) -> None:
    engine = FakeEngine()
    asked = Ask(HI, SamplingParams(), num_choices=2, session=SessionName("s1"))
    await whole(request_of(), await ask(serving_of(connect, engine), request_of(), asked))
    assert [session for session, _ in engine.turns] == [None, None]


async def test_a_failed_choice_fails_the_answer_and_gives_up_the_others(connect: Connect) -> None:
    engine = FakeEngine(failures={2: InvalidRequestError("broken")})
    answer = await ask(
        serving_of(connect, engine), request_of(), Ask(HI, SamplingParams(), num_choices=3)
    )
    with pytest.raises(LeylineError, match="broken"):
        await whole(request_of(), answer)
    await answer._subscription._worker.call(lambda: None)
    assert engine.open == {} and Failure(2, InvalidRequestError("x")) not in answer.completions


async def test_a_count_is_the_prompts_length(connect: Connect) -> None:
    engine = FakeEngine()
    serving = serving_of(connect, engine)
    for use in (ToolUse(), ToolUse((TOOL,))):
        asked = Ask(HI, SamplingParams(), use=use)
        (reply,) = await whole(request_of(), await ask(serving, request_of(), asked))
        assert await count(serving, asked) == reply.over.completion.usage.prompt_tokens


CALL = 'ah <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def test_a_reply_ends_with_the_one_call_that_is_wanted(connect: Connect) -> None:
    for parallel, num_calls in ((False, 1), (True, 3)):
        serving = serving_of(connect, FakeEngine(lambda _: CALL * 3))
        asked = Ask(HI, SamplingParams(), use=ToolUse((TOOL,), parallel=parallel))
        (reply,) = await whole(request_of(), await ask(serving, request_of(), asked))
        assert reply.over.reason == "tool_calls" and len(reply.calls) == num_calls
        assert reply.over.completion.text == CALL * num_calls


async def test_markup_without_a_call_ends_nothing(connect: Connect) -> None:
    text = "<tool_call>no call</tool_call> and on it goes"
    serving = serving_of(connect, FakeEngine(lambda _: text))
    asked = Ask(HI, SamplingParams(), use=ToolUse((TOOL,), parallel=False))
    (reply,) = await whole(request_of(), await ask(serving, request_of(), asked))
    assert reply.content == text and reply.over.reason == "stop"


@pytest.mark.parametrize(
    "begun, thought", [("<think>so", "far"), ("<think>so</think>", ""), ("so", "")]
)
async def test_a_thought_that_was_begun_for_the_model_goes_on_as_one(
    connect: Connect, begun: str, thought: str
) -> None:
    engine = FakeEngine(lambda _: "far</think>said")
    engine.tokenizer.template.source += "<think>"
    serving = serving_of(connect, engine)
    messages = [*HI, {"role": "assistant", "content": begun}]
    asked = Ask(messages, SamplingParams(), opens_reply=False, continues_reply=True)
    (reply,) = await whole(request_of(), await ask(serving, request_of(), asked))
    assert reply.reasoning == thought
    assert reply.content == ("said" if thought else "far</think>said")

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from leyline.errors import EngineClosedError, InvalidRequestError
from leyline.events import Completion, Delta, Failure
from leyline.sampling import SamplingParams
from leyline.server import ServerConfig, Worker

from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


def prompt_of(engine: FakeEngine, text: str, **params: object) -> partial[int]:
    return partial(engine.submit_prompt, text, SamplingParams(**params))  # type: ignore[arg-type]


async def test_a_call_runs_on_the_engines_thread_and_answers(connect: Connect) -> None:
    worker = connect().worker
    assert await worker.call(lambda: threading.current_thread().name) == "leyline-engine"


async def test_a_call_raises_what_the_function_raises_and_the_worker_lives_on(
    connect: Connect,
) -> None:
    worker = connect().worker

    def refuse() -> None:
        raise InvalidRequestError("no")

    with pytest.raises(InvalidRequestError):
        await worker.call(refuse)
    assert await worker.call(lambda: 7) == 7


async def test_run_yields_every_event_up_to_the_terminal_one(connect: Connect) -> None:
    client = connect(FakeEngine(reply=lambda _: "abcdefgh"))
    events = [event async for event in client.worker.run(prompt_of(client.engine, "x"))]
    *deltas, last = events
    assert isinstance(last, Completion) and last.text == "abcdefgh"
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(d.text for d in deltas if isinstance(d, Delta)) == last.text


async def test_leaving_early_cancels(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    client.engine.allow(1)
    events = client.worker.run(prompt_of(client.engine, "x"))
    async for event in events:
        assert isinstance(event, Delta)
        break
    await events.aclose()
    assert await client.open_requests() == 0
    assert client.engine.cancelled == [1]


async def test_ending_normally_cancels_nothing(connect: Connect) -> None:
    client = connect()
    async for _ in client.worker.run(prompt_of(client.engine, "x")):
        pass
    assert await client.open_requests() == 0
    assert client.engine.cancelled == []


async def test_giving_up_while_the_submit_is_still_queued_leaves_nothing(connect: Connect) -> None:
    client = connect()
    release = threading.Event()
    blocker = asyncio.ensure_future(client.worker.call(release.wait))
    submitting = asyncio.ensure_future(client.worker.submit([prompt_of(client.engine, "x")]))
    await asyncio.wait({submitting}, timeout=0)  # let both be posted
    submitting.cancel()
    await asyncio.wait({submitting})
    release.set()
    await blocker
    assert await client.open_requests() == 0


async def test_giving_up_while_the_submit_runs_cancels_it(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    entered, release = threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        release.wait()
        return prompt_of(client.engine, "x")()

    submitting = asyncio.ensure_future(client.worker.submit([slow]))
    await asyncio.to_thread(entered.wait)
    submitting.cancel()
    await asyncio.wait({submitting})
    release.set()
    assert await client.open_requests() == 0
    assert client.engine.cancelled == [1]


async def test_requests_submitted_together_are_all_taken_or_none(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=10))
    submits = [prompt_of(client.engine, "short"), prompt_of(client.engine, "x" * 99)]
    with pytest.raises(InvalidRequestError):
        await client.worker.submit(submits)
    assert await client.open_requests() == 0
    assert client.engine.cancelled == [1]


async def test_a_broken_step_ends_every_request_and_the_worker_refuses_from_then_on(
    connect: Connect,
) -> None:
    client = connect(FakeEngine(gated=True))
    submissions = [
        await client.worker.submit([prompt_of(client.engine, text)]) for text in ("a", "b")
    ]
    client.engine.fault = RuntimeError("out of luck")
    client.engine.allow(2)
    for subscription in submissions:
        events = [event async for event in subscription]
        last = events[-1]
        assert isinstance(last, Failure) and isinstance(last.error, EngineClosedError)
        assert "out of luck" not in last.error.message
    await asyncio.to_thread(client.worker.stop)
    assert not client.worker.is_alive
    with pytest.raises(EngineClosedError):
        await client.worker.call(lambda: 1)
    with pytest.raises(EngineClosedError):
        await client.worker.submit([prompt_of(client.engine, "c")])


async def test_calls_queued_behind_a_broken_step_are_refused(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    await client.worker.submit([prompt_of(client.engine, "a")])
    waiting = asyncio.ensure_future(client.worker.call(lambda: 1))
    await asyncio.wait({waiting}, timeout=0)
    client.engine.fault = RuntimeError("out of luck")
    client.engine.allow(2)
    # It ran if it was taken before the step, else it was refused; it is never left hanging.
    outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
    assert outcome == 1 or isinstance(outcome, EngineClosedError)


async def test_stop_cancels_what_is_open_and_ends_it_with_a_failure(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    subscription = await client.worker.submit([prompt_of(client.engine, "a")])
    await asyncio.to_thread(client.worker.stop)
    last = [event async for event in subscription][-1]
    assert isinstance(last, Failure) and isinstance(last.error, EngineClosedError)
    assert client.engine.open == {}
    client.worker.stop()


def test_stopping_a_worker_that_never_started_returns() -> None:
    worker = Worker(FakeEngine())
    worker.stop()
    assert not worker.is_alive


def test_one_engine_serves_several_event_loops(connect: Connect) -> None:
    client = connect()

    async def ask(text: str) -> str:
        async for event in client.worker.run(prompt_of(client.engine, text)):
            if isinstance(event, Completion):
                return event.text
        raise AssertionError

    assert asyncio.run(ask("a")) == "you said: a"
    assert asyncio.run(ask("b")) == "you said: b"


def test_a_loop_that_closed_meanwhile_does_not_hurt_the_worker(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    asyncio.run(_submit_and_leave(client.worker, client.engine))

    async def ask() -> int:
        return await client.worker.call(lambda: 3)

    assert asyncio.run(ask()) == 3


async def _submit_and_leave(worker: Worker, engine: FakeEngine) -> None:
    await worker.submit([prompt_of(engine, "a")])


async def test_events_of_many_requests_reach_their_own_subscribers(connect: Connect) -> None:
    client = connect()

    async def ask(text: str) -> str:
        events = [event async for event in client.worker.run(prompt_of(client.engine, text))]
        assert {event.request_id for event in events} == {events[0].request_id}
        return "".join(event.text for event in events if isinstance(event, Delta))

    texts = [f"question {number}" for number in range(40)]
    assert await asyncio.gather(*map(ask, texts)) == [f"you said: {text}" for text in texts]


async def test_thousands_of_requests_leave_nothing_in_any_map(connect: Connect) -> None:
    client = connect(config=ServerConfig(request_timeout_s=600))
    for number in range(40):
        texts = [f"{number}.{one}" for one in range(32)]
        assert (await client.complete(texts)).status == 200
    meter: Any = client.worker.observer
    for kept in (client.worker._subscribers, client.worker._deadlines, meter._open, meter._waiting):
        assert not kept
    assert client.engine.cancelled == []

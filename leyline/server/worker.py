"""The engine's thread, and the bridge between it and the event loop.

The engine is not thread-safe and its steps block, so one thread owns it. Whatever the event loop
wants of the engine is posted as a closure into one queue and runs between two steps; whatever the
engine says goes back with one wake-up of the loop a step, however many requests it concerns.

A closure posted later runs later. This is what makes hanging up safe at any moment: a close is
posted behind the submit it undoes, even if nobody has seen that submit's result yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from leyline.errors import (
    DrainingError,
    EngineClosedError,
    LeylineError,
    QueueFullError,
    RequestTimeoutError,
)
from leyline.events import Completion, EditResult, EngineEvent, Failure
from leyline.server import logs
from leyline.server.observers import NOBODY, Observer
from leyline.server.surface import ServedEngine
from leyline.stats import pace_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Submit = Callable[[], int]
"""Submits one request to the engine, on its thread, and returns the request's id."""

_STOPPED = "The server is shutting down; send the request again once it is back."
_DIED = "The engine failed and has stopped; the server's log says why. Restart the server."
_DRAINING = "The server is about to stop and takes no new requests; send this one to another."


def is_terminal(event: EngineEvent) -> bool:
    """Whether `event` is the last one of its request."""
    return isinstance(event, Completion | EditResult | Failure)


class Subscription:
    """The events of some requests, in the order in which they happen.

    Iterate it to the last terminal event, inside a `with` block: leaving the block cancels
    whatever has not ended by then.

    Attributes:
        request_ids: The requests, in the order in which they were submitted.
    """

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self.request_ids: list[int] = []
        self.loop = loop
        self._worker = worker
        self._exchange = logs.current.get()
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._ended = 0

    def put(self, event: EngineEvent) -> None:
        """Hand over an event; called on the event loop."""
        if self._exchange is not None:
            self._exchange.add(event)
        self._events.put_nowait(event)

    @property
    def is_over(self) -> bool:
        """Whether every request's terminal event has been taken."""
        return self._ended == len(self.request_ids)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> EngineEvent:
        if self.is_over:
            raise StopAsyncIteration
        event = await self._events.get()
        self._ended += is_terminal(event)
        return event

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self.is_over:
            self._worker.close(self)


class Worker:
    """Runs an engine on its own thread and serves event loops from it.

    Args:
        engine: A ready engine. Until `stop` returns, nobody else may call it.

    Attributes:
        observer: Who watches.
        max_queued: Requests that may wait for a place; None for any number.
        max_seconds: How long a request may take; None for any time.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.observer: Observer = NOBODY
        self.max_queued: int | None = None
        self.max_seconds: float | None = None
        self.is_draining = False
        self._deadlines: dict[int, float] = {}
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._subscribers: dict[int, Subscription] = {}
        self._gate = threading.Lock()
        self._refusal: str | None = None
        self._thread = threading.Thread(target=self._serve, name="leyline-engine", daemon=True)

    # -- for the event loop ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; once a worker."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in progress. Open requests are cancelled and end in a `Failure`.

        Blocks until the thread is gone; safe to call twice. Keep it off the event loop.
        """
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def drain(self) -> None:
        """Refuse new requests from now on; those that are open go on. Never blocks."""
        self.is_draining = True

    @property
    def num_open(self) -> int:
        """Requests that have not ended, as of about now."""
        return len(self._subscribers)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served: started, not stopped, not dead."""
        return self._thread.is_alive() and self._refusal is None

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on the engine's thread, between two steps, and return its result.

        Raises:
            EngineClosedError: if the engine is gone.
            LeylineError: whatever `function` raises.
        """
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, lambda: function(*args, **kwargs))

        self._post(answer, future)
        return await asyncio.wrap_future(future)

    async def submit(self, submits: Sequence[Submit]) -> Subscription:
        """Submit requests together, all or none, and subscribe to their events.

        Raises:
            LeylineError: if one of them is refused; the others are cancelled.
            QueueFullError: if too many requests wait already.
            DrainingError: if the server takes no new requests.
        """
        subscription = Subscription(self, asyncio.get_running_loop())
        try:
            await self.call(self._open, subscription, submits)
        except BaseException:
            self.close(subscription)
            raise
        return subscription

    async def run(self, submit: Submit) -> AsyncGenerator[EngineEvent, None]:
        """Submit one request and yield its events up to the terminal one.

        Closing the iterator early cancels the request.
        """
        with await self.submit([submit]) as subscription:
            async for event in subscription:
                yield event

    def close(self, subscription: Subscription) -> None:
        """Cancel what is unfinished of a subscription and forget it; never blocks."""
        with self._gate:
            if self._refusal is None:
                self._inbox.put(lambda: self._forget(subscription))

    def _post(self, closure: Callable[[], None], future: Future[Any]) -> None:
        """Queue a closure, or fail its future if nobody will come to run it."""
        with self._gate:
            if self._refusal is None:
                self._inbox.put(_Posted(closure, future))
                return
        future.set_exception(EngineClosedError(self._refusal))

    # -- on the engine's thread --------------------------------------------------------------

    def _serve(self) -> None:
        """The thread's whole life."""
        refusal = _DIED
        try:
            while self._take_posted():
                if self.engine.has_work:
                    since = time.perf_counter()
                    self._publish(self.engine.step(), since)
                    self._expire()
            self._cancel_all()
            refusal = _STOPPED
        except BaseException:
            logger.exception("The engine failed; every open request fails with it.")
        finally:
            self._shut(refusal)

    def _take_posted(self) -> bool:
        """Run what was posted; wait for something if the engine is idle. False means stop."""
        waiting = self._inbox.qsize() or (0 if self.engine.has_work else 1)
        for _ in range(waiting):
            closure = self._inbox.get()
            if closure is None:
                return False
            closure()
        return True

    def _open(self, subscription: Subscription, submits: Sequence[Submit]) -> None:
        self._check_room(len(submits))
        try:
            for submit in submits:
                request_id = submit()
                subscription.request_ids.append(request_id)
                self._subscribers[request_id] = subscription
                if self.max_seconds is not None:
                    self._deadlines[request_id] = time.monotonic() + self.max_seconds
                with _only_logged():
                    self.observer.opened(request_id)
        except BaseException:
            self._forget(subscription)
            raise

    def _check_room(self, count: int) -> None:
        """Refuse requests that nobody would come to serve for long, or at all."""
        if self.is_draining:
            raise DrainingError(_DRAINING)
        if self.max_queued is None:
            return
        pace = pace_of(self.engine)
        if len(pace.waiting) + count > self.max_queued + pace.num_places:
            raise QueueFullError(
                f"{len(pace.waiting)} requests wait already, and {self.max_queued} may; send this "
                "one again in a while."
            )

    def _forget(self, subscription: Subscription) -> None:
        """Cancel those requests of a subscription that still run."""
        for request_id in subscription.request_ids:
            if self._drop(request_id) is not None:
                self.engine.cancel(request_id)
                with _only_logged():
                    self.observer.closed(request_id)

    def _drop(self, request_id: int) -> Subscription | None:
        """Who waited for a request, and does no longer."""
        self._deadlines.pop(request_id, None)
        return self._subscribers.pop(request_id, None)

    def _expire(self) -> None:
        """End requests that took too long; all have the same time, so the oldest go first."""
        now, late = time.monotonic(), list[int]()
        for request_id, deadline in self._deadlines.items():
            if deadline > now:
                break
            late.append(request_id)
        if late:
            error = RequestTimeoutError(f"The request took longer than {self.max_seconds:g} s.")
            self._publish([Failure(request_id, error) for request_id in late])
        for request_id in late:
            self.engine.cancel(request_id)

    def _cancel_all(self) -> None:
        for request_id in self._subscribers:
            self.engine.cancel(request_id)

    def _publish(self, events: Iterable[EngineEvent], since: float | None = None) -> None:
        """Hand a step's events to their subscribers; one wake-up a loop.

        Args:
            events: The events.
            since: When the step began; now for what the engine did not say.
        """
        wanted = [(self._subscriber(event), event) for event in events]
        deliveries = [(one, event) for one, event in wanted if one is not None]
        with _only_logged():
            began = time.perf_counter() if since is None else since
            self.observer.stepped(self.engine, [event for _, event in deliveries], began)
        outgoing: dict[asyncio.AbstractEventLoop, list[tuple[Subscription, EngineEvent]]] = {}
        for subscription, event in deliveries:
            outgoing.setdefault(subscription.loop, []).append((subscription, event))
        for loop, batch in outgoing.items():
            _wake(loop, batch)

    def _subscriber(self, event: EngineEvent) -> Subscription | None:
        """Who waits for this event; None for a request whose client is gone."""
        if is_terminal(event):
            return self._drop(event.request_id)
        return self._subscribers.get(event.request_id)

    def _shut(self, refusal: str) -> None:
        """Refuse everything from now on, and end everything that waits."""
        with self._gate:
            self._refusal = refusal
        error = EngineClosedError(refusal)
        self._publish([Failure(request_id, error) for request_id in self._subscribers])
        while not self._inbox.empty():
            closure = self._inbox.get()
            if isinstance(closure, _Posted):
                closure.refuse(EngineClosedError(refusal))


class _Posted:
    """A closure in the queue, together with the future that waits for it."""

    def __init__(self, closure: Callable[[], None], future: Future[Any]) -> None:
        self._closure = closure
        self._future = future

    def __call__(self) -> None:
        self._closure()

    def refuse(self, error: LeylineError) -> None:
        """Answer without running."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


@contextmanager
def _only_logged() -> Generator[None, None, None]:
    """Whoever watches the engine must not stop it."""
    try:
        yield
    except Exception:
        logger.exception("An observer failed; what it should have seen is not counted.")


def _settle(future: Future[T], compute: Callable[[], T]) -> None:
    """Put the result or the error of `compute` into a running future."""
    try:
        result = compute()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _wake(
    loop: asyncio.AbstractEventLoop, deliveries: list[tuple[Subscription, EngineEvent]]
) -> None:
    """Deliver on the loop; a loop that was closed meanwhile has nobody left to tell."""

    def deliver() -> None:
        for subscription, event in deliveries:
            subscription.put(event)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        logger.debug("An event loop closed while its requests ran.")

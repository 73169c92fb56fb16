"""The engine as people hold it in a notebook.

`generate`, `chat` and `stream` submit a request and drive the loop until it has ended; requests
that were submitted otherwise go on meanwhile. A server uses the same object through the methods
of `SessionDesk` alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leyline.config import EngineConfig
from leyline.conversation import Conversation
from leyline.directive import Directive
from leyline.errors import InvalidRequestError
from leyline.events import Completion, Delta, EditResult, EngineEvent, Failure
from leyline.pointing import Change
from leyline.rendering import PLAIN, Rendering
from leyline.sampling import SamplingParams
from leyline.session_desk import SessionDesk
from leyline.turn import Messages


class Engine(SessionDesk):
    """One model, ready to answer.

        with Engine() as engine:
            print(engine.chat("What is the capital of France?", temperature=0).text)

    Args:
        config: All options; or
        options: some of them by name, such as `Engine(model="folder", dtype="float32")`.

    Raises:
        ConfigError: An option is out of range.
        ModelError: The model folder cannot be served.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        super().__init__(_configured(config, options))
        self._inboxes: dict[int, deque[EngineEvent]] = {}
        self._names = itertools.count(1)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Completion:
        """Continue a text or token ids; sampling options may be given by name."""
        request_id = self.submit_prompt(prompt, _sampling(params, sampling))
        return _last(self._drive(request_id), Completion)

    def chat(
        self,
        messages: Messages | str,
        params: SamplingParams | None = None,
        *,
        rendering: Rendering = PLAIN,
        **sampling: Any,
    ) -> Completion:
        """Answer a conversation, or a single question; tools and the like are in `rendering`."""
        turn = self.turn(_messages(messages), params, sampling, rendering=rendering)
        return _last(turn, Completion)

    def stream(
        self,
        messages: Messages | str,
        params: SamplingParams | None = None,
        *,
        rendering: Rendering = PLAIN,
        **sampling: Any,
    ) -> Iterator[str]:
        """Answer a conversation piece by piece; closing the iterator cancels the rest."""
        for event in self.turn(_messages(messages), params, sampling, rendering=rendering):
            if isinstance(event, Delta) and event.text:
                yield event.text

    def session(self, session_id: str | None = None) -> Conversation:
        """A conversation whose context can be edited; a name is made up if none is given."""
        return Conversation(self, session_id or f"session-{next(self._names)}")

    def turn(
        self,
        messages: Messages,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        session_id: str | None = None,
        edit_mode: str | None = None,
        rendering: Rendering = PLAIN,
    ) -> Iterator[Delta | Completion]:
        """One turn of a conversation: its pieces of text, then its completion."""
        trimmed, _ = self.trim(messages, None, rendering)
        request_id = self.submit_chat(
            trimmed,
            _sampling(params, sampling),
            session_id=session_id,
            edit_mode=edit_mode,
            rendering=rendering,
        )
        for event in self._drive(request_id):
            assert isinstance(event, Delta | Completion), "a turn has no other events"
            yield event

    def edit(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> EditResult:
        """Edit a session's context: all of the changes or none; see `submit_directives`."""
        request_id = self.submit_directives(
            session_id,
            changes,
            expected_version=expected_version,
            idempotency_key=idempotency_key,
        )
        return _last(self._drive(request_id), EditResult)

    def settle(self) -> None:
        """Step until nothing is left to do: marks have fired, and sessions have healed."""
        while self.has_work:
            self._deliver(self.step())

    def _drive(self, request_id: int) -> Iterator[EngineEvent]:
        """Step until a request has ended; yields its events. Leaving early cancels it.

        Raises:
            LeylineError: If it failed.
        """
        inbox = self._inboxes.setdefault(request_id, deque())
        try:
            while True:
                while not inbox:
                    self._deliver(self.step())
                event = inbox.popleft()
                if isinstance(event, Failure):
                    raise event.error
                yield event
                if isinstance(event, Completion | EditResult):
                    return
        finally:
            del self._inboxes[request_id]
            self.cancel(request_id)

    def _deliver(self, events: Iterable[EngineEvent]) -> None:
        """Put events into the inboxes of those who drive their requests."""
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)


def _last(events: Iterable[EngineEvent], kind: type[Any]) -> Any:
    """The terminal event of a request, which is of this kind."""
    *_, last = events
    assert isinstance(last, kind), f"a request ended in {type(last).__name__}"
    return last


def _messages(messages: Messages | str) -> Messages:
    """A single question as a conversation."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _configured(config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    """The options, with those given by name in front."""
    try:
        return replace(config or EngineConfig(), **options)
    except TypeError as error:
        raise InvalidRequestError(f"Unknown engine option: {error}.") from error


def _sampling(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Sampling parameters with options by name; one stop string may stand alone."""
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    for name in ("stop", "stop_token_ids", "shown"):
        if isinstance(options.get(name), list):
            options[name] = tuple(options[name])
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = tuple(options["logit_bias"].items())
    try:
        return replace(params or SamplingParams(), **options)
    except TypeError as error:
        raise InvalidRequestError(f"Unknown sampling option: {error}.") from error

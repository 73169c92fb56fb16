"""An engine of the server's surface that says what it was told to say.

Its tokens are characters. It makes every fault and every moment easy to reach: a step can be kept
from getting anything done until a test lets it, and can be made to raise. It keeps no rows, so
nothing it reports about them means anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline.batch import SamplingParams
from leyline.directive import Directive, Receipt, checked
from leyline.errors import (
    CancelledError,
    ContextLengthError,
    LeylineError,
    SessionBusyError,
    SessionNotFoundError,
)
from leyline.events import (
    Completion,
    Delta,
    EditResult,
    EngineEvent,
    Failure,
    SessionInfo,
    Usage,
)

VOCAB_SIZE = 0x110000
PAUSE_SECONDS = 0.001


class CharacterTokenizer:
    vocab_size = VOCAB_SIZE

    def encode_plain(self, text: str) -> list[int]:
        return [ord(character) for character in text]


@dataclass
class FakeSession:
    text: str
    version: int = 1
    spliced: int = 0
    busy: bool = False


@dataclass
class Generation:
    """A request that says `reply`, a few characters a step."""

    request_id: int
    prompt: str
    reply: str
    finish: str
    session_id: str | None
    said: int = 0


@dataclass
class Edit:
    request_id: int
    session_id: str
    directives: tuple[Directive, ...]


@dataclass
class FakeEngine:
    """See the module. `reply` makes the answer from the prompt's text.

    With `gated`, a step gets nothing done without an `allow()`; without, steps run freely.
    """

    reply: Callable[[str], str] = lambda prompt: f"you said: {prompt}"
    chunk: int = 3
    gated: bool = False
    max_model_len: int = 4096
    degraded: bool = False
    model_name: str = "fake-model"
    tokenizer: CharacterTokenizer = field(default_factory=CharacterTokenizer)
    fault: BaseException | None = None
    failures: dict[int, LeylineError] = field(default_factory=dict)
    open: dict[int, Generation | Edit] = field(default_factory=dict)
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    seen: list[tuple[str, Any, Any]] = field(default_factory=list)
    largest_batch: int = 0
    _pending: list[EngineEvent] = field(default_factory=list)
    _permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _last_id: int = 0

    # -- for the test ------------------------------------------------------------------------

    def allow(self, steps: int = 1) -> None:
        """Let so many gated steps go."""
        self._permits.release(steps)

    # -- the surface -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.open or self._pending)

    def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        salt: str = "",
    ) -> int:
        self.seen.append(("chat", list(messages), (params, salt)))
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        self._begin_turn(session_id, prompt)
        return self._generate(prompt, params, session_id)

    def submit_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        self.seen.append(("prompt", prompt, (params, salt)))
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        return self._generate(text, params, None)

    def submit_directives(
        self, session_id: str, directives: Sequence[Directive], *, salt: str = ""
    ) -> int:
        session = self._session(salt + session_id)
        edits = checked(directives, len(session.text), vocab_size=VOCAB_SIZE)
        request_id = self._next_id()
        self.open[request_id] = Edit(request_id, salt + session_id, edits)
        return request_id

    def cancel(self, request_id: int) -> None:
        request = self.open.pop(request_id, None)
        if request is not None:
            self.cancelled.append(request_id)
            self._end_turn(request)
            self._pending.append(Failure(request_id, CancelledError("cancelled")))

    def step(self) -> list[EngineEvent]:
        events, self._pending = self._pending, []
        if self.gated and not self._permits.acquire(timeout=PAUSE_SECONDS):
            return events
        if self.fault is not None:
            raise self.fault
        self.largest_batch = max(self.largest_batch, len(self.open))
        for request in list(self.open.values()):
            events += self._advance(request)
        return events

    def session_info(self, session_id: str, *, salt: str = "") -> SessionInfo:
        session = self._session(salt + session_id)
        length = len(session.text)
        return SessionInfo(
            session_id=session_id,
            version=session.version,
            context_length=length,
            pieces=((0, length, session.spliced == 0),),
            token_ids=tuple(map(ord, session.text)),
            text=session.text,
            busy=session.busy,
        )

    def delete_session(self, session_id: str, *, salt: str = "") -> None:
        self._session(salt + session_id)
        del self.sessions[salt + session_id]

    # -- inside ------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _session(self, session_id: str) -> FakeSession:
        if session_id not in self.sessions:
            raise SessionNotFoundError(f"There is no session {session_id!r}.", param="session_id")
        return self.sessions[session_id]

    def _begin_turn(self, session_id: str | None, prompt: str) -> None:
        if session_id is None:
            return
        session = self.sessions.setdefault(session_id, FakeSession(prompt, version=0))
        if session.busy:
            raise SessionBusyError("The session is in the middle of a turn.", param="session_id")
        session.busy = True

    def _end_turn(self, request: Generation | Edit) -> None:
        if isinstance(request, Generation) and request.session_id in self.sessions:
            self.sessions[request.session_id].busy = False

    def _generate(self, prompt: str, params: SamplingParams, session_id: str | None) -> int:
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens; the maximum context length is "
                f"{self.max_model_len}."
            )
        reply, finish = self.reply(prompt), "stop"
        for stop in params.stop:
            reply = reply.partition(stop)[0]
        limit = params.max_tokens or self.max_model_len - len(prompt)
        if len(reply) > limit:
            reply, finish = reply[:limit], "length"
        request_id = self._next_id()
        self.open[request_id] = Generation(request_id, prompt, reply, finish, session_id)
        return request_id

    def _advance(self, request: Generation | Edit) -> list[EngineEvent]:
        failure = self.failures.pop(request.request_id, None)
        if failure is not None:
            del self.open[request.request_id]
            self._end_turn(request)
            return [Failure(request.request_id, failure)]
        return self._edit(request) if isinstance(request, Edit) else self._say(request)

    def _say(self, request: Generation) -> list[EngineEvent]:
        text = request.reply[request.said : request.said + self.chunk]
        request.said += len(text)
        events: list[EngineEvent] = [Delta(request.request_id, text, tuple(map(ord, text)))]
        if request.said == len(request.reply):
            del self.open[request.request_id]
            events.append(self._complete(request))
        return events

    def _complete(self, request: Generation) -> Completion:
        version, spliced = None, 0
        if request.session_id is not None:
            session = self.sessions[request.session_id]
            session.version += 1
            session.text = request.prompt + request.reply
            version, spliced = session.version, session.spliced
        self._end_turn(request)
        return Completion(
            request_id=request.request_id,
            text=request.reply,
            token_ids=tuple(map(ord, request.reply)),
            finish_reason="stop" if request.finish == "stop" else "length",
            usage=Usage(
                len(request.prompt), len(request.reply), 2 + spliced, spliced, self.degraded
            ),
            session_id=request.session_id,
            version=version,
        )

    def _edit(self, edit: Edit) -> list[EngineEvent]:
        del self.open[edit.request_id]
        session = self.sessions[edit.session_id]
        before = len(session.text)
        for directive in reversed(edit.directives):
            new = "".join(map(chr, directive.replacement))
            session.text = session.text[: directive.start] + new + session.text[directive.end :]
        session.version += 1
        session.spliced += 1
        receipts = tuple(_receipt(directive, before) for directive in edit.directives)
        after = len(session.text)
        return [
            EditResult(
                edit.request_id, edit.session_id, session.version, before, after, receipts, 1.25
            )
        ]


def _receipt(directive: Directive, length: int) -> Receipt:
    return Receipt(
        start=directive.start,
        end=directive.end,
        mode=directive.mode,
        mode_done=directive.mode,
        removed=directive.end - directive.start,
        inserted=len(directive.replacement),
        kept=length - directive.end,
        recomputed=0,
        moved_in_place=length - directive.end,
        copied=0,
        freed=0,
        delta=directive.delta,
        reason=None,
    )

"""An engine of the server's surface that says what it was told to say.

Its tokens are characters. It makes every fault and every moment easy to reach: a step can be kept
from getting anything done until a test lets it, and can be made to raise. It keeps no rows, so
nothing it reports about them means anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leyline.directive import Directive, Mode, Receipt, checked
from leyline.errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    DirectiveError,
    IdempotencyError,
    LeylineError,
    MarkNotFoundError,
    QuotaError,
    RequestPendingError,
    SessionBusyError,
    SessionNotFoundError,
    VersionConflictError,
    VersionNotFoundError,
)
from leyline.events import (
    Completion,
    Delta,
    EditPlan,
    EditResult,
    EngineEvent,
    Failure,
    Found,
    Purged,
    Reverted,
    SessionInfo,
    TokenLogprob,
    Usage,
)
from leyline.marks import Mark, MessageSpan
from leyline.pointing import Change, MarkRequest, Target
from leyline.rendering import PLAIN, Rendering, rendered
from leyline.reply import Reply
from leyline.sampling import SamplingParams
from leyline.template import content_text
from leyline.tokenizer import TextStream
from leyline.trimming import apply_policies, from_wire

VOCAB_SIZE = 0x110000
PAUSE_SECONDS = 0.001


@dataclass
class FakeTemplate:
    """What tells the formats of a model: one that writes calls as Hermes does, without thoughts."""

    source: str = 'tools tool_calls <tool_call> {"arguments": }'


@dataclass
class FakeTokenizer:
    """Every character is a token; a conversation is a line a message, and how the reply begins."""

    template: FakeTemplate | None = field(default_factory=FakeTemplate)
    opening: str = ""
    vocab_size: int = 1024
    bos_id: int | None = None
    stop_ids = frozenset({0})

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        front = [] if self.bos_id is None or not bos else [self.bos_id]
        return front + list(map(ord, text))

    encode_plain = encode

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(map(_character, ids))

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        return _character(token_id).encode("utf-8", "replace")

    part_separator = "\n"

    def stream(self, *, skip_special: bool = True) -> TextStream:
        return TextStream(self, frozenset())  # type: ignore[arg-type]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        head = "".join(f"tool: {tool['function']['name']}\n" for tool in tools or ())
        lines = (f"{one['role']}: {content_text(one['content'])}\n" for one in messages)
        return head + "".join(lines) + (self.opening if add_generation_prompt else "")


@dataclass
class FakeSession:
    text: str
    version: int = 1
    spliced: int = 0
    busy: bool = False
    salt: str = ""
    messages: list[MessageSpan] = field(default_factory=list)
    old: dict[int, str] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    results: dict[str, tuple[Any, EditResult | None]] = field(default_factory=dict)

    @property
    def state(self) -> Literal["exact", "spliced"]:
        return "spliced" if self.spliced else "exact"


@dataclass
class Generation:
    """A request that says `text`, a few characters a step, as its parameters want it."""

    request_id: int
    prompt: tuple[int, ...]
    text: str
    params: SamplingParams
    reply: Reply
    session_id: str | None
    salt: str = ""
    told: int = 0

    @property
    def limit(self) -> int:
        """Characters that it may say."""
        most = self.params.max_tokens
        return len(self.text) if most is None else min(len(self.text), most)


@dataclass
class Edit:
    request_id: int
    session_id: str
    directives: tuple[Directive, ...]
    salt: str = ""
    purges: bool = False
    key: str | None = None


@dataclass
class FakeEngine:
    """See the module. `reply` makes the answer from the prompt's text; or `choose` does, from that
    and the sampling parameters.

    With `gated`, a step gets nothing done without an `allow()`; without, steps run freely.
    """

    reply: Callable[[str], str] = lambda prompt: f"you said: {prompt}"
    choose: Callable[[str, SamplingParams], str] | None = None
    chunk: int = 3
    gated: bool = False
    max_model_len: int = 4096
    degraded: bool = False
    edited_history: bool = False
    model_name: str = "fake-model"
    fault: BaseException | None = None
    failures: dict[int, LeylineError] = field(default_factory=dict)
    open: dict[int, Generation | Edit] = field(default_factory=dict)
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    seen: list[tuple[str, Any, Any]] = field(default_factory=list)
    turns: list[tuple[str | None, str | None]] = field(default_factory=list)
    renderings: list[Rendering] = field(default_factory=list)
    tokenizer: Any = field(default_factory=lambda: FakeTokenizer())
    largest_batch: int = 0
    max_sessions: int = 99
    measured: bool = True
    max_marks: int = 3
    sessions_file: bool = False
    policy: Callable[[], None] | None = None
    planning: Callable[[], None] | None = None
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
        edit_mode: str | None = None,
        tentative: bool = False,
        rendering: Rendering = PLAIN,
        prompt: Sequence[int] | None = None,
    ) -> int:
        self.seen.append(("chat", list(messages), (params, salt)))
        self.turns.append((session_id, edit_mode))
        self.renderings.append(rendering)
        text = rendered(self.tokenizer, messages, rendering)
        assert prompt is None or list(prompt) == self.tokenizer.encode(text)
        self._begin_turn(session_id, salt, text)
        return self._generate(text, params, session_id, salt)

    def trim(
        self,
        messages: Sequence[Mapping[str, Any]],
        context_management: Any | None,
        rendering: Rendering = PLAIN,
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
        if self.policy is not None:
            self.policy()
        return apply_policies(messages, from_wire(context_management), _count)

    def submit_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        self.seen.append(("prompt", prompt, (params, salt)))
        return self._generate(prompt, params, None)

    def submit_directives(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        salt: str = "",
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> int:
        session = self._session(salt, session_id)
        request_id = self._next_id()
        if idempotency_key is not None and idempotency_key in session.results:
            self._pending.append(self._repeat(request_id, session, idempotency_key, changes))
            return request_id
        directives = self._compiled(session, changes, salt, expected_version)
        purges = any(isinstance(each, Change) and each.scope == "cache" for each in changes)
        self.open[request_id] = Edit(
            request_id, session_id, directives, salt, purges, idempotency_key
        )
        if idempotency_key is not None:
            session.results[idempotency_key] = (changes, None)
        return request_id

    def plan_directives(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        salt: str = "",
        expected_version: int | None = None,
    ) -> EditPlan:
        if self.planning is not None:
            self.planning()
        session = self._session(salt, session_id)
        directives = self._compiled(session, changes, salt, expected_version)
        before = len(session.text)
        after = before + sum(directive.delta for directive in directives)
        receipts = tuple(_receipt(directive, before) for directive in directives)
        times = (1.23456, 7.0) if self.measured else (None, None)
        return EditPlan(session_id, session.version, before, after, receipts, *times)

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
        session = self._session(salt, session_id)
        length = len(session.text)
        return SessionInfo(
            session_id=session_id,
            version=session.version,
            context_length=length,
            pieces=((0, length, session.spliced == 0),),
            token_ids=tuple(map(ord, session.text)),
            text=session.text,
            busy=session.busy,
            state=session.state,
            versions=tuple((number, len(text), True) for number, text in session.old.items()),
            marks=tuple(session.marks),
            messages=tuple(session.messages),
        )

    def sessions_info(self, *, salt: str = "") -> list[SessionInfo]:
        names = [name for name, session in self.sessions.items() if session.salt == salt]
        return [self.session_info(name.removeprefix(salt), salt=salt) for name in names]

    def delete_session(self, session_id: str, *, salt: str = "") -> None:
        self._session(salt, session_id)
        del self.sessions[salt + session_id]

    def save_sessions(self) -> int:
        if not self.sessions_file:
            raise ConfigError("There is no file to save sessions to.", param="sessions_file")
        return len(self.sessions)

    def revert(self, session_id: str, version: int | None, *, salt: str = "") -> Reverted:
        session = self._session(salt, session_id)
        restored = max(session.old, default=0) if version is None else version
        if restored not in session.old:
            raise VersionNotFoundError("No such version is kept.", param="version")
        before, session.text = len(session.text), session.old[restored]
        session.version += 1
        after = len(session.text)
        return Reverted(session_id, session.version, restored, before, after, after, 0, "exact")

    def mark(self, session_id: str, request: MarkRequest, *, salt: str = "") -> Mark:
        session = self._session(salt, session_id)
        if len(session.marks) == self.max_marks:
            raise QuotaError("No more marks for this tenant.")
        start, end = (0, 0) if request.target is None else self._place(session, request.target)
        until = None if request.ttl_s is None else time.monotonic() + request.ttl_s
        mark = Mark(
            f"m{len(session.marks)}",
            request.verb,
            start,
            end,
            until,
            request.turns,
            _ids(request.replacement),
            Mode(request.mode),
            request.of,
        )
        session.marks.append(mark)
        return mark

    def unmark(self, session_id: str, mark_id: str, *, salt: str = "") -> None:
        session = self._session(salt, session_id)
        kept = [mark for mark in session.marks if mark.mark_id != mark_id]
        if len(kept) == len(session.marks):
            raise MarkNotFoundError("There is no such mark.", param="mark_id")
        session.marks = kept

    def find_in_cache(self, what: str | Sequence[int], *, salt: str = "") -> Found:
        text = "".join(map(_character, _ids(what)))
        held = [info for info in self.sessions_info(salt=salt) if text in info.text]
        rows = sum(len(info.text) - info.text.index(text) for info in held)
        return Found(rows, tuple(info.session_id for info in held))

    # -- inside ------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _session(self, salt: str, session_id: str) -> FakeSession:
        session = self.sessions.get(salt + session_id)
        if session is None or session.salt != salt:
            raise SessionNotFoundError(f"There is no session {session_id!r}.", param="session_id")
        return session

    def _begin_turn(self, session_id: str | None, salt: str, prompt: str) -> None:
        if session_id is None:
            return
        if salt + session_id not in self.sessions:
            if len(self.sessions) >= self.max_sessions:
                raise QuotaError("There are too many sessions.")
            self.sessions[salt + session_id] = FakeSession(prompt, version=0, salt=salt)
        session = self.sessions[salt + session_id]
        if session.busy:
            raise SessionBusyError("The session is in the middle of a turn.", param="session_id")
        session.busy = True

    def _end_turn(self, request: Generation | Edit) -> None:
        if request.session_id is None:
            return
        session = self.sessions.get(request.salt + request.session_id)
        if isinstance(request, Generation) and session is not None:
            session.busy = False
        if isinstance(request, Edit) and session is not None and request.key is not None:
            del session.results[request.key]

    def _compiled(
        self,
        session: FakeSession,
        changes: Sequence[Change | Directive],
        salt: str,
        expected_version: int | None,
    ) -> tuple[Directive, ...]:
        if session.busy:
            raise SessionBusyError("The session is in the middle of a turn.", param="session_id")
        if expected_version not in (None, session.version):
            raise VersionConflictError(
                "The session was edited since.", details={"version": session.version}
            )
        directives = [self._directive(session, change, salt) for change in changes]
        return checked(directives, len(session.text), vocab_size=VOCAB_SIZE)

    def _directive(self, session: FakeSession, change: Change | Directive, salt: str) -> Directive:
        if isinstance(change, Directive):
            return change
        ids = _ids(change.replacement)
        if change.source is not None:
            session_id, target = change.source
            source = self._session(salt, session_id)
            start, end = self._place(source, target)
            ids = tuple(map(ord, source.text[start:end]))
        return Directive(*self._place(session, change.target), ids, Mode(change.mode))

    def _place(self, session: FakeSession, target: Target) -> tuple[int, int]:
        if target.start is not None and target.end is not None:
            return target.start, target.end
        start, end = 0, len(session.text)
        for index, message in enumerate(session.messages):
            named = target.message in (index, index - len(session.messages))
            if named or target.tool_call_id == message.tool_call_id is not None:
                start, end = message.start, message.end
        if target.match is not None:
            found = session.text.count(target.match, start, end)
            if found != 1:
                raise DirectiveError(f"The text stands there {found} times.", param="match")
            start = session.text.index(target.match, start, end)
            end = start + len(target.match)
        return start, end

    def _repeat(
        self, request_id: int, session: FakeSession, key: str, changes: Sequence[Change | Directive]
    ) -> EngineEvent:
        asked, result = session.results[key]
        if asked != changes:
            raise IdempotencyError("The key was used for other directives.")
        if result is None:
            raise RequestPendingError("The first request is still under way.")
        return EditResult(
            request_id,
            result.session_id,
            result.version,
            result.length_before,
            result.length_after,
            result.receipts,
            result.elapsed_ms,
            result.state,
            result.purged,
        )

    def _generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        session_id: str | None,
        salt: str = "",
    ) -> int:
        ids = tuple(self.tokenizer.encode(prompt, bos=True) if isinstance(prompt, str) else prompt)
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens; the maximum context length is "
                f"{self.max_model_len}."
            )
        spelled = self.tokenizer.decode(ids)
        text = self.reply(spelled) if self.choose is None else self.choose(spelled, params)
        reply = Reply(
            self.tokenizer.stream(),
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            enough=params.enough,
        )
        request_id = self._next_id()
        text = text[: self.max_model_len - len(ids)]
        self.open[request_id] = Generation(request_id, ids, text, params, reply, session_id, salt)
        return request_id

    def _advance(self, request: Generation | Edit) -> list[EngineEvent]:
        failure = self.failures.pop(request.request_id, None)
        if failure is not None:
            del self.open[request.request_id]
            self._end_turn(request)
            return [Failure(request.request_id, failure)]
        return self._edit(request) if isinstance(request, Edit) else self._say(request)

    def _say(self, request: Generation) -> list[EngineEvent]:
        reply, start = request.reply, len(request.reply.token_ids)
        text = ""
        for character in request.text[start : min(start + self.chunk, request.limit)]:
            text += "" if reply.stopped else reply.push(ord(character))
        done = reply.stopped or len(reply.token_ids) == request.limit
        text += reply.flush() if done else ""
        events: list[EngineEvent] = []
        start, request.told = request.told, reply.num_kept()
        new = tuple(reply.token_ids[start : request.told])
        if text or new:
            events.append(Delta(request.request_id, text, new, self._scored(new, request)))
        if done:
            del self.open[request.request_id]
            events.append(self._complete(request))
        return events

    def _scored(self, ids: Sequence[int], request: Generation) -> tuple[TokenLogprob, ...]:
        most = request.params.logprobs
        return () if most is None else tuple(logprob(one, most) for one in ids)

    def _complete(self, request: Generation) -> Completion:
        version, spliced, state, receipts = None, 0, "exact", ()
        reply, length = request.reply, len(request.prompt)
        if request.session_id is not None:
            session = self.sessions[request.salt + request.session_id]
            if self.edited_history:
                receipts = (_receipt(Directive(length - 1, length - 1), length),)
            session.version += 1
            session.text = self.tokenizer.decode(request.prompt) + reply.text
            version, spliced, state = session.version, session.spliced, session.state
        self._end_turn(request)
        kept = tuple(reply.token_ids[: reply.num_kept()])
        cut = not reply.stopped and request.limit < len(request.text)
        most = request.params.prompt_logprobs
        scores = () if most is None else (None, *(logprob(one, most) for one in request.prompt[1:]))
        return Completion(
            request_id=request.request_id,
            text=reply.text,
            token_ids=kept,
            finish_reason="length" if cut else "stop",
            usage=Usage(
                length,
                len(kept),
                2 + spliced,
                spliced,
                self.degraded,
                state,
                7 if receipts else None,
            ),
            session_id=request.session_id,
            version=version,
            receipts=receipts,
            stopped_by=reply.stopped_by,
            logprobs=self._scored(kept, request),
            prompt_token_ids=request.prompt,
            prompt_logprobs=scores,
        )

    def _edit(self, edit: Edit) -> list[EngineEvent]:
        del self.open[edit.request_id]
        session = self.sessions[edit.salt + edit.session_id]
        session.old[session.version] = session.text
        before = len(session.text)
        for directive in reversed(edit.directives):
            new = "".join(map(_character, directive.replacement))
            session.text = session.text[: directive.start] + new + session.text[directive.end :]
        session.version += 1
        session.spliced += 1
        receipts = tuple(_receipt(directive, before) for directive in edit.directives)
        result = EditResult(
            edit.request_id,
            edit.session_id,
            session.version,
            before,
            len(session.text),
            receipts,
            1.25,
            session.state,
            Purged(5, 4, 1, 2, ("s2",), ("s3",)) if edit.purges else None,
        )
        if edit.key is not None:
            session.results[edit.key] = (session.results[edit.key][0], result)
        return [result]


def logprob(token_id: int, num_top: int) -> TokenLogprob:
    """How likely a token was: the likeliest of those that are told, if there are any."""
    value = -0.125 - token_id % 16
    return TokenLogprob(
        token_id, value, tuple(((token_id + at) % 256, value - at) for at in range(num_top))
    )


def _count(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(content_text(message["content"]) or "") for message in messages)


def _ids(replacement: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(map(ord, replacement)) if isinstance(replacement, str) else tuple(replacement)


def _character(token: int) -> str:
    """A token's text; ids that are none of the vocabulary's stand nowhere."""
    return chr(token) if token < VOCAB_SIZE else "?"


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

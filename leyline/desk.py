"""Where requests come in: prompts, turns of conversations, and edits of their contexts.

A request is validated completely before anything is queued or changed; what it does then is the
loop's business.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from leyline.config import EngineConfig
from leyline.context import Context
from leyline.directive import Directive, Mode
from leyline.door import named_mode
from leyline.editing import listed
from leyline.errors import QuotaError, SessionBusyError
from leyline.events import EditResult
from leyline.job import Asked, Job
from leyline.loop import Loop
from leyline.pointing import Change
from leyline.rendering import PLAIN, Rendering
from leyline.reply import Reply
from leyline.sampling import SamplingParams
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work
from leyline.session import Session
from leyline.target import check_whole
from leyline.turn import Messages, Turn, Turns

MAX_WAITING_EDITS = 64


class Desk(Loop):
    """Takes requests for the loop; see `Loop` for the attributes and errors."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._turns = Turns(self.tokenizer, config.min_run, config.protect_first)
        self._seeds = random.Random(config.seed)

    def submit_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Queue the continuation of a text or of token ids [T]; returns the request's id.

        Raises:
            InvalidRequestError: If the prompt is empty or holds ids outside the vocabulary.
            ContextLengthError: If it leaves no room for an answer.
        """
        params = self._door.sampling(params)
        context = Context.of(self._door.prompt(prompt), self._door.root(salt))
        return self._submit_turn(next(self._ids), context, params)

    def submit_chat(
        self,
        messages: Messages,
        params: SamplingParams,
        *,
        session_id: str | None = None,
        salt: str = "",
        edit_mode: str | None = None,
        tentative: bool = False,
        rendering: Rendering = PLAIN,
        prompt: Sequence[int] | None = None,
    ) -> int:
        """Queue the next turn of a conversation; returns the request's id.

        With a session the messages are the client's full history, as always. If they extend what
        the client was told, or what the context says, the turn goes on from the session's
        context; else the difference is an edit in `edit_mode`, by default the engine's.

        A session may be a guess: agents send one key with all that they ask for, the title of a
        conversation included. With `tentative`, a history that has little in common with the
        session's is answered without it, and so is a request that no session can answer.

        Turning a long history into tokens takes a while. Who has done that already gives them as
        `prompt`; a turn without a session then costs no such time.

        Raises:
            InvalidRequestError: If the messages do not render, or leave nothing to answer.
            DirectiveError: If there is no such mode.
            ContextLengthError: If there is no room for an answer.
            SessionBusyError: If the session is in the middle of a turn or an edit.
        """
        params = self._door.sampling(params, in_session=session_id is not None and not tentative)
        if params.prompt_logprobs is not None:
            session_id = None
        root = self._door.root(salt)
        if session_id is not None:
            self._door.name(session_id, "session_id")
        mode = named_mode(self.config.edit_mode if edit_mode is None else edit_mode)
        self.sessions.expire(time.monotonic())
        session = self.sessions.find(session_id, root) if session_id is not None else None
        told = (messages, params, session_id, root, mode, tentative, rendering, prompt)
        start = partial(self._chat, *told)
        if session is not None and self._fires(session):
            return self._defer(session, start)
        return start(next(self._ids))

    def _chat(
        self,
        messages: Messages,
        params: SamplingParams,
        session_id: str | None,
        root: bytes,
        mode: Mode,
        tentative: bool,
        rendering: Rendering,
        prompt: Sequence[int] | None,
        request_id: int,
    ) -> int:
        """Queue a turn under an id that it has already."""
        session = self._idle_session(session_id, root) if session_id is not None else None
        if session is None or not len(session.context):
            is_located = session_id is not None
            turn = self._turns.fresh(messages, root, rendering, located=is_located, prompt=prompt)
        else:
            turn = self._turns.following(session, messages, mode, rendering)
            if tentative and turn.unrelated(len(session.context)):
                session_id, session = None, None
                turn = self._turns.fresh(messages, root, rendering, located=False, prompt=prompt)
        self._door.room(turn.after, _least(params))
        if session_id is not None and session is None:
            session = self.sessions.create(session_id, root, time.monotonic())
        return self._submit_turn(request_id, turn.context, params, turn, session)

    def submit_directives(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        salt: str = "",
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> int:
        """Queue a set of edits of a session's context; returns the request's id.

        An idle session is edited at once, a busy one between two of its steps, behind the edits
        that wait already. Positions are those of the context as all earlier edits leave it.

        Args:
            session_id: The session.
            changes: The set: all of it is carried out, or none.
            salt: The tenant's or request's cache salt.
            expected_version: Refuse the set if the session was edited since this version.
            idempotency_key: A repeat with this key gets the first one's result, and edits nothing.

        Raises:
            SessionNotFoundError: If there is no such session.
            DirectiveError: If the set does not fit the context; nothing has changed.
            ContextLengthError: If the context would outgrow the window.
            InvalidRequestError: If an argument is not what it should be.
            VersionConflictError: If the session has another version than expected.
            IdempotencyError: If the key came with another request before.
            RequestPendingError: If the first request with this key is still under way.
            QuotaError: If too many edits of the session wait already.
        """
        changes = listed(changes)
        check_whole(expected_version, "expected_version", 0)
        asked = (changes, expected_version)
        session = self._session(session_id, salt)
        if idempotency_key is not None:
            key = self._door.name(idempotency_key, "idempotency_key")
            answer = session.answers.earlier(key, asked)
            if answer is not None:
                return self._again(answer)
        job = self._job(session)
        if job is not None and len(job.work.edits) >= MAX_WAITING_EDITS:
            raise QuotaError(
                f"{MAX_WAITING_EDITS} edits of this session wait already; send this one again "
                "when some of them are done."
            )
        draft = self._editor.draft(session, job, changes, expected_version)
        if idempotency_key is not None:
            session.answers.ask(idempotency_key, asked)
        return self._edit(session, draft, Asked(time.perf_counter(), idempotency_key, draft.reach))

    def _session(self, session_id: str, salt: str) -> Session:
        """The session of that name.

        Raises:
            InvalidRequestError: If the name or the salt is no text.
            SessionNotFoundError: If there is no such session.
        """
        name, root = self._door.name(session_id, "session_id"), self._door.root(salt)
        self.sessions.expire(time.monotonic())
        return self.sessions.get(name, root)

    def _submit_turn(
        self,
        request_id: int,
        context: Context,
        params: SamplingParams,
        turn: Turn | None = None,
        session: Session | None = None,
    ) -> int:
        """Queue a turn."""
        after = turn.after if turn else context
        self._door.scored(len(after), params)
        room = self._door.room(after, _least(params))
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        work = Work(
            sequence_id=request_id,
            view=View(context),
            sampling=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=self._stop_ids(params),
            computed=session.known(context) if session else 0,
        )
        job = Job(
            work,
            session,
            self._reply(params),
            turn,
            reply_start=len(after),
            prompt=after.tokens,
        )
        if session is not None and turn is not None and turn.directives:
            self._take_over(job, session, turn)
        return self._start(job).request_id

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a request's reply."""
        own = frozenset[int]() if params.ignore_eos else self.tokenizer.stop_ids
        return own.union(params.stop_token_ids)

    def _reply(self, params: SamplingParams) -> Reply:
        """An empty reply."""
        stream = self.tokenizer.stream(skip_special=params.skip_special_tokens, shown=params.shown)
        return Reply(
            stream,
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            enough=params.enough,
        )

    def _take_over(self, job: Job, session: Session, turn: Turn) -> None:
        """Have a turn carry out what its client changed in the history."""
        job.keep = self.sessions.affords_version(session, turn.directives[0].start, len(turn.after))
        if turn.carried:
            request = EditRequest(
                next(self._ids), turn.directives, append=turn.append, own=True, keep=job.keep
            )
            job.work.edits.append(request)
            job.requests[request.request_id] = request

    def _again(self, answer: EditResult) -> int:
        """Tell an earlier result once more."""
        request_id = next(self._ids)
        self._outbox.append(replace(answer, request_id=request_id))
        return request_id

    def _idle_session(self, session_id: str, root: bytes) -> Session | None:
        """The session of that name if there is one; a busy one is an error."""
        session = self.sessions.find(session_id, root)
        if session is not None and (session.busy or session in self._deferred):
            raise SessionBusyError(
                f"Session {session_id!r} is in the middle of a turn or an edit; send the request "
                "again when it has ended.",
                param="session_id",
            )
        return session


def _least(params: SamplingParams) -> int:
    """Tokens of an answer that there must be room for: none if the prompt is only scored."""
    return int(params.max_tokens != 0)

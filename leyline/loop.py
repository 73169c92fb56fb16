"""Requests in, events out: the loop of plan, run and commit.

`submit_*` validates a request completely and queues it; `step` does one round and says what
happened. Every accepted request ends with exactly one terminal event. All methods belong to one
thread: a notebook's, or the server's worker.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leyline.batch import Edited, Ended, Event, SamplingParams
from leyline.config import EngineConfig
from leyline.context import Context, salted
from leyline.directive import Directive
from leyline.door import Door
from leyline.errors import (
    CancelledError,
    CapacityError,
    EngineClosedError,
    LeylineError,
    SessionBusyError,
    internal,
    superseded,
)
from leyline.events import EngineEvent, Failure, FinishReason, SessionInfo
from leyline.job import Job
from leyline.parts import Parts, load
from leyline.reply import Reply
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work
from leyline.session import Session, Sessions

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
STALLED_STEPS = 1000


class EngineLoop:
    """Serves one model, a step at a time.

    Args:
        config: The options.

    Attributes:
        config: The options.
        tokenizer: Text to ids and back.
        model_name: What clients call the model.
        max_model_len: Tokens a context holds at most.
        sessions: The resident sessions.

    Raises:
        ConfigError: An option does not fit the model or the machine.
        ModelError: The model folder cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.sessions = Sessions(self.config.max_sessions, self.config.session_ttl_s)
        parts = load(self.config, self.sessions.others)
        self._parts: Parts | None = parts
        self.tokenizer = parts.tokenizer
        self.model_name = parts.model_name
        self.max_model_len = parts.max_model_len
        self._door = Door(parts.tokenizer, parts.num_tokens, parts.max_model_len, self.config)
        self._jobs: dict[int, Job] = {}
        self._outbox: list[EngineEvent] = []
        self._ids = itertools.count(1)
        self._seeds = random.Random(self.config.seed)
        self._empty_steps = 0

    @property
    def parts(self) -> Parts:
        """The engine's inside; an `EngineClosedError` once it is closed."""
        if self._parts is None:
            raise EngineClosedError("The engine is closed; make a new one.")
        return self._parts

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._outbox or self._jobs)

    def close(self) -> None:
        """Give the memory back; requests under way end without an answer. Safe to call twice."""
        self._parts = None
        for session in self.sessions:
            session.sequence_id = None
        self._jobs.clear()
        self._outbox.clear()

    # -- submit ---------------------------------------------------------------------------------

    def submit_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Queue the continuation of a text or of token ids [T]; returns the request's id.

        Raises:
            InvalidRequestError: If the prompt is empty or holds ids outside the vocabulary.
            ContextLengthError: If it leaves no room for an answer.
        """
        return self._submit_turn(Context.of(self._door.prompt(prompt), salted(salt)), params)

    def submit_chat(
        self,
        messages: Messages,
        params: SamplingParams,
        *,
        session_id: str | None = None,
        salt: str = "",
    ) -> int:
        """Queue the next turn of a conversation; returns the request's id.

        With a session the messages are the client's full history, as always. If they extend what
        the client was told, or what the context says, the turn goes on from the session's
        context; else it starts from the messages.

        Raises:
            InvalidRequestError: If the messages do not render, or leave nothing to answer.
            ContextLengthError: If there is no room for an answer.
            SessionBusyError: If the session is in the middle of a turn or an edit.
        """
        rendered = self.tokenizer.render(messages)
        root = salted(salt)
        session = self._idle_session(session_id, root) if session_id is not None else None
        context = self._continued(session, rendered) if session else None
        if context is None:  # the template writes its own BOS
            context = Context.of(self.tokenizer.encode(rendered), root)
        self._door.room(context)
        if session_id is not None and session is None:
            session = self.sessions.create(session_id, root, time.monotonic())
        return self._submit_turn(context, params, rendered, session)

    def submit_directives(
        self, session_id: str, directives: Sequence[Directive], *, salt: str = ""
    ) -> int:
        """Queue a set of edits of a session's context; returns the request's id.

        An idle session is edited at once, a busy one between two of its steps, behind the edits
        that wait already. Positions are those of the context as all earlier edits leave it.

        Raises:
            SessionNotFoundError: If there is no such session.
            DirectiveError: If the set does not fit the context; nothing has changed.
            ContextLengthError: If the context would outgrow the window.
        """
        session = self.sessions.get(session_id, salted(salt))
        request = EditRequest(next(self._ids), self._checked(session, directives))
        job = self._job(session)
        if job is None:
            job = self._start(Job(_edit_work(request.request_id, session), session))
            job.work.edits.append(request)
        else:
            self.parts.scheduler.edit(job.request_id, request)
        job.waiting[request.request_id] = time.perf_counter()
        return request.request_id

    def cancel(self, request_id: int) -> None:
        """Give a request up; nothing happens if it has ended.

        A cancelled turn leaves its session as it was before, but for edits that committed during
        it. A cancelled edit is either done or not done.
        """
        job = self._jobs.get(request_id)
        if job is not None and job.reply is not None:
            self._close(job, CancelledError("The request was cancelled."))
            return
        for job in list(self._jobs.values()):
            if request_id in job.waiting:
                self._cancel_edit(job, request_id)

    def session_ids(self) -> list[str]:
        """Names of the resident sessions."""
        return [session.session_id for session in self.sessions]

    def session_info(self, session_id: str, *, salt: str = "") -> SessionInfo:
        """Describe a session as of now.

        Raises:
            SessionNotFoundError: If there is no such session.
        """
        session = self.sessions.get(session_id, salted(salt))
        job = self._job(session)
        context = job.work.view.whole() if job else session.context
        return SessionInfo(
            session_id=session_id,
            version=session.version,
            context_length=len(context),
            pieces=tuple((start, end, piece.exact) for start, end, piece in context.spans()),
            token_ids=context.tokens,
            text=self.tokenizer.decode(context.tokens, skip_special=False),
            busy=session.busy,
        )

    def delete_session(self, session_id: str, *, salt: str = "") -> None:
        """Forget a session; its turn or edits under way are cancelled.

        Raises:
            SessionNotFoundError: If there is no such session.
        """
        session = self.sessions.get(session_id, salted(salt))
        job = self._job(session)
        if job is not None:
            self._close(job, CancelledError("The session was deleted."))
        if self.sessions.find(session_id, session.context.root) is session:
            self.sessions.delete(session)

    # -- step -----------------------------------------------------------------------------------

    def step(self) -> list[EngineEvent]:
        """One round of plan, run and commit; returns what happened, in order."""
        scheduler, executor = self.parts.scheduler, self.parts.executor
        batch = scheduler.plan()
        try:
            output = executor.run(batch)
        except Exception as error:
            logger.exception("A batch failed; its requests end with an error.")
            self._fail(scheduler.fail(batch), internal(error))
        except BaseException:  # Ctrl-C in a notebook: nothing of the batch may land
            self._fail(scheduler.fail(batch), CancelledError("The step was interrupted."))
            raise
        else:
            # An empty batch is committed too: cancelling may have left a sequence nothing to do.
            for event in scheduler.commit(batch, output):
                self._land(event)
        events, self._outbox = self._outbox, []
        self._watch(progress=bool(batch or events))
        return events

    def _land(self, event: Event) -> None:
        """Turn one thing that the scheduler committed into what callers are told."""
        job = self._jobs.get(event.sequence_id)
        if job is None:  # a stop string ended it a moment ago
            return
        if isinstance(event, Edited):
            self._edited(job, event)
        elif isinstance(event, Ended):
            self._outbox += job.flush()
            self._complete(job, "length" if event.reason == "length" else "stop")
        else:
            self._outbox += job.push(event.token)
            if job.reply is not None and job.reply.stopped:
                self._complete(job, "stop")

    def _edited(self, job: Job, event: Edited) -> None:
        """An edit committed; that of an idle session is reported when its rows are complete."""
        job.commit(event)
        if job.reply is not None:
            self._outbox += job.report()

    def _complete(self, job: Job, reason: FinishReason) -> None:
        """A sequence came to its end, and with it its edits, for none samples while one waits."""
        if job.reply is not None:
            self._outbox.append(job.completion(reason))
        job.hand_over(self.tokenizer)
        self._close(job, None)

    def _close(self, job: Job, error: LeylineError | None) -> None:
        """Forget a job; what it has not answered ends with the error."""
        self.parts.scheduler.finish(job.request_id)
        del self._jobs[job.request_id]
        self._outbox += job.report()
        if error is not None:
            self._refuse(job, error)
        if job.session is not None:
            job.session.sequence_id = None
            job.session.last_used = time.monotonic()

    def _refuse(self, job: Job, error: LeylineError) -> None:
        """End a job's open requests; its session keeps the edits that committed, nothing else."""
        if job.reply is not None:
            self._outbox.append(Failure(job.request_id, error))
        self._outbox += [Failure(request_id, error) for request_id in job.waiting]
        job.waiting.clear()
        if job.edited:
            job.hand_over(self.tokenizer, answered=False)
        elif job.session is not None and not len(job.session.context):
            self.sessions.delete(job.session)

    def _cancel_edit(self, job: Job, request_id: int) -> None:
        """Drop an edit that has not committed."""
        error = CancelledError("The edit was cancelled; nothing has changed.")
        for dropped in self.parts.scheduler.cancel_edit(job.request_id, request_id):
            del job.waiting[dropped]
            self._outbox.append(Failure(dropped, error if dropped == request_id else superseded()))
        if job.reply is None and not job.waiting and not job.results:
            self._close(job, None)

    def _fail(self, sequence_ids: Iterable[int], error: LeylineError) -> None:
        """End the requests of sequences that could not be run."""
        for sequence_id in sequence_ids:
            self._close(self._jobs[sequence_id], error)

    def _watch(self, *, progress: bool) -> None:
        """Count steps that did nothing: after many of them the oldest request makes room."""
        self._empty_steps = 0 if progress or not self._jobs else self._empty_steps + 1
        if self._empty_steps >= STALLED_STEPS:
            self._empty_steps = 0
            self._fail([min(self._jobs)], CapacityError("The cache has no room for this request."))

    # -- turns and contexts ---------------------------------------------------------------------

    def _submit_turn(
        self,
        context: Context,
        params: SamplingParams,
        rendered: str = "",
        session: Session | None = None,
    ) -> int:
        """Queue a turn."""
        room = self._door.room(context)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        work = Work(
            sequence_id=next(self._ids),
            view=View(context),
            sampling=params,
            max_tokens=min(params.max_tokens or room, room),
            stop_ids=frozenset() if params.ignore_eos else self.tokenizer.stop_ids,
            computed=session.known(context) if session else 0,
        )
        reply = Reply(self.tokenizer.stream(), params.stop)
        return self._start(Job(work, session, reply, rendered)).request_id

    def _start(self, job: Job) -> Job:
        """Hand a job to the scheduler."""
        self.parts.scheduler.add(job.work)
        self._jobs[job.request_id] = job
        if job.session is not None:
            job.session.sequence_id = job.request_id
        return job

    def _job(self, session: Session) -> Job | None:
        """The turn or edit that a session is busy with."""
        return None if session.sequence_id is None else self._jobs[session.sequence_id]

    def _idle_session(self, session_id: str, root: bytes) -> Session | None:
        """The session of that name if there is one; a busy one is an error."""
        session = self.sessions.find(session_id, root)
        if session is not None and session.busy:
            raise SessionBusyError(
                f"Session {session_id!r} is in the middle of a turn or an edit; send the request "
                "again when it has ended.",
                param="session_id",
            )
        return session

    def _continued(self, session: Session, rendered: str) -> Context | None:
        """The session's context with what a rendering adds to it, or None if it is no addition."""
        added = session.appended(rendered, "")
        if added is None:
            text = self.tokenizer.decode(session.context.tokens, skip_special=False)
            added = session.appended(rendered, text)
        return None if added is None else session.context.append(self.tokenizer.encode(added))

    def _checked(self, session: Session, directives: Sequence[Directive]) -> tuple[Directive, ...]:
        """A set in order of position, if it fits what the session's context is going to be."""
        job = self._job(session)
        length, to_come = len(session.context), 0
        if job is not None:
            waiting = [d for request in job.work.edits for d in request.directives]
            length = len(job.work.view) + sum(d.delta for d in waiting)
            to_come = max(0, job.work.max_tokens - len(job.work.generated))
        return self._door.directives(directives, length, to_come)


def _edit_work(request_id: int, session: Session) -> Work:
    """The sequence that edits an idle session: it samples nothing."""
    length, computed = len(session.context), session.computed
    return Work(request_id, View(session.context), computed=computed, owed=length - computed)

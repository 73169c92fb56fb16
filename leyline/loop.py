"""The loop of plan, run and commit, and what becomes of the requests in it.

`step` does one round and says what happened. Every accepted request ends with exactly one
terminal event. When a session is idle again, the marks that are due fire, and it heals if it
should. All methods belong to one thread: a notebook's, or the server's worker.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import reduce

from leyline.batch import Batch, Broken, Edited, Ended, Event, StepOutput
from leyline.config import EngineConfig
from leyline.context import Context
from leyline.directive import Directive
from leyline.door import Door
from leyline.editing import Draft, Editor
from leyline.errors import (
    CancelledError,
    CapacityError,
    EngineClosedError,
    LeylineError,
    internal,
    not_forgotten,
    superseded,
)
from leyline.events import EngineEvent, Failure, FinishReason, Purged
from leyline.job import Asked, Job, edit_work
from leyline.parts import Parts, load, sessions_of
from leyline.rates import Rates
from leyline.reach import Reach
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work
from leyline.session import Session

logger = logging.getLogger(__name__)

STALLED_STEPS = 1000


class Loop:
    """Runs jobs, a step at a time.

    Args:
        config: The options.

    Attributes:
        config: The options.
        tokenizer: Text to ids and back.
        model_name: What clients call the model.
        max_model_len: Tokens a context holds at most.
        sessions: The resident sessions.
        rates: How long work takes on this machine.

    Raises:
        ConfigError: An option does not fit the model or the machine.
        ModelError: The model folder cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        parts = load(
            config,
            keepers=lambda sequence_id: self.sessions.others(sequence_id),
            pinned=lambda: self.sessions.pinned(time.monotonic()),
        )
        self._parts: Parts | None = parts
        self.sessions = sessions_of(config, parts)
        self.tokenizer = parts.tokenizer
        self.model_name = parts.model_name
        self.max_model_len = parts.max_model_len
        self.rates = Rates(config.max_num_batched_tokens)
        self._reach = Reach(parts, self.sessions)
        self._door = Door(parts.tokenizer, parts.num_tokens, parts.max_model_len, config)
        self._editor = Editor(self._door, parts.tokenizer, self.sessions)
        self._jobs: dict[int, Job] = {}
        self._deferred: dict[Session, tuple[int, Callable[[int], int]]] = {}
        self._outbox: list[EngineEvent] = []
        self._ids = itertools.count(1)
        self._empty_steps = 0

    @property
    def parts(self) -> Parts:
        """The engine's inside; an `EngineClosedError` once it is closed."""
        if self._parts is None:
            raise EngineClosedError("The engine is closed; make a new one.")
        return self._parts

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, healing in the background included."""
        return bool(self._outbox or self._jobs)

    def close(self) -> None:
        """Give the memory back; requests under way end without an answer. Safe to call twice."""
        self._parts = None
        for session in self.sessions:
            session.sequence_id = session.heal_id = None
        self._jobs.clear()
        self._deferred.clear()
        self._outbox.clear()

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
        for session, (deferred, _) in list(self._deferred.items()):
            if request_id == deferred:
                self._give_up_deferred(session, CancelledError("The request was cancelled."))

    # -- step -----------------------------------------------------------------------------------

    def step(self) -> list[EngineEvent]:
        """One round of plan, run and commit; returns what happened, in order."""
        scheduler, batch = self.parts.scheduler, Batch()
        committed = list[Event]()
        self._stop_orphans()
        try:
            batch = scheduler.plan()
            output = self._run(batch)
        except Exception as error:
            logger.exception("A batch failed; its requests end with an error.")
            self._fail(self._undone(batch), internal(error))
        except BaseException:  # Ctrl-C in a notebook: nothing of the batch may land
            self._fail(self._undone(batch), CancelledError("The step was interrupted."))
            raise
        else:
            # An empty batch is committed too: cancelling may have left a sequence nothing to do.
            committed = scheduler.commit(batch, output)
        for event in committed:
            self._try_to_land(event)
        events, self._outbox = self._outbox, []
        self._watch(progress=bool(batch or events))
        return events

    def _undone(self, batch: Batch) -> list[int]:
        """The sequences that end with a batch that was not planned to its end, or not run."""
        scheduler = self.parts.scheduler
        return scheduler.fail(batch) if batch else scheduler.abandon()

    def _run(self, batch: Batch) -> StepOutput:
        """Have a batch computed, and learn how long that takes."""
        since = time.perf_counter()
        output = self.parts.executor.run(batch)
        self.rates.note(batch, 1e3 * (time.perf_counter() - since))
        return output

    def _try_to_land(self, event: Event) -> None:
        """Have an event told; if that cannot be done, its own request fails and no other."""
        try:
            self._land(event)
        except Exception as error:
            logger.exception("What became of a request could not be told.")
            self.parts.scheduler.put_in_order()
            job = self._jobs.get(event.sequence_id)
            if job is not None:
                self._close(job, internal(error))

    def _land(self, event: Event) -> None:
        """Turn one thing that the scheduler committed into what callers are told."""
        job = self._jobs.get(event.sequence_id)
        if job is None:  # a stop string ended it a moment ago
            return
        if isinstance(event, Edited):
            self._edited(job, event)
        elif isinstance(event, Broken):
            logger.error("A result could not land.", exc_info=event.error)
            self._close(job, internal(event.error))
        elif isinstance(event, Ended):
            self._outbox += job.flush()
            self._complete(job, "length" if event.reason == "length" else "stop")
        else:
            self._outbox += job.push(event.token)
            if job.reply is not None and job.reply.stopped:
                self._complete(job, "stop")

    def _edited(self, job: Job, event: Edited) -> None:
        """An edit committed; that of an idle session is reported when its rows are complete."""
        self._reach.learn(event.edit)
        asked = job.waiting.get(event.request_id)
        job.commit(event)
        if asked is not None and asked.reach:
            self._purge(job, event.edit.before.root, asked.reach)
        if job.reply is not None:
            self._outbox += job.report()

    def _purge(self, job: Job, root: bytes, texts: tuple[bytes, ...]) -> None:
        """Have the cache forget texts; it is tried again once, for what is done is done."""
        for tries_left in (1, 0):
            try:
                purged = [self._reach.purge(root, text) for text in texts]
            except Exception as error:
                logger.exception("A purge failed.")
                self.parts.scheduler.put_in_order()
                if not tries_left:
                    self._outbox.append(job.take_back(not_forgotten(error)))
            else:
                job.purged(reduce(Purged.and_then, purged))
                return

    def _complete(self, job: Job, reason: FinishReason) -> None:
        """A sequence came to its end, and with it its edits, for none samples while one waits."""
        if job.work.background:
            self._healed(job)
            return
        job.hand_over(self.tokenizer)
        if job.reply is not None:
            self._outbox.append(job.completion(reason))
        self._close(job, None)

    def _close(self, job: Job, error: LeylineError | None) -> None:
        """Forget a job; what it has not answered ends with the error."""
        self._finish(job)
        del self._jobs[job.request_id]
        if job.session is not None and job.work.background:
            job.session.heal_id = None
            return
        if job.session is not None:
            job.session.sequence_id = None
        self._outbox += job.report()
        if error is not None:
            self._refuse(job, error)
        if job.session is not None:
            self._leave(job.session, turn_ended=job.reply is not None and error is None)

    def _leave(self, session: Session, *, turn_ended: bool) -> None:
        """A session is idle: it gets what it has coming, and then the turn that waits for it."""
        session.last_used = time.monotonic()
        with self._unasked("what a session had coming"):
            self.sessions.fit(session)
            self._tend(session, turn_ended=turn_ended)
        self._start_deferred(session)

    @contextmanager
    def _unasked(self, what: str) -> Generator[None, None, None]:
        """Something that nobody waits for: if it fails it is told in the log, and not done."""
        try:
            yield
        except Exception:
            logger.exception("This could not be done: %s.", what)
            self.parts.scheduler.put_in_order()

    def _finish(self, job: Job) -> None:
        """Have the scheduler forget a job; rows that cannot be filed are lost, nothing else."""
        with self._unasked("filing the rows of a request"):
            self.parts.scheduler.finish(job.request_id)
            return
        self.parts.scheduler.forsake(job.request_id)

    def _refuse(self, job: Job, error: LeylineError) -> None:
        """End a job's open requests; its session keeps the edits that committed, nothing else."""
        if job.reply is not None:
            self._outbox.append(Failure(job.request_id, error))
        self._outbox += [job.fail(request_id, error) for request_id in list(job.waiting)]
        if job.edited:
            job.hand_over(self.tokenizer, answered=False)
        elif job.session is not None and not len(job.session.context):
            self.sessions.delete(job.session)

    def _cancel_edit(self, job: Job, request_id: int) -> None:
        """Drop an edit that has not committed."""
        error = CancelledError("The edit was cancelled; nothing has changed.")
        for dropped in self.parts.scheduler.cancel_edit(job.request_id, request_id):
            self._outbox.append(job.fail(dropped, error if dropped == request_id else superseded()))
        if job.reply is None and not job.requests and not job.edited:
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

    # -- jobs -----------------------------------------------------------------------------------

    def _edit(self, session: Session, draft: Draft, asked: Asked | None) -> int:
        """Queue an edit; nobody waits for that of a mark."""
        request = EditRequest(next(self._ids), draft.directives, keep=draft.keep)
        job = self._job(session)
        if job is None:
            job = Job(edit_work(request.request_id, session), session)
            job.work.edits.append(request)
            self._start(job)
        else:
            self.parts.scheduler.edit(job.request_id, request)
        job.requests[request.request_id] = request
        if asked is not None:
            job.waiting[request.request_id] = asked
        return request.request_id

    def _start(self, job: Job) -> Job:
        """Hand a job to the scheduler; its session is busy until it ends, and heals later."""
        self.parts.scheduler.add(job.work)
        self._jobs[job.request_id] = job
        if job.session is not None and not job.work.background:
            self._stop_healing(job.session)
            job.session.sequence_id = job.request_id
        return job

    def _job(self, session: Session) -> Job | None:
        """The turn or edit that a session is busy with."""
        return None if session.sequence_id is None else self._jobs[session.sequence_id]

    # -- between turns --------------------------------------------------------------------------

    def _tend(self, session: Session, *, turn_ended: bool) -> None:
        """See to what an idle session has coming: marks that are due, then its healing."""
        if self.sessions.find(session.session_id, session.context.root) is not session:
            return
        due = session.end_turn(time.monotonic()) if turn_ended else ()
        if due:
            self._fire(session, due)
        if not session.busy and session.healing:
            self._heal(session)

    def _fire(self, session: Session, due: tuple[Directive, ...]) -> None:
        """Carry out marks whose time has come; one that does not fit any more is given up."""
        try:
            draft = self._editor.draft(session, None, due, None)
        except LeylineError as error:
            logger.warning("A mark of a session could not fire: %s", error.code)
            return
        self._edit(session, draft, None)

    def _fires(self, session: Session) -> bool:
        """Whether a session is busy with nothing but its marks, which nobody waits for."""
        job = self._job(session)
        asked = job is not None and (job.reply is not None or job.waiting or job.results)
        return job is not None and not asked and session not in self._deferred

    def _defer(self, session: Session, start: Callable[[int], int]) -> int:
        """Have a turn wait until its session's marks have fired; returns its id."""
        request_id = next(self._ids)
        self._deferred[session] = request_id, start
        return request_id

    def _start_deferred(self, session: Session) -> None:
        """Start the turn that waited for a session's marks, if there is one."""
        if session in self._deferred and not session.busy:
            request_id, start = self._deferred.pop(session)
            try:
                start(request_id)
            except LeylineError as error:
                self._outbox.append(Failure(request_id, error))

    def _give_up_deferred(self, session: Session, error: LeylineError) -> None:
        """End the turn that waits for a session's marks, if there is one."""
        if session in self._deferred:
            self._outbox.append(Failure(self._deferred.pop(session)[0], error))

    def _heal(self, session: Session) -> None:
        """Have the exact form of a session's context computed while nobody else wants anything."""
        exact = Context.of(session.context.tokens, session.context.root)
        work = Work(next(self._ids), View(exact), background=True)
        work.owed = len(exact) - session.computed
        session.heal_id = work.sequence_id
        self._start(Job(work, session))

    def _healed(self, job: Job) -> None:
        """Go on from the exact form: the text is the same, so it is no new version."""
        session, exact = job.session, job.work.view.whole()
        assert session is not None and not session.busy, "a session healed in the middle of a turn"
        before = session.context
        session.heal(exact)
        self._close(job, None)
        with self._unasked("forgetting rows that were healed"):
            self.parts.scheduler.forget_grafts(before)

    def _stop_healing(self, session: Session) -> None:
        """Give a healing up; the rows that it has are in the tree and will be found again."""
        if session.heal_id is not None:
            self._close(self._jobs[session.heal_id], None)

    def _stop_orphans(self) -> None:
        """Give up the healing of sessions that had to make room, or that nobody used."""
        for job in [job for job in self._jobs.values() if job.work.background]:
            session = job.session
            assert session is not None, "healing is a session's"
            if self.sessions.find(session.session_id, session.context.root) is not session:
                self._close(job, None)

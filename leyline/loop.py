"""The loop of plan, run and commit, and what becomes of the requests in it.

`step` does one round and says what happened. Every accepted request ends with exactly one
terminal event. All methods belong to one thread: a notebook's, or the server's worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import reduce

from leyline.batch import Batch, Broken, Edited, Ended, Event, StepOutput
from leyline.errors import (
    CancelledError,
    CapacityError,
    LeylineError,
    internal,
    not_forgotten,
    superseded,
)
from leyline.events import EngineEvent, Failure, FinishReason, Purged
from leyline.job import Job
from leyline.jobs import Jobs
from leyline.session import Session

logger = logging.getLogger(__name__)

STALLED_STEPS = 1000


class Loop(Jobs):
    """Runs jobs, a step at a time; see `Jobs` for the attributes and errors."""

    def cancel(self, request_id: int) -> None:
        """Give a request up; nothing happens if it has ended.

        A cancelled turn leaves its session as it was before, but for edits that committed during
        it. The client's own edit of its history is one of those where its rows are carried over:
        the session then has that history, and no reply. A cancelled edit is either done or not.
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
        self._learn(committed)
        for event in self._purges_last(committed):
            self._try_to_land(event)
        self._clean_up()
        events, self._outbox = self._outbox, []
        self._watch(progress=bool(batch or events))
        return events

    def _learn(self, events: Iterable[Event]) -> None:
        """Note where the rows of all edits come from, before a purge among them asks."""
        for event in events:
            if isinstance(event, Edited):
                with self._unasked("noting what carried rows have seen"):
                    self._reach.learn(event.edit)

    def _purges_last(self, events: Iterable[Event]) -> list[Event]:
        """The events, those of jobs that purge behind the others.

        A sequence that ended in this step is gone from the scheduler, and its session learns of it
        when the event lands. A purge in between would overlook what it has.
        """
        purging = {
            job.request_id
            for job in self._jobs.values()
            if any(asked.reach for asked in job.waiting.values())
        }
        return sorted(events, key=lambda event: event.sequence_id in purging)

    def _clean_up(self) -> None:
        """Forget what nobody can go on from any more, and what purges of this step overlooked."""
        with self._unasked("forgetting rows that nobody needs"):
            for context in self.sessions.take_gone():
                self.parts.scheduler.forget_grafts(context)
            if self._purged:
                purged, self._purged = self._purged, []
                self._reach.clean(purged)

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
            self._log_broken(event.error)
            self._close(job, internal(event.error))
        elif isinstance(event, Ended):
            self._complete(job, "length" if event.reason == "length" else "stop")
        else:
            self._outbox += job.push(event)
            if job.reply is not None and job.reply.stopped:
                self._complete(job, "stop")

    def _log_broken(self, error: Exception) -> None:
        """Tell the log of a result that could not land; words meant for a client stay out of it."""
        if isinstance(error, LeylineError):
            logger.error("A result could not land (%s).", error.code)
        else:
            logger.error("A result could not land.", exc_info=error)

    def _edited(self, job: Job, event: Edited) -> None:
        """An edit committed; that of an idle session is reported when its rows are complete."""
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
                self._purged += [(root, text) for text in texts]
                job.purged(reduce(Purged.and_then, purged))
                return

    def _complete(self, job: Job, reason: FinishReason) -> None:
        """A sequence came to its end, and with it its edits, for none samples while one waits."""
        if job.work.background:
            self._healed(job)
            return
        self._outbox += job.flush()
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

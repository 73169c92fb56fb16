"""What an engine has to do: its jobs, and what sessions have coming between turns.

A session is busy with one job at a time. When it is idle again, the marks that are due fire, a
turn that waited for them starts, and it heals in the background if it should.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from leyline.config import EngineConfig
from leyline.context import Context
from leyline.directive import Directive
from leyline.door import Door
from leyline.editing import Draft, Editor
from leyline.errors import (
    EngineClosedError,
    LeylineError,
    internal,
)
from leyline.events import EngineEvent, Failure
from leyline.job import Asked, Job, edit_work
from leyline.parts import Parts, load, sessions_of
from leyline.rates import Rates
from leyline.reach import Reach
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work
from leyline.session import Session

logger = logging.getLogger(__name__)


class Jobs(ABC):
    """Queues jobs for the scheduler and keeps track of them.

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
        self._purged: list[tuple[bytes, bytes]] = []
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

    @abstractmethod
    def _close(self, job: Job, error: LeylineError | None) -> None:
        """Forget a job; what it has not answered ends with the error."""

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

    @contextmanager
    def _unasked(self, what: str) -> Generator[None, None, None]:
        """Something that nobody waits for: if it fails it is told in the log, and not done."""
        try:
            yield
        except Exception:
            logger.exception("This could not be done: %s.", what)
            self.parts.scheduler.put_in_order()

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

    def _fire(self, session: Session, due: Sequence[Directive]) -> None:
        """Carry out marks whose time has come; one that does not fit any more is given up."""
        fitting = [directive for directive in due if self._fits(session, [directive])]
        while fitting and not self._fits(session, fitting):
            fitting.pop()
        if len(fitting) < len(due):
            logger.warning("%d marks did not fit and were given up.", len(due) - len(fitting))
        if fitting:
            self._edit(session, self._editor.draft(session, None, tuple(fitting), None), None)

    def _fits(self, session: Session, directives: Sequence[Directive]) -> bool:
        """Whether marks that are due could be carried out together."""
        try:
            self._editor.draft(session, None, tuple(directives), None)
        except LeylineError:
            return False
        return True

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
            except Exception as error:
                self._outbox.append(Failure(request_id, internal(error)))

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
        session.heal(exact)
        self._close(job, None)

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

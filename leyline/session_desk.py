"""What is asked of sessions beside turns and edits.

They are looked at, taken back, marked, saved and forgotten here, edits of them are planned, and
the cache is searched for what they left behind.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from leyline.batch import Batch, Edited, Move
from leyline.config import EngineConfig
from leyline.desk import Desk
from leyline.directive import Directive, Mode
from leyline.editing import listed
from leyline.errors import (
    CancelledError,
    ConfigError,
    DirectiveError,
    InvalidRequestError,
    LeylineError,
    internal,
)
from leyline.events import EditPlan, Found, Reverted, SessionInfo
from leyline.job import Job, edit_work
from leyline.marks import Mark
from leyline.own_policy import load_policy
from leyline.pointing import Change, MarkRequest
from leyline.rates import num_moved
from leyline.rendering import PLAIN, Rendering, rendered
from leyline.saved_sessions import restore, save
from leyline.sequence import EditRequest
from leyline.session import Session
from leyline.target import check_whole
from leyline.trimming import Policy, from_wire, trim_messages
from leyline.turn import Messages

logger = logging.getLogger(__name__)


class SessionDesk(Desk):
    """Everything that can be asked of an engine; see `Loop` for the attributes and errors."""

    def __init__(self, config: EngineConfig) -> None:
        # What is wrong with these should be said before a model is loaded.
        self._policies = _policies(config.context_management)
        self._own_policy = load_policy(config.policy) if config.policy else None
        super().__init__(config)
        if config.sessions_file:
            num_tokens, now = self.parts.num_tokens, time.monotonic()
            restore(config.sessions_file, self.sessions, self.model_name, num_tokens, now)
            for session in self.sessions:
                self._tend(session, turn_ended=False)

    def close(self) -> None:
        """Save the sessions if that is asked for, and give the memory back in any case.

        Raises:
            ConfigError: If the file cannot be written.
        """
        try:
            if self._parts is not None and self.config.sessions_file:
                self.save_sessions()
        finally:
            super().close()

    def session_ids(self) -> list[str]:
        """Names of the resident sessions."""
        return [session.session_id for session in self.sessions]

    def session_info(self, session_id: str, *, salt: str = "") -> SessionInfo:
        """Describe a session as of now.

        Raises:
            SessionNotFoundError: If there is no such session.
        """
        return self._described(self._session(session_id, salt))

    def sessions_info(self, *, salt: str = "") -> list[SessionInfo]:
        """Describe every session of a tenant, without its tokens and their text."""
        root = self._door.root(salt)
        mine = [one for one in self.sessions if one.context.root == root]
        return [self._described(one, spelled=False) for one in mine]

    def delete_session(self, session_id: str, *, salt: str = "") -> None:
        """Forget a session; its turn or edits under way are cancelled.

        Raises:
            SessionNotFoundError: If there is no such session.
        """
        session = self._session(session_id, salt)
        deleted = CancelledError("The session was deleted.")
        self._give_up_deferred(session, deleted)
        job = self._job(session)
        if job is not None:
            self._close(job, deleted)
        self._stop_healing(session)
        if self.sessions.find(session_id, session.context.root) is session:
            self.sessions.delete(session)
            self._clean_up()

    def plan_directives(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        salt: str = "",
        expected_version: int | None = None,
    ) -> EditPlan:
        """Say what a set of edits would do and cost; nothing is done.

        What an edit in front of it that reaches the whole cache will take away is not foreseen.

        Raises:
            LeylineError: As `submit_directives` would.
        """
        changes = listed(changes)
        check_whole(expected_version, "expected_version", 0)
        session = self._session(session_id, salt)
        job = self._job(session)
        draft = self._editor.draft(session, job, changes, expected_version)
        request = EditRequest(0, draft.directives, keep=draft.keep)
        edited = self._rehearsed(session, job, request)
        carried = edited
        if any(one.mode is Mode.FORGET for one in draft.directives):
            kept = replace(request, directives=tuple(map(_amortized, draft.directives)))
            carried = self._rehearsed(session, job, kept)
        self._measure_moves(num_moved(carried.receipts))
        return EditPlan(
            session_id=session_id,
            version=draft.version,
            length_before=edited.length_before,
            length_after=edited.length_after,
            receipts=edited.receipts,
            amortize_ms=self.rates.edit_ms(carried.receipts),
            forget_ms=self.rates.extend_ms(edited.length_after - edited.edit.head),
        )

    def revert(self, session_id: str, version: int | None = None, *, salt: str = "") -> Reverted:
        """Go back to a kept version of a session, the latest if none is named.

        Turns since that version go too. Going back is an edit: the present context becomes a kept
        version itself.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionBusyError: If it is in the middle of a turn or an edit.
            VersionNotFoundError: If it does not keep that version.
        """
        check_whole(version, "version", 0)
        session = self._idle(session_id, salt)
        before = session.context
        latest = session.versions[-1].number if session.versions else session.version
        restored = session.revert(latest if version is None else version)
        self._stop_healing(session)
        self.sessions.fit(session)
        kept = min(self.parts.scheduler.prefix.resident(session.context), session.computed)
        # Carried rows that are gone cannot be computed again: the text goes on in its exact form.
        session.context = session.context.exact_from(session.context.first_graft(kept))
        self._tend(session, turn_ended=False)
        return Reverted(
            session_id=session_id,
            version=session.version,
            restored=restored.number,
            length_before=len(before),
            length_after=len(session.context),
            kept=kept,
            recomputed=session.computed - kept,
            state=session.state,
        )

    def mark(self, session_id: str, request: MarkRequest, *, salt: str = "") -> Mark:
        """Pin a span of an idle session, or have it decay or be scratched later.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionBusyError: If it is in the middle of a turn or an edit.
            DirectiveError: If the span does not fit, or what is to come of it never could.
            QuotaError: If a pin would exceed what its tenant may pin.
        """
        if not isinstance(request, MarkRequest):
            raise DirectiveError("A mark is asked for with a MarkRequest.", param="mark")
        session = self._idle(session_id, salt)
        mark = request.compile(
            f"mark-{secrets.token_hex(6)}",
            session.context.tokens,
            session.messages,
            self.tokenizer,
            time.monotonic(),
        )
        if mark.verb == "pin":
            self.sessions.pin(session, mark, time.monotonic())
        else:
            self._check_mark(session, mark)
            session.mark(mark)
        return mark

    def unmark(self, session_id: str, mark_id: str, *, salt: str = "") -> None:
        """Take a mark back.

        Raises:
            SessionNotFoundError: If there is no such session.
            MarkNotFoundError: If it has no such mark.
        """
        self._session(session_id, salt).unmark(mark_id)

    def find_in_cache(self, what: str | Sequence[int], *, salt: str = "") -> Found:
        """Tell whether any row in a tenant's cache was computed with a span in view.

        Args:
            what: The span, as text or as token ids; it is found however it was tokenised.
            salt: The tenant's or request's cache salt.

        Raises:
            InvalidRequestError: If the span is empty or no text.
        """
        text = self._door.spelled(what).strip()
        if not text:
            raise InvalidRequestError("The span to look for is empty.", param="text")
        return self._reach.find(self._door.root(salt), text)

    def save_sessions(self) -> int:
        """Save every session to the configured file; returns how many there are.

        Raises:
            ConfigError: If no file is configured, or it cannot be written.
        """
        if not self.config.sessions_file:
            raise ConfigError(
                "There is no file to save sessions to; start with --sessions-file FILE.",
                param="sessions_file",
            )
        return save(
            self.config.sessions_file,
            self.sessions,
            self.model_name,
            self.parts.num_tokens,
            time.monotonic(),
        )

    def trim(
        self,
        messages: Messages,
        context_management: Any = None,
        rendering: Rendering = PLAIN,
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
        """Shorten a history by the request's edits, or the engine's, and the engine's own policy.

        Touches nothing of the engine but its tokenizer: it may be called from any thread.

        Returns:
            The messages for the model, and what was done (`applied_edits`).

        Raises:
            InvalidRequestError: If `context_management` is malformed.
        """
        count = partial(self._count, replace(rendering, opens_reply=False, continues_reply=False))
        return trim_messages(messages, context_management, self._policies, self._own_policy, count)

    def _count(self, rendering: Rendering, messages: Messages) -> int:
        """Tokens of a history as the model would be sent it."""
        return len(self.tokenizer.encode(rendered(self.tokenizer, messages, rendering)))

    def _described(self, session: Session, *, spelled: bool = True) -> SessionInfo:
        """A session as of now."""
        job = self._job(session)
        context = job.work.view.whole() if job else session.context
        return SessionInfo(
            session_id=session.session_id,
            version=session.version,
            context_length=len(context),
            pieces=tuple((start, end, piece.exact) for start, end, piece in context.spans()),
            token_ids=context.tokens if spelled else (),
            text=self.tokenizer.decode(context.tokens, skip_special=False) if spelled else "",
            busy=session.busy,
            state=job.state if job else session.state,
            versions=tuple((one.number, len(one.context), one.kept) for one in session.versions),
            marks=tuple(session.marks),
            messages=tuple(job.messages if job else session.messages),
        )

    def _idle(self, session_id: str, salt: str) -> Session:
        """A session that is there and idle."""
        session = self._session(session_id, salt)
        self._idle_session(session_id, session.context.root)
        return session

    def _check_mark(self, session: Session, mark: Mark) -> None:
        """Refuse now what could not be carried out when its time comes."""
        if mark.of == "span":
            directive = Directive(mark.start, mark.end, mark.replacement, mark.mode)
            self._door.directives([directive], len(session.context), 0)

    def _rehearsed(self, session: Session, job: Job | None, request: EditRequest) -> Edited:
        """What an edit would come to."""
        work = job.work if job else edit_work(0, session)
        double, stand_in = (job or Job(work, session)).double(request)
        work = replace(work, edits=deque([*work.edits, request]))
        try:
            with self.sessions.standing_in(stand_in):
                return self.parts.scheduler.rehearse(work, session.heal_id, double.commit)[-1]
        except Exception as error:  # a policy of the user's may raise
            raise internal(error) from error

    def _measure_moves(self, num_rows: int) -> None:
        """Turn slots that nobody owns, to see how long that takes; the first run warms up."""
        free = np.flatnonzero(self.parts.scheduler.prefix.ledger.counts == 0)[:num_rows]
        if len(free) and not self.rates.knows_moves:
            batch = Batch(moves=(Move(0, free, free, np.ones_like(free)),))
            try:
                self.parts.executor.run(batch)
                self._run(batch)
            except Exception:
                logger.exception("How long rows take to be moved could not be measured.")


def _amortized(directive: Directive) -> Directive:
    """The directive as one that keeps the rows behind it."""
    return replace(directive, mode=Mode.AMORTIZE)


def _policies(context_management: str) -> list[Policy]:
    """The engine's own edits of every history, from their JSON.

    Raises:
        ConfigError: If they are malformed.
    """
    try:
        return from_wire(json.loads(context_management)) if context_management else []
    except (ValueError, LeylineError) as error:
        raise ConfigError(
            f"context_management cannot be used: {str(error).rstrip('.')}. Give JSON such as "
            '{"edits": [{"type": "truncate_older_than"}]}.',
            param="context_management",
        ) from error

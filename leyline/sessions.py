"""The resident sessions of one engine, and who has to go when there are too many.

Three things are limited: how many sessions there are, how many tokens they hold together, and how
long one may lie unused. Beyond them the session that nobody used for longest makes room; one that
is busy never does. Within a session, and a tenant, rows that must not be taken have a quota: those
of kept versions, and those that are pinned.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from leyline.context import Context
from leyline.errors import CapacityError, QuotaError, SessionNotFoundError
from leyline.marks import Mark
from leyline.session import KEEP_VERSIONS, Session, Version

MAX_GONE_NAMES = 1000
MAX_GONE_ROOTS = 100


class Sessions:
    """The resident sessions of one engine.

    Args:
        max_sessions: How many may be resident; idle ones make room, longest unused first.
        time_to_live_s: Seconds after which an idle session is forgotten.
        keep_versions: Contexts before the present one that a session keeps.
        session_slots: Rows that a session's context and kept versions may hold together before
            versions lose theirs; None for no limit.
        pin_slots: Rows that one tenant may pin; None for no limit.
        max_tokens: Tokens of all sessions together, each version counted in full; None for no
            limit.
        num_slots: All slots there are; at most half of them can be pinned. None for no limit.

    Attributes:
        num_expired: Sessions forgotten because nobody used them.
        num_displaced: Sessions forgotten to make room.
        num_refused: Sessions that were not made because there was no room.
    """

    def __init__(
        self,
        max_sessions: int,
        time_to_live_s: float,
        *,
        keep_versions: int = KEEP_VERSIONS,
        session_slots: int | None = None,
        pin_slots: int | None = None,
        max_tokens: int | None = None,
        num_slots: int | None = None,
    ) -> None:
        self.max_sessions = max_sessions
        self.time_to_live_s = time_to_live_s
        self.keep_versions = keep_versions
        self.session_slots = session_slots
        self.pin_slots = pin_slots
        self.max_tokens = max_tokens
        self.num_slots = num_slots
        self.num_expired = 0
        self.num_displaced = 0
        self.num_refused = 0
        self._sessions: dict[tuple[bytes, str], Session] = {}
        self._left: list[Context] = []
        self._gone: OrderedDict[bytes, OrderedDict[str, str]] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        """Tokens that all sessions hold together."""
        return sum(_num_tokens(session) for session in self._sessions.values())

    def get(self, session_id: str, root: bytes = b"") -> Session:
        """The session of that name under that tenant's root, or a `SessionNotFoundError`."""
        session = self._sessions.get((root, session_id))
        if session is None:
            raise self._not_found(session_id, root)
        return session

    def find(self, session_id: str, root: bytes = b"") -> Session | None:
        """The session of that name, or None."""
        return self._sessions.get((root, session_id))

    def create(self, session_id: str, root: bytes, now: float) -> Session:
        """A new session with an empty context.

        Raises:
            CapacityError: If there is no room, and every resident session is busy.
        """
        session = Session(session_id, Context((), root), last_used=now)
        self.admit(session, now)
        return session

    def admit(self, session: Session, now: float) -> None:
        """Make a session resident, with the last few of its versions.

        Raises:
            CapacityError: If there is no room, and every resident session is busy.
        """
        self.expire(now)
        while complaint := self._full():
            idle = self._longest_unused()
            if idle is None:
                self.num_refused += 1
                raise CapacityError(f"{complaint}; try again when a turn has ended.")
            self._displace(idle)
        session.versions = deque(session.versions, maxlen=self.keep_versions)
        key = _key(session)
        self._sessions[key] = session
        self._gone.get(key[0], OrderedDict[str, str]()).pop(key[1], None)

    def delete(self, session: Session) -> None:
        """Forget a session; its rows stay in the tree until they are evicted."""
        del self._sessions[_key(session)]
        self._left += [session.context, *(version.context for version in session.versions)]
        self._left += session.gone

    def take_gone(self) -> list[Context]:
        """Contexts that no session goes on from or back to any more, each told once."""
        gone, self._left = self._left, []
        for session in self:
            gone += session.gone
            session.gone = ()
        return gone

    def expire(self, now: float) -> None:
        """Forget pins that have ended, and idle sessions that nobody used for their time to live.

        A pin that has time left keeps its session.
        """
        for session in self:
            session.marks = [mark for mark in session.marks if not mark.ended(now)]
            if not session.busy and now > self._end(session):
                self._forget(session, "expired")
                self.num_expired += 1

    def fit(self, session: Session) -> None:
        """Bring what a session has become back into its limits, and all sessions into theirs.

        To be called when a turn, an edit or a revert has left it with more. Its versions lose
        their rows, oldest first, until it is within its quota; then other idle sessions are
        displaced, the longest unused first. It is not displaced itself, however large it is.
        """
        if self.session_slots is not None:
            _shrink(session, self.session_slots)
        while self.max_tokens is not None and self.num_tokens > self.max_tokens:
            idle = self._longest_unused(session)
            if idle is None:
                return
            self._displace(idle)

    @contextmanager
    def standing_in(self, double: Session) -> Generator[None, None, None]:
        """Have a copy of a session be found in its place for a while, to try something out."""
        key = _key(double)
        session, self._sessions[key] = self._sessions[key], double
        try:
            yield
        finally:
            self._sessions[key] = session

    def others(self, sequence_id: int) -> list[Context]:
        """Contexts whose rows this sequence must leave alone.

        That is every session's but the one it serves, and every session's kept versions.
        """
        contexts = [session.context for session in self if session.sequence_id != sequence_id]
        kept = (version for session in self for version in session.versions if version.kept)
        return contexts + [version.context for version in kept]

    def affords_version(
        self, session: Session, start: int, length_after: int, *, context: Context | None = None
    ) -> bool:
        """Whether the rows before an edit can be kept beside those after it; changes nothing.

        Rows that only older versions hold do not count, since they make room when the edit has
        committed: see `fit`.

        Args:
            session: The session that is edited.
            start: Position of the edit: rows in front of it are shared.
            length_after: Context length afterwards.
            context: The context that is edited, if it is not the session's own.
        """
        present = len(session.context if context is None else context)
        if not self.keep_versions:
            return False
        new = max(0, length_after - start)
        return self.session_slots is None or present + new <= self.session_slots

    def pin(self, session: Session, mark: Mark, now: float = -math.inf) -> None:
        """Add a pin. It holds the rows of its span and those in front of it, without which they
        could not be found, so a session counts with the largest end of its pins.

        Args:
            session: Whose context the mark is about.
            mark: The pin.
            now: Pins that have ended by then do not count.

        Raises:
            QuotaError: If the tenant, or all tenants together, would pin more than they may.
        """
        root = session.context.root
        pinned = [(other.context.root, _pinned_end(other, now)) for other in self]
        raised = max(0, mark.end - _pinned_end(session, now))
        tenant = sum(end for owner, end in pinned if owner == root)
        everybody = sum(end for _, end in pinned)
        _check_quota("This tenant", tenant, raised, self.pin_slots)
        _check_quota("All tenants together", everybody, raised, self._pin_limit())
        session.mark(mark)

    def pinned(self, now: float) -> Iterator[Context]:
        """Contexts whose rows stay; together they are never longer than the quotas allow.

        An edit can push a pin further back than its quota reaches; it then holds only the front
        of its rows.
        """
        left = self._pin_limit()
        by_root: dict[bytes, int | None] = {}
        for session in self:
            root = session.context.root
            mine = by_root.get(root, self.pin_slots)
            end = min(_pinned_end(session, now), len(session.context))
            end = min(limit for limit in (end, mine, left) if limit is not None)
            if end:
                yield session.context.prefix(end)
            by_root[root] = None if mine is None else mine - end
            left = None if left is None else left - end

    def _pin_limit(self) -> int | None:
        """Rows that all tenants together may pin."""
        return None if self.num_slots is None else self.num_slots // 2

    def _end(self, session: Session) -> float:
        """Until when a session stays if nobody uses it."""
        pins = (mark.until for mark in session.marks if mark.verb == "pin")
        ends = [until for until in pins if until is not None]
        return max([session.last_used + self.time_to_live_s, *ends])

    def _full(self) -> str | None:
        """Why there is no room for one more session, or None."""
        if len(self._sessions) >= self.max_sessions:
            return f"All {self.max_sessions} sessions are busy"
        if self.max_tokens is not None and self.num_tokens >= self.max_tokens:
            return f"All sessions are busy, and they hold {self.max_tokens} tokens or more"
        return None

    def _displace(self, session: Session) -> None:
        """Forget a session so that others have room."""
        self._forget(session, "displaced")
        self.num_displaced += 1

    def _longest_unused(self, spared: Session | None = None) -> Session | None:
        """The idle session that was used least recently."""
        idle = (session for session in self if not session.busy and session is not spared)
        return min(idle, key=lambda session: session.last_used, default=None)

    def _forget(self, session: Session, reason: str) -> None:
        """Forget a session, and remember for a while why."""
        self.delete(session)
        root = session.context.root
        names = self._gone.setdefault(root, OrderedDict())
        names[session.session_id] = reason
        self._gone.move_to_end(root)
        if len(names) > MAX_GONE_NAMES:
            names.popitem(last=False)
        if len(self._gone) > MAX_GONE_ROOTS:
            self._gone.popitem(last=False)

    def _not_found(self, session_id: str, root: bytes) -> SessionNotFoundError:
        """What to say of a session that is not there."""
        reason = self._gone.get(root, OrderedDict[str, str]()).get(session_id)
        said = {
            "expired": f"Session {session_id!r} expired: nobody used it for "
            f"{self.time_to_live_s:g} seconds",
            "displaced": f"Session {session_id!r} was displaced: others needed its room",
            None: f"There is no session {session_id!r}",
        }[reason]
        return SessionNotFoundError(
            f"{said}; a chat request that names it creates it.",
            param="session_id",
            details={"reason": reason or "unknown"},
        )


def _key(session: Session) -> tuple[bytes, str]:
    """Where a session is registered."""
    return session.context.root, session.session_id


def _num_tokens(session: Session) -> int:
    """Tokens of a session's context and its versions."""
    return len(session.context) + sum(len(version.context) for version in session.versions)


def _pinned_end(session: Session, now: float) -> int:
    """Rows that a session's pins hold: one past the last one's last."""
    pins = (mark for mark in session.marks if mark.verb == "pin" and not mark.ended(now))
    return max((pin.end for pin in pins), default=0)


def _check_quota(who: str, pinned: int, raised: int, limit: int | None) -> None:
    """Refuse a pin that goes beyond a limit."""
    if limit is not None and pinned + raised > limit:
        raise QuotaError(
            f"{who} would pin {pinned + raised} rows, and may pin {limit}; a pin holds its span "
            "and everything in front of it. Take a pin off, or pin something further ahead.",
            details={"pinned": pinned, "asked": raised, "limit": limit},
        )


def _shrink(session: Session, room: int) -> None:
    """Let the rows of kept versions go, oldest first, until the session's rows fit.

    What a version has in common with a newer one, or with the context, is one row, not two.
    """
    newer, total = [session.context], len(session.context)
    versions: deque[Version] = deque(maxlen=session.versions.maxlen)
    for version in reversed(session.versions):
        if version.kept:
            shared = max(version.context.common_prefix(context) for context in newer)
            total += len(version.context) - shared
            newer.append(version.context)
        versions.appendleft(replace(version, kept=version.kept and total <= room))
    session.versions = versions

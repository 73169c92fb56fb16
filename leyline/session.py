"""Resident conversations: what the client believes, and what the model attends to.

A session's *context* is the pieces that the next turn goes on from. Its *transcript* is the text
that the client believes in: the rendering it last sent and the reply it got. A request whose
rendering extends either goes on from the context; what is new is appended. Anything else is an
edit by the client, and starts from its own text in the exact form.

A session owns no slot. Its rows live in the tree like everybody's, and may be evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leyline.context import Context
from leyline.errors import CapacityError, SessionNotFoundError


@dataclass(slots=True, eq=False)
class Session:
    """One conversation.

    Attributes:
        session_id: The client's name for it.
        context: What the model attends to.
        transcript: The text the client believes in.
        version: Number of edits committed so far.
        computed: Leading positions whose rows have been computed at some time.
        sequence_id: The turn or edit under way, or None.
        last_used: Seconds on the engine's clock.
    """

    session_id: str
    context: Context
    transcript: str = ""
    version: int = 0
    computed: int = 0
    sequence_id: int | None = None
    last_used: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a turn or an edit is under way."""
        return self.sequence_id is not None

    def known(self, context: Context) -> int:
        """Leading positions of a context whose rows this session has had at some time."""
        return min(self.computed, context.common_prefix(self.context))

    def appended(self, rendered: str, context_text: str) -> str | None:
        """What a rendering adds to the conversation, or None if it is something else.

        Args:
            rendered: The client's full history, rendered.
            context_text: The text of the context's tokens, special tokens included.
        """
        for known in (self.transcript, context_text):
            if known and rendered.startswith(known):
                return rendered[len(known) :]
        return None


class Sessions:
    """The resident sessions of one engine.

    Args:
        max_sessions: How many may be resident; idle ones make room, longest unused first.
        time_to_live_s: Seconds after which an idle session is forgotten.
    """

    def __init__(self, max_sessions: int, time_to_live_s: float) -> None:
        self.max_sessions = max_sessions
        self.time_to_live_s = time_to_live_s
        self._sessions: dict[tuple[bytes, str], Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str, root: bytes = b"") -> Session:
        """The session of that name under that tenant's root, or a `SessionNotFoundError`."""
        session = self._sessions.get((root, session_id))
        if session is None:
            raise SessionNotFoundError(
                f"There is no session {session_id!r}; a chat request that names it creates it.",
                param="session_id",
            )
        return session

    def find(self, session_id: str, root: bytes = b"") -> Session | None:
        """The session of that name, or None."""
        return self._sessions.get((root, session_id))

    def create(self, session_id: str, root: bytes, now: float) -> Session:
        """A new session with an empty context.

        Raises:
            CapacityError: If every resident session is busy.
        """
        self.expire(now)
        while len(self._sessions) >= self.max_sessions:
            self._forget_oldest()
        session = Session(session_id, Context((), root), last_used=now)
        self._sessions[root, session_id] = session
        return session

    def delete(self, session: Session) -> None:
        """Forget a session; its rows stay in the tree until they are evicted."""
        del self._sessions[session.context.root, session.session_id]

    def expire(self, now: float) -> None:
        """Forget idle sessions that nobody used for their time to live."""
        for session in self:
            if not session.busy and now - session.last_used > self.time_to_live_s:
                self.delete(session)

    def others(self, sequence_id: int) -> list[Context]:
        """Contexts of all sessions but the one that this sequence serves."""
        return [session.context for session in self if session.sequence_id != sequence_id]

    def _forget_oldest(self) -> None:
        """Make room for one more."""
        idle = [session for session in self if not session.busy]
        if not idle:
            raise CapacityError(
                f"All {self.max_sessions} sessions are busy; try again when a turn has ended."
            )
        self.delete(min(idle, key=lambda session: session.last_used))

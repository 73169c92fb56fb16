"""Which session a chat request belongs to.

`session_id` is Leyline's own word and means what it says: a malformed one is refused, and a busy
session is a conflict. Agents also send keys of their own, in `prompt_cache_key` or in a header.
Those are arbitrary strings, and the same key goes out with side requests, such as one for a title
while the turn is under way. So any such string names a session, and one that cannot be had now is
done without.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

SESSION_ID = re.compile(r"[A-Za-z0-9._:@~+=-]{1,256}")
SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "thread-id",
)
"""What agents send, in the order in which it counts."""


@dataclass(frozen=True, slots=True)
class SessionName:
    """A session that a request names.

    Attributes:
        session_id: The session's id; None if the request belongs to none.
        required: Whether the request must have it, or may be answered without.
    """

    session_id: str | None = None
    required: bool = False


def is_session_id(text: str) -> bool:
    """Whether a text may be a session's id; one of dots alone would vanish from a URL's path."""
    return SESSION_ID.fullmatch(text) is not None and text not in (".", "..")


def session_name(
    session_id: str | None, cache_key: str | None, headers: Mapping[str, str]
) -> SessionName:
    """The session that a request means.

    Args:
        session_id: The body's field of that name, known to be an id.
        cache_key: The body's `prompt_cache_key`.
        headers: The request's headers.
    """
    if session_id is not None:
        return SessionName(session_id, required=True)
    keys = (cache_key, *(headers.get(name) for name in SESSION_HEADERS))
    key = next((key for key in keys if key), None)
    return SessionName(None if key is None else id_of(key))


def id_of(key: str) -> str:
    """A session id for any string, the same for the same string: itself if it is one."""
    if is_session_id(key):
        return key
    return "key-" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

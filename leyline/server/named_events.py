"""Server-sent events that say what they are, as the Responses and the Messages API have them."""

from __future__ import annotations

from typing import Any

from leyline.server.wire import event


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event with a name; `name` is the server's own word, never a client's."""
    return b"event: " + name.encode("ascii") + b"\n" + event(value)

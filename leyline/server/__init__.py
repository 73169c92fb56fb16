"""The HTTP door: OpenAI-compatible routes over an engine that runs on a thread of its own.

`worker` owns the thread and is the only place where the event loop and the engine meet. The
routes turn JSON into calls on it and events into JSON. Nothing here has heard of a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyline.server.settings import ServerConfig

if TYPE_CHECKING:
    from leyline.server.app import create_app
    from leyline.server.listen import serve
    from leyline.server.worker import Worker

__all__ = ["ServerConfig", "Worker", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    """Load the web framework only for those who serve: `leyline --help` answers at once."""
    if name == "create_app":
        from leyline.server.app import create_app

        return create_app
    if name == "serve":
        from leyline.server.listen import serve

        return serve
    if name == "Worker":
        from leyline.server.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

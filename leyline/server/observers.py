"""Who watches the engine work, such as those who count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from leyline.events import EngineEvent
from leyline.server.surface import ServedEngine


class Observer(Protocol):
    """Watches what a worker does, on the engine's thread; what it raises is only logged."""

    def opened(self, request_id: int) -> None:
        """A request was accepted."""
        ...

    def closed(self, request_id: int) -> None:
        """A request was given up by its client before it ended."""
        ...

    def stepped(self, engine: ServedEngine, events: Sequence[EngineEvent], since: float) -> None:
        """The engine did a step.

        Args:
            engine: The engine.
            events: What happened to requests that somebody waits for.
            since: When the step began, on the clock of `time.perf_counter`.
        """
        ...

    def refused(self, modes: Iterable[str]) -> None:
        """A set of directives in these modes was refused; called from anywhere."""
        ...


class Nobody:
    """An observer that does not look."""

    def opened(self, request_id: int) -> None:
        """Let it pass."""

    def closed(self, request_id: int) -> None:
        """Let it pass."""

    def stepped(self, engine: ServedEngine, events: Sequence[EngineEvent], since: float) -> None:
        """Let it pass."""

    def refused(self, modes: Iterable[str]) -> None:
        """Let it pass."""


NOBODY = Nobody()

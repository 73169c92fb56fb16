"""What the server needs of an engine, as types.

`leyline.engine.Engine` has this surface, and so has the scripted engine of the tests. All of it
is used from the worker's thread; `trim`, `tokenizer`, `model_name` and `max_model_len`
from anywhere. Seconds on
the engine's clock are those of `time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from leyline.directive import Directive
from leyline.events import EditPlan, EngineEvent, Found, Reverted, SessionInfo
from leyline.marks import Mark
from leyline.pointing import Change, MarkRequest
from leyline.rendering import PLAIN, Rendering
from leyline.sampling import SamplingParams
from leyline.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """An engine behind a `Worker`; see `leyline.engine.Engine` for what the methods promise."""

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens that a context holds at most."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back; may be used from any thread."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        salt: str = "",
        edit_mode: str | None = None,
        tentative: bool = False,
        rendering: Rendering = PLAIN,
        prompt: Sequence[int] | None = None,
    ) -> int:
        """Submit a conversation; the id of the request. Without `edit_mode`, the engine's own."""
        ...

    def submit_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Submit a prompt; the id of the request."""
        ...

    def submit_directives(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        salt: str = "",
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> int:
        """Submit a set of edits; the id of the request."""
        ...

    def plan_directives(
        self,
        session_id: str,
        changes: Sequence[Change | Directive],
        *,
        salt: str = "",
        expected_version: int | None = None,
    ) -> EditPlan:
        """Say what a set of edits would do, and do nothing."""
        ...

    def trim(
        self,
        messages: Sequence[Mapping[str, Any]],
        context_management: Any | None,
        rendering: Rendering = PLAIN,
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
        """Shorten a conversation as its client or the server's own policies say; what was done."""
        ...

    def cancel(self, request_id: int) -> None:
        """Give a request up; nothing happens if it has ended."""
        ...

    def step(self) -> list[EngineEvent]:
        """Do a step's work and say what happened."""
        ...

    def session_info(self, session_id: str, *, salt: str = "") -> SessionInfo:
        """Describe a session."""
        ...

    def delete_session(self, session_id: str, *, salt: str = "") -> None:
        """Forget a session."""
        ...

    def sessions_info(self, *, salt: str = "") -> list[SessionInfo]:
        """Describe all sessions of a tenant; their tokens and texts may be left out."""
        ...

    def save_sessions(self) -> int:
        """Write all sessions to the file that is configured for it; how many."""
        ...

    def revert(self, session_id: str, version: int | None, *, salt: str = "") -> Reverted:
        """Go back to a kept version; None means the latest of them."""
        ...

    def mark(self, session_id: str, request: MarkRequest, *, salt: str = "") -> Mark:
        """Promise something about a span of a session."""
        ...

    def unmark(self, session_id: str, mark_id: str, *, salt: str = "") -> None:
        """Take a mark back."""
        ...

    def find_in_cache(self, what: str | Sequence[int], *, salt: str = "") -> Found:
        """Say what in the cache depends on a text or on token ids."""
        ...

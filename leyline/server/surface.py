"""What the server needs of an engine, as types.

`leyline.engine.Engine` has this surface, and so has the scripted engine of the tests. All of it
is used from the worker's thread, `tokenizer`, `model_name` and `max_model_len` from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from leyline.batch import SamplingParams
from leyline.directive import Directive
from leyline.events import EngineEvent, SessionInfo


class PlainEncoder(Protocol):
    """The part of the tokenizer that directives need."""

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`; the names of special tokens in it stay ordinary text."""
        ...


class ServedEngine(Protocol):
    """An engine behind a `Worker`; see `leyline.engine.Engine` for what the methods promise."""

    @property
    def tokenizer(self) -> PlainEncoder:
        """Turns text into ids."""
        ...

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens that a context holds at most."""
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
    ) -> int:
        """Submit a conversation; the id of the request."""
        ...

    def submit_prompt(
        self, prompt: str | Sequence[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Submit a prompt; the id of the request."""
        ...

    def submit_directives(
        self, session_id: str, directives: Sequence[Directive], *, salt: str = ""
    ) -> int:
        """Submit a set of edits; the id of the request."""
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

"""Repeats of a request that carry the same key get the first one's answer.

A client that lost the answer to an edit cannot tell whether the edit was done. It sends the
request again with the key it chose for the first; the edit is then done once whatever happened.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from leyline.errors import IdempotencyError, LeylineError, RequestPendingError

MAX_KEYS = 64

T = TypeVar("T")


@dataclass(slots=True)
class Answers(Generic[T]):
    """The last keyed requests of one session and their answers.

    No text of a request is kept: only the SHA-256 of what was asked, and the answer. An error is
    an answer too where what was asked for is done in part, and must not be done again. A request
    that has no answer yet is never forgotten, or a repeat of it would be done as well.
    """

    _known: OrderedDict[str, tuple[bytes, T | LeylineError | None]] = field(
        default_factory=lambda: OrderedDict[str, tuple[bytes, T | LeylineError | None]]()
    )

    def earlier(self, key: str, asked: object) -> T | None:
        """The answer that this key got before; None if it is new.

        Args:
            key: The client's.
            asked: What is asked for; told apart by its `repr`.

        Raises:
            IdempotencyError: If the key came with something else.
            RequestPendingError: If the first request with it has no answer yet.
            LeylineError: If that was its answer.
        """
        if key not in self._known:
            return None
        digest, answer = self._known[key]
        if digest != _digest(asked):
            raise IdempotencyError(
                "This idempotency key came with another request before; a new request needs a new "
                "key.",
                param="idempotency_key",
            )
        if answer is None:
            raise RequestPendingError(
                "The first request with this idempotency key is still under way; send this one "
                "again when that has ended.",
                param="idempotency_key",
            )
        if isinstance(answer, LeylineError):
            raise answer
        return answer

    def ask(self, key: str, asked: object) -> None:
        """Note a request that was accepted; beyond `MAX_KEYS` the oldest answers are forgotten."""
        self._known[key] = (_digest(asked), None)
        answered = [key for key, (_, answer) in self._known.items() if answer is not None]
        for oldest in answered[: max(0, len(self._known) - MAX_KEYS)]:
            self.drop(oldest)

    def answer(self, key: str, answer: T | LeylineError) -> None:
        """Note a request's answer."""
        if key in self._known:
            self._known[key] = (self._known[key][0], answer)

    def drop(self, key: str) -> None:
        """Forget a request that ended without an answer: a repeat is a first one."""
        self._known.pop(key, None)


def _digest(asked: object) -> bytes:
    """What tells two requests apart: 32 bytes."""
    return hashlib.sha256(repr(asked).encode("utf-8", "surrogatepass")).digest()

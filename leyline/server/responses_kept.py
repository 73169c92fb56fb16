"""Responses that are kept, so that others can go on from them.

They are kept in memory, in a bounded number of bytes, for a while. Each stands for itself: a
conversation is kept whole with every response, as bytes, so that what is counted is what is held
and forgetting one response breaks no other. Whoever holds most makes room first, so no tenant can
push another's out by sending much.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from leyline.errors import LeylineError
from leyline.server.ask import Message
from leyline.server.responses_ask import Past
from leyline.server.responses_items import Body
from leyline.server.wire import encode

MAX_KEPT = 4096
MAX_KEPT_BYTES = 128 * 1024 * 1024
KEPT_SECONDS = 24 * 3600.0


class ResponseNotFoundError(LeylineError):
    """No response of that id is kept for this tenant and salt."""

    code = "response_not_found"
    status = 404


class PreviousResponseNotFoundError(ResponseNotFoundError):
    """The response that a conversation should go on from is not kept."""

    code = "previous_response_not_found"


class Owner(NamedTuple):
    """Whose a response is; the salt is that of the request, its tenant's included."""

    tenant: str
    salt: str


@dataclass(frozen=True, slots=True)
class _Kept:
    body: bytes
    messages: bytes
    session_id: str
    until: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages)


_Key = tuple[str, str]  # salt and id


@dataclass(slots=True)
class _Shelf:
    """What is kept for a tenant, the longest unused first."""

    kept: OrderedDict[_Key, _Kept] = field(default_factory=OrderedDict[_Key, _Kept])
    num_bytes: int = 0

    def put(self, key: _Key, kept: _Kept) -> None:
        self.kept[key] = kept
        self.num_bytes += kept.num_bytes

    def take(self, key: _Key) -> _Kept | None:
        kept = self.kept.pop(key, None)
        self.num_bytes -= 0 if kept is None else kept.num_bytes
        return kept

    def drop_oldest(self) -> None:
        self.take(next(iter(self.kept)))

    def drop_expired(self, now: float) -> None:
        while self.kept and next(iter(self.kept.values())).until <= now:
            self.drop_oldest()


class KeptResponses:
    """What is kept of all tenants.

    Args:
        max_kept: Responses at most.
        max_bytes: Bytes that they take at most.
        seconds: How long one is kept after it was last used.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        max_kept: int = MAX_KEPT,
        max_bytes: int = MAX_KEPT_BYTES,
        seconds: float = KEPT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that everything takes."""
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def keep(self, owner: Owner, body: Body, messages: Sequence[Message], session_id: str) -> None:
        """Keep a response and the conversation up to its end; one that is too large is not.

        Args:
            owner: Whose it is.
            body: The response.
            messages: The conversation, without instructions and with the reply.
            session_id: The session that goes on with it.
        """
        now = self._clock()
        kept = _Kept(encode(body), encode(list(messages)), session_id, now + self._seconds)
        for shelf in self._shelves.values():
            shelf.drop_expired(now)
        if kept.num_bytes <= self._max_bytes:
            shelf = self._shelves.setdefault(owner.tenant, _Shelf())
            shelf.put((owner.salt, body["id"]), kept)
        self._make_room()

    def past(self, owner: Owner, response_id: str) -> Past:
        """The conversation that ends with a response.

        Raises:
            PreviousResponseNotFoundError: If it is not kept.
        """
        kept = self._used(owner, response_id)
        if kept is None:
            raise PreviousResponseNotFoundError(
                "previous_response_id names no response that is kept here: it may be too old, or "
                "have been sent with store false. Send the whole conversation as input.",
                param="previous_response_id",
            )
        return Past(tuple(json.loads(kept.messages)), kept.session_id)

    def body(self, owner: Owner, response_id: str) -> bytes:
        """A response as JSON.

        Raises:
            ResponseNotFoundError: If it is not kept.
        """
        kept = self._used(owner, response_id)
        if kept is None:
            raise _not_found()
        return kept.body

    def forget(self, owner: Owner, response_id: str) -> None:
        """Let go of a response; its session stays.

        Raises:
            ResponseNotFoundError: If it is not kept.
        """
        if self._used(owner, response_id) is None:
            raise _not_found()
        self._shelves[owner.tenant].take((owner.salt, response_id))

    def _used(self, owner: Owner, response_id: str) -> _Kept | None:
        """A response that is kept, and from now on for as long as a new one."""
        shelf, key = self._shelves.get(owner.tenant, _Shelf()), (owner.salt, response_id)
        kept, now = shelf.take(key), self._clock()
        if kept is None or kept.until <= now:
            return None
        kept = replace(kept, until=now + self._seconds)
        shelf.put(key, kept)
        return kept

    def _make_room(self) -> None:
        """Let go of the longest unused responses of whoever holds most, until all fit."""
        while len(self) > self._max_kept or self.num_bytes > self._max_bytes:
            max(self._shelves.values(), key=lambda shelf: shelf.num_bytes).drop_oldest()
        self._shelves = {name: shelf for name, shelf in self._shelves.items() if shelf.kept}


def _not_found() -> ResponseNotFoundError:
    return ResponseNotFoundError(
        "There is no such response here: it may be too old, or not have been stored.",
        param="response_id",
    )

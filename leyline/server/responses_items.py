"""The items that a response consists of, as they grow, and what each event says of them.

An item is announced empty, grows by deltas, and is told once more as a whole when it ends; what the
deltas say together is what the whole says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Body = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class TextKind:
    """How an item that is a text is spelt.

    Attributes:
        prefix: What its id starts with.
        item: What stands in the item.
        part: What stands in its only part.
        event: What the events of its text are called.
        has_logprobs: Whether tokens' log-probabilities are told.
    """

    prefix: str
    item: Body
    part: Body
    event: str
    has_logprobs: bool


MESSAGE = TextKind(
    "msg",
    {"type": "message", "role": "assistant"},
    {"type": "output_text", "annotations": []},
    "output_text",
    has_logprobs=True,
)
REASONING = TextKind(
    "rs",
    {"type": "reasoning", "summary": []},
    {"type": "reasoning_text"},
    "reasoning_text",
    has_logprobs=False,
)


@dataclass(slots=True)
class TextItem:
    """What the model says or thinks."""

    item_id: str
    kind: TextKind
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[Body] = field(default_factory=list[Body])

    def opened(self) -> Iterator[Body]:
        """An item without content, then an empty text in it."""
        yield _added({**self.whole("in_progress"), "content": []})
        yield self._event("content_part.added", part=self._part())

    def grown(self, text: str, logprobs: Sequence[Body] = ()) -> Iterator[Body]:
        """More text, and its tokens' log-probabilities."""
        self.texts.append(text)
        self.logprobs += logprobs
        yield self._event(f"{self.kind.event}.delta", delta=text, **self._logprobs(logprobs))

    def closed(self, status: Status) -> Iterator[Body]:
        """The whole text, its part, the item."""
        part = self._part()
        told = self._logprobs(self.logprobs)
        yield self._event(f"{self.kind.event}.done", text=part["text"], **told)
        yield self._event("content_part.done", part=part)
        yield _done(self.whole(status))

    def whole(self, status: Status) -> Body:
        """The item so far."""
        return {**self.kind.item, "id": self.item_id, "status": status, "content": [self._part()]}

    def _part(self) -> Body:
        text = "".join(self.texts)
        return {**self.kind.part, "text": text, **self._logprobs(self.logprobs)}

    def _logprobs(self, logprobs: Sequence[Body]) -> Body:
        return {"logprobs": list(logprobs)} if self.kind.has_logprobs else {}

    def _event(self, event: str, **more: Any) -> Body:
        place = {"item_id": self.item_id, "content_index": 0}
        return {"type": f"response.{event}", **place, **more}


@dataclass(slots=True)
class FunctionCall:
    """A call of one of the client's functions."""

    item_id: str
    call_id: str
    name: str
    namespace: str | None = None
    texts: list[str] = field(default_factory=list[str])

    def opened(self) -> Iterator[Body]:
        """The call without arguments."""
        yield _added(self.whole("in_progress"))

    def grown(self, text: str) -> Iterator[Body]:
        """More of its arguments."""
        self.texts.append(text)
        yield self._event("delta", delta=text)

    def closed(self, status: Status) -> Iterator[Body]:
        """The whole arguments, then the call."""
        yield self._event("done", name=self.name, arguments="".join(self.texts))
        yield _done(self.whole(status))

    def whole(self, status: Status) -> Body:
        """The call so far."""
        head = {"type": "function_call", "id": self.item_id, "status": status}
        space = {} if self.namespace is None else {"namespace": self.namespace}
        called = {"call_id": self.call_id, **space, "name": self.name}
        return {**head, **called, "arguments": "".join(self.texts)}

    def _event(self, event: str, **more: Any) -> Body:
        kind = f"response.function_call_arguments.{event}"
        return {"type": kind, "item_id": self.item_id, **more}


Item = TextItem | FunctionCall


def _added(item: Body) -> Body:
    return {"type": "response.output_item.added", "item": item}


def _done(item: Body) -> Body:
    return {"type": "response.output_item.done", "item": item}

"""How an answer is spelt for Anthropic's Messages API, whole or as events.

A message is a list of blocks, and a block is a run of pieces of one kind: `block_of` says which,
for both spellings. Usage has Anthropic's kinds: `input_tokens` were computed for this request,
`cache_read_input_tokens` were not, `cache_creation_input_tokens` is always 0, and the three
together are the context's length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from leyline.events import Completion
from leyline.server.ask import Over
from leyline.server.messages_blocks import proper
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, Reasoning
from leyline.server.usage import session_of, usage
from leyline.server.wire import encode
from leyline.template import INVALID

Body = dict[str, Any]
Event = tuple[str, Body]
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]

SIGNATURE = "leyline"
"""The signature of every thinking block. It proves nothing; clients send none back without one."""

_KINDS = {Reasoning: "thinking", Content: "text"}


@dataclass(frozen=True, slots=True)
class Heading:
    """What a message says of itself, and what else its request wants to be told.

    Attributes:
        message_id: The answer's id.
        model: The served model's name.
        max_tokens: The limit that the request set.
        managed: What is told of edits of its history; see `usage.managed`.
    """

    message_id: str
    model: str
    max_tokens: int
    managed: Body = field(default_factory=dict[str, Any])

    def message(self, content: Sequence[Body], ending: Body, counts: Body) -> Body:
        """A message; `ending` has its stop reason."""
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(content),
            **ending,
            "usage": counts,
        }

    def whole(self, pieces: Iterable[Piece], over: Over) -> Body:
        """A complete answer."""
        return {
            **self.message(content_of(pieces, over), self._ending(over), usage_of(over)),
            **self._extras(over.completion),
        }

    def closing(self, over: Over) -> Body:
        """The event that says how it ended."""
        return {
            "type": "message_delta",
            "delta": self._ending(over),
            "usage": usage_of(over),
            **self._extras(over.completion),
        }

    def _ending(self, over: Over) -> Body:
        reason = stop_reason(over, self.max_tokens)
        stopped_by = over.completion.stopped_by if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _extras(self, completion: Completion) -> Body:
        return {**self.managed, **session_of([completion])}


def stop_reason(over: Over, max_tokens: int) -> StopReason:
    """Why a message ended.

    The end of the window is told from the end of `max_tokens`, since only a request can mend one.
    """
    if over.reason == "tool_calls":
        return "tool_use"
    if over.reason == "length":
        reached = over.completion.usage.completion_tokens >= max_tokens
        return "max_tokens" if reached else "model_context_window_exceeded"
    return "stop_sequence" if isinstance(over.completion.stopped_by, str) else "end_turn"


def usage_of(over: Over) -> Body:
    """The usage of a message, with Leyline's own kinds beside Anthropic's."""
    counts = usage([over.completion])
    details = counts.pop("prompt_tokens_details")
    more = {key: counts[key] for key in ("degraded", "state") if key in counts}
    return {
        "input_tokens": details["recomputed_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": details.pop("cached_tokens"),
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": over.reasoning_tokens},
        **details,
        **more,
    }


def content_of(pieces: Iterable[Piece], over: Over) -> list[Body]:
    """The blocks of a whole answer.

    A call that a limit or a stop sequence cut short is left out: it could be run, with half of its
    arguments. So is one that has none, for what calls without any is the empty object.
    """
    runs = [list(run) for _, run in groupby(filter(_says, pieces), block_of)]
    runs = [run for run in runs if not isinstance(run[-1], CallHead)]
    if runs and _is_cut_short(over) and _is_cut(runs[-1]):
        runs.pop()
    return [_block(run) for run in runs]


def block_of(piece: Piece) -> str | int:
    """Which block a piece belongs to: pieces next to each other of one block are put together."""
    if isinstance(piece, CallHead | CallArguments):
        return piece.index
    return _KINDS[type(piece)]


class Events:
    """The events of a stream's blocks, in the order in which their pieces come.

    A call's block opens with the first of its arguments: if the reply is cut short before that,
    there is none. One that is cut short later is left as it is, as Anthropic's own are; the stop
    reason says so.
    """

    def __init__(self) -> None:
        self._index = -1
        self._first: Piece | None = None  # of the present block
        self._is_open = False

    def said(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """The events of some more pieces."""
        for piece in filter(_says, pieces):
            if self._first is None or block_of(self._first) != block_of(piece):
                yield from self.ended()
                self._first = piece
            if isinstance(piece, CallHead):
                continue
            if not self._is_open:
                self._index, self._is_open = self._index + 1, True
                yield self._event("content_block_start", content_block=_empty(self._first))
            yield self._event("content_block_delta", delta=_delta(piece))

    def ended(self) -> Iterator[Event]:
        """The end of the present block, if one is open."""
        if self._is_open:
            if isinstance(self._first, Reasoning):
                signed = {"type": "signature_delta", "signature": SIGNATURE}
                yield self._event("content_block_delta", delta=signed)
            yield self._event("content_block_stop")
        self._first, self._is_open = None, False

    def _event(self, name: str, **fields: Any) -> Event:
        return name, {"type": name, "index": self._index, **fields}


def opening(heading: Heading) -> Event:
    """The first event of a stream; how many tokens came in, only the last one can say."""
    counts = {
        "input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    ending = {"stop_reason": None, "stop_sequence": None}
    message = heading.message([], ending, counts)
    return "message_start", {"type": "message_start", "message": message}


def _says(piece: Piece) -> bool:
    """Whether there is anything in a piece."""
    return isinstance(piece, CallHead) or bool(piece.text)


def _empty(piece: Piece) -> Body:
    """A block before anything is in it."""
    if isinstance(piece, Content):
        return {"type": "text", "text": ""}
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    assert isinstance(piece, CallHead), "a call begins with its head"
    return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}


def _delta(piece: Content | Reasoning | CallArguments) -> Body:
    if isinstance(piece, Content):
        return {"type": "text_delta", "text": piece.text}
    if isinstance(piece, Reasoning):
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}


def _block(run: Sequence[Piece]) -> Body:
    """A whole block."""
    first, text = run[0], _text(run)
    if isinstance(first, Content):
        return {"type": "text", "text": text}
    if isinstance(first, Reasoning):
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
    arguments = _object(text)
    return {**_empty(first), "input": {INVALID: text} if arguments is None else arguments}


def _is_cut_short(over: Over) -> bool:
    """Whether its client ended an answer, wherever it was; behind a whole call it was between."""
    is_stopped = isinstance(over.completion.stopped_by, str)
    return over.reason == "length" or (over.reason == "stop" and is_stopped)


def _is_cut(run: Sequence[Piece]) -> bool:
    return isinstance(run[0], CallHead) and _object(_text(run)) is None


def _text(run: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in run if not isinstance(piece, CallHead))


def _object(text: str) -> Body | None:
    """A call's arguments, or None if the text is no JSON object that can be sent on.

    Half a surrogate pair, which a JSON escape can stand for, becomes U+FFFD: it is no text, and
    would be refused when it comes back.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        encode(value)  # a number may be too large to be one
        return proper(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    """`NaN` and the infinities, which Python reads, are no JSON."""
    raise ValueError(name)

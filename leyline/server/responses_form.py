"""How a response is spelt: from what is said to items, events and the whole.

Streamed or not, a response is made of the same events; one that is not streamed is what the last
of them carries. Space around calls is no message: a text of nothing but white space is told only if
nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from leyline.errors import LeylineError
from leyline.events import TokenLogprob
from leyline.server.ask import Over, Said
from leyline.server.failures import error_body
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, Reasoning
from leyline.server.responses_ask import Called
from leyline.server.responses_items import (
    MESSAGE,
    REASONING,
    Body,
    FunctionCall,
    Item,
    Status,
    TextItem,
    TextKind,
)
from leyline.server.responses_schema import (
    TOOL_TYPES,
    Function,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
    TextOptions,
    Tool,
    ToolChoice,
)

SPELT = frozenset(
    {
        "prompt_tokens",
        "prompt_tokens_details",
        "completion_tokens",
        "completion_tokens_details",
        "total_tokens",
    }
)
SpellLogprobs = Callable[[Sequence[TokenLogprob]], list[Body]]


def heading_of(body: ResponsesRequest, response_id: str, created: int, model: str) -> Body:
    """What stands in a response from the start: who it is, and what was asked for."""
    choice = body.tool_choice or ToolChoice(type="auto")
    is_long = choice.type in ("function", "allowed_tools")
    form = (body.text or TextOptions()).format or TextFormat()
    reasoning = body.reasoning or ReasoningOptions()
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "store": body.is_stored,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": _told(body.tools),
        "tool_choice": choice.model_dump(exclude_unset=True) if is_long else choice.type,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
    }


def _told(tools: Iterable[Function] | None) -> list[Body]:
    """Tools as they were sent, without those that were left out."""
    return [_told_tool(tool) for tool in tools or [] if tool.type in TOOL_TYPES]


def _told_tool(tool: Function) -> Body:
    told = tool.model_dump(include={"type", "name", "description"}, exclude_none=True)
    if isinstance(tool, Tool) and tool.type == "namespace":
        return told | {"tools": _told(tool.tools)}
    return told | {"parameters": tool.parameters, "strict": tool.strict}


class ResponseForm:
    """Spells one response as it comes.

    Args:
        heading: What stands in the response from the start, its `id` among it.
        called: What the client calls each function, by what the model calls it.
        spell_logprobs: Log-probabilities as JSON.
    """

    def __init__(
        self, heading: Body, called: Mapping[str, Called], spell_logprobs: SpellLogprobs
    ) -> None:
        self._heading = heading
        self._called = called
        self._spell_logprobs = spell_logprobs
        self._number = 0
        self._ended: list[Body] = []
        self._item: Item | None = None
        self._space = ""  # content that may turn out to be none
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not been told
        self._is_answered = False

    def begun(self) -> Iterator[Body]:
        """The events in front."""
        yield self._lifecycle("created", "in_progress")
        yield self._lifecycle("in_progress", "in_progress")

    def said(self, said: Said) -> Iterator[Body]:
        """The events of what was said."""
        self._logprobs += said.logprobs
        for piece in said.pieces:
            yield from self._piece(piece)

    def over(self, over: Over, ending: Body) -> Iterator[Body]:
        """The events at the end, the last of which carries the whole response.

        Args:
            over: How it ended.
            ending: More entries for the response.
        """
        if not self._is_answered:
            yield from self._message(self._space)
        is_cut = over.reason == "length"
        status: Status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        yield self._lifecycle(status, status, **details, **ending)

    def failed(self, error: LeylineError) -> Body:
        """The last event of a response that breaks off."""
        told = error_body(error)["error"]
        return self._lifecycle("failed", "failed", error=told)

    # -- pieces --------------------------------------------------------------------------------

    def _piece(self, piece: Piece) -> Iterator[Body]:
        if isinstance(piece, Content):
            yield from self._content(piece.text)
            return
        self._space, self._logprobs = "", []
        if isinstance(piece, Reasoning):
            yield from self._text(REASONING, piece.text)
        elif isinstance(piece, CallHead):
            yield from self._call(piece)
        else:
            yield from self._arguments(piece)

    def _content(self, text: str) -> Iterator[Body]:
        if self._is_open(MESSAGE):
            yield from self._message(text)
            return
        self._space += text
        if self._space and not self._space.isspace():
            yield from self._message(self._space)

    def _message(self, text: str) -> Iterator[Body]:
        self._is_answered = True
        logprobs = self._spell_logprobs(self._logprobs)
        self._space, self._logprobs = "", []
        yield from self._text(MESSAGE, text, logprobs)

    def _text(self, kind: TextKind, text: str, *logprobs: Sequence[Body]) -> Iterator[Body]:
        """More of the text item that is open, or of a new one."""
        if not self._is_open(kind):
            yield from self._open(TextItem(self._item_id(kind.prefix), kind))
        if text and isinstance(self._item, TextItem):
            yield from self._placed(self._item.grown(text, *logprobs))

    def _call(self, head: CallHead) -> Iterator[Body]:
        self._is_answered = True
        name, namespace = self._called.get(head.name, Called(head.name))
        item_id = self._item_id("fc")
        yield from self._open(FunctionCall(item_id, head.call_id, name, namespace))

    def _arguments(self, piece: CallArguments) -> Iterator[Body]:
        assert isinstance(self._item, FunctionCall), "arguments follow their call's head"
        if piece.text:
            yield from self._placed(self._item.grown(piece.text))

    # -- items ---------------------------------------------------------------------------------

    def _is_open(self, kind: TextKind) -> bool:
        return isinstance(self._item, TextItem) and self._item.kind is kind

    def _item_id(self, prefix: str) -> str:
        """An id for the next item, unlike that of any other response's."""
        return f"{prefix}_{self._heading['id'].partition('_')[2]}_{self._index + 1}"

    @property
    def _index(self) -> int:
        """Where the item that is open stands, or the last one."""
        return len(self._ended) - (self._item is None)

    def _open(self, item: Item) -> Iterator[Body]:
        yield from self._close("completed")
        self._item = item
        yield from self._placed(item.opened())

    def _close(self, status: Status) -> Iterator[Body]:
        if self._item is not None:
            yield from self._placed(self._item.closed(status))
            self._ended.append(self._item.whole(status))
            self._item = None

    # -- events --------------------------------------------------------------------------------

    def _placed(self, events: Iterator[Body]) -> Iterator[Body]:
        for event in events:
            yield self._numbered({**event, "output_index": self._index})

    def _lifecycle(self, event: str, status: str, **more: Any) -> Body:
        rest = [] if self._item is None else [self._item.whole("incomplete")]
        output = [*self._ended, *rest]
        response = {**self._heading, "status": status, "output": output, **more}
        return self._numbered({"type": f"response.{event}", "response": response})

    def _numbered(self, event: Body) -> Body:
        number, self._number = self._number, self._number + 1
        return {**event, "sequence_number": number}


def spelt_usage(usage: Mapping[str, Any]) -> Body:
    """A chat's usage in the words of responses; what else stands in it stays as it is."""
    details = usage["prompt_tokens_details"]
    more = {key: value for key, value in usage.items() if key not in SPELT}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**details, "cache_write_tokens": details["recomputed_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        **more,
    }

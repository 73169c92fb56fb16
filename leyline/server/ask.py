"""A turn of a conversation as every chat API means it, and its answer, piece by piece.

`/v1/chat/completions`, `/v1/responses` and `/v1/messages` differ in how they spell things and in
nothing else: each makes an `Ask` of its body, and spells what the `Answer` yields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leyline.events import Completion, TokenLogprob
from leyline.sampling import SamplingParams
from leyline.server.parsers.pieces import Piece, ToolUse
from leyline.server.session_names import SessionName

Message = Mapping[str, Any]
EndReason = Literal["stop", "length", "tool_calls"]
NO_TOOLS = ToolUse()
NO_SESSION = SessionName()


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a reply's content must be: a constraint as its client wrote it.

    Attributes:
        kind: `json_object`, `json_schema`, `regex`, `choice` or `grammar` (Lark).
        value: The schema as a mapping, the expression, the list of texts, or the grammar.
        param: The field in which the client wrote it.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    param: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn of a conversation.

    Attributes:
        messages: In OpenAI's form; tool calls in `tool_calls`, reasoning in `reasoning_content`.
        params: Sampling parameters, without what tools and form add to them.
        salt: The tenant and cache salt, as `tenants.salt_of` gives them.
        use: The tools.
        form: What the content must be, if anything in particular.
        num_choices: Answers wanted.
        session: The session that the turn belongs to, if any.
        edit_mode: How the client's own edits of its history are carried out.
        context_management: Edits that the server is to make of the history, as sent.
        variables: More variables for the chat template.
        opens_reply: See `leyline.rendering.Rendering`, and
        continues_reply: likewise.
    """

    messages: Sequence[Message]
    params: SamplingParams
    salt: str = ""
    use: ToolUse = NO_TOOLS
    form: OutputForm | None = None
    num_choices: int = 1
    session: SessionName = NO_SESSION
    edit_mode: str | None = None
    context_management: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opens_reply: bool = True
    continues_reply: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """A choice goes on: what became certain, in the order in which it was said.

    Attributes:
        index: Which choice.
        pieces: Reasoning, content and calls.
        token_ids: The tokens sampled since the last one.
        logprobs: Theirs, if they were asked for.
    """

    index: int
    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Over:
    """A choice has ended; nothing follows for it.

    Attributes:
        index: Which choice.
        reason: Why: `tool_calls` if it stopped with at least one call that is complete.
        completion: What the engine says of it.
        reasoning_tokens: How many of its tokens were reasoning.
    """

    index: int
    reason: EndReason
    completion: Completion
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call; the arguments are JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole choice: all that was said of it, put together.

    Attributes:
        over: How it ended.
        content: What was said.
        reasoning: What was thought.
        calls: The tool calls.
    """

    over: Over
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

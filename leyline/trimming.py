"""Ready-made policies that make a conversation shorter: messages in, messages and a report out.

Three are built in: `truncate_older_than`, which is the paper's, and `clear_tool_uses` and
`clear_thinking`, which mean what the hosted API's context management edits
`clear_tool_uses_20250919` and `clear_thinking_20251015` mean. A fourth is anybody's own function.
Nothing here knows of token ids or of the cache: a policy's messages are rendered and aligned with
what the model has seen, like messages that a client edited itself.

Messages have OpenAI's form: tool calls in an assistant message's `tool_calls`, each result in a
message of role `tool`; reasoning in `reasoning_content` or `reasoning`, or in think tags in the
content. They are never mutated; a message that a policy leaves alone is the same object afterwards.
`count` gives the tokens of a list of messages, as the model would be sent it. Every policy run
again on what it gave changes nothing more, as long as no message is added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Any, NamedTuple, Protocol

from leyline.edit_fields import (
    CLEAR_THINKING,
    CLEAR_TOOL_USES,
    TRUNCATE_OLDER_THAN,
    Threshold,
    read_edits,
    read_fields,
)
from leyline.message_cuts import (
    Message,
    with_texts,
    without_arguments,
    without_result,
    without_thinking,
)

Messages = Sequence[Message]
Count = Callable[[Any], int]
Report = dict[str, Any]

REMOVED = "[... {} characters removed ...]"
MARKER_ROOM = 40  # the longest that REMOVED gets, for texts of up to 10^11 characters
RESULT_ROLES = ("tool", "function")
INSTRUCTION_ROLES = ("system", "developer")
MAX_ERROR_CHARS = 500
FULL = Threshold("input_tokens", 100_000)  # when the hosted API clears tool uses by itself

logger = logging.getLogger(__name__)


class Trimmed(NamedTuple):
    """What a policy made of the messages; the report is None if it changed nothing."""

    messages: list[Message]
    report: Report | None


class Policy(Protocol):
    """Anything that shortens messages."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def __call__(self, messages: Messages, count: Count) -> Trimmed:
        """Return the messages that go to the model instead, and what was done."""
        ...


@dataclass(frozen=True, slots=True)
class TruncateOlderThan:
    """Cut every long text that is older than the last `n` turns; see `truncate_older_than`."""

    n: int = 2
    max_chars: int = 200
    name: str = field(default=TRUNCATE_OLDER_THAN, init=False)

    def __call__(self, messages: Messages, count: Count | None = None) -> Trimmed:
        """Return the cut messages."""
        turns = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        recent = [0, *turns, len(messages)][max(len(turns) + 1 - self.n, 0)]
        task = next((at for at, m in enumerate(messages) if m.get("role") == "user"), None)
        after = list(messages)
        for at, message in enumerate(messages[:recent]):
            if at != task and message.get("role") not in INSTRUCTION_ROLES:
                after[at] = with_texts(message, self._cut)
        changed = sum(map(is_not, messages, after))
        return trimmed(self.name, messages, after, count, truncated_messages=changed)

    def _cut(self, text: str) -> str:
        """Head and tail of a text, with what is missing named between them."""
        missing = len(text) - self.max_chars
        if missing <= MARKER_ROOM:
            return text
        tail = self.max_chars // 2
        head = self.max_chars - tail
        return text[:head] + REMOVED.format(missing) + text[len(text) - tail :]


class _ToolUse(NamedTuple):
    """A tool's result, and the call it answers: index of the message, index in its calls."""

    tool: str | None
    result: int
    call: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Put a placeholder in place of old tool results; see `clear_tool_uses`."""

    trigger: Threshold = FULL
    keep: int = 3
    clear_at_least: int = 0
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool | tuple[str, ...] = False
    name: str = field(default=CLEAR_TOOL_USES, init=False)

    def __call__(self, messages: Messages, count: Count) -> Trimmed:
        """Return the messages with old results cleared, if there is reason to."""
        uses = list(_tool_uses(messages))
        by_uses = self.trigger.kind == "tool_uses"
        if (len(uses) if by_uses else count(messages)) <= self.trigger.value:
            return Trimmed(list(messages), None)
        after = list(messages)
        old = uses[: max(len(uses) - self.keep, 0)]
        cleared = sum([self._clear(after, use) for use in old])
        result = trimmed(self.name, messages, after, count, cleared_tool_uses=cleared)
        if result.report and result.report["cleared_input_tokens"] < self.clear_at_least:
            return Trimmed(list(messages), None)
        return result

    def _clear(self, messages: list[Message], use: _ToolUse) -> bool:
        """Clear one use in the list; False if it is excluded, or nothing of it is left to clear."""
        if use.tool in self.exclude_tools:
            return False
        result = messages[use.result]
        messages[use.result] = without_result(result)
        changed = messages[use.result] is not result
        inputs = self.clear_tool_inputs
        if use.call and (use.tool in inputs if isinstance(inputs, tuple) else inputs):
            at, index = use.call
            caller = messages[at]
            messages[at] = without_arguments(caller, index)
            changed = changed or messages[at] is not caller
        return changed


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """Drop the reasoning of old turns; see `clear_thinking`. `keep` None keeps all."""

    keep: int | None = 1
    name: str = field(default=CLEAR_THINKING, init=False)

    def __call__(self, messages: Messages, count: Count) -> Trimmed:
        """Return the messages without the reasoning of all but the last turns that have any."""
        after = [without_thinking(message) for message in messages]
        turn, turn_of = 0, list[int]()
        for message in messages:
            turn += message.get("role") == "user"
            turn_of.append(turn)
        numbered = list(zip(turn_of, map(is_not, messages, after), strict=True))
        thinking = sorted({turn for turn, changed in numbered if changed})
        keep = len(thinking) if self.keep is None else self.keep
        old = set(thinking[: max(len(thinking) - keep, 0)])
        after = [a if t in old else b for a, b, t in zip(after, messages, turn_of, strict=True)]
        return trimmed(self.name, messages, after, count, cleared_thinking_turns=len(old))


def truncate_older_than(
    messages: Messages, n: int = 2, max_chars: int = 200, *, count: Count | None = None
) -> Trimmed:
    """Cut every text older than the last `n` turns to its first and last `max_chars / 2`.

    A turn is an assistant's message and what answers it. Tool results, replies and the user's
    later messages are cut; instructions and the user's first message, which is the task, are not,
    nor are tool calls. Between head and tail stands how many characters are missing. A text that
    is at most `MARKER_ROOM` characters too long stays: the marker would eat the gain, and so a
    text that was cut once is never cut again.

    Returns:
        The messages and `{"type", "truncated_messages"}`, with `cleared_input_tokens` if there is
        a `count`.

    Raises:
        InvalidRequestError: If `n` or `max_chars` is negative or no integer.
    """
    return TruncateOlderThan(**read_fields(TRUNCATE_OLDER_THAN, {"n": n, "max_chars": max_chars}))(
        messages, count
    )


def clear_tool_uses(
    messages: Messages,
    count: Count,
    *,
    trigger: Mapping[str, Any] | None = None,
    keep: Mapping[str, Any] | None = None,
    clear_at_least: Mapping[str, Any] | None = None,
    exclude_tools: Sequence[str] | None = None,
    clear_tool_inputs: bool | Sequence[str] | None = None,
) -> Trimmed:
    """Put a placeholder in place of all but the last tool results, once there are too many.

    Args:
        messages: The conversation.
        count: Tokens of a list of messages.
        trigger: `{"type": "input_tokens" | "tool_uses", "value": ...}`: nothing happens up to and
            including it; by default 100,000 input tokens.
        keep: `{"type": "tool_uses", "value": ...}`: the last tool uses, excluded ones among them,
            keep their results; by default 3.
        clear_at_least: `{"type": "input_tokens", "value": ...}`: if fewer tokens would go, nothing
            is cleared.
        exclude_tools: Names of tools whose uses are never cleared.
        clear_tool_inputs: Clear the arguments of the calls too: of all, or of the tools named.

    Returns:
        The messages and `{"type", "cleared_tool_uses", "cleared_input_tokens"}`.

    Raises:
        InvalidRequestError: If an argument is malformed; names it.
    """
    fields = {
        "trigger": trigger,
        "keep": keep,
        "clear_at_least": clear_at_least,
        "exclude_tools": exclude_tools,
        "clear_tool_inputs": clear_tool_inputs,
    }
    return ClearToolUses(**read_fields(CLEAR_TOOL_USES, fields))(messages, count)


def clear_thinking(messages: Messages, count: Count, *, keep: Any = None) -> Trimmed:
    """Drop the reasoning of all but the last turns that have any.

    A turn is everything from one user message to the next, tool calls and results included.

    Args:
        messages: The conversation.
        count: Tokens of a list of messages.
        keep: `{"type": "thinking_turns", "value": ...}`, or "all"; by default the last one.

    Returns:
        The messages and `{"type", "cleared_thinking_turns", "cleared_input_tokens"}`.

    Raises:
        InvalidRequestError: If `keep` is malformed.
    """
    return ClearThinking(**read_fields(CLEAR_THINKING, {"keep": keep}))(messages, count)


POLICIES: dict[str, Callable[..., Policy]] = {
    CLEAR_TOOL_USES: ClearToolUses,
    CLEAR_THINKING: ClearThinking,
    TRUNCATE_OLDER_THAN: TruncateOlderThan,
}


def from_wire(context_management: Any) -> list[Policy]:
    """The policies of a request's `context_management`, in the order in which they are listed.

    Takes `{"edits": [{"type": ..., ...}, ...]}` with the fields of `clear_tool_uses_20250919`,
    `clear_thinking_20251015` and `truncate_older_than`; a field that is null has its default.

    Raises:
        InvalidRequestError: If anything is malformed or unknown; `param` is its path.
    """
    return [POLICIES[kind](**fields) for kind, fields in read_edits(context_management)]


def trim_messages(
    messages: Messages,
    context_management: Any,
    defaults: Sequence[Policy],
    own: Policy | None,
    count: Count,
) -> tuple[list[Message], list[Report]]:
    """What a request's messages become before they are rendered; safe to call from any thread.

    Args:
        messages: The request's.
        context_management: Its own edits, as `from_wire` takes them. They replace the defaults,
            even if there are none in the list; None leaves the defaults.
        defaults: The server's policies.
        own: A user's own policy, which runs last in any case.
        count: Tokens of a list of messages.

    Returns:
        As `apply_policies`.

    Raises:
        InvalidRequestError: If `context_management` is malformed. Nothing else: a policy that
            fails is left out.
    """
    policies = defaults if context_management is None else from_wire(context_management)
    return apply_policies(messages, [*policies, *([own] if own else [])], count)


def apply_policies(
    messages: Messages, policies: Sequence[Policy], count: Count
) -> tuple[list[Message], list[Report]]:
    """Run policies one after the other; what one raises costs the request its edit and no more.

    Returns:
        The messages for the model, and the response's `applied_edits`: the report of each policy
        that changed something, and `{"type", "error"}` of each that failed, whose messages stayed
        as they were. The log names those too, without their messages: they may quote the user.
    """
    current, edits = list(messages), list[Report]()
    for policy in policies:
        try:
            current, report = policy(current, count)
        except Exception as error:
            kind = type(error).__name__
            logger.warning("The policy %s failed (%s); its edit is left out.", policy.name, kind)
            report = {"type": policy.name, "error": described(error)}
        edits += [report] if report else []
    return current, edits


def described(error: Exception) -> str:
    """An exception's type and message in one bounded line, whatever foreign code put there."""
    try:
        message = str(error)
    except Exception:
        message = ""
    text = f"{type(error).__name__}: {message[:MAX_ERROR_CHARS]}"[:MAX_ERROR_CHARS]
    return "".join(letter if letter.isprintable() else " " for letter in text).strip(": ")


def trimmed(
    name: str, before: Messages, after: list[Message], count: Count | None, **figures: int
) -> Trimmed:
    """What a policy returns: its messages and report, or no report if they are the same objects.

    Args:
        name: The policy's.
        before: What it was given.
        after: What it made of it.
        count: Tokens of a list of messages, for `cleared_input_tokens`; None leaves that out.
        figures: What else the report says.
    """
    if len(before) == len(after) and not any(map(is_not, before, after)):
        return Trimmed(after, None)
    tokens = {"cleared_input_tokens": count(before) - count(after)} if count else {}
    return Trimmed(after, {"type": name, **figures, **tokens})


def _tool_uses(messages: Messages) -> Iterator[_ToolUse]:
    """Every tool result, in order, with the latest call of its id before it."""
    calls: dict[Any, tuple[Any, int, int]] = {}
    for at, message in enumerate(messages):
        for index, call in enumerate(message.get("tool_calls") or ()):
            calls[call.get("id")] = (call.get("function") or {}).get("name"), at, index
        if message.get("role") in RESULT_ROLES:
            tool, *call = calls.get(message.get("tool_call_id"), (message.get("name"),))
            yield _ToolUse(tool, at, (call[0], call[1]) if call else None)

"""The fields of a request's `context_management`, read and checked.

The form is the hosted API's: `{"edits": [{"type": "clear_tool_uses_20250919", ...}, ...]}`. What
is read here are plain values by field; `trimming` makes policies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline.errors import InvalidRequestError

Reader = Callable[[Any, str], Any]  # a field's value and its path to what a policy is given

CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEAR_THINKING = "clear_thinking_20251015"
TRUNCATE_OLDER_THAN = "truncate_older_than"
MAX_EDITS = 16


@dataclass(frozen=True, slots=True)
class Threshold:
    """Fires above `value` input tokens or tool uses."""

    kind: str
    value: int


def read_edits(context_management: Any) -> list[tuple[str, dict[str, Any]]]:
    """Type and fields of every edit, in the order in which they are listed.

    Raises:
        InvalidRequestError: If anything is malformed or unknown; `param` is its path.
    """
    where = "context_management"
    fields = _object({} if context_management is None else context_management, where, "edits")
    edits = [] if fields.get("edits") is None else fields["edits"]
    if not isinstance(edits, list) or len(edits) > MAX_EDITS:
        raise _refusal(f"{where}.edits", f"a list of at most {MAX_EDITS} edits")
    return [_edit(edit, f"{where}.edits[{index}]") for index, edit in enumerate(edits)]


def read_fields(kind: str, fields: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """An edit's fields as its policy takes them; those that are None are left to their defaults.

    Args:
        kind: One of the edit types.
        fields: Named as that type names them.
        where: What stands before a field's name in errors.

    Raises:
        InvalidRequestError: If a value is malformed; names it.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return {name: READERS[kind][name](value, where + name) for name, value in given.items()}


def _edit(edit: Any, where: str) -> tuple[str, dict[str, Any]]:
    kind = edit.get("type") if isinstance(edit, Mapping) else None
    if not isinstance(kind, str) or kind not in READERS:
        raise _refusal(f"{where}.type", f"one of {', '.join(READERS)}")
    fields = _object(edit, where, "type", *READERS[kind])
    return kind, read_fields(kind, {k: v for k, v in fields.items() if k != "type"}, f"{where}.")


def _refusal(where: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} must be {rule}.", param=where)


def _object(value: Any, where: str, *names: str) -> Mapping[str, Any]:
    """Refuse anything but an object with no other fields than these."""
    if not isinstance(value, Mapping):
        raise _refusal(where, f"an object with {' and '.join(names)}")
    for name in value:
        if name not in names:
            raise InvalidRequestError(
                f"{where} has no field {str(name)[:60]!r}; it may have {', '.join(names)}.",
                param=where,
            )
    return value


def _whole(value: Any, where: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise _refusal(where, f"a whole number, {least} or more")
    return value


def _threshold(value: Any, where: str, kinds: Sequence[str], least: int = 0) -> Threshold:
    fields = _object(value, where, "type", "value")
    if fields.get("type") not in kinds:
        raise _refusal(f"{where}.type", " or ".join(kinds))
    return Threshold(fields["type"], _whole(fields.get("value"), f"{where}.value", least))


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise _refusal(where, "a list of tool names")
    return tuple(value)


def _inputs(value: Any, where: str) -> bool | tuple[str, ...]:
    return value if isinstance(value, bool) else _names(value, where)


def _kept_thinking(value: Any, where: str) -> int | None:
    if value == "all" or value == {"type": "all"}:
        return None
    return _threshold(value, where, ["thinking_turns"], 1).value


READERS: dict[str, dict[str, Reader]] = {
    CLEAR_TOOL_USES: {
        "trigger": lambda value, at: _threshold(value, at, ["input_tokens", "tool_uses"]),
        "keep": lambda value, at: _threshold(value, at, ["tool_uses"]).value,
        "clear_at_least": lambda value, at: _threshold(value, at, ["input_tokens"]).value,
        "exclude_tools": _names,
        "clear_tool_inputs": _inputs,
    },
    CLEAR_THINKING: {"keep": _kept_thinking},
    TRUNCATE_OLDER_THAN: {"n": _whole, "max_chars": _whole},
}

"""From the wire form of edits and marks to the engine's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from leyline.directive import Mode
from leyline.errors import DirectiveError, InvalidRequestError
from leyline.pointing import Change, MarkRequest, Target
from leyline.server.failures import quoted
from leyline.server.schema_edits import DirectiveItem, MarkBody, Pointing

_WAYS = "start and end, message, tool_call_id, or match"


def changes_of(items: Sequence[DirectiveItem]) -> list[Change]:
    """The changes that a request asks for, in its order.

    Raises:
        InvalidRequestError: if an item does not point in exactly one way, or says twice what is
            to be put in; `param` names the field.
        DirectiveError: for a mode that does not exist.
    """
    return [_change(item, f"directives[{index}]") for index, item in enumerate(items)]


def mark_request(body: MarkBody) -> MarkRequest:
    """The mark that a request asks for.

    Raises:
        InvalidRequestError: if it points to a span and to a part of the next turn.
        DirectiveError: if its fields do not fit together.
    """
    target = None if body.of != "span" and not _given(body) else target_of(body)
    if target is not None and body.of != "span":
        raise InvalidRequestError(
            f"A mark of the next turn's {body.of} points to no span; leave out "
            f"{', '.join(_given(body))}.",
            param="of",
        )
    mode = _mode(body.mode, "mode")
    with _inside(""):
        return MarkRequest(
            verb=body.verb,
            target=target,
            of=body.of,
            ttl_s=body.ttl_s,
            turns=body.turns,
            replacement=body.replacement,
            mode=mode,
        )


def target_of(item: Pointing, where: str = "") -> Target:
    """The span that an item points to.

    Args:
        item: What points.
        where: Its path in the body; empty for the body itself.

    Raises:
        InvalidRequestError: if it does not point in exactly one way.
        DirectiveError: if it points to what can be in no context.
    """
    given = _given(item)
    if not given:
        raise _malformed(where, f"it must point to a span: give {_WAYS}")
    if item.start is not None or item.end is not None:
        _check_range(item, given, where)
    if item.message is not None and item.tool_call_id is not None:
        raise _malformed(where, "give message or tool_call_id, not both")
    if item.occurrence is not None and item.match is None and item.tool_call_id is None:
        raise _malformed(_path(where, "occurrence"), "it goes with match or tool_call_id")
    with _inside(where):
        return Target(**{name: getattr(item, name) for name in given})


def _check_range(item: Pointing, given: Sequence[str], where: str) -> None:
    for name, value in (("start", item.start), ("end", item.end)):
        if value is None:
            raise _malformed(_path(where, name), "start and end go together; give both")
    if len(given) > 2:
        raise _malformed(where, f"it must point in one way: give {_WAYS}, not several")


def _given(item: Pointing) -> list[str]:
    """Names of the pointing fields that an item has."""
    return [name for name in Pointing.model_fields if getattr(item, name) is not None]


def _change(item: DirectiveItem, where: str) -> Change:
    source = None
    if item.source is not None:
        if item.replacement is not None:
            raise _malformed(where, "give replacement or source, not both")
        source = (item.source.session_id, target_of(item.source, f"{where}.source"))
    target, mode = target_of(item, where), _mode(item.mode, f"{where}.mode")
    with _inside(where):
        return Change(target, item.replacement or "", mode, item.scope, source)


def _mode(name: str, param: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        modes = ", ".join(mode.value for mode in Mode)
        raise DirectiveError(
            f"There is no mode {quoted(name)}; the modes are: {modes}.", param=param
        ) from None


@contextmanager
def _inside(where: str) -> Iterator[None]:
    """Let errors name a field by its path in the body."""
    try:
        yield
    except DirectiveError as error:
        param = where if error.param in (None, "target") else _path(where, error.param)
        raise DirectiveError(error.message, param=param or None, details=error.details) from error


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _malformed(where: str, rule: str) -> InvalidRequestError:
    subject = f"{where}: " if where else ""
    return InvalidRequestError(f"{subject}{rule}.", param=where or None)

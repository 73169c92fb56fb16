"""What a session's context is to become when only the chat template changed what was told.

Some templates write a reply otherwise into a history than it was told: GLM's drop the reasoning of
earlier turns, DeepSeek-V2's put a space in front. The client edited nothing then, but its rendered
history is no extension of what it was told. So three texts are compared: what was told, what the
context spells now that somebody edited it, and the new rendering. What the template changes, and
what is new, is carried over into the context; what was edited there stays.

Two things must hold wherever both changed the same place: what is new behind the old text is never
lost, and what was taken out of the context never comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leyline.align import align

MIN_RUN = 4  # characters in a row that two texts have in common for a reason
SLACK = 16  # by how many characters a template may lengthen what it writes otherwise


@dataclass(frozen=True, slots=True)
class Change:
    """Characters `[start, end)` of the text told become `text`."""

    start: int
    end: int
    text: str

    def meets(self, other: Change) -> bool:
        """Whether two changes are of the same characters."""
        return self.start < other.end and other.start < self.end

    def holds(self, other: Change) -> bool:
        """Whether this one is of all characters that another one is of."""
        return self.start <= other.start and other.end <= self.end


def merged(told: str, context: str, rendered: str) -> str:
    """The context's text with what changed from `told` to `rendered`.

    Args:
        told: What the client was told.
        context: What the context spells: `told` with edits.
        rendered: The new history: `told` as the template writes it now, and what is new.
    """
    ours, theirs = _changes(told, context), _changes(told, rendered)
    return "".join(_pieces(told, ours, theirs))


def _changes(old: str, new: str) -> list[Change]:
    """How a text becomes another one, character by character."""
    aligned = align([*map(ord, old)], [*map(ord, new)], MIN_RUN)
    return [Change(one.start, one.end, "".join(map(chr, one.replacement))) for one in aligned]


def _pieces(told: str, ours: Sequence[Change], theirs: Sequence[Change]) -> Iterator[str]:
    """The merged text from left to right: what the template left alone, and what it wrote."""
    at, waiting = 0, list(ours)
    for change in theirs:
        yield from _left_alone(told, at, change.start, waiting)
        yield _written(told, change, ours)
        waiting = [one for one in waiting if not (one.start < one.end and change.holds(one))]
        at = change.end
    yield from _left_alone(told, at, len(told), waiting)


def _left_alone(told: str, start: int, end: int, waiting: list[Change]) -> Iterator[str]:
    """Characters `[start, end)` as the context has them; what is put in is told once."""
    for change in list(waiting):
        if change.start > end or (change.start == end < len(told) and change.end > end):
            break
        yield told[start : max(start, change.start)] + change.text
        start = max(start, min(change.end, end))
        waiting.remove(change)
        if change.end > end:  # the rest of it lies in what the template wrote, or behind that
            waiting.insert(0, Change(end, change.end, ""))
            break
    yield told[start:end]


def _written(told: str, change: Change, ours: Sequence[Change]) -> str:
    """What the template wrote, without what the context has no longer."""
    text, length = change.text, change.end - change.start + SLACK
    for edit in ours:
        if not edit.meets(change):
            continue
        if edit.holds(change) and change.end < len(told):
            return ""  # it wrote otherwise what is not there any more
        gone = told[max(edit.start, change.start) : min(edit.end, change.end)].strip()
        put = edit.text if change.holds(edit) else ""
        if gone and gone in text[:length]:
            text = text.replace(gone, put, 1)
    return text

"""What a session's context is to become when only the chat template changed what was told.

Some templates write a reply otherwise into a history than it was told: GLM's drop the reasoning of
earlier turns, DeepSeek-V2's put a space in front. The client edited nothing then, but its rendered
history is no extension of what it was told. So three texts are compared: what was told, what the
context spells now that somebody edited it, and the new rendering. What the template changes, and
what is new, is carried over into the context; what was edited there stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leyline.align import align
from leyline.directive import Directive

MIN_RUN = 4  # characters in a row that two texts have in common for a reason


def merged(told: str, context: str, rendered: str) -> str:
    """The context's text with what changed from `told` to `rendered`.

    Where both changed the same characters, the context's stand, unless the rendering leaves out
    all of them and more.
    """
    before = _codes(told)
    theirs = align(before, _codes(rendered), MIN_RUN)
    ours = align(before, _codes(context), MIN_RUN)
    pieces, at = [], 0
    for change in _disjoint(ours, theirs):
        pieces += [told[at : change.start], "".join(map(chr, change.replacement))]
        at = change.end
    return "".join([*pieces, told[at:]])


def _codes(text: str) -> list[int]:
    return [*map(ord, text)]


def _disjoint(ours: Sequence[Directive], theirs: Sequence[Directive]) -> Iterator[Directive]:
    """Both sets without those that another one stands in for, sorted."""
    kept = [one for one in ours if not any(_holds(other, one) for other in theirs)]
    kept += [one for one in theirs if not any(_meet(one, other) for other in kept)]
    # Of two at one place, what is put into the context comes first.
    return iter(sorted(kept, key=lambda one: (one.start, one.end)))


def _holds(outer: Directive, inner: Directive) -> bool:
    """Whether one change replaces all that another one does, and more."""
    return outer.start <= inner.start < inner.end <= outer.end


def _meet(one: Directive, other: Directive) -> bool:
    """Whether two changes are of the same characters."""
    return one.start < other.end and other.start < one.end

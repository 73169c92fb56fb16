"""Edits of a context, as pure functions.

A `Directive` says what an edit means: tokens `[start, end)` become `replacement`. `apply` compiles
a set of them to an `Edit`: the context afterwards and where its rows come from; it computes none.

A set means its directives one by one **from right to left**, so that every one is in the
coordinates of the context before the set, and every replacement sees the original text to its
left. AMORTIZE keeps the tail as a graft. FORGET is the same splice with the tail made part of the
replacement, so that nothing is kept behind it. HEAL is AMORTIZE here; that the exact form follows
in the background is the engine's affair. A replacement with a `Source` is not computed: its rows
are brought from another context, as grafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from leyline.applying import Change, edited
from leyline.context import Context, Piece, Tokens, canonical
from leyline.coverage import Coverage
from leyline.errors import DirectiveError

MAX_DIRECTIVES = 256


class Mode(str, Enum):
    """What happens to the rows behind an edit."""

    AMORTIZE = "amortize"
    FORGET = "forget"
    HEAL = "heal"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the rows of a replacement are taken from.

    Attributes:
        context: Any context of the same root, that of the edit included.
        start: Position of the first row taken.
    """

    context: Context
    start: int

    def pieces(self, length: int) -> tuple[Piece, ...]:
        """The first `length` tokens as grafts."""
        return self.context.tail(self.start, self.start + length)


@dataclass(frozen=True, slots=True)
class Directive:
    """Replace tokens `[start, end)` of a context.

    Attributes:
        start: Position of the first token removed.
        end: One past the last; equal to `start` for a pure insertion.
        replacement: Token ids put in their place, possibly none.
        mode: AMORTIZE keeps the rows behind the edit, FORGET computes them anew, HEAL keeps them
            until they have been computed anew.
        source: Where the replacement's rows are; None if they are computed. Its tokens there must
            be the replacement.
    """

    start: int
    end: int
    replacement: Tokens = ()
    mode: Mode = Mode.AMORTIZE
    source: Source | None = None

    @property
    def delta(self) -> int:
        """By how much the tail's positions change."""
        return len(self.replacement) - (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that are kept: `length` of them, from position `src` before to `dst` after."""

    src: int
    dst: int
    length: int

    @property
    def delta(self) -> int:
        """Positions by which the rows' rope band turns."""
        return self.dst - self.src


@dataclass(frozen=True, slots=True)
class Insert:
    """Rows that are new: `tokens` computed at position `start` behind the first `start` tokens of
    the context *before* the edit, and standing at `dst` afterwards.
    """

    start: int
    dst: int
    tokens: Tokens

    @property
    def end(self) -> int:
        """One past the last position after the edit."""
        return self.dst + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Share:
    """Rows that are brought: `length` of them from a source, standing at `dst` afterwards."""

    source: Source
    dst: int
    length: int

    @property
    def end(self) -> int:
        """One past the last position after the edit."""
        return self.dst + self.length

    @property
    def run(self) -> Run:
        """The way of these rows, as if they came from the context before."""
        return Run(self.source.start, self.dst, self.length)


@dataclass(frozen=True, slots=True)
class Edit:
    """A compiled edit.

    Attributes:
        before: The context that is edited.
        after: The context it becomes.
        kept: Runs of rows carried over, in order of position.
        inserts: Rows computed before the edit commits, in order of position. Positions of
            `after` that are nowhere here are an ordinary gap, closed after the commit.
        shares: Rows brought from other contexts, in order of position.
    """

    before: Context
    after: Context
    kept: tuple[Run, ...]
    inserts: tuple[Insert, ...]
    shares: tuple[Share, ...] = ()

    @property
    def head(self) -> int:
        """Rows kept in front of the first change."""
        return next((run.length for run in self.kept if run.src == run.dst == 0), 0)

    def available(self) -> Coverage:
        """Positions of `after` that have a row once the edit commits."""
        return Coverage.of([*self.found(), *((new.dst, new.end) for new in self.inserts)])

    def found(self) -> Coverage:
        """Positions of `after` whose rows nobody computes for this edit: kept and brought ones."""
        kept = ((run.dst, run.dst + run.length) for run in self.kept)
        return Coverage.of([*kept, *((share.dst, share.end) for share in self.shares)])

    def lose(self, resident: int) -> Edit:
        """The same edit when only the first `resident` rows of `before` exist.

        Whatever is kept or inserted stands in front of the first hole. From there on everything
        but shared rows is labelled exact and left to be computed after the commit. An edit that
        carries nothing is the plain prefill that it comes to.
        """
        kept = tuple(_clip(self.kept, resident))
        inserts = tuple(new for new in self.inserts if new.start <= resident)
        had = Edit(self.before, self.after, kept, inserts, self.shares)
        edit = replace(had, after=had._relabelled(had.available().reach))
        carries = edit.shares or any(run.src or run.dst for run in edit.kept)
        grafted = edit.after.first_graft(edit.head) < len(edit.after)
        return edit if carries or grafted else edit.exact()

    def _relabelled(self, hole: int) -> Context:
        """The context afterwards, from `hole` on exact but for the rows that are brought."""
        if hole == len(self.after):
            return self.after
        tokens, position = self.after.tokens, hole
        pieces = list(self.after.prefix(hole).pieces)
        for share in self.shares:
            if share.dst >= hole:
                pieces += [Piece(tokens[position : share.dst]), *share.source.pieces(share.length)]
                position = share.end
        return canonical([*pieces, Piece(tokens[position:])], self.after.root)

    def exact(self) -> Edit:
        """The same text with nothing kept behind the first change: an honest re-prefill."""
        kept = _runs((0, 0, self.head))
        return Edit(self.before, self.after.exact_from(self.head), kept, ())


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one directive did.

    Attributes:
        start: First token removed, in the coordinates before the set.
        end: One past the last token removed.
        mode: The mode asked for.
        mode_done: The mode carried out; `reason` says why where it differs.
        removed: Tokens taken out.
        inserted: Tokens put in, those whose rows were brought included.
        kept: Rows behind the edit, up to the next one, that were not computed again.
        recomputed: Rows behind the edit, up to the next one, that were or will be computed again.
        moved_in_place: Kept rows that stayed in their slots.
        copied: Kept rows that went to new slots.
        freed: Slots of the removed span that became free.
        delta: Positions by which the kept rows moved.
        reason: Why less was kept or brought than asked, or None.
        shared: Inserted tokens whose rows were brought from elsewhere instead of computed.
    """

    start: int
    end: int
    mode: Mode
    mode_done: Mode
    removed: int
    inserted: int
    kept: int
    recomputed: int
    moved_in_place: int
    copied: int
    freed: int
    delta: int
    reason: str | None = None
    shared: int = 0


def checked(
    directives: Iterable[Directive],
    length: int,
    *,
    vocab_size: int,
    protect_first: int = 0,
    root: bytes = b"",
) -> tuple[Directive, ...]:
    """The set in order of position, or a `DirectiveError` that says what is wrong with it.

    Args:
        directives: Any number up to `MAX_DIRECTIVES`; spans may touch but not overlap.
        length: Tokens in the context.
        vocab_size: Replacement ids must be below it.
        protect_first: Tokens at the head that must not be edited (attention sinks live there).
        root: The context's root: rows are shared within it only.
    """
    ordered = sorted(directives, key=lambda directive: (directive.start, directive.end))
    if len(ordered) > MAX_DIRECTIVES:
        raise _refusal(
            f"{len(ordered)} directives in one call; at most {MAX_DIRECTIVES} are allowed."
        )
    for directive in ordered:
        _check_one(directive, length, vocab_size, protect_first)
        if directive.source is not None:
            _check_source(directive, directive.source, root)
    for left, right in pairwise(ordered):
        if right.start < left.end:
            raise _refusal(
                f"Spans [{left.start}, {left.end}) and [{right.start}, {right.end}) overlap; "
                "spans of one set may touch but not overlap."
            )
    if length + sum(directive.delta for directive in ordered) < 1:
        raise _refusal("The edit would leave an empty context.")
    return tuple(ordered)


def apply(context: Context, directives: Sequence[Directive]) -> Edit:
    """Compile a checked, sorted set: its directives one by one from right to left."""
    ordered = _without_forget(context, directives)
    kept, inserts, shares, position, shift = list[Run](), list[Insert](), list[Share](), 0, 0
    for one in ordered:
        kept += _runs((position, position + shift, one.start - position))
        if one.replacement and one.source:
            shares.append(Share(one.source, one.start + shift, len(one.replacement)))
        elif one.replacement:
            inserts.append(Insert(one.start, one.start + shift, one.replacement))
        position, shift = one.end, shift + one.delta
    kept += _runs((position, position + shift, len(context) - position))
    after = edited(context, map(_change, ordered))
    return Edit(context, after, tuple(kept), tuple(inserts), tuple(shares))


def compose(first: Edit, second: Edit) -> Edit:
    """`first`, then `second`, as one edit.

    The second edit's new rows must see only what the first left alone, that is, its inserts lie
    at or before the first changed position; a row of `first` is dropped or kept whole.

    Raises:
        ValueError: If they do not.
    """
    untouched = first.after.common_prefix(first.before)
    if any(new.start > untouched for new in second.inserts):
        raise ValueError("the second edit's replacement would see the first edit")
    kept = [run for outer in second.kept for run in _through(first.kept, outer)]
    carried = [new for outer in second.kept for new in _carried(first.inserts, outer)]
    inserts = sorted((*carried, *second.inserts), key=lambda new: new.dst)
    brought = [share for outer in second.kept for share in _brought(first.shares, outer)]
    shares = sorted((*brought, *second.shares), key=lambda share: share.dst)
    return Edit(first.before, second.after, tuple(kept), tuple(inserts), tuple(shares))


def _without_forget(context: Context, directives: Sequence[Directive]) -> Sequence[Directive]:
    """The same set without mode FORGET: the text behind the first one is its replacement."""
    first = next((i for i, one in enumerate(directives) if one.mode is Mode.FORGET), None)
    if first is None:
        return directives
    text, position = list[int](), directives[first].start
    for one in directives[first:]:
        text += [*context.tokens[position : one.start], *one.replacement]
        position = one.end
    new = (*text, *context.tokens[position:])
    return [*directives[:first], Directive(directives[first].start, len(context), new)]


def _change(one: Directive) -> Change:
    """What a directive does to the context."""
    brought = () if one.source is None else one.source.pieces(len(one.replacement))
    return Change(one.start, one.end, one.replacement, brought)


def _refusal(message: str) -> DirectiveError:
    """An error about the set that a caller sent."""
    return DirectiveError(message, param="directives")


def _check_one(directive: Directive, length: int, vocab_size: int, protect_first: int) -> None:
    """Refuse a span outside the context, a protected head, or ids outside the vocabulary."""
    start, end = directive.start, directive.end
    if not 0 <= start <= end <= length:
        raise _refusal(
            f"The span [{start}, {end}) does not fit: it must satisfy 0 <= start <= end <= "
            f"{length}, the length of the context."
        )
    if start < protect_first:
        raise _refusal(
            f"The span [{start}, {end}) touches the first {protect_first} token(s), which are "
            "protected because attention sinks live there; start later."
        )
    if any(not 0 <= token < vocab_size for token in directive.replacement):
        raise _refusal(f"Replacement token ids must be at least 0 and below {vocab_size}.")


def _check_source(directive: Directive, source: Source, root: bytes) -> None:
    """Refuse rows that are not those of the replacement, or not this directive's to take."""
    context, start, end = source.context, source.start, source.start + len(directive.replacement)
    if context.root != root:
        raise _refusal("Rows can only be shared within one tenant or cache salt.")
    if not 0 <= start <= end <= len(context):
        raise _refusal(
            f"The shared span [{start}, {end}) does not fit its source, which has {len(context)} "
            "token(s)."
        )
    if context.tokens[start:end] != directive.replacement:
        raise _refusal(
            f"The replacement is not what stands at [{start}, {end}) of the source that its rows "
            "should come from; take its tokens from there."
        )
    if directive.mode is Mode.FORGET:
        raise _refusal(
            "Mode forget computes everything anew and cannot take rows from a source; use "
            "amortize, or leave the source out."
        )


def _runs(*runs: tuple[int, int, int]) -> tuple[Run, ...]:
    """Runs from `(src, dst, length)` triples, without the empty ones."""
    return tuple(Run(*run) for run in runs if run[2] > 0)


def _clip(runs: Iterable[Run], src_end: int) -> Iterator[Run]:
    """The parts of the runs below a source position."""
    for run in runs:
        yield from _runs((run.src, run.dst, min(run.length, src_end - run.src)))


def _through(runs: Iterable[Run], outer: Run) -> Iterator[Run]:
    """The parts of `runs` that `outer` carries on, end to end."""
    for run in runs:
        start = max(run.dst, outer.src)
        end = min(run.dst + run.length, outer.src + outer.length)
        yield from _runs((start - run.delta, start + outer.delta, end - start))


def _carried(inserts: Iterable[Insert], outer: Run) -> Iterator[Insert]:
    """The inserts that `outer` carries on; one that it cuts in two cannot be composed."""
    for new in inserts:
        if outer.src <= new.dst and new.end <= outer.src + outer.length:
            yield replace(new, dst=new.dst + outer.delta)
        elif new.dst < outer.src + outer.length and outer.src < new.end:
            raise ValueError("the second edit cuts a replacement of the first in two")


def _brought(shares: Iterable[Share], outer: Run) -> Iterator[Share]:
    """The parts of shares that `outer` carries on."""
    for share in shares:
        for run in _through((share.run,), outer):
            yield Share(Source(share.source.context, run.src), run.dst, run.length)

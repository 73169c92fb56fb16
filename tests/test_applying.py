"""The one pass over a set against what a set means: its directives one by one, composed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from random import Random
from time import process_time

import pytest

from leyline.applying import Change, _Tail, edited
from leyline.context import Context, Piece, Tokens, canonical
from leyline.directive import (
    Directive,
    Edit,
    Insert,
    Mode,
    Run,
    Share,
    Source,
    apply,
    compose,
)

# -- the reference --------------------------------------------------------------------------------


def one_by_one(context: Context, directives: Sequence[Directive]) -> Edit:
    """What a set means: from right to left, each of what the others have left."""
    edit = Edit(context, context, runs((0, 0, len(context))), ())
    return reduce(lambda e, one: compose(e, alone(e.after, one)), reversed(directives), edit)


def alone(context: Context, directive: Directive) -> Edit:
    """One directive: head, replacement, and the tail as grafts."""
    start, end, new = directive.start, directive.end, directive.replacement
    if directive.mode is Mode.FORGET:
        new, end = new + context.tokens[end:], len(context)
    source = directive.source
    middle = [Piece(new)] if source is None else source.pieces(len(new))
    after = canonical([*context.prefix(start).pieces, *middle, *context.tail(end)], context.root)
    kept = runs((0, 0, start), (end, start + len(new), len(context) - end))
    if new and source is not None:
        return Edit(context, after, kept, (), (Share(source, start, len(new)),))
    return Edit(context, after, kept, (Insert(start, start, new),) if new else ())


def runs(*found: tuple[int, int, int]) -> tuple[Run, ...]:
    return tuple(Run(*run) for run in found if run[2])


class History:
    """Contexts that come of one another by sets which often undo what was done, or repeat it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.letters = self.random.choice([1, 2, 2, 3])
        self.contexts = [Context.of(self.tokens(1, 10)), Context.of(self.tokens(1, 8))]

    def tokens(self, low: int, high: int) -> Tokens:
        size = self.random.randint(low, high)
        return tuple(self.random.randrange(self.letters) for _ in range(size))

    def directive(self, start: int, end: int) -> Directive:
        other, kind = self.random.choice(self.contexts), self.random.random()
        if kind < 0.08:
            return Directive(start, end, self.tokens(0, 2), Mode.FORGET)
        if kind < 0.4:
            first = self.random.randint(0, len(other))
            brought = other.tokens[first : first + self.random.randint(0, 4)]
            return Directive(start, end, brought, source=Source(other, first))
        if kind < 0.7:
            more = kind > 0.6
            return Directive(start, end, other.tokens[start : end + more])
        return Directive(start, end, self.tokens(0, 3))

    def check(self) -> None:
        """One more set, both ways."""
        context, random = self.random.choice(self.contexts[-3:]), self.random
        num_points = 2 * random.choice([0, 1, 2, 3, 4])
        points = sorted(random.randint(0, len(context)) for _ in range(num_points))
        spans = zip(points[::2], points[1::2], strict=True)
        directives = [self.directive(*span) for span in spans]
        edit = apply(context, directives)
        assert edit == one_by_one(context, directives)
        assert canonical(edit.after.pieces, edit.after.root) == edit.after
        if 0 < len(edit.after) < 16:
            self.contexts.append(edit.after)
            if random.random() < 0.2:
                self.contexts.append(edit.after.append(self.tokens(0, 3)))


def check(seeds: range) -> None:
    for seed in seeds:
        history = History(seed)
        for _ in range(5):
            history.check()


@pytest.mark.parametrize("chunk", range(10))
def test_a_set_is_its_directives_one_by_one(chunk: int) -> None:
    check(range(200 * chunk, 200 * chunk + 200))


@pytest.mark.parametrize("doubt", ["_continued", "_restored", "_met", "_may_continue", "_same"])
def test_a_pass_that_leaves_a_doubt_out_is_found_out(
    monkeypatch: pytest.MonkeyPatch, doubt: str
) -> None:
    monkeypatch.setattr(_Tail, doubt, lambda *_: False)
    with pytest.raises(AssertionError):
        check(range(2000))


def test_a_pass_that_is_never_sure_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Tail, "unsettled", lambda _: True)
    check(range(200))


# -- single cases ---------------------------------------------------------------------------------


def test_changes_that_restore_the_text_together_restore_the_context() -> None:
    context = Context.of([1, 2, 3, 4])
    assert edited(context, [Change(0, 1, (1, 2)), Change(1, 2, ())]) == context
    assert edited(context, [Change(1, 3, (2, 3))]) is context


def test_an_edit_undone_in_front_of_another_one_is_undone() -> None:
    """In between, the grafts are exact again and one piece; then they are one graft."""
    context = Context.of([1, 2, 3, 4])
    spliced = apply(context, [Directive(0, 1, (9,)), Directive(2, 2, (8,))]).after
    spliced = apply(spliced, [Directive(2, 3)]).after
    assert len(spliced.pieces) == 3
    after = edited(spliced, [Change(0, 0, (7,)), Change(0, 1, (1,))])
    assert after.pieces == (Piece((7,)), Piece((1, 2, 3, 4), Context().digest()))


@pytest.mark.parametrize("spans", [[(2, 3), (0, 1)], [(0, 2), (1, 3)]])
def test_changes_out_of_order_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlap or are not in order"):
        edited(Context.of([1, 2, 3]), [Change(*span, ()) for span in spans])


def test_a_full_set_on_a_long_context_costs_no_more_than_the_hashing() -> None:
    """About 60 ms; it was 1,000 with a context for each directive.

    The context was edited before, and every piece of it is asked at every directive.
    """
    context = Context.of(range(100_000))
    spots = range(100, 99_900, 390)
    first = apply(context, [Directive(at, at + 2, (1, 2, 3)) for at in spots]).after
    second = [Directive(at, at + 2, (4,)) for at in range(200, 100_000, 390)]
    start = process_time()
    after = apply(first, second).after
    assert process_time() - start < 0.4
    assert len(second) == 256 and len(after) == len(first) - len(second)
    assert first.num_grafted() > 99_000 and after.num_grafted() > 98_000

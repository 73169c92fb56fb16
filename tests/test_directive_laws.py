"""What a set of directives means, as laws: of contexts, and of the rows behind them.

Rows are symbols here, `(token, what it was computed under)`, folded by the machine of
`tests.simulation`. Every law has a twin that breaks it. That a set which fails leaves a whole
engine as it was, whatever fails in it, is shown in `tests/test_failure_injection.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leyline.context import Context, Tokens
from leyline.directive import Directive, Edit, Mode, Source, apply, compose
from tests.bench import Bench, edits
from tests.simulation import Symbol, computed

TOKENS = st.lists(st.integers(0, 2), max_size=3).map(tuple)
SOURCE = Context.of([2, 2]).append([0, 1, 2, 0])
Set = tuple[Directive, ...]


@st.composite
def directives(draw: st.DrawFn, start: int, end: int, *modes: Mode) -> Directive:
    """One directive for a span; one in three brings its replacement from `SOURCE`."""
    mode = draw(st.sampled_from(modes or tuple(Mode)))
    if mode is Mode.FORGET or draw(st.integers(0, 2)):
        return Directive(start, end, draw(TOKENS), mode)
    first = draw(st.integers(0, len(SOURCE)))
    shared = SOURCE.tokens[first : draw(st.integers(first, len(SOURCE)))]
    return Directive(start, end, shared, mode, Source(SOURCE, first))


@st.composite
def sets(draw: st.DrawFn, length: int, *modes: Mode) -> Set:
    """Spans that may touch or be empty, in order of position, that leave something."""
    points = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    spans = zip(points[::2], points[1::2], strict=False)
    found = tuple(draw(directives(start, end, *modes)) for start, end in spans)
    assume(length + sum(directive.delta for directive in found) > 0)
    return found


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """An exact context, or one that was edited before."""
    tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    context = Context.of(tokens)
    return apply(context, draw(sets(len(context)))).after if draw(st.booleans()) else context


@st.composite
def cases(draw: st.DrawFn, *modes: Mode) -> tuple[Tokens, Set, Set]:
    """An exact context, an edit of it, and an edit of what that leaves."""
    tokens = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    first = draw(sets(len(tokens), *modes))
    after = apply(Context.of(tokens), first).after
    return tokens, first, draw(sets(len(after), *modes))


def sources(bench: Bench) -> None:
    """Leave the rows of `SOURCE` in the tree."""
    bench.file(*SOURCE.tokens)
    bench.keep = (*bench.keep, SOURCE)


def carried_out(bench: Bench, context: Context, steps: Sequence[Set], **request: bool) -> Context:
    """Carry out sets one after the other on a context whose rows are all there."""
    for step in steps:
        work = bench.edit(context, *step, computed=len(context), **request)
        answers = edits(bench.drain())
        assert all(receipt.reason in (None, FORGOTTEN) for receipt in answers[0].receipts)
        context = work.view.whole()
    return context


FORGOTTEN = "an edit in mode forget before it computes everything behind it again"


def seen(bench: Bench, context: Context) -> list[Symbol]:
    """The symbols of a context's rows, which must all be there and stand where they should."""
    rows = bench.rows(context)
    assert [row.position for row in rows] == list(range(len(context)))
    assert tuple(row.token for row in rows) == context.tokens
    return [(row.token, row.seen) for row in rows]


# -- several at once ------------------------------------------------------------------------------


def one_by_one(bench: Bench, context: Context, directives: Set) -> Context:
    return carried_out(bench, context, [(directive,) for directive in reversed(directives)])


def at_once(bench: Bench, context: Context, directives: Set) -> Context:
    return carried_out(bench, context, [directives])


def outcome(
    way: Callable[[Bench, Context, Set], Context], tokens: Tokens, steps: Sequence[Set]
) -> tuple[Context, list[Symbol]]:
    """The context and the rows to which a way of carrying out sets leads."""
    bench = Bench(200)
    sources(bench)
    context = bench.file(*tokens)
    for step in steps:
        context = way(bench, context, step)
    return context, seen(bench, context)


@given(cases())
@settings(max_examples=150)
def test_a_set_is_its_directives_one_by_one_from_right_to_left(case: tuple) -> None:
    tokens, *steps = case
    assert outcome(at_once, tokens, steps) == outcome(one_by_one, tokens, steps)


def test_from_left_to_right_is_something_else() -> None:
    def wrong_way(bench: Bench, context: Context, directives: Set) -> Context:
        return carried_out(bench, context, [(directive,) for directive in directives])

    step = (Directive(1, 2, (0,)), Directive(3, 3, (2,)))
    left, right = (outcome(way, (1, 2, 1, 2), [step]) for way in (wrong_way, at_once))
    assert left[0].tokens == right[0].tokens and left[0] != right[0] and left[1] != right[1]


# -- nothing --------------------------------------------------------------------------------------


@given(contexts())
def test_the_empty_set_is_the_identity(context: Context) -> None:
    edit = apply(context, ())
    assert edit.after == context and not edit.inserts and not edit.shares
    assert [(run.src, run.dst, run.length) for run in edit.kept] == [(0, 0, len(context))]


@given(contexts(), st.data())
def test_forgetting_a_span_for_its_own_tokens_changes_no_token(
    context: Context, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(context)))
    end = data.draw(st.integers(start, len(context)))
    same = Directive(start, end, context.tokens[start:end], Mode.FORGET)
    after = apply(context, (same,)).after
    assert after.tokens == context.tokens and after == context.exact_from(start)
    if context.first_graft() == len(context):
        assert after == context


@pytest.mark.parametrize("start", range(5))
def test_forgetting_a_span_for_its_own_tokens_computes_the_same_rows(start: int) -> None:
    tokens = (1, 2, 0, 1, 2)
    same = Directive(start, 5, tokens[start:], Mode.FORGET)
    assert outcome(at_once, tokens, [(same,)]) == outcome(at_once, tokens, [])
    other = Directive(start, 5, (*tokens[start:-1], 1), Mode.FORGET)
    assert outcome(at_once, tokens, [(other,)]) != outcome(at_once, tokens, [])


def test_a_graft_is_not_the_same_as_its_tokens() -> None:
    context = apply(Context.of([1, 2, 0, 1]), (Directive(0, 1),)).after
    same = Directive(0, 1, (2,), Mode.FORGET)
    assert apply(context, (same,)).after.tokens == context.tokens
    assert apply(context, (same,)).after != context


# -- composition ----------------------------------------------------------------------------------


def rows_after(edit: Edit, before: list[Symbol], source: list[Symbol]) -> list[Symbol | None]:
    """The symbols that an edit leads to; None where nobody has computed any yet."""
    after: list[Symbol | None] = [None] * len(edit.after)
    for run in edit.kept:
        after[run.dst : run.dst + run.length] = before[run.src : run.src + run.length]
    for new in edit.inserts:
        after[new.dst : new.end] = computed(b"", before[: new.start], new.tokens)
    for share in edit.shares:
        start = share.source.start
        after[share.dst : share.end] = source[start : start + share.length]
    return after


def whole(rows: list[Symbol | None]) -> list[Symbol]:
    """Rows without a hole."""
    assert None not in rows
    return [row for row in rows if row is not None]


@given(cases())
@settings(max_examples=300)
def test_composing_two_edits_is_applying_one_after_the_other(case: tuple) -> None:
    tokens, *steps = case
    first = apply(Context.of(tokens), steps[0])
    second = apply(first.after, steps[1])
    try:
        both = compose(first, second)
    except ValueError:
        return
    before, source = computed(b"", [], tokens), computed(b"", [], SOURCE.tokens)
    between = whole(rows_after(first, before, source))
    assert (both.before, both.after) == (first.before, second.after)
    assert rows_after(both, before, source) == rows_after(second, between, source)


def test_composing_the_wrong_way_round_is_something_else() -> None:
    context = Context.of([1, 2, 0, 1])
    first, second = (Directive(2, 3, (0, 0)), Directive(0, 1))
    there = compose(apply(context, (first,)), apply(apply(context, (first,)).after, (second,)))
    rows = computed(b"", [], context.tokens)
    right = rows_after(there, rows, [])
    back = apply(apply(context, (second,)).after, (first,))
    assert right != rows_after(back, whole(rows_after(apply(context, (second,)), rows, [])), [])


@given(st.data())
@settings(max_examples=300)
def test_composition_is_associative(data: st.DataObject) -> None:
    context = data.draw(contexts())
    found: list[Edit] = []
    for _ in range(3):
        found.append(apply(context, data.draw(sets(len(context)))))
        context = found[-1].after
    first, second, third = found
    ways: list[Edit | None] = []
    for way in (
        lambda: compose(compose(first, second), third),
        lambda: compose(first, compose(second, third)),
    ):
        try:
            ways.append(way())
        except ValueError:
            ways.append(None)
    assert None in ways or ways[0] == ways[1]


# -- undoing --------------------------------------------------------------------------------------


def inverse(context: Context, directives: Set) -> Set:
    """The set that puts back what another one took out, in the positions that it left."""
    back: list[Directive] = []
    shift = 0
    for one in directives:
        start = one.start + shift
        removed = context.tokens[one.start : one.end]
        back.append(Directive(start, start + len(one.replacement), removed))
        shift += one.delta
    return tuple(back)


KEEPING = (Mode.AMORTIZE, Mode.HEAL)


@given(cases(*KEEPING))
def test_the_inverse_of_one_edit_restores_every_label(case: tuple) -> None:
    tokens, step, _ = case
    context = Context.of(tokens)
    for directive in step:
        there = apply(context, (directive,)).after
        assert apply(there, inverse(context, (directive,))).after == context


@given(cases(*KEEPING))
@settings(max_examples=100)
def test_the_inverse_of_a_set_restores_every_token(case: tuple) -> None:
    tokens, step, _ = case
    context = Context.of(tokens)
    there = apply(context, step).after
    assert apply(there, inverse(context, step)).after.tokens == tokens


def test_an_inverse_that_puts_back_something_else_is_noticed() -> None:
    context = Context.of([1, 2, 0, 1])
    there = apply(context, (Directive(1, 2),)).after
    assert apply(there, (Directive(1, 1, (0,)),)).after != context
    assert apply(there, (Directive(1, 1, (2,)),)).after == context


def test_what_a_forget_has_computed_anew_is_exact_whatever_comes_back() -> None:
    context = Context.of([1, 2, 0, 1])
    there = apply(context, (Directive(1, 2, (), Mode.FORGET),)).after
    assert apply(there, (Directive(1, 1, (2,)),)).after != context


@given(cases())
@settings(max_examples=150)
def test_a_kept_context_is_there_again_bit_for_bit(case: tuple) -> None:
    tokens, *steps = case
    bench = Bench(200)
    sources(bench)
    context = bench.file(*tokens)
    before = bench.prefix.tree.match(context).tolist(), bench.rows(context)
    carried_out(bench, context, [step for step in steps if step], keep=True)
    assert (bench.prefix.tree.match(context).tolist(), bench.rows(context)) == before
    assert seen(bench, context) == computed(b"", [], tokens)


def test_a_context_that_nobody_keeps_is_gone() -> None:
    bench = Bench()
    context = bench.file(1, 2, 0, 1)
    before = bench.rows(context)
    carried_out(bench, context, [(Directive(1, 2),)])
    assert bench.rows(context) == before[:1]


def test_going_back_by_an_inverse_edit_finds_the_very_same_slots() -> None:
    bench = Bench()
    context = bench.file(1, 2, 0, 1)
    before = bench.prefix.tree.match(context).tolist(), bench.rows(context)
    step = (Directive(1, 2, (0, 0)),)
    there = carried_out(bench, context, [step], keep=True)
    assert carried_out(bench, there, [inverse(context, step)], keep=True) == context
    assert (bench.prefix.tree.match(context).tolist(), bench.rows(context)) == before

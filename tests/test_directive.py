"""Directives: what a set means, what is refused, and how edits compose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.context import Context, Piece, Tokens
from leyline.directive import (
    MAX_DIRECTIVES,
    Directive,
    Edit,
    Insert,
    Mode,
    Run,
    Share,
    Source,
    apply,
    checked,
    compose,
)
from leyline.errors import DirectiveError

TOKENS = st.lists(st.integers(0, 3), max_size=4).map(tuple)


ELSEWHERE = Context.of([9, 8]).append([0, 1, 2, 3, 0, 1])


@st.composite
def sets(draw: st.DrawFn) -> tuple[Context, tuple[Directive, ...]]:
    """An exact context and a set of directives for it."""
    tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    points = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    spans = list(zip(points[::2], points[1::2], strict=False))
    return Context.of(tokens), tuple(draw(directive(a, b)) for a, b in spans)


@st.composite
def directive(draw: st.DrawFn, start: int, end: int) -> Directive:
    """A directive of any mode; one in three brings its replacement from elsewhere."""
    mode = draw(st.sampled_from(Mode))
    if mode is Mode.FORGET or draw(st.integers(0, 2)):
        return Directive(start, end, draw(TOKENS), mode)
    first = draw(st.integers(0, len(ELSEWHERE)))
    shared = ELSEWHERE.tokens[first : draw(st.integers(first, len(ELSEWHERE)))]
    return Directive(start, end, shared, mode, Source(ELSEWHERE, first))


def text_after(tokens: Tokens, directives: Sequence[Directive]) -> Tokens:
    """The text that a set leads to."""
    for directive in reversed(directives):
        tokens = tokens[: directive.start] + directive.replacement + tokens[directive.end :]
    return tokens


def rows_of(edit: Edit) -> dict[int, tuple[str, int, int]]:
    """Where each row of the context afterwards comes from."""
    rows: dict[int, tuple[str, int, int]] = {}
    for run in edit.kept:
        rows |= {run.dst + i: ("kept", run.src + i, 0) for i in range(run.length)}
    for share in edit.shares:
        first, tokens = share.source.start, share.source.context.tokens
        rows |= {
            share.dst + i: ("shared", first + i, tokens[first + i]) for i in range(share.length)
        }
    for new in edit.inserts:
        rows |= {new.dst + i: ("new", new.start + i, token) for i, token in enumerate(new.tokens)}
    return rows


# -- apply ----------------------------------------------------------------------------------------


@given(sets())
def test_the_text_is_that_of_slices_from_right_to_left(case: tuple) -> None:
    context, directives = case
    assert apply(context, directives).after.tokens == text_after(context.tokens, directives)


@given(sets())
def test_every_position_afterwards_has_one_row(case: tuple) -> None:
    context, directives = case
    edit = apply(context, directives)
    counted = sum(run.length for run in edit.kept) + sum(len(new.tokens) for new in edit.inserts)
    counted += sum(share.length for share in edit.shares)
    assert sorted(rows_of(edit)) == list(range(len(edit.after))) and counted == len(edit.after)
    assert edit.available().missing(len(edit.after)) == 0


@given(sets())
def test_kept_rows_carry_their_own_tokens(case: tuple) -> None:
    context, directives = case
    edit = apply(context, directives)
    for dst, (how, src, token) in rows_of(edit).items():
        assert edit.after.tokens[dst] == (context.tokens[src] if how == "kept" else token)


def test_amortize_keeps_the_tail_as_a_graft() -> None:
    context = Context.of([1, 2, 3, 4, 5])
    edit = apply(context, [Directive(1, 3, (9,))])
    assert edit.after.pieces == (Piece((1, 9)), Piece((4, 5), context.digest(3)))
    assert edit.kept == (Run(0, 0, 1), Run(3, 2, 2)) and edit.kept[1].delta == -1
    assert edit.inserts == (Insert(1, 1, (9,)),) and edit.head == 1


def test_forget_keeps_nothing_behind_it() -> None:
    edit = apply(Context.of([1, 2, 3, 4]), [Directive(1, 2, (9,), Mode.FORGET)])
    assert edit.after == Context.of([1, 9, 3, 4]) and edit.kept == (Run(0, 0, 1),)


def test_putting_the_same_tokens_back_changes_nothing() -> None:
    context = Context.of([1, 2, 3, 4])
    assert apply(context, [Directive(1, 3, (2, 3))]).after == context


def test_a_replacement_of_the_same_length_is_not_exact() -> None:
    edit = apply(Context.of([1, 2, 3]), [Directive(1, 2, (0,))])
    assert edit.kept[1].delta == 0 and not edit.after.pieces[1].exact


def test_heal_is_compiled_like_amortize() -> None:
    context = Context.of([1, 2, 3, 4])
    heal, amortize = (
        apply(context, [Directive(1, 2, (9,), mode)]) for mode in (Mode.HEAL, Mode.AMORTIZE)
    )
    assert heal == amortize and heal.after.first_graft() == 2


def test_shared_rows_are_grafts_of_their_source() -> None:
    context = Context.of([1, 2, 3])
    edit = apply(context, [Directive(1, 2, (2, 3), source=Source(ELSEWHERE, 4))])
    assert edit.after.pieces == (
        Piece((1,)),
        Piece((2, 3), ELSEWHERE.digest(4)),
        Piece((3,), context.digest(2)),
    )
    assert edit.shares == (Share(Source(ELSEWHERE, 4), 1, 2),) and edit.inserts == ()
    assert (edit.shares[0].end, edit.shares[0].run) == (3, Run(4, 1, 2))
    assert edit.found().covers(0, 4) and edit.available() == edit.found()


def test_shared_grafts_stay_what_they_are() -> None:
    spliced = apply(ELSEWHERE, [Directive(3, 4), Directive(6, 7)]).after
    edit = apply(Context.of([5]), [Directive(1, 1, (0, 2, 3, 1), source=Source(spliced, 2))])
    assert edit.after.pieces[1:] == (
        Piece((0,), ELSEWHERE.digest(2)),
        Piece((2, 3), ELSEWHERE.digest(4)),
        Piece((1,), ELSEWHERE.digest(7)),
    )


def test_rows_of_the_very_same_context_are_exact() -> None:
    edit = apply(Context.of([9, 8, 7]), [Directive(2, 3, (0, 1), source=Source(ELSEWHERE, 2))])
    assert edit.after == Context.of([9, 8, 0, 1])


def test_a_forget_in_front_takes_the_shared_rows_away() -> None:
    shared = Directive(3, 3, (0, 1), source=Source(ELSEWHERE, 2))
    edit = apply(Context.of([1, 2, 3]), [Directive(1, 2, (), Mode.FORGET), shared])
    assert edit.shares == () and edit.after == Context.of([1, 3, 0, 1])
    nothing = Directive(3, 3, (), source=Source(ELSEWHERE, 2))
    assert apply(Context.of([1, 2, 3]), [nothing]).shares == ()


def test_no_directive_is_no_change() -> None:
    context = Context.of([1, 2])
    edit = apply(context, [])
    assert edit.after == context and edit.kept == (Run(0, 0, 2),) and edit.inserts == ()


# -- lose -----------------------------------------------------------------------------------------


def test_losing_nothing_changes_nothing() -> None:
    edit = apply(Context.of([1, 2, 3, 4]), [Directive(1, 2)])
    assert edit.lose(4) == edit


def test_the_longest_run_that_exists_is_kept() -> None:
    context = Context.of([1, 2, 3, 4, 5])
    edit = apply(context, [Directive(1, 2)]).lose(4)
    assert edit.kept == (Run(0, 0, 1), Run(2, 1, 2))
    assert [piece.exact for piece in edit.after.pieces] == [True, False, True]
    assert edit.after.tokens == (1, 3, 4, 5)


def test_an_insertion_at_the_head_keeps_the_tail() -> None:
    """Its run starts at source 0, which once read like "nothing is kept"."""
    edit = apply(Context.of([1, 2, 3]), [Directive(0, 0, (9,))]).lose(3)
    assert edit.kept == (Run(0, 1, 3),)


def test_a_deletion_at_the_head_keeps_the_tail() -> None:
    edit = apply(Context.of([1, 2, 3]), [Directive(0, 1)]).lose(3)
    assert edit.kept == (Run(1, 0, 2),)


def test_with_no_tail_left_the_edit_is_a_plain_prefill() -> None:
    edit = apply(Context.of([1, 2, 3, 4]), [Directive(1, 2, (9,))]).lose(2)
    assert edit == Edit(edit.before, Context.of([1, 9, 3, 4]), (Run(0, 0, 1),), ())


def test_a_replacement_whose_head_is_missing_is_not_computed_early() -> None:
    edit = apply(Context.of([1, 2, 3, 4]), [Directive(0, 1), Directive(3, 3, (9,))]).lose(2)
    assert edit.inserts == () and edit.kept == (Run(1, 0, 1),)
    assert edit.after.tokens == (2, 3, 9, 4)


def test_shared_rows_may_stand_behind_a_row_that_is_still_to_come() -> None:
    """The last token of a reply is never computed, and that is where a document is put."""
    context = Context.of([1, 2, 3])
    edit = apply(context, [Directive(0, 1), Directive(3, 3, (0, 1), source=Source(ELSEWHERE, 2))])
    lost = edit.lose(2)
    assert [piece.exact for piece in edit.after.pieces] == [False, False]
    assert lost.after.pieces == (
        Piece((2,), context.digest(1)),
        Piece((3,)),
        Piece((0, 1), ELSEWHERE.digest(2)),
    )
    assert lost.kept == (Run(1, 0, 1),) and lost.shares == edit.shares
    assert lost.available().first_gap(4) == (1, 2)


def test_shared_rows_alone_are_worth_an_edit() -> None:
    edit = apply(Context.of([1]), [Directive(1, 1, (0,), source=Source(ELSEWHERE, 2))])
    assert edit.lose(0).shares == edit.shares and edit.exact().shares == ()
    assert edit.exact().after == Context.of([1, 0])


@given(sets(), st.integers(0, 12))
def test_what_is_lost_becomes_exact_and_shared_rows_stay(case: tuple, resident: int) -> None:
    context, directives = case
    whole = apply(context, directives)
    edit = whole.lose(min(resident, len(context)))
    rows = edit.available()
    assert edit.after.tokens == whole.after.tokens
    assert edit.after.common_prefix(whole.after) >= rows.reach
    for start, end, piece in edit.after.spans():
        assert piece.exact or rows.covers(start, end)
    assert all(run.src + run.length <= resident for run in edit.kept)
    assert all(run.dst + run.length <= rows.reach for run in edit.kept)
    assert all(new.start <= resident and new.end <= rows.reach for new in edit.inserts)
    assert edit.shares == whole.shares


# -- compose --------------------------------------------------------------------------------------


@given(sets())
@settings(max_examples=200)
def test_composing_is_associative(case: tuple) -> None:
    context, directives = case
    if len(directives) < 3:
        return
    first = apply(context, directives[2:])
    second = apply(first.after, directives[1:2])
    third = apply(second.after, directives[:1])
    try:
        left = compose(compose(first, second), third)
    except ValueError:
        return
    assert left == compose(first, compose(second, third)) == apply(context, directives)


def test_a_replacement_must_not_see_the_first_edit() -> None:
    first = apply(Context.of([1, 2, 3, 4]), [Directive(0, 1)])
    with pytest.raises(ValueError, match="would see the first edit"):
        compose(first, apply(first.after, [Directive(2, 2, (9,))]))


def test_a_replacement_is_kept_or_dropped_whole() -> None:
    first = apply(Context.of([1, 2, 3]), [Directive(1, 1, (8, 9))])
    dropped = compose(first, apply(first.after, [Directive(1, 3)]))
    assert dropped.inserts == () and dropped.after.tokens == (1, 2, 3)
    with pytest.raises(ValueError, match="cuts a replacement"):
        compose(first, apply(first.after, [Directive(1, 2)]))


def test_shared_rows_are_carried_in_parts() -> None:
    first = apply(Context.of([1, 5]), [Directive(1, 1, (0, 1, 2, 3), source=Source(ELSEWHERE, 2))])
    both = compose(first, apply(first.after, [Directive(0, 0), Directive(1, 3)]))
    assert both.shares == (Share(Source(ELSEWHERE, 4), 1, 2),) and both.after.tokens == (1, 2, 3, 5)


def test_edits_that_follow_one_another_compose() -> None:
    context = Context.of([1, 2, 3, 4, 5])
    first = apply(context, [Directive(3, 4)])
    second = apply(first.after, [Directive(1, 2)])
    assert compose(first, second) == apply(context, [Directive(1, 2), Directive(3, 4)])


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directives", "says"),
    [
        ([Directive(-1, 2)], "0 <= start"),
        ([Directive(3, 2)], "0 <= start"),
        ([Directive(0, 11)], "10, the length"),
        ([Directive(11, 11)], "10, the length"),
        ([Directive(0, 2)], "protected"),
        ([Directive(1, 2, (5,))], "below 5"),
        ([Directive(1, 2, (-1,))], "at least 0"),
        ([Directive(1, 4), Directive(3, 5)], "overlap"),
        ([Directive(3, 5), Directive(1, 9)], "overlap"),
        ([Directive(2, 2)] * (MAX_DIRECTIVES + 1), f"at most {MAX_DIRECTIVES}"),
        ([Directive(1, 2, (2, 2), source=Source(Context.of([2]), 0))], "has 1 token"),
        ([Directive(1, 2, (2,), source=Source(Context.of([2]), -1))], "does not fit its source"),
        ([Directive(1, 2, (), source=Source(Context.of([2]), 2))], "does not fit its source"),
        ([Directive(1, 2, (2,), source=Source(Context.of([1, 2]), 0))], "take its tokens"),
        ([Directive(1, 2, (2,), source=Source(Context.of([2], b"x"), 0))], "one tenant"),
        ([Directive(1, 2, (2,), Mode.FORGET, Source(Context.of([2]), 0))], "Mode forget"),
    ],
)
def test_a_bad_set_is_refused(directives: list[Directive], says: str) -> None:
    with pytest.raises(DirectiveError, match=says) as caught:
        checked(directives, 10, vocab_size=5, protect_first=1)
    assert caught.value.param == "directives" and caught.value.status == 422


def test_rows_are_shared_within_one_root() -> None:
    shared = Directive(1, 2, (2,), source=Source(Context.of([1, 2], b"x"), 1))
    assert checked([shared], 10, vocab_size=5, root=b"x") == (shared,)


def test_an_empty_context_is_refused() -> None:
    with pytest.raises(DirectiveError, match="empty context"):
        checked([Directive(0, 3)], 3, vocab_size=5)
    assert checked([Directive(0, 3, (1,))], 3, vocab_size=5)


def test_a_good_set_comes_back_in_order() -> None:
    spans = [Directive(4, 4, (1,)), Directive(1, 4), Directive(4, 6, (4,)), Directive(10, 10, (0,))]
    assert checked(spans, 10, vocab_size=5, protect_first=1) == tuple(
        [spans[1], spans[0], spans[2], spans[3]]
    )
    assert checked([], 3, vocab_size=5) == ()

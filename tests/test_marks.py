"""Spans that follow edits: against tokens that carry their names through list slices."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leyline.directive import Directive, Mode
from leyline.marks import Mark, MessageSpan, Path, due, follow, follow_marks, follow_messages

Spot = tuple[int, int]
LENGTH = 12


@st.composite
def directive_sets(draw: st.DrawFn) -> list[Directive]:
    """Sorted sets without overlaps; empty spans, touching ones and empty replacements included."""
    cuts = sorted(draw(st.lists(st.integers(0, LENGTH), min_size=2, max_size=8)))
    spans = list(pairwise(cuts))
    chosen = [span for span in spans if draw(st.booleans())]
    sizes = [draw(st.integers(0, 3)) for _ in chosen]
    return [
        Directive(start, end, (7,) * size)
        for (start, end), size in zip(chosen, sizes, strict=True)
        if size or start < end
    ]


def edited(directives: list[Directive]) -> list[tuple[int, int | None]]:
    """Each token after the set as (number of its directive or -1, old position or None)."""
    tokens: list[tuple[int, int | None]] = [(-1, position) for position in range(LENGTH)]
    for number, directive in reversed(list(enumerate(directives))):
        new = [(number, None) for _ in directive.replacement]
        tokens[directive.start : directive.end] = new
    return tokens


def brute_follow(
    start: int, end: int, directives: list[Directive], content: bool = False
) -> tuple[int, int] | None:
    """The hull of what survives of the span, found by looking at every token."""
    survivors: list[int] = []
    for place, (number, position) in enumerate(edited(directives)):
        if position is not None:
            survives = start <= position < end
        else:
            edit = directives[number]
            survives = content and start <= edit.start < edit.end <= end
        survivors += [place] if survives else []
    return (survivors[0], survivors[-1] + 1) if survivors else None


@given(directive_sets(), st.integers(0, LENGTH), st.integers(0, LENGTH), st.booleans())
@example([Directive(4, 4, (7,)), Directive(4, 8)], 4, 10, False)
@example([Directive(2, 4), Directive(4, 4, (7,)), Directive(4, 6, (7,))], 2, 8, True)
def test_a_span_follows_as_its_tokens_do(
    directives: list[Directive], one: int, other: int, content: bool
) -> None:
    start, end = min(one, other), max(one, other)
    assert follow(start, end, directives, content=content) == brute_follow(
        start, end, directives, content
    )


def test_the_reference_notices_a_replacement_one_token_longer() -> None:
    assert brute_follow(5, 9, [Directive(2, 4, (7,))]) == (4, 8)
    assert follow(5, 9, [Directive(2, 4, (7, 7))]) == (5, 9) != (4, 8)


@pytest.mark.parametrize(
    ("span", "directives", "after", "as_content"),
    [
        ((4, 8), [], (4, 8), (4, 8)),
        ((4, 8), [Directive(0, 2)], (2, 6), (2, 6)),
        ((4, 8), [Directive(8, 9, (1, 1))], (4, 8), (4, 8)),
        ((4, 8), [Directive(5, 7, (1,))], (4, 7), (4, 7)),
        ((4, 8), [Directive(4, 8, (1, 1, 1))], None, (4, 7)),
        ((4, 8), [Directive(4, 8)], None, None),
        ((4, 8), [Directive(3, 8, (1, 1, 1))], None, None),
        ((4, 8), [Directive(2, 6, (1,))], (3, 5), (3, 5)),
        ((4, 8), [Directive(4, 6, (1,))], (5, 7), (4, 7)),
        ((4, 8), [Directive(6, 8, (1,))], (4, 6), (4, 7)),
        ((4, 8), [Directive(6, 10, (1,))], (4, 6), (4, 6)),
        ((4, 8), [Directive(4, 4, (1,))], (5, 9), (5, 9)),
        ((4, 8), [Directive(8, 8, (1,))], (4, 8), (4, 8)),
        ((4, 8), [Directive(4, 6, (1,)), Directive(6, 8, (1, 1))], None, (4, 7)),
        ((4, 4), [Directive(4, 4, (1,))], None, None),
    ],
)
def test_where_a_span_stands(
    span: Spot, directives: list[Directive], after: Spot | None, as_content: Spot | None
) -> None:
    assert follow(*span, directives) == after
    assert follow(*span, directives, content=True) == as_content


@given(directive_sets(), st.integers(0, LENGTH))
def test_a_place_stays_between_what_is_left_of_its_neighbours(
    directives: list[Directive], position: int
) -> None:
    place = Path(directives).point(position)
    for index, (_, origin) in enumerate(edited(directives)):
        if origin is not None:
            assert (origin < position) == (index < place)


@pytest.mark.parametrize(
    ("position", "directives", "after"),
    [
        (4, [Directive(4, 4, (1,))], 4),  # what is put in there stands behind it
        (4, [Directive(2, 4, (1,))], 3),
        (4, [Directive(2, 6, (1,))], 2),
        (4, [Directive(4, 6, (1,))], 4),
    ],
)
def test_where_a_place_is(position: int, directives: list[Directive], after: int) -> None:
    assert Path(directives).point(position) == after


def test_marks_follow_and_those_of_which_nothing_remains_go() -> None:
    marks = [
        Mark("gone", "pin", 2, 4),
        Mark("moved", "decay", 5, 8, turns_left=2, replacement=(3,)),
        Mark("next", "scratch", 0, 0, turns_left=1, of="reasoning"),
        Mark("found", "scratch", 6, 9, turns_left=1, of="reasoning"),
    ]
    assert follow_marks(marks, [Directive(2, 4, (1,))]) == [
        Mark("moved", "decay", 4, 7, turns_left=2, replacement=(3,)),
        marks[2],
        Mark("found", "scratch", 5, 8, turns_left=1, of="reasoning"),
    ]


def test_messages_keep_their_numbers() -> None:
    messages = [
        MessageSpan("system", None, 1, 4),
        MessageSpan("user", None, 6, 6),
        MessageSpan("tool", "call_1", 6, 8),
        MessageSpan("assistant", None, 9, 11),
    ]
    replaced = follow_messages(messages, [Directive(6, 8, (1, 1, 1))])
    assert [(one.start, one.end) for one in replaced] == [(1, 4), (6, 6), (6, 9), (10, 12)]
    assert [(one.role, one.tool_call_id) for one in replaced] == [
        (one.role, one.tool_call_id) for one in messages
    ]
    removed = follow_messages(messages, [Directive(5, 9)])
    assert [(one.start, one.end) for one in removed] == [(1, 4), (5, 5), (5, 5), (5, 7)]


@given(
    st.lists(
        st.tuples(st.integers(0, LENGTH), st.integers(0, 5), st.integers(0, 2)), max_size=6
    ).map(
        lambda spans: [
            Mark(str(i), "decay", start, start + size, replacement=(i,) * new)
            for i, (start, size, new) in enumerate(spans)
        ]
    )
)
def test_what_is_due_is_one_valid_set_that_takes_out_every_token(marks: list[Mark]) -> None:
    directives = due(marks)
    assert all(one.start < one.end for one in directives)
    assert all(left.end <= right.start for left, right in pairwise(directives))
    taken = {place for one in directives for place in range(one.start, one.end)}
    assert taken == {place for mark in marks for place in range(mark.start, mark.end)}


def test_of_two_that_overlap_the_earlier_takes_what_both_claim() -> None:
    marks = [
        Mark("late", "decay", 5, 15, replacement=(2,), mode=Mode.FORGET),
        Mark("early", "scratch", 2, 10, replacement=(1,)),
        Mark("inside", "decay", 4, 6, replacement=(3,)),
        Mark("nothing", "scratch", 20, 20, replacement=(4,)),
    ]
    assert due(marks) == (Directive(2, 10, (1,)), Directive(10, 15, (2,), Mode.FORGET))


@pytest.mark.parametrize(
    ("mark", "now", "ended"),
    [
        (Mark("a", "pin", 0, 1, until=5.0), 4.9, False),
        (Mark("a", "pin", 0, 1, until=5.0), 5.0, True),
        (Mark("a", "pin", 0, 1), 1e9, False),
        (Mark("a", "decay", 0, 1, until=5.0, turns_left=1), 6.0, False),
    ],
)
def test_only_a_pin_ends_with_time(mark: Mark, now: float, ended: bool) -> None:
    assert mark.ended(now) is ended


@pytest.mark.parametrize(
    ("verb", "turns_left", "after"),
    [("pin", None, None), ("decay", None, None), ("scratch", None, 0), ("decay", 2, 1),
     ("pin", 1, 0), ("scratch", 1, 0), ("decay", 0, 0)],
)  # fmt: skip
def test_a_turn_counts(verb: str, turns_left: int | None, after: int | None) -> None:
    mark = Mark("a", verb, 0, 1, turns_left=turns_left)  # pyright: ignore[reportArgumentType]
    assert mark.after_turn().turns_left == after

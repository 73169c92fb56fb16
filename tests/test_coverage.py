"""Coverage against a set of integers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from leyline.coverage import Coverage

INTERVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6)


def members(intervals: list[tuple[int, int]]) -> set[int]:
    return {position for start, end in intervals for position in range(start, end)}


@given(INTERVALS)
def test_it_is_the_union(intervals: list[tuple[int, int]]) -> None:
    coverage = Coverage.of(intervals)
    assert members(list(coverage)) == members(intervals)
    assert len(coverage) == len(members(intervals))


@given(INTERVALS)
def test_its_intervals_neither_touch_nor_overlap(intervals: list[tuple[int, int]]) -> None:
    coverage = Coverage.of(intervals)
    assert all(start < end for start, end in coverage)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(coverage))


@given(INTERVALS, st.integers(0, 12))
def test_a_prefix_and_what_it_misses(intervals: list[tuple[int, int]], length: int) -> None:
    coverage, kept = Coverage.of(intervals), {p for p in members(intervals) if p < length}
    assert coverage.prefix(length) == Coverage.of((p, p + 1) for p in sorted(kept))
    assert coverage.missing(length) == length - len(kept)


@given(INTERVALS, st.integers(0, 12), st.integers(0, 12))
def test_what_it_covers(intervals: list[tuple[int, int]], start: int, end: int) -> None:
    inside = set(range(start, end)) <= members(intervals)
    assert Coverage.of(intervals).covers(start, end) == inside


@given(INTERVALS, st.integers(0, 14))
def test_its_reach_and_first_gap(intervals: list[tuple[int, int]], length: int) -> None:
    coverage, have = Coverage.of(intervals), members(intervals)
    reach = next(position for position in itertools.count() if position not in have)
    assert coverage.reach == reach
    gap = list(itertools.takewhile(lambda p: p not in have, range(reach, length)))
    assert coverage.first_gap(length) == ((gap[0], gap[-1] + 1) if gap else None)


def test_an_empty_interval_adds_nothing() -> None:
    coverage = Coverage().add(3, 3)
    assert coverage == Coverage() and coverage.add(5, 2) is coverage

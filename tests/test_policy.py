"""The four decisions, as tables."""

from __future__ import annotations

import numpy as np
import pytest

from leyline.cache.radix import Node
from leyline.context import Context
from leyline.policy import DEFAULT, PATIENCE, Policy, admit, degrade, evict, victim
from leyline.sequence import Sequence, View


@pytest.mark.parametrize(
    ("needed", "available", "num_running", "starts"),
    [(3, 3, 5, True), (4, 3, 5, False), (4, 3, 0, True), (0, 0, 1, True)],
)
def test_who_starts(needed: int, available: int, num_running: int, starts: bool) -> None:
    assert admit(needed, available, num_running) is starts


@pytest.mark.parametrize(
    ("num_running", "waited", "gives_up"),
    [(1, 0, True), (2, 0, False), (2, PATIENCE - 1, False), (2, PATIENCE, True)],
)
def test_when_a_splice_gives_up(num_running: int, waited: int, gives_up: bool) -> None:
    assert degrade(num_running, waited) is gives_up


def test_exact_sequences_are_preempted_before_grafted_ones_and_late_before_early() -> None:
    grafted = Context(Context.of([1, 2]).tail(1))
    exact = Context.of([1, 2])
    works = [Sequence(n, View(c)) for n, c in enumerate((exact, exact, grafted, grafted))]
    order = []
    while works:
        order.append(victim(works).sequence_id)
        works.remove(victim(works))
    assert order == [1, 0, 3, 2]


def test_exact_rows_are_evicted_before_grafted_ones_and_old_before_new() -> None:
    def leaf(origin: bytes | None, last_used: int) -> Node:
        return Node(origin, origin is not None, (1,), np.arange(1), 0, last_used, None)

    leaves = [leaf(b"o", 1), leaf(None, 9), leaf(b"o", 0), leaf(None, 3)]
    assert [leaves.index(node) for node in sorted(leaves, key=evict)] == [3, 1, 2, 0]


def test_the_default_is_all_four() -> None:
    assert Policy() == DEFAULT == Policy(admit, victim, evict, degrade)

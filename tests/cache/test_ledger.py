"""The ledger against a counter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.batch import Slots
from leyline.cache.ledger import Ledger

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["alloc", "alloc", "retain", "release"]), st.integers(0, 7)),
    max_size=40,
)


@given(ACTIONS, st.integers(1, 12))
def test_counts_are_those_of_a_counter(actions: list[tuple[str, int]], size: int) -> None:
    freed: list[int] = []
    ledger = Ledger(size, lambda slots: freed.extend(slots.tolist()))
    owners: Counter[int] = Counter()
    held: list[Slots] = []
    for verb, number in actions:
        if verb == "alloc":
            after = int(held[number % len(held)][-1]) if held else -1
            free = size - len(owners)
            slots = ledger.alloc(number, after)
            assert (slots is None) == (number > free)
            if slots is not None and number:
                assert not owners.keys() & set(slots.tolist()) and len(set(slots)) == number
                owners.update(slots.tolist())
                held.append(slots)
        elif held and verb == "retain":
            ledger.retain(held[number % len(held)])
            owners.update(held[number % len(held)].tolist())
            held.append(held[number % len(held)])
        elif held:
            slots = held.pop(number % len(held))
            owners -= Counter(slots.tolist())
            freed.clear()
            assert ledger.release(slots).tolist() == freed
            assert freed == [slot for slot in slots.tolist() if slot not in owners]
        assert ledger.counts.tolist() == [owners[slot] for slot in range(size)]
        assert ledger.num_free == size - len(owners) and ledger.num_slots == size


def test_slots_follow_the_last_one_where_they_can() -> None:
    ledger = Ledger(8)
    first = ledger.alloc(2)
    assert first is not None and first.tolist() == [0, 1]
    second = ledger.alloc(2, after=1)
    assert second is not None and second.tolist() == [2, 3]


def test_else_they_come_from_the_largest_run_and_are_neighbours() -> None:
    ledger = Ledger(12)
    ledger.alloc(12)
    ledger.release(np.array([0, 1, 4, 5, 6, 9]))
    slots = ledger.alloc(3, after=11)
    assert slots is not None and slots.tolist() == [4, 5, 6]


def test_a_roomy_run_is_entered_half_way_so_that_its_neighbour_may_grow() -> None:
    ledger = Ledger(20)
    ledger.alloc(4)
    slots = ledger.alloc(2)
    assert slots is not None and slots.tolist() == [12, 13]


def test_scattered_slots_are_better_than_none() -> None:
    ledger = Ledger(5)
    ledger.alloc(5)
    ledger.release(np.array([0, 2, 4]))
    slots = ledger.alloc(3)
    assert slots is not None and slots.tolist() == [0, 2, 4]


def test_all_or_nothing() -> None:
    ledger = Ledger(3)
    ledger.alloc(2)
    assert ledger.alloc(2) is None and ledger.num_free == 1
    assert ledger.alloc(0) is not None and ledger.num_free == 1


def test_a_free_slot_is_neither_retained_nor_released() -> None:
    ledger = Ledger(3)
    with pytest.raises(AssertionError, match="retained"):
        ledger.retain(np.array([0]))
    with pytest.raises(AssertionError, match="released"):
        ledger.release(np.array([0]))


def test_one_slot_named_twice_has_two_owners() -> None:
    ledger = Ledger(2)
    ledger.alloc(1)
    ledger.retain(np.array([0, 0]))
    assert ledger.counts.tolist() == [3, 0]
    ledger.release(np.array([0, 0]))
    assert ledger.counts.tolist() == [1, 0]


def test_free_slots_are_those_of_nobody() -> None:
    ledger = Ledger(5)
    ledger.alloc(5)
    ledger.release(np.array([3, 0]))
    assert ledger.free_slots.tolist() == [0, 3] and ledger.free_slots.dtype == np.int64


def test_a_copy_counts_for_itself_and_calls_nobody() -> None:
    freed: list[int] = []
    ledger = Ledger(4, lambda slots: freed.extend(slots.tolist()))
    slots = ledger.alloc(2)
    assert slots is not None
    twin = ledger.copy()
    twin.release(slots)
    assert twin.num_free == 4 and ledger.num_free == 2 and not freed
    assert ledger.release(slots).tolist() == freed

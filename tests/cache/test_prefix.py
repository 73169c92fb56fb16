"""The prefix cache: what may be evicted is what is evicted, and nobody loses a row they hold."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from leyline.batch import Slots
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.cache.radix import Node
from leyline.context import Context, Piece
from leyline.policy import DEFAULT, evict


def cache(num_slots: int = 16) -> PrefixCache:
    return PrefixCache(Ledger(num_slots), evict)


def filed(prefix: PrefixCache, context: Context, slots: Slots | None = None) -> Slots:
    """Publish a context in new slots, or in those given, and let go of them."""
    if slots is None:
        slots = prefix.ledger.alloc(len(context))
        assert slots is not None
    else:
        prefix.ledger.retain(slots)
    prefix.publish(context, slots)
    prefix.ledger.release(slots)
    return slots


def test_published_rows_are_found_and_acquired() -> None:
    prefix = cache()
    slots = filed(prefix, Context.of([1, 2, 3]))
    assert prefix.resident(Context.of([1, 2, 9])) == 2
    assert prefix.acquire(Context.of([1, 2, 3]), 2).tolist() == slots[:2].tolist()
    assert prefix.ledger.counts[slots].tolist() == [2, 2, 1]


def test_a_row_that_is_there_keeps_its_slot() -> None:
    prefix = cache()
    first = filed(prefix, Context.of([1, 2]))
    filed(prefix, Context.of([1, 2, 3]))
    assert prefix.acquire(Context.of([1, 2, 3])).tolist()[:2] == first.tolist()
    assert prefix.ledger.num_free == prefix.ledger.num_slots - 3


def test_the_least_recently_used_leaf_goes_first_and_only_as_far_as_needed() -> None:
    prefix = cache(6)
    filed(prefix, Context.of([1, 2, 3]))
    filed(prefix, Context.of([2, 2, 3]))
    prefix.ledger.release(prefix.acquire(Context.of([1, 2, 3])))
    assert prefix.reclaim(1) == 1
    assert prefix.resident(Context.of([1, 2, 3])) == 3
    assert prefix.resident(Context.of([2, 2, 3])) == 2


def test_exact_rows_go_before_grafted_ones() -> None:
    prefix = cache(4)
    graft = Context((Piece((1, 2), b"o"),))
    filed(prefix, graft)
    filed(prefix, Context.of([1, 2]))
    assert prefix.reclaim(2) == 2
    assert prefix.resident(graft) == 2 and prefix.resident(Context.of([1, 2])) == 0


def test_asking_for_what_is_free_evicts_nothing() -> None:
    prefix = cache(4)
    filed(prefix, Context.of([1, 2]))
    assert prefix.reclaim(2) == 0 == prefix.reclaim(0)
    assert prefix.resident(Context.of([1, 2])) == 2


def test_a_held_row_stays_and_so_does_all_above_it_if_somebody_holds_that() -> None:
    prefix = cache(4)
    filed(prefix, Context.of([1, 2, 3]))
    prefix.acquire(Context.of([1, 2]))
    assert prefix.evictable() == 1 == prefix.reclaim(4)
    assert prefix.resident(Context.of([1, 2, 3])) == 2


def test_held_rows_of_one_leaf_do_not_shield_the_rows_above_them() -> None:
    """A same-length splice shares its tail's slots with its old branch, which others keep.

    Found by the simulation: the rows of the old branch that the splice had replaced could never
    be evicted, and a sequence that was alone waited for ever.
    """
    prefix = cache(4)
    old = filed(prefix, Context.of([1, 2, 3]))
    prefix.ledger.retain(old[2:])  # what the splice carries on
    assert prefix.evictable() == 2
    assert prefix.reclaim(3) == 2
    assert prefix.ledger.counts[old].tolist() == [0, 0, 1]


def test_a_held_leaf_without_idle_rows_above_it_is_left_alone() -> None:
    prefix = cache(4)
    prefix.ledger.retain(filed(prefix, Context.of([1, 2])))
    assert prefix.reclaim(4) == 0
    assert prefix.resident(Context.of([1, 2])) == 2


def test_eviction_counts_slots_freed_not_references_dropped() -> None:
    prefix = cache(4)
    slots = filed(prefix, Context.of([1, 2]))
    filed(prefix, Context((Piece((1, 2), b"o"),)), slots)
    assert prefix.evictable() == 2
    assert prefix.reclaim(3) == 1
    assert prefix.reclaim(4) == 1


@pytest.mark.parametrize("seed", range(150))
def test_reclaiming_all_frees_what_is_evictable(seed: int) -> None:
    random = Random(seed)
    prefix = PrefixCache(Ledger(30), lambda node: random.random())
    published: list[tuple[Context, Slots]] = []
    for _ in range(12):
        publish_something(random, prefix, published)
    held = prefix.ledger.counts > tree_counts(prefix)
    wanted = random.randint(1, 30)
    evictable, free = prefix.evictable(), prefix.ledger.num_free
    assert evictable == np.count_nonzero((prefix.ledger.counts > 0) & ~held)
    assert prefix.reclaim(wanted) == max(0, min(wanted - free, evictable))
    assert prefix.evictable() + prefix.ledger.num_free == evictable + free
    assert prefix.reclaim(31) == prefix.ledger.num_free - max(free, min(wanted, evictable + free))
    assert prefix.evictable() == 0
    assert (prefix.ledger.counts[held] > 0).all()


def publish_something(
    random: Random, prefix: PrefixCache, published: list[tuple[Context, Slots]]
) -> None:
    """File a context, perhaps in slots that another context has; some rows stay held."""
    origin = random.choice([None, None, b"o", b"p"])
    pieces = (Piece(tuple(random.choices(range(2), k=random.randint(1, 4))), origin),)
    tail = (Piece((random.randrange(2),), random.choice([b"q", b"r"])),)
    context = Context(pieces + tail * random.randrange(2))
    shared = [s for c, s in published if len(c) == len(context) and prefix.ledger.counts[s].all()]
    if shared and random.random() < 0.4:
        slots = random.choice(shared)
        prefix.ledger.retain(slots)
    else:
        slots = prefix.ledger.alloc(len(context))
    if slots is None:
        return
    prefix.publish(context, slots)
    keep = random.choice([0, 0, 0, 1, 2, len(slots)])
    prefix.ledger.release(slots[keep:])
    published.append((context, slots))


def tree_counts(prefix: PrefixCache) -> np.ndarray:
    counts = np.zeros(prefix.ledger.num_slots, dtype=np.int64)
    for node in prefix.tree.nodes():
        np.add.at(counts, node.slots, 1)
    return counts


# -- giving up ------------------------------------------------------------------------------------


def test_a_branch_of_ones_own_is_given_up_whole() -> None:
    prefix, context = cache(), Context.of([1, 2, 3])
    filed(prefix, context)
    prefix.acquire(context)
    assert prefix.exclusive(context, (), owners=1) == 0
    prefix.give_up(context, 1)
    assert prefix.resident(context) == 1


def test_what_another_context_needs_is_not_given_up() -> None:
    prefix, context = cache(), Context.of([1, 2, 3])
    filed(prefix, context)
    prefix.acquire(context)
    assert prefix.exclusive(context, [Context.of([1, 2, 0])], owners=1) == 2
    assert prefix.exclusive(context, [Context.of([1, 2, 0], b"x")], owners=1) == 0


def test_what_somebody_else_holds_is_not_given_up() -> None:
    prefix, context = cache(), Context.of([1, 2, 3])
    filed(prefix, context)
    prefix.acquire(context)
    prefix.acquire(context, 1)
    assert prefix.exclusive(context, (), owners=1) == 1


def test_a_branch_that_goes_on_is_not_given_up() -> None:
    prefix, context = cache(), Context.of([1, 2, 3])
    filed(prefix, Context.of([1, 2, 3, 4]))
    prefix.acquire(context)
    assert prefix.exclusive(context, (), owners=1) == 3
    filed(prefix, Context.of([1, 2, 0]))
    assert prefix.exclusive(context, (), owners=1) == 3
    assert prefix.exclusive(Context.of([1, 2]), (), owners=1) == 2


def test_a_branch_that_forks_is_given_up_behind_the_fork() -> None:
    prefix, context = cache(), Context.of([1, 2, 3])
    filed(prefix, context)
    filed(prefix, Context.of([1, 0]))
    prefix.acquire(context)
    assert prefix.exclusive(context, (), owners=1) == 1
    prefix.give_up(context, 1)
    assert prefix.resident(Context.of([1, 0])) == 2 and prefix.resident(context) == 1


def test_clear_forgets_every_row_but_frees_none_that_is_held() -> None:
    prefix = cache(8)
    filed(prefix, Context.of([1, 2, 3]))
    filed(prefix, Context.of([1, 4]))
    prefix.acquire(Context.of([1]))
    prefix.clear()
    assert prefix.ledger.num_free == 7 and not list(prefix.tree.nodes())


def test_the_default_order_of_eviction() -> None:
    exact = Node(None, False, (1,), np.arange(1), 0, 5, None)
    graft = Node(b"o", True, (1,), np.arange(1), 0, 1, None)
    assert DEFAULT.evict(exact) < DEFAULT.evict(graft)

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


# -- pins -----------------------------------------------------------------------------------------


def pinning(num_slots: int, *pins: Context) -> PrefixCache:
    return PrefixCache(Ledger(num_slots), evict, lambda: pins)


def test_pinned_rows_are_not_evicted_nor_counted() -> None:
    context = Context.of([1, 2, 3])
    prefix = pinning(6, context.prefix(2))
    filed(prefix, context)
    filed(prefix, Context.of([1, 9]))
    assert prefix.evictable() == 2
    assert prefix.reclaim(6) == 2
    assert prefix.resident(context) == 2


def test_a_pin_of_rows_that_are_gone_keeps_what_is_left_of_them() -> None:
    prefix = pinning(4, Context.of([1, 2, 3, 4]))
    filed(prefix, Context.of([1, 2]))
    assert prefix.evictable() == 0 == prefix.reclaim(4)


def test_pinned_rows_do_not_leave_the_tree_even_where_somebody_holds_them() -> None:
    """The second pass takes held rows that stand below idle ones; a pin keeps all above it."""
    prefix = pinning(8, Context.of([1, 2, 3]))
    slots = filed(prefix, Context.of([1, 2, 3, 4]))
    prefix.ledger.retain(slots[2:3])
    assert prefix.reclaim(8) == 1
    assert prefix.resident(Context.of([1, 2, 3, 4])) == 3


def test_a_pinned_row_may_lose_its_second_place() -> None:
    context, other = Context.of([1, 2]), Context((Piece((9,)), Piece((1, 2), b"o")))
    prefix = pinning(4, context)
    slots = filed(prefix, context)
    above = prefix.ledger.alloc(1)
    assert above is not None
    filed(prefix, other, np.append(above, slots))
    prefix.ledger.release(above)
    assert prefix.evictable() == 1 == prefix.reclaim(4)
    assert prefix.resident(context) == 2 and prefix.resident(other) == 0


def test_a_pin_is_no_owner() -> None:
    context = Context.of([1, 2, 3])
    prefix = pinning(8, context)
    filed(prefix, context)
    prefix.acquire(context)
    assert prefix.exclusive(context, (), owners=1) == 0
    prefix.give_up(context, 1)
    assert prefix.resident(context) == 1


def random_cache(random: Random, num_slots: int = 40) -> tuple[PrefixCache, list[Context]]:
    """A cache with a dozen contexts in it, some of their rows held, and those contexts."""
    prefix = PrefixCache(Ledger(num_slots), lambda node: (node.origin is not None, node.start % 2))
    published: list[tuple[Context, Slots]] = []
    for _ in range(12):
        publish_something(random, prefix, published)
    return prefix, [context for context, _ in published]


@pytest.mark.parametrize("seed", range(100))
def test_reclaiming_all_leaves_what_is_pinned_and_frees_the_rest(seed: int) -> None:
    random = Random(seed)
    prefix, contexts = random_cache(random)
    pins = [c.prefix(random.randint(1, len(c))) for c in random.sample(contexts, 2)]
    prefix.pinned = lambda: pins
    pinned = [prefix.tree.match(pin) for pin in pins]
    kept = np.zeros(40, dtype=bool)
    kept[np.concatenate(pinned)] = True
    alone = (prefix.ledger.counts > 0) & (prefix.ledger.counts == tree_counts(prefix))
    assert prefix.evictable() == np.count_nonzero(alone & ~kept)
    assert prefix.reclaim(41) == np.count_nonzero(alone & ~kept)
    assert [prefix.tree.match(pin).tolist() for pin in pins] == [p.tolist() for p in pinned]
    assert prefix.evictable() == 0


def test_without_pins_those_rows_go() -> None:
    gone = 0
    for seed in range(30):
        prefix, contexts = random_cache(Random(seed))
        before = [prefix.resident(context) for context in contexts]
        prefix.reclaim(41)
        gone += before > [prefix.resident(context) for context in contexts]
    assert gone > 25


# -- copies ---------------------------------------------------------------------------------------

Books = tuple[object, ...]


def books(prefix: PrefixCache) -> Books:
    """All that a prefix cache knows."""
    nodes = [
        (n.origin, n.starts, n.tokens, n.slots.tolist(), n.start, n.last_used, [*n.children])
        for n in prefix.tree.nodes()
    ]
    roots = {key: [*root.children] for key, root in prefix.tree.roots.items()}
    return prefix.clock, prefix.ledger.counts.tolist(), nodes, roots


def try_out(random: Random, prefix: PrefixCache, contexts: list[Context]) -> list[object]:
    """Do this and that; returns what came of it."""
    said: list[object] = []
    for _ in range(12):
        context = random.choice(contexts)
        context = context.prefix(random.randint(1, len(context))).append([random.randrange(3)])
        kind = random.randrange(5)
        if kind < 2:
            slots = prefix.ledger.alloc(len(context))
            if slots is not None:
                prefix.publish(context, slots)
                prefix.ledger.release(slots)
        elif kind == 2:
            said.append(prefix.reclaim(prefix.ledger.num_free + random.randint(0, 3)))
        elif kind == 3:
            prefix.ledger.release(prefix.acquire(context))
        else:
            bound = prefix.exclusive(context, contexts[:2], owners=0)
            said.append(bound)
            prefix.give_up(context, bound)
        nodes = list(prefix.tree.nodes())
        if nodes and random.random() < 0.2:
            node = random.choice(nodes)
            said.append(prefix.cut(node, random.randint(0, len(node.tokens))).tolist())
    return said


@pytest.mark.parametrize("seed", range(100))
def test_a_copy_does_what_the_original_would_do_and_changes_nothing(seed: int) -> None:
    random = Random(seed)
    prefix, contexts = random_cache(random)
    freed: list[int] = []
    prefix.ledger.on_free = lambda slots: freed.extend(slots.tolist())
    before, twin = books(prefix), prefix.copy()
    assert books(twin) == before
    said = try_out(Random(seed), twin, contexts)
    assert books(prefix) == before and not freed
    assert try_out(Random(seed), prefix, contexts) == said
    assert books(prefix) == books(twin)
    check_parents(twin)


def check_parents(prefix: PrefixCache) -> None:
    for node in prefix.tree.nodes():
        assert node.parent is not None and node.parent.children[node.edge] is node


def test_what_is_tried_out_does_change_a_copy() -> None:
    changed = 0
    for seed in range(20):
        prefix, contexts = random_cache(Random(seed))
        twin = prefix.copy()
        try_out(Random(seed), twin, contexts)
        changed += books(twin) != books(prefix)
    assert changed == 20


def test_a_copy_shares_tokens_and_no_slots() -> None:
    prefix = pinning(8, Context.of([5]))
    filed(prefix, Context.of([1, 2, 3]))
    twin = prefix.copy()
    (mine,), (theirs,) = prefix.tree.nodes(), twin.tree.nodes()
    assert mine.tokens is theirs.tokens and not np.shares_memory(mine.slots, theirs.slots)
    assert twin.pinned is prefix.pinned and twin.evict is prefix.evict


# -- cutting --------------------------------------------------------------------------------------


def test_a_cut_takes_all_below_it_and_leaves_the_rest() -> None:
    prefix = cache(12)
    first = filed(prefix, Context.of([1, 2, 3, 4]))
    second = filed(prefix, Context.of([1, 2, 5]))
    node = next(node for node in prefix.tree.nodes() if node.start == 0)
    leaves = list(node.children.values())
    assert sorted(prefix.cut(node, 1)) == sorted([*first[1:], second[2]])
    assert prefix.resident(Context.of([1, 2, 3, 4])) == 1
    assert all(leaf.parent is None for leaf in leaves) and node.parent is not None
    assert prefix.cut(node, 0).tolist() == [first[0]]
    assert node.parent is None and not prefix.tree.roots
    with pytest.raises(AssertionError, match="not in the tree"):
        prefix.cut(node, 0)


def test_a_cut_behind_a_whole_node_takes_its_children() -> None:
    prefix = cache(12)
    filed(prefix, Context.of([1, 2]))
    filed(prefix, Context.of([1, 2, 3]))
    node = next(node for node in prefix.tree.nodes() if node.start == 0)
    assert len(prefix.cut(node, 2)) == 1 and len(prefix.cut(node, 2)) == 0
    assert prefix.resident(Context.of([1, 2, 3])) == 2


@pytest.mark.parametrize("seed", range(100))
def test_a_cut_frees_each_slot_of_nobody_once_and_no_other(seed: int) -> None:
    random = Random(seed)
    prefix, contexts = random_cache(random)
    node = random.choice(list(prefix.tree.nodes()))
    offset = random.randint(0, len(node.tokens))
    paths = [prefix.tree.path(context) for context in contexts]
    places = [[(n, k) for n, length in path for k in range(length)] for path in paths]
    below = {id(node), *map(id, prefix.tree.below(node))}
    want = [
        next(
            (i for i, (n, k) in enumerate(p) if id(n) in below and (n is not node or k >= offset)),
            len(p),
        )
        for p in places
    ]
    counts, owned = prefix.ledger.counts.copy(), tree_counts(prefix)
    freed = prefix.cut(node, offset)
    assert [prefix.resident(context) for context in contexts] == want
    dropped = owned - tree_counts(prefix)
    assert (prefix.ledger.counts == counts - dropped).all()
    assert sorted(freed) == np.flatnonzero((counts > 0) & (counts == dropped)).tolist()
    check_parents(prefix)


def test_rows_that_somebody_runs_on_stay_theirs() -> None:
    prefix, context = cache(8), Context.of([1, 2, 3])
    filed(prefix, context)
    mine = prefix.acquire(context)
    node = next(prefix.tree.nodes())
    assert len(prefix.cut(node, 0)) == 0 and prefix.ledger.counts[mine].tolist() == [1, 1, 1]


def test_a_branch_is_let_go_as_far_as_nothing_hangs_on_it() -> None:
    prefix, one, two = cache(), Context.of([1, 2, 3, 4]), Context.of([1, 2, 5])
    filed(prefix, one)
    filed(prefix, two)
    longer = Context.of([1, 2, 3, 4, 6])
    prefix.let_go(longer, 0, [])  # never filed to its end: what is there goes
    assert prefix.resident(one) == 2 and prefix.resident(two) == 3
    filed(prefix, one)
    prefix.let_go(Context.of([1, 2, 3]), 0, [])  # something goes on from it
    assert prefix.resident(one) == 4
    prefix.let_go(one, 3, [])
    assert prefix.resident(one) == 3
    prefix.let_go(one, 0, [Context.of([1, 2, 3])])
    assert prefix.resident(one) == 3
    prefix.let_go(one, 0, [])
    assert prefix.resident(one) == 2 and prefix.ledger.num_free == prefix.ledger.num_slots - 3


def test_a_branch_is_let_go_although_another_shares_its_slots() -> None:
    prefix, plain = cache(), Context.of([1, 2, 3])
    slots = filed(prefix, plain)
    graft = Context((Piece((1,)), Piece((2, 3), b"origin")))
    filed(prefix, graft, slots)
    prefix.let_go(graft, 1, [plain])
    assert prefix.resident(graft) == 1 and prefix.resident(plain) == 3
    assert (prefix.ledger.counts[slots] == 1).all()

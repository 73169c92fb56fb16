"""The radix tree against a dictionary of prefixes, its structure checked after every step."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from leyline.cache.radix import NO_SLOTS, Node, RadixTree
from leyline.context import Context, Piece, canonical

Reference = dict[Context, int]  # a context with its last row: the slot of that row


def random_context(random: Random) -> Context:
    """A short context of few tokens, origins and roots, so that paths meet and part."""
    pieces = [
        Piece(
            tuple(random.choices(range(2), k=random.randint(1, 3))),
            random.choice([None, None, b"a", b"b"]),
        )
        for _ in range(random.randint(0, 3))
    ]
    return canonical(pieces, random.choice([b"", b"", b"x"]))


def prefixes(context: Context) -> list[Context]:
    return [context.prefix(length) for length in range(1, len(context) + 1)]


def check(tree: RadixTree, reference: Reference) -> None:
    """Every node hangs where its edge says, and the tree's rows are the reference's."""
    found: list[int] = []
    for node in tree.nodes():
        assert node.parent is not None and node.parent.children[node.edge] is node
        assert node.tokens and len(node.tokens) == len(node.slots)
        assert node.start == (node.parent.end if node.parent.parent else 0)
        found += node.slots.tolist()
    assert sorted(found) == sorted(reference.values())
    for key, root in tree.roots.items():
        assert root.parent is None and root.children and any(c.root == key for c in reference)


@pytest.mark.parametrize("seed", range(60))
def test_it_finds_what_a_dictionary_finds(seed: int) -> None:
    random, tree, reference = Random(seed), RadixTree(), Reference()
    next_slot = 0
    for now in range(40):
        context = random_context(random)
        if random.random() < 0.65:
            slots = np.arange(next_slot, next_slot + len(context))
            next_slot += len(context)
            new = [p for p in prefixes(context) if p not in reference]
            kept = tree.insert(context, slots, now)
            assert kept.tolist() == slots[len(context) - len(new) :].tolist()
            reference |= {p: int(slots[len(p) - 1]) for p in new}
        else:
            cut_some_leaf(random, tree, reference)
        check(tree, reference)
        other = random_context(random)
        want = [reference[p] for p in prefixes(other) if p in reference]
        assert tree.match(other).tolist() == want


def cut_some_leaf(random: Random, tree: RadixTree, reference: Reference) -> None:
    """Shorten or remove a leaf."""
    leaves = [node for node in tree.nodes() if not node.children]
    if leaves:
        node = random.choice(leaves)
        dropped = tree.truncate(node, random.randrange(len(node.tokens)))
        for context in [c for c, slot in reference.items() if slot in dropped]:
            del reference[context]
        assert len(dropped)


def test_the_empty_context_matches_nothing_and_files_nothing() -> None:
    tree = RadixTree()
    assert len(tree.match(Context())) == 0
    assert len(tree.insert(Context(), NO_SLOTS, 0)) == 0 and not tree.roots


def test_an_exact_prompt_never_finds_a_graft() -> None:
    tree = RadixTree()
    spliced = Context((Piece((1,)), Piece((2, 3), b"o")))
    tree.insert(spliced, np.arange(3), 0)
    assert tree.match(Context.of([1, 2, 3])).tolist() == [0]
    assert tree.match(spliced).tolist() == [0, 1, 2]
    assert tree.match(Context((Piece((1,)), Piece((2, 3), b"p")))).tolist() == [0]


def test_what_is_generated_behind_a_graft_is_out_of_reach_too() -> None:
    tree = RadixTree()
    tree.insert(Context((Piece((1,)), Piece((2,), b"o"), Piece((3,)))), np.arange(3), 0)
    assert tree.match(Context.of([1, 2, 3])).tolist() == [0]


def test_two_grafts_of_one_origin_are_not_one_longer_graft() -> None:
    tree = RadixTree()
    tree.insert(Context((Piece((1,), b"o"), Piece((2,), b"o"))), np.arange(2), 0)
    assert tree.match(Context((Piece((1, 2), b"o"),))).tolist() == [0]


def test_a_graft_is_found_after_a_split_inside_it() -> None:
    tree = RadixTree()
    long = Context((Piece((1, 2, 3), b"o"),))
    tree.insert(long, np.arange(3), 0)
    tree.insert(Context((Piece((1, 9), b"o"),)), np.arange(10, 12), 1)
    assert tree.match(long).tolist() == [0, 1, 2]
    assert tree.match(Context((Piece((1, 9), b"o"),))).tolist() == [0, 11]


def test_roots_share_nothing_and_go_with_their_last_leaf() -> None:
    tree = RadixTree()
    tree.insert(Context.of([1], b"x"), np.arange(1), 0)
    tree.insert(Context.of([1], b"y"), np.arange(1, 2), 0)
    assert len(tree.match(Context.of([1]))) == 0
    (leaf,) = (node for node in tree.nodes() if node.slots[0] == 0)
    assert tree.truncate(leaf, 0).tolist() == [0]
    assert tree.roots.keys() == {b"y"} and leaf.parent is None


def test_a_look_up_marks_its_path_only_when_it_has_a_time() -> None:
    tree = RadixTree()
    tree.insert(Context.of([1, 2]), np.arange(2), 3)
    tree.match(Context.of([1]))
    assert [node.last_used for node in tree.nodes()] == [3]
    tree.match(Context.of([1]), 7)
    assert [node.last_used for node in tree.nodes()] == [7]


def test_only_a_leaf_can_be_cut() -> None:
    tree = RadixTree()
    tree.insert(Context.of([1, 2]), np.arange(2), 0)
    tree.insert(Context.of([1, 3]), np.arange(2, 4), 0)
    upper = next(node for node in tree.nodes() if node.children)
    with pytest.raises(AssertionError, match="only a leaf"):
        tree.truncate(upper, 0)


def test_a_root_has_no_end_of_its_own() -> None:
    root = Node(None, False, (), NO_SLOTS, 0, 0, None)
    assert root.end == 0


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_is_the_same_tree_in_other_nodes(seed: int) -> None:
    random, tree, reference = Random(seed), RadixTree(), Reference()
    for now in range(12):
        context = random_context(random)
        slots = np.arange(100 * now, 100 * now + len(context))
        new = [p for p in prefixes(context) if p not in reference]
        tree.insert(context, slots, now)
        reference |= {p: int(slots[len(p) - 1]) for p in new}
    twin = tree.copy()
    check(twin, reference)
    assert not {id(node) for node in tree.nodes()} & {id(node) for node in twin.nodes()}
    for ours, theirs in zip(tree.nodes(), twin.nodes(), strict=True):
        assert ours.tokens is theirs.tokens and ours.last_used == theirs.last_used
        assert ours.slots.tolist() == theirs.slots.tolist()
    there = dict(reference)
    while any(not node.children for node in tree.nodes()):
        cut_some_leaf(random, tree, there)
    check(twin, reference)


def test_what_is_below_a_node() -> None:
    tree = RadixTree()
    for tokens in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [7]):
        tree.insert(Context.of(tokens), np.arange(len(tokens)), 0)
    upper = tree.roots[b""].children[None, False, 1]
    assert sorted(node.tokens for node in tree.below(upper)) == [(3,), (4,), (5,), (6,)]

"""Purges against rows that remember what they saw."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

import leyline.purge
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.cache.radix import Node
from leyline.context import Context, Piece, canonical
from leyline.directive import Directive, apply
from leyline.origins import Origins, View
from leyline.policy import evict
from leyline.purge import Purge, Spell, cleaned, dependents, first_dependent, holds
from tests.remembering import SPELLING, Row, World, spelled

ROOT, OTHER = b"", b"another tenant"


def spell(token: int) -> bytes:
    return SPELLING[token]


class Filed(World):
    """A world whose rows are filed in a cache now and then, and evicted now and then."""

    def __init__(self, random: Random, origins: Origins) -> None:
        super().__init__(random, origins)
        self.prefix = PrefixCache(Ledger(400), evict)
        self.rows: dict[int, Row] = {}

    def live(self, steps: int) -> Filed:
        """Step and file."""
        for _ in range(steps):
            story = self.step()
            if self.random.random() < 0.7:
                self.publish(self.random.randint(1, len(story.rows)), story.context, story.rows)
            if self.random.random() < 0.1:
                self.prefix.reclaim(self.prefix.ledger.num_free + self.random.randint(1, 4))
        return self

    def publish(self, length: int, context: Context, rows: list[Row]) -> None:
        """File the first rows of a story, in this tenant's tree and in another's."""
        for root in (ROOT, OTHER):
            slots = self.prefix.ledger.alloc(length)
            assert slots is not None
            self.rows |= dict(zip(slots.tolist(), rows, strict=False))
            part = Context(context.prefix(length).pieces, root)
            self.prefix.publish(part, slots)
            self.prefix.ledger.release(slots)

    def paths(self) -> list[tuple[list[tuple[Node, int]], Context]]:
        """Every place of the tree down to each leaf, and the context that it spells."""
        found: list[tuple[list[tuple[Node, int]], Context]] = []
        for leaf in (node for node in self.nodes() if not node.children):
            nodes: list[Node] = [leaf]
            while (parent := nodes[0].parent) is not None and parent.parent is not None:
                nodes.insert(0, parent)
            pieces: list[Piece] = []
            for node in nodes:
                if pieces and not node.starts and pieces[-1].origin == node.origin:
                    pieces[-1] = Piece(pieces[-1].tokens + node.tokens, node.origin)
                else:
                    pieces.append(Piece(node.tokens, node.origin))
            places = [(node, offset) for node in nodes for offset in range(len(node.tokens))]
            found.append((places, Context(tuple(pieces))))
        return found

    def nodes(self) -> list[Node]:
        """The nodes of the tenant."""
        root = self.prefix.tree.roots.get(ROOT)
        return list(self.prefix.tree.below(root)) if root else []

    def at(self, place: tuple[Node, int]) -> Row:
        """The row of a place."""
        return self.rows[int(place[0].slots[place[1]])]

    def text(self) -> bytes:
        """A part of what somebody once wrote, cut anywhere."""
        tokens = self.random.choice([*self.stories]).rows
        seen = self.random.choice([row for row in tokens for row in row.view])
        data = spelled(seen.view) or b"a"
        start = self.random.randrange(len(data))
        return data[start : start + self.random.randint(2, 9)]


# -- the reference --------------------------------------------------------------------------------


def owners(tokens: list[int]) -> list[int]:
    """For each byte the index of its token."""
    return [index for index, token in enumerate(tokens) for _ in SPELLING[token]]


def occurrence(tokens: list[int], text: bytes, *, ends: bool) -> int | None:
    """Index of the token in which the text, or enough of it at the end, begins."""
    data = b"".join(SPELLING[token] for token in tokens)
    for start in range(len(data)):
        if data[start : start + len(text)] == text:
            return owners(tokens)[start]
    for length in reversed(range((len(text) + 1) // 2, len(text))):
        if ends and data.endswith(text[:length]):
            return owners(tokens)[len(data) - length]
    return None


def first_graft(context: Context, rows: list[Row], text: bytes) -> int:
    """The first grafted position that knows the text."""
    for start, end, piece in context.spans():
        if piece.exact:
            continue
        seen = rows[start].seen
        if text in spelled(seen) or any(row.saw(text) for row in seen):
            return start
        tokens = [row.token for row in (*seen, *rows[start:end])]
        at = occurrence(tokens, text, ends=end == len(context))
        if at is not None:
            return start + max(0, at - len(seen))
    return len(context)


def first_that_knows(context: Context, rows: list[Row], text: bytes) -> int:
    """The first position that knows the text."""
    at = occurrence(list(context.tokens), text, ends=True)
    return min(first_graft(context, rows, text), len(context) if at is None else at)


def removed(world: Filed, text: bytes) -> set[tuple[int, int]]:
    """All places of the tree that must go: below the first dependent one of any path."""
    paths = world.paths()
    cuts: set[tuple[int, int]] = set()
    for places, context in paths:
        first = first_that_knows(context, [world.at(place) for place in places], text)
        cuts |= {(id(node), offset) for node, offset in places[first : first + 1]}
    gone: set[tuple[int, int]] = set()
    for places, _ in paths:
        keys = [(id(node), offset) for node, offset in places]
        first = next((index for index, key in enumerate(keys) if key in cuts), len(keys))
        gone |= set(keys[first:])
    return gone


# -- purges ---------------------------------------------------------------------------------------


def purged(
    seed: int,
    *,
    origins: Callable[[], Origins] = Origins,
    asked: Callable[[Origins], Origins] = lambda origins: origins,
    how: Spell = spell,
) -> tuple[int, int]:
    """Live, forget something, and check that it is gone and that no more is gone than must be.

    Returns:
        Places that went and places that stayed.
    """
    world = Filed(Random(seed), origins()).live(25)
    text = world.text()
    gone = removed(world, text)
    places = {(id(node), k): node for node in world.nodes() for k in range(len(node.tokens))}
    nodes = [*places.values()]
    others = sum(len(node.tokens) for node in world.prefix.tree.nodes()) - len(nodes)
    counts, tree = world.prefix.ledger.counts.copy(), world.prefix
    purge = Purge(text, asked(world.origins), how)
    for story in world.stories:
        check_context(purge, story.context, story.rows, text)
    freed = [tree.cut(*cut) for cut in purge.dependents(tree.tree, ROOT)]
    rows = [world.at((node, k)) for node in world.nodes() for k in range(len(node.tokens))]
    assert not any(row.saw(text) for row in rows)
    left = {(id(node), k) for node in world.nodes() for k in range(len(node.tokens))}
    assert left == places.keys() - gone
    assert others == sum(len(node.tokens) for node in tree.tree.nodes()) - len(left)
    slots = np.concatenate((np.empty(0, np.int64), *freed))
    assert sorted(slots) == np.flatnonzero((counts > 0) & (tree.ledger.counts == 0)).tolist()
    return len(gone), len(left)


def check_context(purge: Purge, context: Context, rows: list[Row], text: bytes) -> None:
    """What a purge says of a context is what its rows know."""
    first, graft = first_that_knows(context, rows, text), first_graft(context, rows, text)
    assert purge.first_dependent(context) == first
    assert not any(row.saw(text) for row in rows[:first])
    clean = purge.cleaned(context)
    assert clean == context.exact_from(graft)
    assert (clean is context) == (graft == len(context))
    assert purge.holds(context) == (text in spelled(rows))


@pytest.mark.parametrize("chunk", range(10))
def test_what_knows_the_text_goes_and_nothing_else(chunk: int) -> None:
    gone = left = 0
    for seed in range(30 * chunk, 30 * chunk + 30):
        went, stayed = purged(seed)
        gone, left = gone + went, left + stayed
    assert gone > 100 and left > 100


def found_out(purge: Callable[[int], object]) -> int:
    """How many worlds show that a purge is wrong."""
    found = 0
    for seed in range(60):
        try:
            purge(seed)
        except AssertionError:
            found += 1
    return found


def test_a_purge_that_ignores_what_grafts_saw_is_found_out() -> None:
    class Blind(Origins):
        def view(self, origin: bytes) -> View:
            return View(Context(), 0)

    assert found_out(lambda seed: purged(seed, asked=lambda _: Blind())) > 5


def test_a_purge_that_ignores_the_borders_of_tokens_is_found_out() -> None:
    assert found_out(lambda seed: purged(seed, how=lambda token: SPELLING[token] + b"|")) > 5


def test_a_purge_that_forgets_what_was_cut_off_a_graft_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(View, "extended", lambda view, tokens: view)
    assert found_out(purged) > 0


def test_a_purge_that_reads_only_the_tokens_of_what_grafts_saw_is_found_out() -> None:
    class Flat(Origins):
        def view(self, origin: bytes) -> View | None:
            view = super().view(origin)
            return view and View(view.context.exact_from(0), view.length)

    assert found_out(lambda seed: purged(seed, origins=Flat)) > 0


# -- single cases ---------------------------------------------------------------------------------

LETTERS = "abcdefghij."


def letters(text: str) -> tuple[int, ...]:
    return tuple(map(LETTERS.index, text))


def sought(text: bytes, origins: Origins | None = None) -> Purge:
    return Purge(text, Origins() if origins is None else origins, lambda t: LETTERS[t].encode())


def filed(*contexts: Context) -> PrefixCache:
    prefix = PrefixCache(Ledger(100), evict)
    for context in contexts:
        slots = prefix.ledger.alloc(len(context))
        assert slots is not None
        prefix.publish(context, slots)
        prefix.ledger.release(slots)
    return prefix


def left_after(prefix: PrefixCache, purge: Purge) -> list[str]:
    """What the nodes of the tree spell once it is purged."""
    for node, offset in purge.dependents(prefix.tree, ROOT):
        prefix.cut(node, offset)
    return sorted("".join(map(LETTERS.__getitem__, n.tokens)) for n in prefix.tree.nodes())


def text_of(word: str) -> Context:
    return Context.of(letters(word))


def test_a_cut_reaches_into_the_nodes_above() -> None:
    """The text begins before the tree forks; the branch that shares its beginning goes too."""
    prefix = filed(text_of("aabcd"), text_of("aabce"), text_of("aa.."))
    assert left_after(prefix, sought(b"bcd")) == ["..", "aa"]
    prefix = filed(text_of("aabcd"), text_of("aab.."), text_of("aabccc"), text_of("d"))
    assert left_after(prefix, sought(b"abcd")) == ["a", "d"]


def test_no_cut_is_below_another() -> None:
    prefix = filed(text_of("abcabd"), text_of("abcab."), text_of("abcaba"))
    for text in (b"cabd", b"ab", b"abd"):
        cuts = sought(text).dependents(prefix.tree, ROOT)
        assert len(cuts) == 1


def test_a_later_branch_may_begin_the_text_further_up() -> None:
    """Both branches know the text; in one of them it begins a token earlier."""
    prefix = filed(text_of("abababd"), text_of("ababad"))
    for order in ("bababd", "babad"):
        (cut,) = sought(order.encode()).dependents(prefix.tree, ROOT)
        assert cut[1] == 1


def test_where_a_path_ends_half_of_the_text_is_the_text() -> None:
    assert left_after(filed(text_of("..abc")), sought(b"abcdef")) == [".."]
    assert left_after(filed(text_of("..ab")), sought(b"abcdef")) == ["..ab"]
    assert left_after(filed(text_of("..abc.")), sought(b"abcdef")) == ["..abc."]
    assert sought(b"abcdef").first_dependent(text_of("abcd")) == 0
    assert sought(b"abcdef").first_dependent(text_of("ab")) == 2
    assert sought(b"abaaba").first_dependent(text_of(".abaab")) == 1
    assert sought(b"abaabb").first_dependent(text_of(".aabaaba")) == 5
    assert sought(b"a").first_dependent(text_of("b")) == 1


def test_a_reply_to_half_a_text_that_a_graft_remembers_counts_too() -> None:
    origins, context = Origins(), text_of("ab.")
    edit = apply(context, [Directive(0, 1), Directive(2, 3)])
    origins.learn(edit)
    assert edit.after.tokens == letters("b")
    assert sought(b"abcd", origins).first_dependent(edit.after) == 0
    assert sought(b"abcde", origins).first_dependent(edit.after) == 1
    prefix = filed(edit.after)
    assert left_after(prefix, sought(b"abcde", origins)) == ["b"]
    assert left_after(prefix, sought(b"abcd", origins)) == []


def test_half_a_text_in_the_middle_of_what_a_graft_saw_is_another_text() -> None:
    """The first edit's graft ends with half the text, and a second graft goes on differently."""
    origins = Origins()
    first = apply(text_of(".ab"), [Directive(0, 1)])
    grown = first.after.append(letters("ghi"))
    second = apply(grown, [Directive(0, 2)])
    origins.learn(first)
    origins.learn(second)
    assert sought(b"abcd", origins).first_dependent(second.after) == 3
    assert sought(b"abcd", origins).first_dependent(first.after) == 0


def test_a_graft_of_unknown_origin_may_have_seen_anything() -> None:
    context = canonical([Piece(letters("ab")), Piece(letters("cd"), b"o" * 32)])
    purge = sought(b"j")
    assert purge.first_dependent(context) == 2
    assert purge.cleaned(context) == text_of("abcd")
    assert left_after(filed(context), purge) == ["ab"]


def test_an_empty_text_is_nowhere() -> None:
    context = canonical([Piece(letters("ab")), Piece(letters("cd"), b"o" * 32)])
    purge = sought(b"")
    assert purge.first_dependent(context) == 4 and purge.cleaned(context) is context
    assert not purge.holds(context) and not purge.dependents(filed(context).tree, ROOT)


def test_a_tenant_without_rows_has_nothing_to_purge() -> None:
    tree = filed(text_of("ab")).tree
    assert not sought(b"a").dependents(tree, OTHER)
    assert sought(b"a").dependents(tree, ROOT)


def test_ten_thousand_edits_in_a_row_are_read_without_recursion() -> None:
    class Chain(Origins):
        def view(self, origin: bytes) -> View | None:
            number = int.from_bytes(origin, "big")
            if number < 2:
                return View(text_of("c"), 1)
            older = [Piece(letters("b"), (number - k).to_bytes(4, "big")) for k in (1, 2)]
            return View(Context((Piece(letters("a")), *older)), 3)

    last = Context((Piece(letters("d"), (10_000).to_bytes(4, "big")),))
    assert sought(b"c", Chain()).first_dependent(last) == 0
    assert sought(b"e", Chain()).first_dependent(last) == 1


def test_an_origin_is_read_once() -> None:
    asked: list[bytes] = []

    class Counted(Origins):
        def view(self, origin: bytes) -> View | None:
            asked.append(origin)
            return View(text_of("abc"), 3)

    context = canonical([Piece(letters("a")), *[Piece(letters("d"), b"o" * 32)] * 3])
    purge = sought(b"j", Counted())
    for _ in range(3):
        assert purge.first_dependent(context) == 4
    assert asked == [b"o" * 32]


def test_a_single_question_needs_no_purge_of_its_own() -> None:
    origins, before = Origins(), text_of("abcdef")
    edit = apply(before, [Directive(2, 4)])
    origins.learn(edit)

    def letter(token: int) -> bytes:
        return LETTERS[token].encode()

    prefix = filed(edit.after)
    for text in (b"cd", b"de", b"ab", b"j"):
        purge = Purge(text, origins, letter)
        want = purge.first_dependent(edit.after)
        assert first_dependent(edit.after, text, origins, letter) == want
        assert cleaned(edit.after, text, origins, letter) == purge.cleaned(edit.after)
        assert holds(edit.after, text, letter) == (text == b"ab")
        cuts = dependents(prefix.tree, ROOT, text, origins, letter)
        assert cuts == purge.dependents(prefix.tree, ROOT)
        assert [node.start + offset for node, offset in cuts] == [want] * (want < 4)
    assert [purge.first_dependent(edit.after) for purge in map(sought, (b"cd", b"j"))] == [2, 2]


def test_a_purge_that_remembers_no_spelling_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leyline.purge, "MAX_SPELLED", 0)
    assert all(sum(purged(seed)) for seed in range(20))


def test_what_many_origins_share_is_spelled_once() -> None:
    """A cut of it for each of them took 16 ms and half a megabyte at 100,000 tokens."""
    origins, num_tokens = Origins(), 2_000
    context = Context.of(letters("abcdefghij" * (num_tokens // 10)))
    edit = apply(context, [Directive(at, at + 1) for at in range(0, num_tokens, 50)])
    origins.learn(edit)
    purge = sought(b"jjj", origins)
    assert purge.first_dependent(edit.after) == len(edit.after) and len(origins) == 40
    held = sum(len(run.tokens) for run in purge._runs.values())
    assert held <= 3 * num_tokens

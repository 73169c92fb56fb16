"""Origins against rows that remember what they saw."""

from __future__ import annotations

from random import Random

import pytest

from leyline.context import Context, Piece, continuation
from leyline.directive import Directive, Edit, Mode, Share, Source, apply
from leyline.origins import Origins, View
from tests.remembering import World, labelled


def live(world: World) -> set[bytes]:
    """Origins of all grafts of the present."""
    pieces = (piece for story in world.stories for piece in story.context.pieces)
    return {piece.origin for piece in pieces if piece.origin is not None}


def check(world: World) -> None:
    """Every row of the present is what its label and the book say, and saw what they say."""
    for story in world.stories:
        assert labelled(story.context, world.origins) == story.rows
        for position in range(len(story.context) + 1):
            seen = world.origins.seen(story.context, position)
            assert seen is not None
            want = [*story.rows[position].seen] if position < len(story.rows) else story.rows
            assert labelled(seen, world.origins) == want


def lived(seed: int, origins: Origins, steps: int = 12, *, prune: bool = False) -> World:
    """A world in which all is well after every step."""
    world = World(Random(seed), origins)
    for _ in range(steps):
        world.step()
        if prune:
            origins.prune(live(world))
        check(world)
    return world


@pytest.mark.parametrize("chunk", range(10))
def test_every_graft_saw_what_the_book_says(chunk: int) -> None:
    for seed in range(40 * chunk, 40 * chunk + 40):
        lived(seed, Origins())


def test_the_worlds_go_where_it_hurts() -> None:
    """Cut grafts, inserts that became grafts, shares that were carried on, losses."""
    found = dict.fromkeys(["cut", "insert", "share", "carried share", "nested", "lost"], 0)
    for seed in range(150):
        world = lived(seed, Origins(), steps=8)
        for edit in world.edits:
            for start, _, piece in edit.after.spans():
                if piece.origin is None:
                    continue
                runs = [run for run in edit.kept if run.dst <= start < run.dst + run.length]
                for run in runs:
                    source = start - run.delta
                    inside = source not in edit.before.starts
                    found["cut"] += inside and edit.before.first_graft(source) == source
                found["insert"] += any(new.dst <= start < new.end for new in edit.inserts)
                shares = [share for share in edit.shares if share.dst <= start < share.end]
                found["share"] += bool(shares)
                found["carried share"] += any(
                    share.source.context.first_graft(share.source.start) == share.source.start
                    for share in shares
                )
                seen = world.origins.of(piece.origin)
                found["nested"] += seen is not None and seen.num_grafted() > 0
            found["lost"] += edit.available().missing(len(edit.after)) > 0
    assert all(count >= 20 for count in found.values()), found


def test_a_book_without_continuations_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "extended", lambda view, tokens: view)
    assert broken(Origins)


@pytest.mark.parametrize("leave_out", ["kept", "inserts", "shares"])
def test_a_book_that_leaves_something_out_is_wrong(leave_out: str) -> None:
    class Partial(Origins):
        def learn(self, edit: Edit) -> None:
            parts = {"kept": edit.kept, "inserts": edit.inserts, "shares": edit.shares}
            super().learn(Edit(edit.before, edit.after, **(parts | {leave_out: ()})))

    assert broken(Partial)


def broken(kind: type[Origins]) -> list[int]:
    """Seeds of worlds in which such a book is found out."""
    seeds: list[int] = []
    for seed in range(60):
        try:
            lived(seed, kind())
        except AssertionError:
            seeds.append(seed)
    return seeds


# -- what is remembered ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(5))
def test_pruning_keeps_all_that_the_living_refer_to(chunk: int) -> None:
    for seed in range(30 * chunk, 30 * chunk + 30):
        world = lived(seed, Origins(), prune=True)
        before = len(world.origins)
        world.origins.prune([*live(world), None, b"unheard of"])
        assert len(world.origins) == before >= len(live(world))
        world.origins.prune([])
        assert len(world.origins) == 0


def test_pruning_that_keeps_only_the_living_is_found_out() -> None:
    class Shallow(Origins):
        def prune(self, live) -> None:
            self._views = {key: self._views[key] for key in live if key is not None}

    found = 0
    for seed in range(60):
        try:
            lived(seed, Shallow(), prune=True)
        except (AssertionError, KeyError):
            found += 1
    assert found


def test_the_grafts_of_one_edit_share_what_they_saw() -> None:
    origins, context = Origins(), Context.of(range(100))
    edit = apply(context, [Directive(10, 11), Directive(60, 61)])
    origins.learn(edit)
    again = apply(edit.after, [Directive(20, 30)])
    origins.learn(again)
    views = list(origins._views.values())
    assert [view.length for view in views] == [11, 61, 31]
    assert len({id(view.context) for view in views}) == 1


def test_a_view_that_goes_another_way_than_its_context_is_a_copy() -> None:
    context = Context.of([1, 2, 3])
    assert View(context, 1).extended((2, 3)) == View(context, 3)
    assert View(context, 1).extended((2, 4)) == View(Context.of([1, 2, 4]), 3)
    assert View(context, 3).extended((4,)) == View(Context.of([1, 2, 3, 4]), 4)
    assert View(context, 3).extended(()) == View(context, 3)
    spliced = Context((Piece((1,)), Piece((2,), b"o")))
    assert View(spliced, 1).extended((2,)) == View(Context.of([1, 2]), 2)
    assert View(context, 3).read() is context and View(context, 2).read() == Context.of([1, 2])


def test_the_oldest_context_is_unknown_once_the_book_is_full() -> None:
    origins, found = Origins(max_tokens=250), list[bytes]()
    for number in range(4):
        edit = apply(Context.of([number] * 100), [Directive(10, 11), Directive(60, 61)])
        origins.learn(edit)
        found += [piece.origin for piece in edit.after.pieces if piece.origin is not None]
        assert origins.num_tokens == 100 * min(2, number + 1)
    assert [origins.of(origin) is not None for origin in found] == [False] * 4 + [True] * 4
    origins.prune(reversed(found))
    origins.learn(apply(Context.of([5] * 100), [Directive(10, 11)]))
    assert [origins.of(origin) is not None for origin in found] == [False] * 6 + [True] * 2
    origins.prune(found)
    assert len(origins) == 2 and origins.num_tokens == 100
    origins.learn(apply(Context.of([9] * 300), [Directive(0, 1)]))
    assert len(origins) == origins.num_tokens == 0


def test_what_falls_out_of_the_book_is_doubted() -> None:
    """Less is known, and then more is taken away, never less."""
    origins, context = Origins(max_tokens=3), Context.of([1, 2, 3, 4])
    edit = apply(context, [Directive(1, 2)])
    origins.learn(edit)
    assert len(origins) == 0 and origins.seen(edit.after, 2) is None


def test_the_book_holds_no_more_than_the_tokens() -> None:
    origins, context = Origins(), Context.of([1, 2, 3, 4])
    assert context.digest() and context.tokens
    origins.learn(apply(context, [Directive(1, 2)]))
    (view,) = origins._views.values()
    assert view.context.pieces[0].tokens is context.pieces[0].tokens
    assert "packed" in vars(context.pieces[0]) and "packed" not in vars(view.context.pieces[0])


# -- single cases ---------------------------------------------------------------------------------


def test_a_tail_saw_the_removed_span() -> None:
    origins, context = Origins(), Context.of([1, 2, 3, 4])
    after = apply(context, [Directive(1, 2)]).after
    origins.learn(apply(context, [Directive(1, 2)]))
    assert origins.seen(after, 1) == Context.of([1, 2])
    assert origins.seen(after, 2) == Context.of([1, 2, 3])
    assert origins.seen(after, 3) == after


def test_a_graft_that_is_cut_saw_what_was_cut_off() -> None:
    origins, context = Origins(), Context.of([1, 2, 3, 4])
    first = apply(context, [Directive(0, 1)])
    second = apply(first.after, [Directive(0, 2)])
    origins.learn(first)
    origins.learn(second)
    (piece,) = second.after.pieces
    origin = continuation(context.digest(1), (2, 3))
    assert piece.origin == origin
    assert origins.of(origin) == Context.of([1, 2, 3])


def test_rows_from_elsewhere_saw_what_was_there() -> None:
    origins, source = Origins(), Context.of([7, 8, 9])
    edit = apply(Context.of([1, 2]), [Directive(1, 1, (8, 9), source=Source(source, 1))])
    origins.learn(edit)
    assert origins.seen(edit.after, 1) == Context.of([7])
    assert origins.seen(edit.after, 2) == Context.of([7, 8])
    assert origins.seen(edit.after, 3) == Context.of([1])


def test_what_was_never_learned_is_unknown_and_so_is_what_comes_of_it() -> None:
    origins, restored = Origins(), Context((Piece((1,)), Piece((2, 3, 4), b"o" * 32)))
    assert origins.of(b"o" * 32) is None and origins.seen(restored, 2) is None
    edit = apply(restored, [Directive(1, 2)])
    origins.learn(edit)
    assert origins.seen(edit.after, 1) is None and len(origins) == 0
    assert origins.seen(edit.after, 0) == Context()
    assert origins.seen(edit.after, 3) == edit.after


def test_a_graft_without_a_row_is_unknown() -> None:
    """No edit has one; a book that is asked about it says so."""
    after = Context((Piece((1,), b"o" * 32),))
    origins = Origins()
    origins.learn(Edit(Context.of([2]), after, (), (), (Share(Source(after, 0), 5, 1),)))
    assert len(origins) == 0


def test_forget_makes_no_origins() -> None:
    origins = Origins()
    origins.learn(apply(Context.of([1, 2, 3]), [Directive(0, 1, (), Mode.FORGET)]))
    assert len(origins) == 0

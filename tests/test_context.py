"""Contexts: canonical form, labels that survive slicing, digests that tell contexts apart."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.context import (
    Context,
    Piece,
    canonical,
    common_length,
    continuation,
    salted,
)

TOKENS = st.lists(st.integers(0, 2), max_size=5).map(tuple)
ORIGINS = st.sampled_from([None, None, b"a" * 32, b"b" * 32])
PIECES = st.lists(st.builds(Piece, TOKENS, ORIGINS), max_size=5)
CONTEXTS = st.builds(canonical, PIECES, st.sampled_from([b"", b"x"]))


def flat(context: Context) -> list[tuple[int, bytes | None]]:
    """Each token with the origin of its own row: what a piece stands for."""
    return [
        (token, piece.tail(index).origin)
        for piece in context.pieces
        for index, token in enumerate(piece.tokens)
    ]


# -- canonical form -------------------------------------------------------------------------------


@given(PIECES)
def test_canonical_keeps_the_text_and_is_a_fixed_point(pieces: list[Piece]) -> None:
    context = canonical(pieces)
    assert context.tokens == tuple(token for piece in pieces for token in piece.tokens)
    assert canonical(context.pieces) == context


@given(CONTEXTS)
def test_no_piece_is_empty_and_no_two_exact_ones_are_neighbours(context: Context) -> None:
    assert all(piece.tokens for piece in context.pieces)
    for left, right in itertools.pairwise(context.pieces):
        assert not (left.exact and right.exact)


def test_a_graft_that_continues_its_neighbour_is_part_of_it() -> None:
    graft = Piece((1, 2, 3), b"o" * 32)
    halves = [Piece((9,)), Piece((1,), graft.origin), graft.tail(1)]
    assert canonical(halves).pieces == (Piece((9,)), graft)


def test_equal_grafts_in_a_row_stay_two() -> None:
    graft = Piece((1,), b"o" * 32)
    assert canonical([graft, graft]).pieces == (graft, graft)


def test_a_graft_of_the_very_context_before_it_is_exact() -> None:
    head = Context.of([1, 2])
    assert canonical([*head.pieces, Piece((3,), head.digest())]) == Context.of([1, 2, 3])


def test_the_empty_context() -> None:
    empty = Context.of([])
    assert empty == Context() and len(empty) == 0 and empty.tokens == ()
    assert list(empty.spans()) == [] and empty.append([1]) == Context.of([1])


# -- slices ---------------------------------------------------------------------------------------


@given(CONTEXTS, st.integers(0, 25))
def test_a_prefix_keeps_its_labels(context: Context, length: int) -> None:
    prefix = context.prefix(length)
    assert flat(prefix) == flat(context)[:length]
    assert canonical(prefix.pieces, context.root) == prefix
    assert prefix.digest() == context.digest(length)


@given(CONTEXTS, st.integers(0, 25))
def test_a_tail_of_grafts_keeps_each_origin(context: Context, start: int) -> None:
    tail = context.tail(start)
    assert tuple(t for piece in tail for t in piece.tokens) == context.tokens[start:]
    assert not any(piece.exact for piece in tail)
    for piece, (first, _, old) in zip(tail, pieces_from(context, start), strict=True):
        at = max(first, start)
        moved = old.tail(at - first).origin
        assert piece.origin == (context.digest(at) if old.exact else moved)


def pieces_from(context: Context, start: int) -> list[tuple[int, int, Piece]]:
    return [span for span in context.spans() if span[1] > start]


@given(CONTEXTS, st.integers(0, 25), st.integers(0, 25))
def test_a_tail_ends_where_it_is_told_to(context: Context, start: int, end: int) -> None:
    whole = flat(Context(context.tail(start)))
    assert flat(Context(context.tail(start, end))) == whole[: max(0, end - start)]
    assert all(piece.tokens for piece in context.tail(start, end))


@given(CONTEXTS)
def test_a_tail_behind_its_own_head_is_the_context(context: Context) -> None:
    for start in range(len(context) + 1):
        rebuilt = canonical([*context.prefix(start).pieces, *context.tail(start)], context.root)
        assert rebuilt == context


def test_an_origin_moves_along_with_its_piece() -> None:
    piece = Piece((1, 2, 3), b"o" * 32)
    assert piece.tail(0) == piece
    assert piece.tail(2) == Piece((3,), continuation(b"o" * 32, (1, 2)))
    assert piece.tail(1) != Piece((2, 3), piece.origin)
    assert Piece((1, 2)).tail(1) == Piece((2,))


@given(CONTEXTS, st.integers(0, 25))
def test_the_exact_form(context: Context, start: int) -> None:
    exact = context.exact_from(start)
    assert exact.tokens == context.tokens
    assert exact.first_graft(start) == len(context)
    assert flat(exact)[:start] == flat(context)[:start]


def test_a_context_that_is_exact_already_stays_the_same_object() -> None:
    context = Context.of([1, 2])
    assert context.exact_from(1) is context and context.exact_from(7) is context


@given(CONTEXTS, TOKENS)
def test_appended_tokens_are_exact(context: Context, tokens: tuple[int, ...]) -> None:
    longer = context.append(tokens)
    assert flat(longer) == flat(context) + [(token, None) for token in tokens]


@given(CONTEXTS, st.integers(0, 25))
def test_grafts_are_found_and_counted(context: Context, start: int) -> None:
    grafted = [index for index, (_, origin) in enumerate(flat(context)) if origin is not None]
    assert context.first_graft(start) == next((i for i in grafted if i >= start), len(context))
    assert context.num_grafted(start) == sum(i < start for i in grafted)
    assert context.num_grafted() == len(grafted)


# -- comparisons ----------------------------------------------------------------------------------


@given(CONTEXTS, CONTEXTS)
def test_a_common_prefix_agrees_in_token_and_provenance(left: Context, right: Context) -> None:
    shared = left.common_prefix(right)
    assert shared == right.common_prefix(left) <= min(len(left), len(right))
    assert left.root == right.root or shared == 0
    if left.root == right.root:
        assert left.prefix(shared) == right.prefix(shared)
        if shared < min(len(left), len(right)):
            assert left.prefix(shared + 1) != right.prefix(shared + 1)


@given(TOKENS, TOKENS)
def test_the_common_length_of_two_runs(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    pairs = zip(left, right, strict=False)
    assert common_length(left, right) == len(
        list(itertools.takewhile(lambda p: p[0] == p[1], pairs))
    )


def test_the_common_length_of_long_runs() -> None:
    run = list(range(1000))
    for length in (0, 1, 499, 500, 999):
        assert common_length(run, [*run[:length], -1, *run[length:]]) == length


# -- digests --------------------------------------------------------------------------------------


def test_digests_tell_small_contexts_apart() -> None:
    """Every context of up to three tokens, two origins and two roots has a digest of its own."""
    labels = [None, b"a" * 32, b"b" * 32]
    pieces = [
        Piece(tokens, label)
        for size in (1, 2)
        for tokens in itertools.product(range(2), repeat=size)
        for label in labels
    ]
    contexts = {
        canonical(some, root)
        for size in range(3)
        for some in itertools.product(pieces, repeat=size)
        for root in (b"", b"x")
    }
    digests = {context.digest() for context in contexts}
    assert len(digests) == len(contexts) > 500


@given(CONTEXTS, CONTEXTS)
def test_equal_digests_are_equal_contexts(left: Context, right: Context) -> None:
    assert (left.digest() == right.digest()) == (left == right)


def test_joining_a_root_and_tokens_cannot_collide() -> None:
    """Roots are told apart by their length, not by what follows them."""
    tokens = Context.of([1])
    assert Context((), b"\0" * 8).digest() != Context((), b"\0" * 16).digest()
    assert Context(tokens.pieces, b"ab").digest() != Context(tokens.pieces, b"a").digest()


def test_a_continuation_is_no_digest_and_depends_on_all_it_is_made_of() -> None:
    origin = Context.of([1]).digest()
    made = {continuation(origin, tokens) for tokens in ((), (2,), (2, 3), (3, 2))}
    assert len(made) == 4 and Context.of([1, 2]).digest() not in made


def test_digests_are_what_they_were() -> None:
    """They are in saved sessions, and in the origins of every graft: computed once, by `struct`."""
    pieces = [Piece((1, 2, 3)), Piece((4, 70_000, 2**32 - 1), b"o" * 32), Piece((5,))]
    context = canonical(pieces, b"r")
    assert [context.digest(length).hex()[:16] for length in (0, 2, 3, 5, 7)] == [
        "25ad539354c12e5d",
        "d690240f74c0f4c1",
        "d9b58df889e474cf",
        "ecdfefe1275327c3",
        "d336cb20f2d8beb2",
    ]
    assert Context.of(range(1000)).digest().hex()[:16] == "24b443a65fca4303"
    assert continuation(b"o" * 32, (1, 70_000)).hex()[:16] == "9cbf643883124976"
    assert context.tail(1)[0] == Piece((2, 3), context.digest(1))
    assert context.digest(1).hex()[:16] == "3f8aa189748dd839"


@given(CONTEXTS, st.integers(0, 25), TOKENS)
def test_a_digest_goes_on_with_exact_tokens(
    context: Context, length: int, new: tuple[int, ...]
) -> None:
    assert context.hashed(length, new).digest() == context.prefix(length).append(new).digest()


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_id_that_is_none_has_no_digest(token: int) -> None:
    with pytest.raises(OverflowError):
        Context.of([token]).digest()


def test_salts_are_roots() -> None:
    assert salted("") == b"" and len(salted("a")) == 32 and salted("a") != salted("b")
    assert Context.of([1], salted("a")).common_prefix(Context.of([1])) == 0

"""Replies: stop strings over token borders, text held back and let go, against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.reply import Reply
from leyline.tokenizer import Tokenizer
from tests.tiny_models import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), stop_ids=[2])
# Letters that make the merges of the tiny vocabulary, a two-byte character, special tokens.
ALPHABET = "the inand r\nü"
TOKEN_IDS = sorted({*TOKENIZER.encode(ALPHABET), *range(256, 266), 0, 1})


def pushed(text: str, stop: tuple[str, ...]) -> tuple[Reply, list[str]]:
    """A reply to which the tokens of a text were pushed until it stopped, and what it let go."""
    reply = Reply(TOKENIZER.stream(), stop)
    pieces = []
    for token in TOKENIZER.encode(text):
        pieces.append(reply.push(token))
        if reply.stopped:
            return reply, pieces
    pieces.append(reply.flush())
    return reply, pieces


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("the cat", (), "the cat"),
        ("the cat", ("dog",), "the cat"),
        ("in the land", ("the",), "in "),
        ("xthey", ("hey",), "xt"),  # begins within the token "the"
        ("a then b", ("hen b",), "a t"),  # and ends tokens later
        ("aab", ("ab",), "a"),  # the first a was held and had to be let go
        ("abcd", ("bcd", "c"), "ab"),  # the one that is complete first
        ("the", ("the",), ""),
        ("ünder", ("ü",), ""),
        ("in\n\nand", ("\n\n",), "in"),
        ("so <|im", ("<|im_end|>",), "so <|im"),  # held back to the end, then let go
    ],
)
def test_text_ends_before_the_first_stop_string(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    reply, pieces = pushed(text, stop)
    assert reply.text == "".join(pieces) == expected
    assert reply.stopped == (expected != text)


def test_what_cannot_become_a_stop_string_is_let_go_at_once() -> None:
    reply = Reply(TOKENIZER.stream(), ("the end",))
    (the, blank, x) = (TOKENIZER.encode(piece)[0] for piece in ("the", " ", "x"))
    assert [reply.push(the), reply.push(blank), reply.push(x)] == ["", "", "the x"]


def test_half_a_character_waits_for_the_other_half() -> None:
    first, second = TOKENIZER.encode("ü")
    reply = Reply(TOKENIZER.stream())
    assert [reply.push(first), reply.push(second), reply.flush()] == ["", "ü", ""]
    reply = Reply(TOKENIZER.stream())
    assert [reply.push(first), reply.flush()] == ["", "\ufffd"]


def test_tokens_that_reach_into_the_stop_string_are_not_kept() -> None:
    reply, _ = pushed("in the end", ("nd",))
    ids = reply.token_ids
    assert TOKENIZER.decode(ids[: reply.num_kept()]) == "in the e"
    reply, _ = pushed("xthey", ("hey",))
    assert (reply.text, TOKENIZER.decode(reply.token_ids[: reply.num_kept()])) == ("xt", "x")
    reply, _ = pushed("the", ("t",))
    assert reply.num_kept() == 0


def test_text_is_held_back_in_whole_tokens() -> None:
    """So that no reader of markup is handed half of a marker, as if it were a word's beginning."""
    stream = TOKENIZER.stream(shown=("<|im_end|>",))
    reply = Reply(stream, (">!",))
    x, marker = TOKENIZER.encode("x")[0], 2
    assert [reply.push(one) for one in (x, marker, x)] == ["x", "", "<|im_end|>x"]
    assert (reply.push(marker), reply.num_kept()) == ("", 3)
    assert (reply.flush(), reply.num_kept()) == ("<|im_end|>", 4)


def test_a_token_is_settled_with_the_last_of_its_text() -> None:
    first, second = TOKENIZER.encode("ü")
    reply = Reply(TOKENIZER.stream(), ("in",))
    settled = []
    for token in (first, second, 0, *TOKENIZER.encode("ix"), first):
        reply.push(token)
        settled.append(reply.num_kept())
    assert settled == [0, 2, 3, 3, 5, 5]
    assert (reply.flush(), reply.num_kept()) == ("\ufffd", 6)


def test_half_a_character_before_the_stop_string_goes_with_it() -> None:
    reply, _ = pushed("inü", ("ü",))
    assert (reply.text, len(reply.token_ids), reply.num_kept()) == ("in", 3, 1)


def test_a_hidden_token_has_no_text_and_is_kept() -> None:
    reply = Reply(TOKENIZER.stream(), ("the end",))
    (the,) = TOKENIZER.encode("the")
    assert [reply.push(the), reply.push(the, hidden=True), reply.num_kept()] == ["", "", 0]
    assert (reply.flush(), reply.num_kept()) == ("the", 2)
    reply = Reply(TOKENIZER.stream())
    reply.push(TOKENIZER.encode("ü")[0])
    assert (reply.push(the, hidden=True), reply.flush(), reply.num_kept()) == ("", "\ufffd", 2)


def test_the_first_stop_string_ends_a_reply_and_the_shortest_of_several_there() -> None:
    for stop in (("the", "th", "he"), ("he", "the", "th")):
        assert pushed("in the", stop)[0].stopped_by == "th"
    reply = Reply(TOKENIZER.stream(), ("the", "th"), include_stop=True)
    assert (reply.push(TOKENIZER.encode("the")[0]), reply.stopped_by) == ("th", "th")
    assert (reply.flush(), reply.num_kept()) == ("", 0)


def text_of(ids: Sequence[int]) -> str:
    """What is certain of tokens without what may follow."""
    stream = TOKENIZER.stream()
    return "".join(map(stream.push, ids))


def brute_force(
    ids: list[int], stop: tuple[str, ...], min_tokens: int, include: bool
) -> tuple[str, int, str | None]:
    """Text of a reply, how many tokens it takes to get there, and what stopped it, by looking at
    whole texts.
    """
    base = len(text_of(ids[:min_tokens]))
    texts = [(length, text_of(ids[:length])) for length in range(min_tokens + 1, len(ids) + 1)]
    if len(ids) > min_tokens:
        texts.append((len(ids), TOKENIZER.decode(ids)))
    for length, text in texts:
        found = [(text.find(one, base), len(one), one) for one in stop if one in text[base:]]
        if found:
            at, size, one = min(found)
            return text[: at + size if include else at], length, one
    return TOKENIZER.decode(ids), len(ids), None


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(st.sampled_from(TOKEN_IDS), max_size=14),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    min_tokens=st.sampled_from([0, 0, 1, 3, 20]),
    include=st.booleans(),
)
def test_any_tokens_and_stop_strings_agree_with_brute_force(
    ids: list[int], stop: list[str], min_tokens: int, include: bool
) -> None:
    expected, length, stopped_by = brute_force(ids, tuple(stop), min_tokens, include)
    reply = Reply(TOKENIZER.stream(), stop, min_tokens=min_tokens, include_stop=include)
    released, settled = "", 0
    for token in ids[:length]:
        assert not reply.stopped
        released += reply.push(token)
        assert reply.text == released
        assert expected.startswith(released)
        assert settled <= reply.num_kept() <= len(reply.token_ids), "a token is unsettled again"
        settled = reply.num_kept()
        assert released.startswith(text_of(ids[:settled]))
        if not reply.stopped:
            held = text_of(reply.token_ids)[len(released) :]
            assert not held or any(could_begin(one, held) for one in stop)
    released += reply.flush()
    assert (released, reply.stopped_by) == (expected, stopped_by)
    assert reply.text == released and reply.flush() == ""
    base = text_of(ids[:min_tokens])
    assert include or not any(one in released[len(base) :] for one in stop)
    kept = ids[: reply.num_kept()]
    assert expected.startswith(text_of(kept)) and settled <= len(kept)
    assert reply.stopped or kept == ids


def could_begin(stop: str, held: str) -> bool:
    """Whether text is held back for a reason: somewhere in its first token a stop may begin."""
    return any(stop.startswith(held[at:]) and held[at:] != stop for at in range(len(held)))


@pytest.mark.parametrize("min_tokens, expected", [(0, "a b in"), (4, "a b in"), (5, "a b in ")])
def test_a_reply_ends_with_the_token_that_makes_it_enough(min_tokens: int, expected: str) -> None:
    heard: list[str] = []

    def enough(text: str) -> bool:
        heard.append(text)
        return "n" in text

    reply = Reply(TOKENIZER.stream(), ("d",), min_tokens=min_tokens, enough=enough)
    plain = Reply(TOKENIZER.stream(), ("d",), min_tokens=min_tokens)
    for token in TOKENIZER.encode(expected):
        assert not reply.stopped and not plain.stopped
        reply.push(token)
        plain.push(token)
    assert reply.stopped and reply.stopped_by is None and not plain.stopped
    assert reply.text == "".join(heard) == expected and reply.flush() == ""
    assert reply.num_kept() == len(reply.token_ids)

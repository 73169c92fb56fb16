"""Replies: stop strings over token borders, text held back and let go, against brute force."""

from __future__ import annotations

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


def brute_force(ids: list[int], stop: tuple[str, ...]) -> tuple[str, int]:
    """Text of a reply and how many tokens it takes to get there, by looking at whole texts."""
    for length in range(1, len(ids) + 1):
        stream = TOKENIZER.stream()
        text = "".join(stream.push(token) for token in ids[:length])
        found = [text.find(one) for one in stop if one in text]
        if found:
            return text[: min(found)], length
    text = TOKENIZER.decode(ids)
    found = [text.find(one) for one in stop if one in text]
    return (text[: min(found)] if found else text), len(ids)


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.sampled_from(TOKEN_IDS), max_size=14),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
)
def test_any_tokens_and_stop_strings_agree_with_brute_force(
    ids: list[int], stop: list[str]
) -> None:
    expected, length = brute_force(ids, tuple(stop))
    reply = Reply(TOKENIZER.stream(), tuple(stop))
    released = ""
    for token in ids[:length]:
        assert not reply.stopped
        released += reply.push(token)
        assert reply.text == released
        assert expected.startswith(released)
    released += reply.flush()
    assert released == reply.text == expected
    assert reply.flush() == ""
    assert not any(one in released for one in stop)
    kept = ids[: reply.num_kept()]
    stream = TOKENIZER.stream()
    assert expected.startswith("".join(stream.push(token) for token in kept))
    assert reply.stopped or kept == ids


@given(st.integers(1, 5))
def test_the_brute_force_would_notice_a_lost_character(position: int) -> None:
    ids = TOKENIZER.encode("in the land")
    expected, _ = brute_force(ids, ())
    assert expected[:position] + expected[position + 1 :] != pushed("in the land", ())[0].text

"""Pointing at spans, and changes and marks that say what is to happen there."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leyline.context import Context
from leyline.directive import Directive, Mode, Source
from leyline.errors import DirectiveError, InvalidRequestError
from leyline.marks import Mark, MessageSpan
from leyline.pointing import MAX_TTL_S, Change, MarkRequest
from leyline.spelling import Spelling
from leyline.target import SHOWN, Target
from tests.test_rewriting import PIECES, SPELLED, TOKENIZER, spelled, split_by_hand

TEXT = "The cat sat. The cat ran. A cat!"
IDS = TOKENIZER.encode(TEXT)
HUGE = 10**5000  # more digits than Python prints
NO_WHOLE = [True, 1.0, "1", float("nan"), [], HUGE, -HUGE, 2**31]


def nobody(session_id: str) -> Any:
    raise AssertionError(f"nobody asked for {session_id}")


def applied(ids: Any, change: Directive) -> list[int]:
    return [*ids[: change.start], *change.replacement, *ids[change.end :]]


def compiled(change: Change, ids: Any, messages: Any = ()) -> Directive:
    return change.compile(ids, messages, TOKENIZER, nobody)


def resolved(ids: Any = IDS, messages: Any = (), **fields: Any) -> tuple[int, int]:
    return Target(**fields).resolve(ids, messages, TOKENIZER)


def refusal(call: Any) -> DirectiveError:
    with pytest.raises(DirectiveError) as caught:
        call()
    assert len(caught.value.message) < 600
    return caught.value


class TestWaysToPoint:
    def test_a_range_means_itself(self):
        for span in [(0, 0), (2, 5), (len(IDS), len(IDS)), (0, len(IDS))]:
            assert resolved(start=span[0], end=span[1]) == span

    def test_a_range_outside(self):
        error = refusal(lambda: resolved(start=1, end=len(IDS) + 1))
        assert f"has {len(IDS)} tokens" in error.message
        assert error.param == "end"

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"match": None},
            {"start": 1, "end": 2, "message": 0},
            {"start": 1, "end": 2, "match": "cat"},
            {"start": 1, "match": "cat"},
            {"start": 1, "end": 2, "tool_call_id": "c"},
            {"message": 0, "tool_call_id": "c"},
            {"message": 0, "tool_call_id": "c", "match": "cat"},
            {"occurrence": 0},
        ],
    )
    def test_anything_but_one_way_lists_the_ways(self, fields):
        error = refusal(lambda: Target(**fields))
        assert "exactly one way: start and end" in error.message
        assert "tool_call_id, or match" in error.message
        assert error.param == "target"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"start": 1}, "end"),
            ({"end": 1}, "end"),
            ({"start": 3, "end": 2}, "end"),
            ({"start": 1, "end": 2, "occurrence": 0}, "occurrence"),
            ({"message": 1, "occurrence": 0}, "occurrence"),
            ({"start": -1, "end": 2}, "start"),
            ({"start": 0, "end": -2}, "end"),
            ({"match": ""}, "match"),
            ({"tool_call_id": ""}, "tool_call_id"),
            *(({"start": wrong, "end": 5}, "start") for wrong in NO_WHOLE),
            *(({"start": 0, "end": wrong}, "end") for wrong in NO_WHOLE),
            *(({"message": wrong}, "message") for wrong in NO_WHOLE),
            *(({"match": "a", "occurrence": wrong}, "occurrence") for wrong in NO_WHOLE),
            *(({"match": wrong}, "match") for wrong in [b"a", 5, ["a"], True]),
            *(({"tool_call_id": wrong}, "tool_call_id") for wrong in [b"a", 5, {}]),
        ],
    )
    def test_malformed_fields(self, fields, param):
        assert refusal(lambda: Target(**fields)).param == param

    @pytest.mark.parametrize("name", ["match", "tool_call_id"])
    def test_half_a_surrogate_pair(self, name):
        with pytest.raises(InvalidRequestError, match="surrogate") as caught:
            Target(**{name: "\ud83d"})  # pyright: ignore[reportArgumentType]
        assert caught.value.param == name


MESSAGES = [
    MessageSpan("user", None, 0, 4),
    MessageSpan("assistant", None, 4, 4),
    MessageSpan("tool", "c", 4, 8),
    MessageSpan("tool", "d", 8, len(IDS)),
    MessageSpan("tool", "d", 0, 2),
]


class TestMessages:
    @pytest.mark.parametrize(("message", "span"), [(0, 0), (2, 2), (-1, 4), (-5, 0)])
    def test_by_index(self, message, span):
        assert resolved(messages=MESSAGES, message=message) == spans(MESSAGES)[span]

    @pytest.mark.parametrize("message", [5, -6, 2**31 - 1])
    def test_an_index_that_there_is_not(self, message):
        error = refusal(lambda: resolved(messages=MESSAGES, message=message))
        assert f"no message {message}: they are -5 to 4" in error.message
        assert "it has none" in refusal(lambda: resolved(message=message)).message

    def test_a_content_that_is_nowhere(self):
        error = refusal(lambda: resolved(messages=MESSAGES, message=1))
        assert "message 1 (role assistant)" in error.message
        assert error.param == "message"

    def test_by_the_call_it_answers(self):
        assert resolved(messages=MESSAGES, tool_call_id="c") == (4, 8)
        error = refusal(lambda: resolved(messages=MESSAGES, tool_call_id="x" * 999))
        assert "No tool result answers the call 'xxx" in error.message
        nowhere = [MessageSpan("tool", "c", 3, 3)]
        assert refusal(lambda: resolved(messages=nowhere, tool_call_id="c")).param == "tool_call_id"

    def test_several_results_of_one_call(self):
        error = refusal(lambda: resolved(messages=MESSAGES, tool_call_id="d"))
        assert f"The call 'd' has 2 results, at tokens [8, {len(IDS)}), [0, 2)" in error.message
        assert resolved(messages=MESSAGES, tool_call_id="d", occurrence=0) == (8, len(IDS))
        assert resolved(messages=MESSAGES, tool_call_id="d", occurrence=-1) == (0, 2)
        error = refusal(lambda: resolved(messages=MESSAGES, tool_call_id="d", occurrence=2))
        assert error.param == "occurrence"


def spans(messages: Any) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in messages]


class TestMatches:
    def test_a_text_that_is_there_once(self):
        assert resolved(match="The cat ran") == TOKENIZER.find(IDS, "The cat ran")[0]

    def test_one_that_is_not(self):
        error = refusal(lambda: resolved(match="the cat"))
        assert "'the cat' stands in the context 0 times. It must stand there exactly" in str(error)
        assert error.param == "match"

    def test_one_that_is_there_several_times(self):
        found = TOKENIZER.find(IDS, "cat")
        error = refusal(lambda: resolved(match="cat"))
        shown = ", ".join(f"[{start}, {end})" for start, end in found)
        assert f"stands in the context 3 times, at tokens {shown}. Say which" in error.message
        for occurrence in range(-3, 3):
            assert resolved(match="cat", occurrence=occurrence) == found[occurrence]
        for occurrence in (3, -4):
            error = refusal(lambda index=occurrence: resolved(match="cat", occurrence=index))
            assert "0 to 2, or negative from the end" in error.message
            assert error.param == "occurrence"

    def test_thousands_are_not_all_listed(self):
        error = refusal(lambda: resolved(TOKENIZER.encode("a b " * 3000), match="b"))
        assert "3000 times" in error.message
        assert error.message.count("[") == SHOWN

    def test_inside_a_message_only(self):
        first = TOKENIZER.find(IDS[:4], "cat")[0]
        assert resolved(messages=MESSAGES, message=0, match="cat") == first
        assert resolved(messages=MESSAGES, tool_call_id="d", match="A cat")[1] <= len(IDS)
        error = refusal(lambda: resolved(messages=MESSAGES, message=0, match="ran"))
        assert "'ran' stands in that message 0 times" in error.message

    def test_inside_all_results_of_a_call(self):
        target = Target(tool_call_id="d", match="cat", occurrence=1)
        assert target.resolve(IDS, MESSAGES, TOKENIZER) == TOKENIZER.find(IDS, "cat")[0]
        error = refusal(lambda: resolved(messages=MESSAGES, tool_call_id="d", match="cat"))
        assert "in that message 2 times" in error.message

    def test_two_inside_one_token(self):
        (token,) = TOKENIZER.encode(" banana")
        for occurrence in (0, 1):
            change = Change(Target(match="an", occurrence=occurrence), "-")
            after = applied([token], compiled(change, [token]))
            assert spelled(after) == [b" b-ana", b" ban-a"][occurrence]


words = st.lists(st.sampled_from([*PIECES, "\ufffd", "cat", "<|"]), min_size=1, max_size=20)
replacements = st.sampled_from(["", "dog", "é", " x", "<|im_end|>"])


def occurrences(data: bytes, wanted: bytes) -> list[int]:
    """Where it stands, none overlapping the one before."""
    found: list[int] = []
    for at in range(len(data)):
        if data[at:].startswith(wanted) and at >= (found[-1] + len(wanted) if found else 0):
            found.append(at)
    return found


def cuts_special(ids: Any, *offsets: int) -> bool:
    """Whether one of the byte offsets is inside a special token."""
    at = 0
    for token in ids:
        end = at + len(SPELLED[token])
        if token <= 16 and any(at < offset < end for offset in offsets):
            return True
        at = end
    return False


@given(words.map("".join), replacements, st.integers(0, 99), st.data())
@settings(max_examples=300, deadline=None)
def test_exactly_the_match_is_replaced_however_the_text_was_tokenised(text, new, seed, data):
    ids = split_by_hand(TOKENIZER.encode(text), random.Random(seed))
    first = data.draw(st.integers(0, len(text) - 1))
    match = text[first : data.draw(st.integers(first + 1, len(text)))].encode()
    places = occurrences(text.encode(), match)
    number = data.draw(st.integers(-len(places), len(places) - 1))
    start, end = places[number], places[number] + len(match)
    assume(not cuts_special(ids, start, end))
    target = Target(match=match.decode(), occurrence=number)
    change = compiled(Change(target, new), ids)
    after = text.encode()[:start] + new.encode() + text.encode()[end:]
    assert spelled(applied(ids, change)) == after
    assert all(token > 16 for token in change.replacement)
    covering = target.resolve(ids, (), TOKENIZER)
    assert covering in TOKENIZER.find(ids, match.decode())
    assert change.start <= covering[0] < covering[1] <= change.end


def test_replacing_the_tokens_that_cover_it_would_replace_more():
    ids = TOKENIZER.encode(" unbelievable")
    assert spelled(ids[:1]) == b" unbelie"
    target = Target(match="lie")
    assert target.resolve(ids, (), TOKENIZER) == (0, 1)
    naive = Directive(0, 1, tuple(TOKENIZER.encode_plain("x")))
    assert spelled(applied(ids, naive)) == b"xvable"
    assert spelled(applied(ids, compiled(Change(target, "x"), ids))) == b" unbexvable"


class Chopped:
    """A tokenizer of any byte strings: `chunks` are tokens 0, 1, ..., and bytes those from 1000."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return bytes([token - 1000]) if token >= 1000 else self.chunks[token]

    def encode_plain(self, text: str) -> list[int]:
        return [1000 + byte for byte in text.encode()]


def chopped(data: bytes, cuts: list[int]) -> Any:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return Chopped([data[a:b] for a, b in pairwise(edges)])


cuts = st.lists(st.integers(0, 99), max_size=12)


@given(st.text("a é日🙂", min_size=1, max_size=12), cuts, replacements, st.data())
@settings(max_examples=400, deadline=None)
def test_tokens_may_cut_characters_in_any_way(text, cuts, new, data):
    tokenizer = chopped(text.encode(), cuts)
    ids = range(len(tokenizer.chunks))
    first = data.draw(st.integers(0, len(text) - 1))
    match = text[first : data.draw(st.integers(first + 1, len(text)))].encode()
    places = occurrences(text.encode(), match)
    at = places[data.draw(st.integers(0, len(places) - 1))]
    target = Target(match=match.decode(), occurrence=places.index(at))
    after = text.encode()[:at] + new.encode() + text.encode()[at + len(match) :]
    for replacement in (new, tokenizer.encode_plain(new)):
        change = Change(target, replacement).compile(ids, (), tokenizer, nobody)
        made = applied(ids, change)
        assert b"".join(map(tokenizer.token_bytes, made)) == after


@given(st.binary(max_size=9), st.binary(max_size=9), cuts)
@settings(max_examples=400, deadline=None)
def test_beside_bytes_that_are_no_text_it_is_exact_or_refused(before, behind, cuts):
    tokenizer = chopped(before + b"cat" + behind, cuts)
    ids = range(len(tokenizer.chunks))
    assume((before + b"cat" + behind).count(b"cat") == 1)
    try:
        change = Change(Target(match="cat"), "dog").compile(ids, (), tokenizer, nobody)
    except DirectiveError as error:
        assert "no valid text" in error.message
        assert not is_text(before) or not is_text(behind)
    else:
        made = applied(ids, change)
        assert b"".join(map(tokenizer.token_bytes, made)) == before + b"dog" + behind


def is_text(data: bytes) -> bool:
    return data.decode("utf-8", "ignore").encode() == data


def test_many_changes_of_one_context_spell_it_once():
    tokenizer: Any = Chopped([b"The ", b"cat", b" sat"] * 40)
    calls: list[int] = []
    looked_up = tokenizer.token_bytes

    def counting(token: int, skip_special: bool = True) -> bytes:
        calls.append(token)
        return looked_up(token, skip_special)

    tokenizer.token_bytes = counting
    spelling = Spelling(range(120), tokenizer)
    ranged = Change(Target(start=1, end=2), "dog").compile(spelling, (), tokenizer, nobody)
    assert calls == []  # a token range needs no text
    for number in range(40):
        target = Target(match="cat", occurrence=number)
        change = Change(target, "dog").compile(spelling, (), tokenizer, nobody)
        assert change == Change(target, "dog").compile(range(120), (), tokenizer, nobody)
        assert (change.start, change.replacement) == (1 + 3 * number, ranged.replacement)
    assert len(calls) == 120 + 40 * 120  # once for all, and once for each that was not given it


class TestChange:
    def test_a_range_is_replaced_as_it_is(self):
        for replacement in ("a dog", TOKENIZER.encode("a dog"), tuple(TOKENIZER.encode("a dog"))):
            change = Change(Target(start=1, end=3), replacement, "forget")
            expected = Directive(1, 3, tuple(TOKENIZER.encode("a dog")), Mode.FORGET)
            assert compiled(change, IDS) == expected

    def test_a_text_makes_no_special_token_and_ids_do(self):
        target = Target(start=0, end=1)
        assert min(compiled(Change(target, "<|im_end|>"), IDS).replacement) > 16
        assert compiled(Change(target, [2]), IDS).replacement == (2,)

    def test_ids_stand_between_what_the_outer_tokens_spell(self):
        ids = TOKENIZER.encode(" unbelievable")
        change = compiled(Change(Target(match="lie"), [2]), ids)
        assert spelled(change.replacement) == b" unbe<|im_end|>"

    def test_a_message_keeps_the_white_space_around_it(self):
        ids = TOKENIZER.encode("<|im_start|>user The cat\n\n\n")
        last = len(ids) - 1
        assert spelled(ids[2:3]) == b" The"
        messages = [MessageSpan("user", None, 2, last), MessageSpan("user", None, last, last + 1)]
        change = compiled(Change(Target(message=0), "dog"), ids, messages)
        assert spelled(applied(ids, change)) == b"<|im_start|>user dog\n\n\n"
        change = compiled(Change(Target(message=1), "dog"), ids, messages)
        assert spelled(applied(ids, change)) == b"<|im_start|>user The catdog"

    def test_half_a_special_token_is_not_replaced(self):
        ids = TOKENIZER.encode("a<|im_end|>b")
        for match in ("im_end", "a<", "|>b"):
            error = refusal(lambda text=match: compiled(Change(Target(match=text), "x"), ids))
            assert "it is special, or no valid text" in error.message
            assert error.param == "match"
        change = compiled(Change(Target(match="<|im_end|>"), "x"), ids)
        assert spelled(applied(ids, change)) == b"axb"
        # Pointing changes nothing, so it need not be exact.
        assert Target(match="im_end").resolve(ids, (), TOKENIZER) == (1, 2)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"target": None}, "target"),
            ({"target": {"message": 0}}, "target"),
            ({"mode": "keep"}, "mode"),
            ({"mode": None}, "mode"),
            ({"mode": ["forget"]}, "mode"),
            ({"scope": "tenant", "mode": "forget"}, "scope"),
            ({"scope": [], "mode": "forget"}, "scope"),
            ({"scope": "cache"}, "scope"),
            ({"scope": "cache", "mode": Mode.HEAL}, "scope"),
            *(({"replacement": [wrong]}, "replacement") for wrong in [*NO_WHOLE, -1, None]),
            *(({"replacement": wrong}, "replacement") for wrong in [None, 5, b"a", {}, {1}]),
            ({"source": "s"}, "source"),
            ({"source": ("s",)}, "source"),
            ({"source": ("", Target(message=0))}, "source"),
            ({"source": (5, Target(message=0))}, "source"),
            ({"source": ("s", None)}, "source"),
            ({"source": ["s", Target(message=0)]}, "source"),
            ({"source": ("s", Target(message=0)), "replacement": "x"}, "replacement"),
            ({"source": ("s", Target(message=0)), "mode": "forget"}, "mode"),
        ],
    )
    def test_malformed_fields(self, fields, param):
        error = refusal(lambda: Change(**{"target": Target(match="cat"), **fields}))
        assert error.param == param

    def test_half_a_surrogate_pair(self):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            Change(Target(match="cat"), "\udc00")
        with pytest.raises(InvalidRequestError, match="surrogate"):
            Change(Target(match="cat"), source=("\udc00", Target(message=0)))

    def test_modes_by_name_and_scope(self):
        assert Change(Target(match="cat"), mode="heal") == Change(
            Target(match="cat"), mode=Mode.HEAL
        )
        assert Change(Target(match="cat"), mode="forget", scope="cache").scope == "cache"


class TestShare:
    OTHER = Context.of(TOKENIZER.encode("Read this: A long document. Good."))
    MESSAGES = (MessageSpan("user", None, 3, 7),)

    def sources(self, session_id: str) -> Any:
        assert session_id == "other"
        return self.OTHER, self.MESSAGES

    def shared(self, target: Target, source: Target, **fields: Any) -> Directive:
        change = Change(target, source=("other", source), **fields)
        return change.compile(IDS, (), TOKENIZER, self.sources)

    def test_the_tokens_are_the_other_contexts(self):
        expected = Directive(2, 4, self.OTHER.tokens[3:7], Mode.HEAL, Source(self.OTHER, 3))
        place = Target(start=2, end=4)
        for source in (Target(start=3, end=7), Target(message=0), Target(match=" A long document")):
            made = self.shared(place, source, mode="heal")
            assert made.source is not None
            assert (
                made.replacement == self.OTHER.tokens[made.source.start :][: len(made.replacement)]
            )
        assert self.shared(place, Target(start=3, end=7), mode="heal") == expected
        assert expected != self.shared(place, Target(start=3, end=6), mode="heal")

    def test_a_place_inside_a_token_cannot_take_rows(self):
        error = refusal(lambda: self.shared(Target(match="ran"), Target(message=0)))
        assert "begins or ends inside a token" in error.message
        assert self.shared(Target(match=" ran"), Target(message=0)).end

    def test_what_cannot_be_found_there(self):
        assert refusal(lambda: self.shared(Target(match=" ran"), Target(match="cat"))).param


class TestMarkRequest:
    def mark(self, *args: Any, **fields: Any) -> Mark:
        return MarkRequest(*args, **fields).compile("m", IDS, MESSAGES, TOKENIZER, 100.0)

    def test_a_pin(self):
        target = Target(message=0)
        assert self.mark("pin", target, ttl_s=5) == Mark("m", "pin", 0, 4, 105.0)
        assert self.mark("pin", target, turns=2) == Mark("m", "pin", 0, 4, None, 2)
        assert self.mark("pin", target) == Mark("m", "pin", 0, 4)
        assert self.mark("pin", Target(match="at sat")).end == TOKENIZER.find(IDS, "at sat")[0][1]

    def test_a_decay(self):
        made = self.mark("decay", Target(message=0), turns=3, replacement="x", mode="heal")
        ids = tuple(TOKENIZER.encode("x"))
        assert made == Mark("m", "decay", 0, 4, None, 3, ids, Mode.HEAL)
        cut = self.mark("decay", Target(match="ran"), turns=1, replacement="sat")
        assert spelled(cut.replacement) == b" sat"

    def test_a_scratch(self):
        span = Target(start=4, end=8)
        assert self.mark("scratch", span) == Mark("m", "scratch", 4, 8, None, 1)
        made = self.mark("scratch", of="reasoning", mode="forget")
        assert made == Mark("m", "scratch", 0, 0, None, 1, (), Mode.FORGET, "reasoning")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"verb": "keep"}, "verb"),
            ({"verb": None}, "verb"),
            ({"verb": []}, "verb"),
            ({"of": "reply"}, "of"),
            ({"of": []}, "of"),
            ({"of": "reasoning"}, "of"),
            ({"verb": "scratch", "of": "reasoning"}, "of"),
            ({"verb": "pin", "of": "tool_output", "target": None}, "of"),
            ({"target": None}, "target"),
            ({"target": (1, 2)}, "target"),
            ({"mode": "keep"}, "mode"),
            ({"replacement": "x"}, "replacement"),
            ({"replacement": 5}, "replacement"),
            *(({"turns": wrong}, "turns") for wrong in [*NO_WHOLE, 0, -1]),
            *(({"ttl_s": wrong}, "ttl_s") for wrong in [True, "1", 0, -1.0, 2 * MAX_TTL_S, HUGE]),
            *(({"ttl_s": float(wrong)}, "ttl_s") for wrong in ["nan", "inf", "-inf"]),
            ({"verb": "decay"}, "turns"),
            ({"verb": "decay", "turns": 1, "ttl_s": 1.0}, "ttl_s"),
            ({"verb": "scratch", "turns": 1}, "turns"),
        ],
    )
    def test_malformed_fields(self, fields, param):
        wanted = {"verb": "pin", "target": Target(message=0), **fields}
        assert refusal(lambda: MarkRequest(**wanted)).param == param

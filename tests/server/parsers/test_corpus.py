"""Every split of every reply says what the whole says; so does every beginning of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from leyline.server.parsers import calls, json_text, source, tagged
from leyline.server.parsers.pieces import CallArguments, CallHead
from tests.server.parsers.corpus import (
    CASES,
    CUT,
    Case,
    glm,
    hermes,
    kimi,
    kimi_section,
    qwen,
    v3,
    v3_section,
)
from tests.server.parsers.readings import Read, read, splits

IDS = [f"{case.form}: {case.name}" for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=IDS)


def test_the_corpus_is_large_and_has_every_format():
    assert len(CASES) >= 60 and len(set(zip(IDS, (c.text for c in CASES), strict=True))) == len(
        CASES
    )
    assert {case.form for case in CASES} == {
        "glm47", "qwen3_coder", "prompted", "hermes", "deepseek_v3", "kimi_k2"
    }  # fmt: skip


@every_case
def test_the_whole_says_what_it_says(case: Case):
    said = read(case, [case.text])
    assert said.content == case.content
    assert said.calls == case.calls
    assert said.reasoning == (case.reasoning or "")
    if case.ids:
        assert tuple(head.call_id for head in said.heads) == case.ids
    assert [head.index for head in said.heads] == list(range(len(said.heads)))


@every_case
def test_every_split_says_what_the_whole_says(case: Case):
    whole = read(case, [case.text])
    for pieces in splits(case.text, seed=len(case.text)):
        assert read(case, pieces) == whole, pieces
    assert read(case, ["", *case.text, ""]) == whole


@every_case
def test_what_is_given_out_is_never_taken_back(case: Case):
    whole = list(flat(read(case, [case.text])))
    for at in range(len(case.text)):
        so_far = list(flat(read(case, [case.text[:at]], ends=False)))
        assert so_far == whole[: len(so_far)]


@every_case
def test_a_reply_that_is_cut_anywhere_has_no_call_that_looks_whole_and_is_not(case: Case):
    whole = read(case, [case.text]).calls
    for at in range(len(case.text)):
        for index, (name, arguments) in enumerate(read(case, [case.text[:at]]).calls):
            if arguments.endswith(CUT):
                assert len(arguments) > 1  # not even empty: some clients take that for {}
                assert not is_json(arguments) or "twice" in case.name or "string" in case.name
            elif "closed" not in case.name:
                assert (name, arguments) == whole[index]


def is_json(arguments: str) -> bool:
    try:
        json.loads(arguments.removesuffix(CUT))
    except ValueError:
        return False
    return True


def flat(said: Read):
    """What was said, character by character."""
    for piece in said.pieces:
        if isinstance(piece, CallHead):
            yield piece
        else:
            index = piece.index if isinstance(piece, CallArguments) else None
            yield from ((type(piece), index, character) for character in piece.text)


LONG = "The quick brown fox; jumps <over> the 'lazy' dog? " * 20
STREAMED = {
    "glm47": glm("write", ("text", LONG)),
    "qwen3_coder": qwen("write", ("text", LONG)),
    "prompted": hermes('{"name": "write", "arguments": {"text": "' + LONG + '"}}'),
    "deepseek_v3": v3_section(v3("write", '{"text": "' + LONG + '"}')),
    "kimi_k2": kimi_section(kimi("functions.write:0", '{"text": "' + LONG + '"}')),
}


@pytest.mark.parametrize("form", STREAMED)
def test_long_arguments_come_as_they_are_written(form: str):
    # bug-cases 51: an agent that writes a file shows it while it is written.
    text = STREAMED[form]
    begin = text.index(LONG)
    for size in range(1, len(LONG)):
        said = read(Case("", form, text), [text[: begin + size]], ends=False)
        ((_, arguments),) = said.calls
        assert LONG[: max(0, size - len("</arg_value>"))] in arguments


# Twins: parsers with a fault in how they wait. ----------------------------------------------------


def no_hold_back(patch: pytest.MonkeyPatch):
    patch.setattr(source.Stops, "num_open", lambda *_: 0)


def one_character_too_few(patch: pytest.MonkeyPatch):
    real = source.Stops.num_open
    patch.setattr(source.Stops, "num_open", lambda *given: max(0, real(*given) - 1))


def impatient_tags(patch: pytest.MonkeyPatch):
    patch.setattr(source.Source, "_may_come", lambda *_: False)


def impatient_space(patch: pytest.MonkeyPatch):
    real = source.Source.skip_space

    def skip_space(self: source.Source, also: str = ""):
        was_over, self.is_over = self.is_over, True
        skipped = yield from real(self, also)
        self.is_over = was_over
        return skipped

    patch.setattr(source.Source, "skip_space", skip_space)


def forgetful_rewind(patch: pytest.MonkeyPatch):
    def hold(self: source.Source):
        self._held = [] if len(self._text) > 40 else None

    patch.setattr(source.Source, "hold", hold)


def eager_trim(patch: pytest.MonkeyPatch):
    patch.setattr(calls.Trimmed, "__call__", lambda self, text: self._sink(text.rstrip()))


def escapes_cut_in_two(patch: pytest.MonkeyPatch):
    real = json_text.JsonString.read

    def read(self: json_text.JsonString, text: str, start: int = 0):
        self._escape = ""
        return real(self, text, start)

    patch.setattr(json_text.JsonString, "read", read)


def halves_never_joined(patch: pytest.MonkeyPatch):
    real = json_text.JsonString.read

    def read(self: json_text.JsonString, text: str, start: int = 0):
        self._high = ""
        return real(self, text, start)

    patch.setattr(json_text.JsonString, "read", read)


def strings_as_their_pieces_look(patch: pytest.MonkeyPatch):
    patch.setattr(tagged, "quoted", lambda text: calls.quoted(text.strip("\n")))


def state_per_push(patch: pytest.MonkeyPatch):
    real = json_text.JsonValue.read

    def read(self: json_text.JsonValue, text: str, start: int = 0):
        self._state = "value" if self._state == "colon" else self._state
        return real(self, text, start)

    patch.setattr(json_text.JsonValue, "read", read)


TWINS: list[Callable[[pytest.MonkeyPatch], Any]] = [
    no_hold_back,
    one_character_too_few,
    impatient_tags,
    impatient_space,
    forgetful_rewind,
    eager_trim,
    escapes_cut_in_two,
    halves_never_joined,
    strings_as_their_pieces_look,
    state_per_push,
]


@pytest.mark.parametrize("seed_fault", TWINS)
def test_a_parser_with_a_fault_is_caught(seed_fault, monkeypatch: pytest.MonkeyPatch):
    seed_fault(monkeypatch)
    assert any(is_caught(case) for case in CASES)


def is_caught(case: Case) -> bool:
    try:
        test_every_split_says_what_the_whole_says(case)
        test_the_whole_says_what_it_says(case)
    except Exception:
        return True
    return False

"""Grammars of calls: what they let a model write is a call, and what they refuse is none.

Tokens are bytes here, so that every way of spelling a text is tried at once; some of a format's
markers are special tokens besides, as in a vocabulary that marks them so.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from leyline.grammar import Grammars
from leyline.server.parsers.choosing import Chosen
from leyline.server.parsers.formats import TOOL_FORMATS
from leyline.server.parsers.grammars import MAX_CALLS
from leyline.server.parsers.pieces import ToolUse
from leyline.server.parsers.thinking import NO_REASONING
from leyline.tokenizer import Tokenizer
from tests.server.parsers.corpus import STRING, Case, tool
from tests.server.parsers.readings import read
from tests.tiny_models import byte_tokenizer

ALL = sorted(TOOL_FORMATS)
END = 256
TOOLS = (
    tool(
        "weather",
        ("city", "days"),
        city=STRING,
        days={"type": "integer", "minimum": 1, "maximum": 9},
        unit={"type": "string", "enum": ["C", "F"]},
        near={"type": ["boolean", "null"]},
        tags={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        where={"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
    ),
    tool("now"),
    {
        "type": "function",
        "function": {"name": "shut", "parameters": {"additionalProperties": False}},
    },
)
REQUIRED = ToolUse(TOOLS, choice="required")
ONE = ToolUse(TOOLS, choice="required", parallel=False)
NAMED = ToolUse(TOOLS, choice="required", name="weather")
BERN = ("weather", '{"city": "Bern \\"1\\"", "days": 3}')


class Bytes:
    """A vocabulary of bytes, an end, and special tokens, as llguidance wants to see it."""

    eos_token_id, bos_token_id = END, None

    def __init__(self, special: Sequence[str]) -> None:
        self.ids = {text: END + 1 + at for at, text in enumerate(special)}
        self.tokens = [bytes([one]) for one in range(256)] + [b"<end>"]
        self.tokens += [text.encode() for text in special]
        self.special_token_ids = [END, *self.ids.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text with special tokens in it."""
        for special, number in self.ids.items():
            if special in text:
                first, _, rest = text.partition(special)
                return [*self.encode(first), number, *self.encode(rest)]
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[one] for one in ids).decode()


@functools.cache
def vocabulary(special: tuple[str, ...]) -> tuple[Bytes, LLTokenizer]:
    spelled = Bytes(special)
    wrapped: Any = TokenizerWrapper(spelled)
    return spelled, LLTokenizer(wrapped, n_vocab=len(spelled.tokens), eos_token=[END])


def matcher(name: str, use: ToolUse, special: bool) -> tuple[Bytes, LLMatcher]:
    form = TOOL_FORMATS[name]
    spelled, tokenizer = vocabulary(form.markers if special else ())
    found = LLMatcher(tokenizer, form.grammar(use, spelled.ids), log_level=0)
    assert not found.is_error(), found.get_error()
    assert not found.get_grammar_warnings()
    return spelled, found


def accepts(name: str, use: ToolUse, text: str, special: bool) -> bool:
    """Whether a reply is allowed, and may end there."""
    spelled, found = matcher(name, use, special)
    ids = spelled.encode(text)
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def written(name: str, *calls: tuple[str, str]) -> str:
    told = [(f"functions.{name}:{at}", name, text) for at, (name, text) in enumerate(calls)]
    return TOOL_FORMATS[name].write(told)


both = pytest.mark.parametrize("special", [False, True], ids=["as text", "special tokens"])


@both
@pytest.mark.parametrize("name", ALL)
def test_what_the_format_writes_is_allowed(name: str, special: bool):
    everything = {"city": "Zürich 🙂 <b> {", "days": 9, "unit": "C", "near": None}
    everything |= {"tags": ["a", "ü"], "where": {"lat": -1.5}}
    for use in (REQUIRED, ONE, NAMED):
        assert accepts(name, use, written(name, BERN), special)
        assert accepts(name, use, written(name, ("weather", dumps(everything))), special)
    assert accepts(name, ONE, written(name, ("shut", "{}")), special)
    assert accepts(name, ONE, written(name, ("now", "{}")), special)
    assert accepts(name, REQUIRED, written(name, BERN, ("now", "{}"), BERN), special)


@both
@pytest.mark.parametrize("name", ALL)
def test_what_is_no_call_is_refused(name: str, special: bool):
    whole = written(name, BERN)
    for use in (REQUIRED, ONE, NAMED):
        assert not accepts(name, use, "", special)
        assert not accepts(name, use, "Let me see.", special)
        assert not accepts(name, use, " " + whole, special)
        assert not accepts(name, use, whole + "x", special)
        assert not accepts(name, use, whole[:-1], special) or special
        assert not accepts(name, use, written(name, ("rm", "{}")), special)
    assert not accepts(name, ONE, written(name, BERN, BERN), special)
    assert not accepts(name, NAMED, written(name, ("now", "{}")), special)


WRONG = [
    {"city": "Bern"},
    {"days": 3},
    {"city": "Bern", "days": "three"},
    {"city": "Bern", "days": 10},
    {"city": "Bern", "days": 3, "unit": "K"},
    {"city": "Bern", "days": 3, "near": 5},
    {"city": "Bern", "days": 3, "tags": "a"},
    {"city": "Bern", "days": 3, "tags": ["abcd"]},
    {"city": "Bern", "days": 3, "where": {}},
    {"city": "Bern", "days": 3, "made": "up"},
    {"city": "Bern", "days": 3, "where": {"lat": 1, "made": "up"}},
]


@both
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("arguments", WRONG, ids=map(str, range(len(WRONG))))
def test_arguments_against_the_schema_are_refused(name: str, arguments: Any, special: bool):
    assert not accepts(name, REQUIRED, written(name, ("weather", dumps(arguments))), special)


@both
@pytest.mark.parametrize("name", ALL)
def test_whatever_a_grammar_lets_a_model_write_is_read_as_calls(name: str, special: bool):
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    several = 0
    for seed in range(8):
        for use in (REQUIRED, ONE, NAMED):
            text = wandered(*matcher(name, use, special), random.Random(seed))
            said = read(Case("", name, text, use=use), [text])
            assert not said.content and len(said.complete) == len(said.heads) >= 1
            assert use.parallel or len(said.heads) == 1
            several += len(said.heads) > 1
            for call, arguments in said.calls:
                jsonschema.validate(json.loads(arguments), schemas[call])
    assert several


def wandered(spelled: Bytes, found: LLMatcher, rng: random.Random) -> str:
    """A reply of a model that says anything it may, and tends to come to an end."""
    ids: list[int] = []
    while not found.is_stopped():
        chosen = jump(spelled, found, rng) or [step(spelled, found, rng)]
        if chosen == [END]:
            break
        assert found.consume_tokens(chosen)
        ids += chosen
        assert len(ids) < 5000
    return spelled.decode(ids)


def jump(spelled: Bytes, found: LLMatcher, rng: random.Random) -> list[int]:
    """The end of a bare text, now and then, where it may stand: nobody finds it by chance."""
    if rng.random() < 0.7:
        return []
    ends = ["</arg_value>", "</arg_key>", "\n</parameter>"]
    for text in rng.sample(ends, len(ends)):
        ids = spelled.encode(text)
        if found.deep_copy().try_consume_tokens(ids) == len(ids):
            return ids
    return []


def step(spelled: Bytes, found: LLMatcher, rng: random.Random) -> int:
    mask = np.frombuffer(found.compute_bitmask(), dtype=np.uint8)
    allowed = np.unpackbits(mask, bitorder="little")[: len(spelled.tokens)].nonzero()[0].tolist()
    ends = [one for one in allowed if one >= END or one in b'"}]>']
    return rng.choice(ends if ends and rng.random() < 0.4 else allowed)


@pytest.mark.parametrize("name", ALL)
def test_arguments_are_made_up_only_where_the_schema_is_open(name: str):
    functions = [
        {"name": "none", "parameters": {"type": "object", "properties": {}}},
        {"name": "any", "parameters": {"type": "object"}},
    ]
    use = ToolUse(tuple({"type": "function", "function": one} for one in functions), "required")
    for function in ("none", "any"):
        assert accepts(name, use, written(name, (function, "{}")), special=False)
        made_up = accepts(name, use, written(name, (function, '{"a": "b"}')), special=False)
        assert made_up == (function == "any")


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def test_a_strict_tool_is_refused_for_what_cannot_be_enforced_and_another_is_not():
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    _, tokenizer = vocabulary(())
    for strict in (False, True):
        function: Mapping[str, Any] = {"name": "now", "parameters": odd, "strict": strict}
        use = ToolUse(({"type": "function", "function": function},), choice="required")
        found = LLMatcher(tokenizer, TOOL_FORMATS["hermes"].grammar(use), log_level=0)
        assert found.is_error() == strict


def test_a_schema_that_names_its_dialect_is_taken():
    schema = {"$schema": "https://example.com/draft", "$id": "x", "type": "object"}
    use = ToolUse(
        ({"type": "function", "function": {"name": "now", "parameters": schema}},), "required"
    )
    _, tokenizer = vocabulary(())
    for form in TOOL_FORMATS.values():
        assert not LLMatcher(tokenizer, form.grammar(use), log_level=0).is_error()


def test_parts_of_a_schema_may_point_to_its_definitions():
    pointing = {
        "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        "properties": {
            "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
            "one": {"$ref": "#/$defs/Place"},
            "any": True,
        },
        "required": ["places"],
    }
    use = ToolUse(
        ({"type": "function", "function": {"name": "now", "parameters": pointing}},), "required"
    )
    for name in ALL:
        right, wrong = (dumps({"places": [{"lat": lat}]}) for lat in (1.5, "north"))
        assert accepts(name, use, written(name, ("now", right)), special=False)
        assert not accepts(name, use, written(name, ("now", wrong)), special=False)


@pytest.mark.parametrize("name", ALL)
def test_the_engines_own_compiler_takes_them(name: str):
    tokenizer = Tokenizer(byte_tokenizer(), stop_ids=[2])
    grammar = Grammars(tokenizer).compile("grammar", TOOL_FORMATS[name].grammar(REQUIRED))
    follower = grammar.start()
    ids = tokenizer.encode(written(name, BERN))
    for at, token in enumerate([*ids, 2]):
        assert is_set(follower.allowed(ids[:at]), token)
    assert not is_set(follower.allowed([]), 2)


def is_set(mask: Any, token: int) -> bool:
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def test_markers_that_are_special_tokens_cannot_be_spelled_as_text():
    spelled, found = matcher("kimi_k2", ONE, special=True)
    text = written("kimi_k2", ("now", "{}"))
    assert found.try_consume_tokens(list(text.encode())) == 0
    assert Chosen(TOOL_FORMATS["kimi_k2"], NO_REASONING).markers(ONE) == tuple(spelled.ids)


@both
@pytest.mark.parametrize("name", ALL)
def test_demanded_calls_come_to_an_end(name: str, special: bool):
    most = [("shut", "{}")] * MAX_CALLS
    assert accepts(name, REQUIRED, written(name, *most), special)
    assert not accepts(name, REQUIRED, written(name, *most, ("shut", "{}")), special)

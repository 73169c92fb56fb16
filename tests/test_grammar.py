"""Forms that replies must keep: random walks through the masks, checked by independent readers."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from leyline.errors import InvalidRequestError, LeylineError
from leyline.grammar import MAX_CACHED, MAX_CHOICES, MAX_SOURCE_BYTES, Grammars
from leyline.sampling import Constraint
from leyline.tokenizer import Tokenizer

from .embedded_fixtures import embedded_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12, "pattern": "^[A-Z][a-zü]*$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["city", "days", "units", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(embedded_model())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def bits(mask: np.ndarray) -> np.ndarray:
    """The ids that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(
    constraint: Constraint, tokenizer: Tokenizer, seed: int, most: int = 400
) -> list[int] | None:
    """A reply of random allowed tokens, which ends where it may; None if it is too long."""
    chance, generated = random.Random(seed), []
    for _ in range(most):
        allowed = bits(constraint.allowed(generated))
        ending = tokenizer.stop_ids & set(allowed.tolist())
        if ending and (len(allowed) == len(ending) or chance.random() < 0.3):
            return generated
        generated.append(int(chance.choice(allowed)))
        if generated[-1] in tokenizer.stop_ids:
            return generated[:-1]
    return None


def walks(constraint_of: Any, tokenizer: Tokenizer, num: int) -> list[str]:
    found = (walk(constraint_of(), tokenizer, seed) for seed in range(num))
    return [tokenizer.decode(one, skip_special=False) for one in found if one is not None]


def test_every_walk_through_a_schema_is_an_instance_of_it(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    grammar = grammars.compile("json_schema", SCHEMA)
    texts = walks(grammar.start, tokenizer, 12)
    assert len(texts) >= 8
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_walk_through_a_wider_schema_is_not(tokenizer: Tokenizer, grammars: Grammars) -> None:
    wider = {**SCHEMA, "properties": {**SCHEMA["properties"], "days": {"type": "string"}}}
    texts = walks(grammars.compile("json_schema", wider).start, tokenizer, 6)
    with pytest.raises(jsonschema.ValidationError):
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)


def follows(constraint: Any, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a reply of that text is allowed, and may end there."""
    ids = [*tokenizer.encode_plain(text), min(tokenizer.stop_ids)]
    return all(one in bits(constraint.allowed(ids[:at])) for at, one in enumerate(ids))


def test_a_schema_that_says_nothing_of_other_properties_lets_none_through(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    named = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, others in ((named, False), ({**named, "additionalProperties": True}, True)):
        grammar = grammars.compile("json_schema", schema)
        assert follows(grammar.start(), tokenizer, '{"a": 1}')
        assert follows(grammar.start(), tokenizer, '{"a": 1, "b": 2}') is others


def test_two_lists_of_properties_together_can_be_followed(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    lists = [{"properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"]
    grammar = grammars.compile("json_schema", {"type": "object", "allOf": lists})
    assert follows(grammar.start(), tokenizer, '{"a": 1, "b": 2}')
    assert not follows(grammar.start(), tokenizer, '{"a": 1}')


def test_a_json_object_is_one(tokenizer: Tokenizer, grammars: Grammars) -> None:
    texts = walks(grammars.compile("json_object").start, tokenizer, 8)
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def test_an_expression_matches_from_end_to_end(tokenizer: Tokenizer, grammars: Grammars) -> None:
    expression = r"[a-c]{2,5}-(é|😀|\d{3})"
    texts = walks(grammars.compile("regex", expression).start, tokenizer, 20)
    assert texts and all(re.fullmatch(expression, text) for text in texts)


def test_choices_are_all_reached_and_nothing_else(tokenizer: Tokenizer, grammars: Grammars) -> None:
    choices = ["yes", "no", "näher 😀", 'a "quoted"\nline', "yes, but"]
    grammar = grammars.compile("choice", choices)
    assert set(walks(grammar.start, tokenizer, 200)) == set(choices)


def test_a_lark_grammar_is_followed(tokenizer: Tokenizer, grammars: Grammars) -> None:
    grammar = grammars.compile("grammar", 'start: "<" body ">"\nbody: /[0-9]+/ | "x"')
    texts = walks(grammar.start, tokenizer, 20)
    assert texts and all(re.fullmatch(r"<([0-9]+|x)>", text) for text in texts)


def test_no_special_token_is_ever_inside_a_form(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.compile("json_schema", {"type": "string"}).start()
    opened = tokenizer.encode_plain('"<|im')
    allowed = set(bits(constraint.allowed(opened)).tolist())
    special = {i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)}
    assert special and not allowed & special


def test_a_mask_depends_on_the_tokens_alone(tokenizer: Tokenizer, grammars: Grammars) -> None:
    grammar = grammars.compile("json_schema", SCHEMA)
    told = walk(grammar.start(), tokenizer, 1)
    assert told is not None
    other = walk(grammar.start(), tokenizer, 2)
    assert other is not None
    one_by_one, at_random = grammar.start(), grammar.start()
    at_random.allowed(other)  # another history, which is to be forgotten
    for length in (*range(len(told)), 3, 0, len(told)):  # as after a preemption, and back
        expected = grammar.start().allowed(told[:length])
        assert np.array_equal(one_by_one.allowed(told[:length]), expected)
        assert np.array_equal(at_random.allowed(tuple(told[:length])), expected)


def test_two_replies_of_one_grammar_do_not_meet(tokenizer: Tokenizer, grammars: Grammars) -> None:
    grammar = grammars.compile("choice", ["left", "right"])
    first, second = grammar.start(), grammar.start()
    beginning = second.allowed([])
    first.allowed(tokenizer.encode_plain("left"))
    assert np.array_equal(second.allowed([]), beginning)


def test_tokens_that_do_not_fit_end_the_reply_and_no_other(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    grammar = grammars.compile("choice", ["left", "right"])
    broken = grammar.start()
    with pytest.raises(LeylineError, match="follow its form"):
        broken.allowed(tokenizer.encode_plain("up"))
    assert bits(grammar.start().allowed([])).size


def test_a_reply_that_was_refused_is_refused_again(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    constraint = grammars.compile("choice", ["left", "right"]).start()
    constraint.allowed(tokenizer.encode_plain("le"))
    for _ in range(2):
        with pytest.raises(LeylineError, match="follow its form"):
            constraint.allowed(tokenizer.encode_plain("leap"))
    assert bits(constraint.allowed(tokenizer.encode_plain("lef"))).size


def test_a_reply_that_uses_a_parser_up_takes_nobody_with_it(tokenizer: Tokenizer) -> None:
    """What copies of a parser learn is shared, and so is its limit."""
    grammars, expression = Grammars(tokenizer), "(a{1,300}){1,300}"
    (letter,) = tokenizer.encode_plain("a")
    grammar = grammars.compile("regex", expression)
    greedy, other, start = grammar.start(), grammar.start(), grammar._matcher
    other.allowed([letter])
    with pytest.raises(InvalidRequestError, match="any further"):
        for length in range(1000):
            greedy.allowed([letter] * length)
    spent = start.deep_copy()
    spent.consume_tokens([letter] * 3)
    spent.compute_bitmask()
    assert spent.is_error()  # so would the others be
    for length in (2, 3):
        assert letter in bits(other.allowed([letter] * length))
    again = grammars.compile("regex", expression)
    assert again is not grammar and grammars.compile("regex", expression) is again
    assert letter in bits(again.start().allowed([letter] * 3))


def test_a_form_can_begin_behind_a_thought(tokenizer: Tokenizer, grammars: Grammars) -> None:
    end = "</think>"
    constraint = grammars.after(end, grammars.compile("choice", ["yes"]).start())
    thought = tokenizer.encode_plain(f"so {end[:4]} and {end}")
    for length in range(len(thought)):
        assert may_be_anything(constraint.allowed(thought[:length]), tokenizer)
    allowed = bits(constraint.allowed(thought))
    assert {tokenizer.decode([int(one)]) for one in allowed} <= {"y", "ye", "yes"}
    assert may_be_anything(constraint.allowed(thought[:-1]), tokenizer)  # and back


def may_be_anything(mask: np.ndarray, tokenizer: Tokenizer) -> bool:
    """Whether a mask rules out nothing but the end."""
    everything = set(range(tokenizer.vocab_size)) - tokenizer.stop_ids
    return set(bits(mask).tolist()) & set(range(tokenizer.vocab_size)) == everything


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"type": "strin"}),
        ("json_schema", {"type": 5}),
        ("json_schema", {"properties": []}),
        ("json_schema", []),
        ("json_schema", "{}"),
        ("json_schema", None),
        ("json_schema", {"type": "array", "uniqueItems": True}),
        ("json_schema", {"$ref": "http://127.0.0.1:9/never-fetched"}),
        ("json_schema", {"$ref": "file:///etc/passwd"}),
        ("json_schema", {"type": "string", "pattern": "(a|b"}),
        ("json_schema", {"enum": [float("nan")]}),
        ("json_schema", {"oneOf": [{"type": "string"}, {"maxLength": 3}]}),
        ("json_schema", {"$ref": "#"}),
        ("json_schema", {"type": "integer", "multipleOf": 999_983}),
        ("json_schema", {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]}),
        ("regex", "(a{1000}){1000}"),
        ("regex", "(a|b"),
        ("regex", ""),
        ("regex", "\ud83d"),
        ("regex", 5),
        ("regex", "(" * 5000),
        ("choice", []),
        ("choice", "yes"),
        ("choice", ["yes", 5]),
        ("choice", [""]),
        ("choice", ["x"] * (MAX_CHOICES + 1)),
        ("grammar", 'start: "a'),
        ("grammar", "start: missing"),
        ("grammar", 'start: %json // how many\n {"type": "integer", "multipleOf": 999983}'),
        ("grammar", "x" * (MAX_SOURCE_BYTES + 1)),
        ("nonsense", None),
    ],
)
def test_what_cannot_be_enforced_is_refused(grammars: Grammars, kind: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as caught:
        grammars.compile(kind, value)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("multiple", [7, 0.01, 1000, 9973, 1e-9, 57_000_000])
def test_multiples_that_take_few_remainders_are_enforced(
    tokenizer: Tokenizer, grammars: Grammars, multiple: float
) -> None:
    schema = {"type": "array", "items": {"multipleOf": multiple}, "maxItems": 1}
    for kind, value in (("json_schema", schema), ("grammar", f"start: %json {json.dumps(schema)}")):
        assert bits(grammars.compile(kind, value).start().allowed([])).size  # type: ignore[arg-type]


def test_a_form_that_grows_out_of_its_limits_is_its_senders_fault(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    names = {f"k{number}": {"type": "string"} for number in range(1000)}
    constraint = grammars.compile("json_schema", {"type": "object", "properties": names}).start()
    with pytest.raises(InvalidRequestError, match="follow its form"):
        constraint.allowed(tokenizer.encode_plain("{"))


def test_a_pattern_and_a_length_hold_both(tokenizer: Tokenizer, grammars: Grammars) -> None:
    schema = {"type": "string", "pattern": "^a+$", "maxLength": 3}
    texts = walks(grammars.compile("json_schema", schema).start, tokenizer, 30)
    assert {json.loads(text) for text in texts} == {"a", "aa", "aaa"}


@pytest.mark.parametrize("depth", [1, 3, 5, 7, 9])
def test_nesting_is_compiled_or_refused(grammars: Grammars, depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        branch = {"type": "object", "properties": {f"k{level}": schema}}
        schema = {"anyOf": [branch, {"type": "array", "items": schema}]}
    try:
        grammars.compile("json_schema", schema)
    except InvalidRequestError as error:
        assert depth > 5, error.message


def test_a_schema_deeper_than_the_stack_is_refused(grammars: Grammars) -> None:
    schema: dict[str, Any] = {}
    for _ in range(50_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError):
        grammars.compile("json_schema", schema)


def test_a_form_is_compiled_once_and_forgotten_in_time(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    first = grammars.compile("choice", ["a"])
    assert grammars.compile("choice", ["a"]) is first
    for number in range(MAX_CACHED):
        grammars.compile("choice", [str(number)])
    assert grammars.compile("choice", ["a"]) is not first
    assert len(grammars._compiled) == MAX_CACHED


def test_white_space_has_an_end(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.compile("json_object").start()
    blank = tokenizer.encode_plain(" ")
    allowed = bits(constraint.allowed(tokenizer.encode_plain("{") + blank * 20))
    assert not set(blank) & set(allowed.tolist())

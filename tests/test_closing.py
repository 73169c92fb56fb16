"""Closed schemas: what they let through the original does, and what it needs they have."""

from __future__ import annotations

import itertools
from copy import deepcopy
from random import Random
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest

from leyline.closing import closed

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAMES = ("a", "b", "c")


def thing(*names: str, **more: Any) -> Schema:
    return {"type": "object", "properties": {name: TEXT for name in names}, **more}


def shut(*names: str, **more: Any) -> Schema:
    return thing(*names, additionalProperties=False, **more)


def fits(instance: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(instance)


# -- what is closed ----------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (thing("a"), shut("a")),
        (thing(), shut()),
        ({"properties": {"a": thing("b")}}, {**shut(), "properties": {"a": shut("b")}}),
        ({"items": thing("a")}, {"items": shut("a")}),
        ({"prefixItems": [thing("a"), TEXT]}, {"prefixItems": [shut("a"), TEXT]}),
        ({"additionalProperties": thing("a")}, {"additionalProperties": shut("a")}),
        ({"anyOf": [thing("a"), {"type": "null"}]}, {"anyOf": [shut("a"), {"type": "null"}]}),
        (
            {"$ref": "#/$defs/One", "$defs": {"One": thing("a")}},
            {"$ref": "#/$defs/One", "$defs": {"One": shut("a")}},
        ),
        (thing("a", required=["a"], minProperties=1), shut("a", required=["a"], minProperties=1)),
    ],
)
def test_a_schema_that_stands_alone_is_closed(given: Any, expected: Any) -> None:
    without_type = {key: value for key, value in expected.items() if key != "type"}
    assert closed(given) in (expected, without_type)


ALONE = [
    thing("a", additionalProperties=True),
    thing("a", additionalProperties={}),
    thing("a", unevaluatedProperties=True),
    thing("a", patternProperties={"^x-": {}}),
    thing("a", required=["b"]),
    thing("a", minProperties=2),
    thing("a", required="a"),
    thing("a", required=[["a"]]),
    thing("a", minProperties="1"),
    thing("a", propertyNames={"maxLength": 3}),
    thing("a", dependentRequired={"a": ["b"]}),
    thing("a", enum=[{"b": "x"}]),
    {"type": "object"},
    {"properties": 5},
    {"allOf": [thing("a"), thing("b", required=["b"])]},
    {"anyOf": [thing("a"), thing("b")]},
    {"oneOf": [thing("a", required=["a"]), thing("b", required=["b"])]},
    {"not": thing("a", required=["a"])},
    {"if": thing("a"), "then": thing("b"), "else": thing("c")},
    {"items": thing("a"), "contains": thing("b", required=["b"])},
    {"properties": {"a": thing("b")}, "allOf": [{"properties": {"a": thing("c")}}]},
    {"patternProperties": {"^a": thing("b"), "a$": thing("c")}},
    {"allOf": [{"$ref": "#/$defs/One"}, thing("b")], "$defs": {"One": thing("a")}},
    {"$ref": "#/$defs/One", "required": ["b"], "$defs": {"One": thing("a")}},
    {
        "not": {"$ref": "#/$defs/One"},
        "$defs": {"One": {"items": {"$ref": "#/$defs/T~0w~1o%20x"}}, "T~w/o x": thing("a")},
    },
    {"items": thing("a"), "$ref": "#/$defs/gone"},
    {"$ref": "other.json#/One", "$defs": {"One": thing("a")}},
    {"$defs": {"One": {"$id": "one", **thing("a")}}},
    {"$dynamicRef": "#one", "$defs": {"One": thing("a")}},
    True,
    None,
    "text",
]


@pytest.mark.parametrize("given", ALONE)
def test_where_something_could_be_lost_nothing_is_closed(given: Any) -> None:
    assert closed(given) == given


def test_only_the_definitions_that_others_speak_beside_stay_open() -> None:
    schema = {
        "properties": {"one": {"$ref": "#/$defs/One"}, "two": {"$ref": "#/$defs/Two"}},
        "$defs": {
            "One": thing("a"),
            "Two": {"allOf": [{"$ref": "#/$defs/Three"}, thing("b")]},
            "Three": thing("c"),
        },
    }
    result = closed(schema)
    assert result["additionalProperties"] is False
    definitions = result["$defs"]
    assert [one.get("additionalProperties") for one in definitions.values()] == [False, None, None]


def test_a_property_may_be_called_like_a_word_of_schemas() -> None:
    words = {"properties": thing("a"), "$ref": TEXT, "allOf": TEXT, "$id": TEXT, "required": TEXT}
    result = closed({"properties": words})
    assert result == {
        "properties": {**words, "properties": shut("a")},
        "additionalProperties": False,
    }


def test_a_schema_is_not_changed_and_may_be_any_mapping() -> None:
    schema = {"properties": {"a": thing("b")}}
    before = deepcopy(schema)
    result = closed(MappingProxyType(schema))
    assert schema == before and type(result) is dict
    assert closed(result) == result


# -- in general ----------------------------------------


def random_schema(random: Random, depth: int) -> Any:
    """A schema of objects within objects, combined in all ways there are."""

    def part() -> Any:
        return random_schema(random, depth - 1)

    if depth == 0 or random.random() < 0.15:
        leaves = [{}, TEXT, True, {"$ref": "#/$defs/D"}, {"$ref": "#/$defs/E"}]
        return deepcopy(random.choice([*leaves, {"$ref": "#/properties/a"}]))
    names = random.sample(NAMES, random.randint(0, 2))
    schema: Schema = {"properties": {name: part() for name in names}}
    if random.random() < 0.5:
        schema["required"] = random.sample(NAMES, 1)
    for word in random.sample(("allOf", "anyOf", "oneOf"), random.choice([0, 0, 1])):
        schema[word] = [part(), random.choice([part(), {"type": "null"}])]
    for word in ("not", "if", "additionalProperties", "items", "contains"):
        if random.random() < 0.12:
            schema[word] = part()
    if "if" in schema:
        schema["then"], schema["else"] = part(), part()
    if random.random() < 0.1:
        schema["patternProperties"] = {"a|b": part()}
    if "contains" in schema and random.random() < 0.5:
        schema["maxContains"] = 1
    if random.random() < 0.3 and names:
        del schema["properties"]
    return schema


def random_document(random: Random) -> Schema:
    root = random_schema(random, 3)
    root = {} if isinstance(root, bool) or "$ref" in root else root
    around: Schema = {"properties": {"a": {"$ref": "#/$defs/D"}, "b": {"$ref": "#/$defs/E"}}}
    return {
        **root,
        "properties": {**root.get("properties", {}), "a": ref_free(random, 2)},
        "$defs": {"D": ref_free(random, 2), "E": around},
    }


def ref_free(random: Random, depth: int) -> Any:
    """One that points nowhere, so that no reference ever goes round in circles at one place."""
    while "$ref" in repr(schema := random_schema(random, depth)):
        pass
    return schema


def instances(depth: int) -> list[Any]:
    """All small values."""
    if depth == 0:
        return ["x", None, {}]
    below = instances(depth - 1)
    found: list[Any] = ["x", None, [], {}]
    for name, value in itertools.product(NAMES, below):
        found += [{name: value}]
    for value in below:
        found += [[value], {"a": value, "b": "x"}, {"a": value, "c": {}}, {"b": value, "c": "x"}]
    return found


INSTANCES = instances(2)


def naive(schema: Any) -> Any:
    """What somebody might write who has not thought of combinations."""
    if isinstance(schema, list):
        return [naive(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {word: naive(part) for word, part in schema.items()}
    if isinstance(result.get("properties"), dict) and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result


def test_every_instance_of_a_closed_schema_is_one_of_the_original() -> None:
    random, changed, kept, wrong = Random(5), 0, 0, 0
    for _ in range(150):
        schema = random_document(random)
        result, careless = closed(schema), naive(schema)
        changed += result != schema
        original = [fits(one, schema) for one in INSTANCES]
        allowed = [fits(one, result) for one in INSTANCES]
        assert not any(new and not old for new, old in zip(allowed, original, strict=True)), schema
        assert any(allowed) == any(original), schema  # what can be met still can be
        kept += sum(allowed)
        wrong += any(
            fits(one, careless) and not old for one, old in zip(INSTANCES, original, strict=True)
        )
    assert changed > 50 and kept > 1000
    assert wrong  # a twin that must not

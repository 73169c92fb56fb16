"""Arguments that are written as bare text: their JSON, by the types that the tool declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_COMBINED = ("anyOf", "oneOf", "allOf")
_TYPES = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_SPELLINGS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # Python's too


def properties_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool declares of its arguments, by their names."""
    parameters = tool["function"].get("parameters")
    declared = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return declared if isinstance(declared, Mapping) else {}


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says so; none if it does not."""
    return frozenset(_types(schema))


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (one for one in kind if isinstance(one, str))
    else:
        if isinstance(allowed := schema.get("enum"), list):
            yield from map(_type_of, allowed)
        if "const" in schema:
            yield _type_of(schema["const"])
        for word in _COMBINED:
            if isinstance(parts := schema.get(word), list):
                for part in parts:
                    yield from _types(part)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    return _TYPES.get(type(value), "string")


def is_text(types: frozenset[str]) -> bool:
    """Whether nothing but a string is allowed, so that its JSON is known before its end."""
    return types == {"string"}


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is written as bare text.

    What parses stays as it is written, unless the declared types rule it out where they allow a
    string; what does not is a string.
    """
    bare = text.strip()
    if types & {"boolean", "null"}:
        bare = _SPELLINGS.get(bare.lower(), bare)
    try:
        kind = _type_of(json.loads(bare, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind in types or (kind == "integer" and "number" in types)
    if "string" in types and (kind == "string" or not fits):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _refuse(word: str) -> None:
    raise ValueError(word)

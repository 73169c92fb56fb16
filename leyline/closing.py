"""JSON schemas that say nothing of further properties, closed to them.

A schema that declares properties lets any others through unless it says so. Hardly anybody means
that, and a small model that may make up a property makes up many. `closed` adds the word that is
missing, `additionalProperties: false`, wherever nothing is lost by it but made-up properties:
every instance of the result is one of the original.

So only schemas that alone say what is allowed at their place are closed. Where several speak of
the same value, as in an `allOf`, each may declare properties that the others do not; and a schema
that is negated, or counted among others, would let more through for being closed. The same holds
for what such places point to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

Path = tuple[str, ...]
Schema = dict[str, Any]

_DEFINITIONS = ("$defs", "definitions")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# What holds schemas that alone speak of their values, if the schema around them does: by name,
_NAMED = ("properties", *_DEFINITIONS)
# one for all, and a list of them.
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LISTED = ("items", "prefixItems", "anyOf")
# What speaks of the same value as the words beside it, or of the values in it as they do.
_BESIDE = {*_REFERENCES, "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const"}
_BESIDE |= {"dependencies", "dependentRequired", "dependentSchemas"}
_BESIDE |= {"patternProperties", "propertyNames", "contains", "unevaluatedItems"}
# What says nothing of properties.
_SILENT = {*_DEFINITIONS, "$comment", "$id", "$schema", "default", "deprecated", "description"}
_SILENT |= {"examples", "readOnly", "title", "type", "writeOnly"}
_CLOSED = ("additionalProperties", "unevaluatedProperties")
_NULL = {"type": "null"}


def closed(schema: Any) -> Any:
    """A schema whose instances have no property that it could name and does not.

    Args:
        schema: Any; it is not changed.

    Returns:
        A copy of it. Where references are too much to follow, nothing is closed in it.

    Raises:
        RecursionError: If it is too deep.
    """
    result = _copied(schema)
    if not isinstance(result, dict) or not _is_simple(result):
        return result
    found = list(_schemas(result, ()))
    entangled = [one for _, one in found if not _speaks_alone(one)]
    shared = _pointed_at(result, [ref for one in entangled for ref in _references(_bare(one))])
    for path, one in found:
        if _is_open(one) and not any(path[: len(start)] == start for start in shared):
            one["additionalProperties"] = False
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in cast("Sequence[Any]", value)]
    return value


def _schemas(value: Any, path: Path) -> Iterator[tuple[Path, Schema]]:
    """The schemas that stand alone at their place, and those at which that ends."""
    if not isinstance(value, dict):
        return
    schema = cast("Schema", value)
    yield path, schema
    for below, part in _parts(schema, alone=_speaks_alone(schema)):
        yield from _schemas(part, (*path, *below))


def _parts(schema: Schema, *, alone: bool) -> Iterator[tuple[Path, Any]]:
    """What stands in a schema, with the way to it; definitions stand alone in any case."""
    for word in _NAMED if alone else _DEFINITIONS:
        if isinstance(parts := schema.get(word), dict):
            yield from (((word, name), part) for name, part in cast("Schema", parts).items())
    if alone:
        yield from (((word,), schema.get(word)) for word in _SINGLE)
        for word in _LISTED:
            if isinstance(parts := schema.get(word), list):
                yield from (((word, str(at)), one) for at, one in enumerate(cast("Any", parts)))


def _speaks_alone(schema: Schema) -> bool:
    """Whether what it says of a value stands in one place: here, or where it points to."""
    if not schema.keys() & _BESIDE:
        return True
    said = schema.keys() - _SILENT
    return said == {"$ref"} or (said == {"anyOf"} and _is_optional(schema["anyOf"]))


def _is_optional(either: Any) -> bool:
    """Whether alternatives are one schema and null."""
    return isinstance(either, list) and len(either) == 2 and _NULL in either


def _is_open(schema: Schema) -> bool:
    """Whether it declares properties, and lets through others that it neither speaks of nor needs.

    One that speaks with others is not open: they may have spoken of those.
    """
    declared, required = schema.get("properties"), schema.get("required", [])
    least = schema.get("minProperties", 0)
    if not isinstance(declared, dict) or not isinstance(required, list):
        return False
    if not isinstance(least, int | float) or least > len(cast("Schema", declared)):
        return False
    needed = all(isinstance(name, str) and name in declared for name in cast("Any", required))
    return needed and not schema.keys() & {*_BESIDE, *_CLOSED}


def _bare(schema: Schema) -> Schema:
    """A schema without its definitions, which apply only where they are pointed to."""
    return {word: said for word, said in schema.items() if word not in _DEFINITIONS}


def _is_simple(schema: Schema) -> bool:
    """Whether all references are paths from the schema's root."""
    inside = (part for word, part in schema.items() if word != "$id")
    renamed = any(isinstance(one.get("$id"), str) for part in inside for one in _mappings(part))
    return not renamed and all(ref == "#" or ref.startswith("#/") for ref in _references(schema))


def _pointed_at(root: Schema, references: Sequence[str]) -> set[Path]:
    """Where references point, and those that stand there."""
    found, waiting = set[Path](), list(references)
    while waiting:
        path = _path(waiting.pop())
        if path not in found:
            found.add(path)
            waiting += _references(_at(root, path))
    return found


def _path(reference: str) -> Path:
    """A JSON pointer as it stands in a reference (RFC 6901)."""
    names = map(unquote, reference.split("/")[1:])
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in names)


def _at(value: Any, path: Path) -> Any:
    """What stands at a path; None if nothing does."""
    for name in path:
        if isinstance(value, list) and name.isdecimal() and int(name) < len(cast("Any", value)):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return None
    return value


def _references(value: Any) -> Iterator[str]:
    """All references in a value, wherever they stand."""
    for one in _mappings(value):
        yield from (ref for word in _REFERENCES if isinstance(ref := one.get(word), str))


def _mappings(value: Any) -> Iterator[Schema]:
    """All JSON objects in a value."""
    if isinstance(value, dict):
        yield cast("Schema", value)
        value = list(cast("Schema", value).values())
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _mappings(item)

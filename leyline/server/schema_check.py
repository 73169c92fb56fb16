"""Whether a JSON schema that came with a request is one, at every depth.

What a tool's parameters look like is read by chat templates, by grammars and by parsers, and none
of them expects a number where a list of names belongs. Only the types of known keywords are
checked here; whether a schema can be enforced is the grammar's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from leyline.sampling import INT32_MAX
from leyline.server.fields import encodable, wrong

MAX_DEPTH = 64

Check = Callable[[Any, str, int], None]


def check_schema(schema: Any) -> Any:
    """Return a JSON schema as it is, without the keywords that are null.

    Some clients write null for what they do not say.

    Raises:
        PydanticCustomError: If it is none; the message says where.
    """
    _schema(schema, "the schema", 0)
    return _said(encodable(schema))


def check_parameters(schema: Any) -> Any:
    """Return the schema of a tool's parameters, which must be an object's; None is one too.

    Raises:
        PydanticCustomError: If it is none; the message says where.
    """
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        raise wrong("must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        raise wrong('must be the schema of an object: its type must be "object"')
    return check_schema(schema)


def without_notes(schema: Any) -> Any:
    """A schema that was checked, without what it says to people: it demands the same, shorter."""
    if isinstance(schema, list):
        return [without_notes(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare: dict[str, Any] = {}
    for key, value in schema.items():
        if _KEYWORDS.get(key) is _named and isinstance(value, Mapping):
            bare[key] = {name: without_notes(one) for name, one in value.items()}
        elif key not in _NOTES:
            bare[key] = value if key in _VALUES else without_notes(value)
    return bare


def _schema(value: Any, where: str, depth: int) -> None:
    if isinstance(value, bool):
        return
    if not isinstance(value, Mapping):
        raise wrong(f"{where} must be an object or a boolean")
    if depth > MAX_DEPTH:
        raise wrong(f"a schema may be {MAX_DEPTH} levels deep at most")
    for keyword, check in _KEYWORDS.items():
        if value.get(keyword) is not None:
            check(value[keyword], keyword, depth + 1)


def _schemas(value: Any, where: str, depth: int) -> None:
    if not isinstance(value, list):
        raise wrong(f"{where} must be a list of schemas")
    for one in value:
        _schema(one, where, depth)


def _items(value: Any, where: str, depth: int) -> None:
    (_schemas if isinstance(value, list) else _schema)(value, where, depth)


def _named(value: Any, where: str, depth: int) -> None:
    if not isinstance(value, Mapping):
        raise wrong(f"{where} must be an object with a schema for each name")
    for one in value.values():
        _schema(one, where, depth)


def _text(value: Any, where: str, _: int) -> None:
    if not isinstance(value, str):
        raise wrong(f"{where} must be a string")


def _texts(value: Any, where: str, _: int) -> None:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise wrong(f"{where} must be a list of strings")


def _type(value: Any, where: str, depth: int) -> None:
    (_texts if isinstance(value, list) else _text)(value, where, depth)


def _list(value: Any, where: str, _: int) -> None:
    if not isinstance(value, list):
        raise wrong(f"{where} must be a list")


def _number(value: Any, where: str, _: int) -> None:
    if type(value) not in (int, float) or not _finite(value):
        raise wrong(f"{where} must be a finite number")


def _limit(value: Any, where: str, depth: int) -> None:
    """A bound of its own, or, in older drafts, whether another bound excludes its end."""
    if not isinstance(value, bool):
        _number(value, where, depth)


def _count(value: Any, where: str, _: int) -> None:
    if type(value) is not int or not 0 <= value <= INT32_MAX:
        raise wrong(f"{where} must be an integer from 0 to {INT32_MAX}")


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _said(schema: Any) -> Any:
    """A schema that was checked, without null keywords; values that it speaks of stay."""
    if isinstance(schema, list):
        return [_said(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _said(value)
        for key, value in schema.items()
        if value is not None or key not in _KEYWORDS
    }


_NOTES = ("description", "title", "examples", "default", "$comment", "deprecated", "readOnly")
_VALUES = ("default", "const", "enum", "examples")
_KEYWORDS: dict[str, Check] = {
    "type": _type,
    **dict.fromkeys(["description", "title", "pattern", "format", "$ref", "$id", "$schema"], _text),
    **dict.fromkeys(["properties", "patternProperties", "$defs", "definitions"], _named),
    **dict.fromkeys(["dependentSchemas"], _named),
    **dict.fromkeys(["anyOf", "oneOf", "allOf", "prefixItems"], _schemas),
    **dict.fromkeys(["not", "if", "then", "else", "contains", "propertyNames"], _schema),
    **dict.fromkeys(["additionalProperties", "unevaluatedProperties"], _schema),
    **dict.fromkeys(["items", "additionalItems", "unevaluatedItems"], _items),
    **dict.fromkeys(["required"], _texts),
    **dict.fromkeys(["enum", "examples"], _list),
    **dict.fromkeys(["minimum", "maximum", "multipleOf"], _number),
    **dict.fromkeys(["exclusiveMinimum", "exclusiveMaximum"], _limit),
    **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], _count),
    **dict.fromkeys(["minProperties", "maxProperties", "minContains", "maxContains"], _count),
}

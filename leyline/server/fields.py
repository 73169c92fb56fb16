"""The types that request fields have, every one of them bounded, and what is said about a field.

Each field of a request says in its description what it does, and in its JSON schema, under
`support`, whether it is supported, refused or ignored; docs/server.md is made from that.
Types are strict: `true` is no number and `"5"` is none either. `null` is the same as absent.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)
from pydantic_core import PydanticCustomError

from leyline.sampling import INT32_MAX, MAX_STOP_STRINGS
from leyline.server.session_names import is_session_id

MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 256
MAX_PARTS = 4096
MAX_NESTING = 200
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
SUPPORT = "support"
TAG = "<{}>"
"""How unions name their alternatives: `failures` tells such a step of a place from a field."""


def does(meaning: str) -> Any:
    """Says what a supported field does, in one sentence."""
    return Field(description=meaning, json_schema_extra={SUPPORT: "supported"})


def refused(meaning: str) -> Any:
    """Says when a field is refused; goes with `only`."""
    return Field(description=meaning, json_schema_extra={SUPPORT: "refused"})


def only(*neutral: object) -> AfterValidator:
    """A field that is not supported beyond its neutral values; null is always one of them."""

    def check(value: Any) -> Any:
        if value is None or any(same(value, allowed) for allowed in neutral):
            return value
        raise PydanticCustomError("unsupported_value", "not supported by this server; leave it out")

    return AfterValidator(check)


def same(value: Any, allowed: Any) -> bool:
    """Equality that tells `1` from `True`."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def wrong(message: str, kind: Any = "invalid_value") -> PydanticCustomError:
    """The error of a validator; braces in the message are meant as they stand."""
    return PydanticCustomError(kind, "{reason}", {"reason": message})


def encodable(value: Any) -> Any:
    """Refuse text that is no text: a JSON escape can carry half a surrogate pair.

    Refuses what is nested very deeply too: whoever reads it later may read it recursively.
    """
    if not isinstance(value, str) and _is_deep(value):
        raise wrong(f"may be nested {MAX_NESTING} levels deep at most")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise wrong("must be proper Unicode text, without lone surrogates", "not_text") from None
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [
            inner
            for one in containers
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _content(content: Any) -> Any:
    """A message's content as its text, or as the list of its text parts if it has several.

    What stands between several parts is for the model's chat template to say.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong("must be a string, null or a list of text parts", "string_type")
    if len(content) > MAX_PARTS:
        raise wrong(f"must have at most {MAX_PARTS} parts")
    texts = [_part_text(part) for part in content]
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "".join(texts)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
    text = part.get(field[kind]) if isinstance(kind, str) and kind in field else None
    if not isinstance(text, str):
        raise wrong(
            'a content part must be {"type": "text", "text": "..."}; this server reads text only, '
            "and fetches nothing",
            "unsupported_content",
        )
    return text


def _listed(value: Any) -> Any:
    """One text where several are allowed."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """One prompt, as text or as token ids, where several are allowed."""
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return value
    return [value]


def _text_only(value: Any) -> Any:
    """Text as it is; None for the objects that some clients put where others put text."""
    return value if isinstance(value, str) else None


def _session_id(value: str) -> str:
    if not is_session_id(value):
        raise PydanticCustomError(
            "session_id", "must be 1 to 256 of A-Z a-z 0-9 . _ : @ ~ + = -, not all of them dots"
        )
    return value


def tagged(*types: str, none: str | None = None, other: str | None = None) -> Any:
    """Reads which alternative of a union an object is from its type.

    Args:
        types: The types that have an alternative of their own.
        none: The alternative for what has no type, and
        other: for any other type; None refuses it.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str):
            return none
        return TAG.format(kind) if kind in types else other

    return tag


def _text_or_ids(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<ids>" if isinstance(value, list) else None


by_kind = Discriminator(
    _text_or_ids,
    custom_error_type="text_or_ids",
    custom_error_message="must be a string or a list of token ids",
)

Text = Annotated[str, AfterValidator(encodable)]
Name = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
Salt = Annotated[Name, Field(min_length=1)]
SessionId = Annotated[str, AfterValidator(_session_id)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Content = Annotated[Any, BeforeValidator(_content), AfterValidator(encodable)]
Stops = Annotated[
    Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        Field(max_length=MAX_STOP_STRINGS),
    ],
    BeforeValidator(_listed),
]
Prompt = Annotated[
    Annotated[Text, Field(min_length=1), Tag("<text>")]
    | Annotated[list[TokenId], Field(min_length=1, fail_fast=True), Tag("<ids>")],
    by_kind,
]
several_prompts = BeforeValidator(_prompts)
Reasoning = Annotated[Text | None, BeforeValidator(_text_only)]


class WireModel(BaseModel):
    """Strict about types, silent about unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

"""What a reply must look like, as JSON: the several ways in which clients say it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from leyline.errors import InvalidRequestError
from leyline.server.ask import OutputForm
from leyline.server.fields import Name, Text, WireModel, does, only, refused, wrong
from leyline.server.schema_check import check_schema

MAX_CHOICES = 1024
MAX_FORM_CHARS = 64 * 1024


def _parsed(value: Any) -> Any:
    """A schema that was sent as its text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise wrong("must be a JSON schema, or the text of one") from None


Schema = Annotated[Any, AfterValidator(check_schema)]
SchemaOrText = Annotated[Any, BeforeValidator(_parsed), AfterValidator(check_schema)]
FormText = Annotated[Text, Field(min_length=1, max_length=MAX_FORM_CHARS)]
Choices = Annotated[
    list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)
]


class JsonSchemaFormat(WireModel):
    """A named JSON schema."""

    name: Annotated[Name | None, does("What the client calls it.")] = None
    description: Annotated[Text | None, does("Not told to the model.")] = None
    # `schema` is a method of pydantic's models
    schema_: Annotated[Schema, Field(alias="schema"), does("The schema; it is always enforced.")]
    strict: Annotated[bool | None, does("Taken either way: the schema is always enforced.")] = None


class ResponseFormat(WireModel):
    """The form of a chat's answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], does("Which form the content has.")
    ]
    json_schema: Annotated[JsonSchemaFormat | None, does("The schema, with type json_schema.")] = (
        None
    )

    def form(self) -> OutputForm | None:
        """The constraint that it stands for.

        Raises:
            InvalidRequestError: If the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return OutputForm("json_object")
        if self.json_schema is None:
            raise InvalidRequestError(
                'response_format.json_schema is missing; send {"name": "...", "schema": {...}}.',
                param="response_format.json_schema",
            )
        return OutputForm("json_schema", self.json_schema.schema_)


class StructuredOutputs(WireModel):
    """The form of an answer, in the words of vLLM: exactly one of them."""

    json_: Annotated[
        SchemaOrText | None, Field(alias="json"), does("A JSON schema, or its text.")
    ] = None
    json_object: Annotated[bool | None, does("Any JSON object.")] = None
    regex: Annotated[FormText | None, does("An expression that the whole answer matches.")] = None
    choice: Annotated[Choices | None, does("The answer is one of these texts.")] = None
    grammar: Annotated[FormText | None, does("A Lark grammar, in llguidance's dialect.")] = None
    structural_tag: Annotated[Any, only(), refused("Refused.")] = None

    def forms(self) -> list[tuple[str, OutputForm]]:
        """The constraints that it names, with the names of their fields."""
        given = {
            "json": ("json_schema", self.json_),
            "json_object": ("json_object", self.json_object or None),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
            "grammar": ("grammar", self.grammar),
        }
        return [
            (f"structured_outputs.{name}", form_of(kind, value))
            for name, (kind, value) in given.items()
            if value is not None
        ]


def form_of(kind: Any, value: Any) -> OutputForm:
    """A form; a JSON object needs no more than its kind."""
    return OutputForm(kind, None if kind == "json_object" else value)


def the_only_form(given: list[tuple[str, OutputForm]]) -> OutputForm | None:
    """The one form that a request names, if it names any.

    Raises:
        InvalidRequestError: If it names several.
    """
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidRequestError(
            f"{names} exclude each other; send one of them.", param=given[1][0]
        )
    return replace(given[0][1], param=given[0][0]) if given else None

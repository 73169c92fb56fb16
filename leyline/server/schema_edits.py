"""The requests that edit, mark and search contexts, as JSON.

Unlike a chat request they come from nobody who does not know Leyline, so a field that is unknown
is refused: a misspelt `occurrence` must not become another edit than the one that was meant.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Tag

from leyline.directive import MAX_DIRECTIVES
from leyline.marks import Of, Verb
from leyline.pointing import MAX_TTL_S
from leyline.sampling import INT32_MAX
from leyline.server.fields import Int64, Name, Salt, SessionId, Text, TokenId, WireModel, by_kind

Key = Annotated[Name, Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
ModeName = Annotated[Text, Field(max_length=32)]
SomeText = Annotated[Text, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Replacement = Annotated[Annotated[Text, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")], by_kind]


class EditModel(WireModel):
    """Strict about unknown fields too."""

    model_config = ConfigDict(extra="forbid")


class Pointing(EditModel):
    """A span, pointed to in one of four ways; `pointed.target_of` sees that it is one."""

    start: Int64 | None = None
    end: Int64 | None = None
    message: Int64 | None = None
    tool_call_id: Key | None = None
    match: SomeText | None = None
    occurrence: Int64 | None = None


class SourceItem(Pointing):
    """A span of a session, whose rows are to be shared."""

    session_id: SessionId


class DirectiveItem(Pointing):
    """One edit: the span becomes `replacement`, or what `source` points to with its rows."""

    replacement: Replacement | None = None
    mode: ModeName = "amortize"
    scope: Literal["context", "cache"] = "context"
    source: SourceItem | None = None


class DirectivesRequest(EditModel):
    """Body of `POST /v1/directives`: a set that commits all or nothing."""

    session_id: SessionId
    directives: Annotated[list[DirectiveItem], Field(min_length=1, max_length=MAX_DIRECTIVES)]
    expected_version: Count | None = None
    idempotency_key: Key | None = None
    dry_run: bool | None = None
    cache_salt: Salt | None = None


class RevertRequest(EditModel):
    """Body of `POST /v1/sessions/{id}/revert`; without a version, back by one."""

    version: Count | None = None
    cache_salt: Salt | None = None


class MarkBody(Pointing):
    """Body of `POST /v1/sessions/{id}/marks`."""

    verb: Verb
    of: Of = "span"
    ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)] | None = None
    turns: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    replacement: Replacement = ""
    mode: ModeName = "amortize"
    cache_salt: Salt | None = None


class SaveRequest(EditModel):
    """Body of `POST /v1/sessions:save`: an empty object. Where to is not for clients to say."""


class FindRequest(EditModel):
    """Body of `POST /v1/cache/find`: a text or token ids."""

    text: SomeText | None = None
    tokens: Annotated[TokenIds, Field(min_length=1)] | None = None
    cache_salt: Salt | None = None

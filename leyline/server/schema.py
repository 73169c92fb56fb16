"""The requests as JSON: every field typed, every number and every list bounded at the door.

Three kinds of fields. *Supported* ones have a type. *Refused* ones are known, would change what
the answer means, and are not built yet: they are declared with `only(...)`, which lets their
neutral values pass and answers 400 for the rest. *Unknown* ones are ignored, since clients send
many. Types are strict: `true` is no number and `"5"` is none either. `null` is the same as absent.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

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

from leyline.sampling import SamplingParams
from leyline.server.session_names import is_session_id

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 256
MAX_PROMPTS = 32
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 256
MAX_TOP_K = 1_000_000
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DEFAULT_COMPLETION_TOKENS = 16
"""Tokens a completion gets without `max_tokens`, as OpenAI has it; a chat gets the window."""


def only(*neutral: object) -> AfterValidator:
    """A field that is not supported beyond its neutral values; null is always one of them."""

    def check(value: Any) -> Any:
        if value is None or any(_same(value, allowed) for allowed in neutral):
            return value
        raise PydanticCustomError("unsupported_value", "not supported by this server; leave it out")

    return AfterValidator(check)


def _same(value: Any, allowed: Any) -> bool:
    """Equality that tells `1` from `True`."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def _encodable(value: Any) -> Any:
    """Refuse text that is no text: a JSON escape can carry half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise PydanticCustomError(
            "not_text", "must be proper Unicode text, without lone surrogates"
        ) from None
    return value


def _joined(content: Any) -> Any:
    """A message's content as one string; its parts are put together with nothing between."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return content


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise PydanticCustomError(
        "unsupported_content", 'a content part must be {{"type": "text", "text": "..."}}', {}
    )


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


def _text_or_ids(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "ids" if isinstance(value, list) else None


by_kind = Discriminator(
    _text_or_ids,
    custom_error_type="text_or_ids",
    custom_error_message="must be a string or a list of token ids",
)

Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
Salt = Annotated[Name, Field(min_length=1)]
SessionId = Annotated[str, AfterValidator(_session_id)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Content = Annotated[Text, BeforeValidator(_joined)]
Stops = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    BeforeValidator(_listed),
    Field(max_length=MAX_STOPS),
]
Prompt = Annotated[
    Annotated[Text, Field(min_length=1), Tag("text")]
    | Annotated[list[TokenId], Field(min_length=1, fail_fast=True), Tag("ids")],
    by_kind,
]
Reasoning = Annotated[Text | None, BeforeValidator(_text_only)]
ToolCalls = Annotated[
    list[dict[str, Any]], Field(max_length=MAX_TOOL_CALLS), AfterValidator(_encodable)
]


class WireModel(BaseModel):
    """Strict about types, silent about unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(WireModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class GenerationRequest(WireModel):
    """What chat and completions have in common."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    seed: Int64 | None = None
    stop: Stops = []
    ignore_eos: bool | None = None
    cache_salt: Salt | None = None

    n: Annotated[Any, only(1)] = None
    best_of: Annotated[Any, only(1)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    logit_bias: Annotated[Any, only({})] = None
    logprobs: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
    prompt_logprobs: Annotated[Any, only()] = None
    min_p: Annotated[Any, only(0)] = None
    min_tokens: Annotated[Any, only(0)] = None
    stop_token_ids: Annotated[Any, only([])] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    return_token_ids: Annotated[Any, only(False)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    echo: Annotated[Any, only(False)] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    structured_outputs: Annotated[Any, only()] = None
    guided_json: Annotated[Any, only()] = None
    guided_regex: Annotated[Any, only()] = None
    guided_choice: Annotated[Any, only()] = None
    guided_grammar: Annotated[Any, only()] = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def salt(self) -> str:
        """Separates this request's cache from that of others."""
        return self.cache_salt or ""

    def token_limit(self) -> int | None:
        """Tokens to generate at most; None for as many as fit the window."""
        return self.max_tokens

    def sampling(self) -> SamplingParams:
        """The request's fields in the engine's words."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),  # -1 means "all" elsewhere, 0 means it here
            seed=self.seed,
            max_tokens=self.token_limit(),
            stop=tuple(self.stop),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatMessage(WireModel):
    """One message of a conversation, from whichever side."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = ""
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: ToolCalls | None = None
    reasoning_content: Reasoning = None
    reasoning: Reasoning = None

    def rendered(self) -> dict[str, Any]:
        """What the chat template gets to see: only what was said, a developer as the system."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if not message.get(name):
                message.pop(name, None)
        return message


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    session_id: SessionId | None = None
    prompt_cache_key: Text | None = None
    edit_mode: Literal["forget", "amortize", "heal"] | None = None
    context_management: Annotated[Any, AfterValidator(_encodable)] = None

    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[Any, only({})] = None

    def token_limit(self) -> int | None:
        """The newer name of the limit wins where both are given."""
        return self.max_completion_tokens or self.max_tokens

    def rendered(self) -> list[dict[str, Any]]:
        """The messages as the chat template gets to see them."""
        return [message.rendered() for message in self.messages]


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`; several prompts make several choices."""

    prompt: Annotated[
        list[Prompt], BeforeValidator(_prompts), Field(min_length=1, max_length=MAX_PROMPTS)
    ]

    suffix: Annotated[Any, only("")] = None
    add_special_tokens: Annotated[Any, only(True)] = None
    prompt_embeds: Annotated[Any, only()] = None

    def token_limit(self) -> int | None:
        """A completion without a limit is a short one, as OpenAI has it."""
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

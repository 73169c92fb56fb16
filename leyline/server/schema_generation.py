"""The request fields that chat and completions have in common.

Three kinds of fields; see `leyline.server.fields`. *Refused* ones are known, would change what
the answer means, and are not supported: their neutral values pass, and the rest is answered with
400. *Unknown* ones are ignored, since clients send many; those in `IGNORED` are known to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from leyline.errors import InvalidRequestError
from leyline.sampling import (
    INT32_MAX,
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from leyline.server.answer import MAX_CHOICES
from leyline.server.ask import OutputForm
from leyline.server.fields import (
    MAX_NAME_CHARS,
    Int64,
    Name,
    Salt,
    Stops,
    TokenId,
    WireModel,
    does,
    encodable,
    only,
    refused,
    wrong,
)
from leyline.server.schema_forms import (
    Choices,
    FormText,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    form_of,
    the_only_form,
)

MAX_TOP_K = 1_000_000
MAX_VARIABLES = 64

IGNORED: Mapping[str, str] = {
    "user": "Whom the request is for; the server keeps no accounts.",
    "safety_identifier": "The same.",
    "store": "Nothing is stored for later.",
    "metadata": "Belongs to what is stored.",
    "service_tier": "There is one.",
    "priority": "Requests are served in the order in which they come.",
    "prediction": "Only makes hosted models faster.",
    "verbosity": "No model served here knows of it.",
    "reasoning": "An object of other APIs; send reasoning_effort or chat_template_kwargs.",
    "include": "A field of other APIs.",
    "prompt_cache_retention": "The cache keeps what it has room for.",
    "client_metadata": "The client's own.",
}
"""Known fields that clients send and nothing depends on."""

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"


def _biases(value: Any) -> Any:
    """Biases by token id, whose keys are texts, since all keys of JSON are."""
    if not isinstance(value, dict):
        raise wrong("must be an object with a number for each token id")
    if len(value) > MAX_BIASES:
        raise wrong(f"may have at most {MAX_BIASES} entries")
    return tuple((_token(key), _bias(bias)) for key, bias in value.items())


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
        raise wrong('its keys must be token ids, such as "50256"')
    if int(key) > INT32_MAX:
        raise wrong(f"its keys must be token ids, at most {INT32_MAX}")
    return int(key)


def _bias(value: Any) -> float:
    if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
        raise wrong(f"its values must be numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return float(value)


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if not name.isidentifier() or len(name) > MAX_NAME_CHARS or name in RESERVED:
            raise wrong("its keys must be names of variables, and none that Leyline sets itself")
    return encodable(value)


def variables_of(effort: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a chat template is told of the reasoning that is wanted, and besides.

    Templates know of it by several names. The request's own variables win.
    """
    told: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        told |= {"enable_thinking": False, "thinking": False}
    return told | dict(variables or {})


Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Tops = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Biases = Annotated[Any, AfterValidator(_biases)]
Variables = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES), AfterValidator(_variables)]


# Fields that several APIs have, with what they do.
Temperature = Annotated[
    Annotated[Number, Field(ge=0, le=2)] | None,
    does("0 takes the likeliest token; larger is more varied. 1 by default."),
]
TopP = Annotated[
    Annotated[Number, Field(gt=0, le=1)] | None,
    does("Sample from the likeliest tokens whose probabilities reach this."),
]
TopK = Annotated[
    Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None,
    does("Sample from so many of the likeliest tokens; 0 and -1 mean all."),
]
MinP = Annotated[
    Fraction | None, does("Leave out tokens below this part of the likeliest one's chance.")
]
PresencePenalty = Annotated[
    Penalty | None, does("Taken off the logits of tokens that were generated.")
]
FrequencyPenalty = Annotated[Penalty | None, does("Taken off as often as they were generated.")]
EditMode = Annotated[
    Literal["forget", "amortize", "heal"] | None,
    does("How the client's own edits of its history are carried out in a session."),
]
ContextEdits = Annotated[
    Annotated[Any, AfterValidator(encodable)],
    does("Edits that the server makes of the history; see docs/directives.md."),
]


class StreamOptions(WireModel):
    """What a stream carries besides text."""

    include_usage: Annotated[bool | None, does("End with a chunk that has the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None,
        does("With include_usage, tell the usage so far in every chunk but the finishing ones."),
    ] = None


class GenerationRequest(WireModel):
    """What chat and completions have in common."""

    model: Annotated[Name | None, does("The served name, or nothing.")] = None
    stream: Annotated[bool | None, does("Answer in chunks, as server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, does("What a stream carries.")] = None
    max_tokens: Annotated[
        Count | None, does("Tokens to generate at most; more than fit the window are cut to it.")
    ] = None
    min_tokens: Annotated[Count | None, does("Tokens before which nothing ends the answer.")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    seed: Annotated[
        Int64 | None, does("Makes sampling reproducible; choice i of several has seed + i.")
    ] = None
    stop: Annotated[Stops, does("Up to 16 strings that end the answer.")] = Field([])
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None,
        does("Token ids that end the answer."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, does("Show the stop string at the answer's end.")
    ] = None
    ignore_eos: Annotated[bool | None, does("Go on past the model's own end of turn.")] = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    repetition_penalty: Annotated[
        Annotated[Number, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None,
        does("Divides the logits of tokens of prompt and answer; 1 changes nothing."),
    ] = None
    logit_bias: Annotated[
        Biases | None, does("Numbers added to logits, from -100 to 100, by token id.")
    ] = None
    n: Annotated[
        Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None,
        does("Answers wanted, 16 at most, and one in a session."),
    ] = None
    prompt_logprobs: Annotated[
        Tops | None, does("Log-probabilities of the prompt's tokens; refused in streams.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, does("false shows the texts of special tokens.")
    ] = None
    return_token_ids: Annotated[bool | None, does("Tell the ids of prompt and answer.")] = None
    response_format: Annotated[
        ResponseFormat | None, does("text, json_object or json_schema; always enforced.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, does("Other forms of the answer; always enforced.")
    ] = None
    guided_json: Annotated[SchemaOrText | None, does("An older structured_outputs.json.")] = None
    guided_regex: Annotated[FormText | None, does("An older structured_outputs.regex.")] = None
    guided_choice: Annotated[Choices | None, does("An older structured_outputs.choice.")] = None
    guided_grammar: Annotated[
        FormText | None, does("An older structured_outputs.grammar, in the Lark dialect.")
    ] = None
    cache_salt: Annotated[
        Salt | None, does("Keeps this request's cache apart from that of other salts.")
    ] = None
    request_id: Annotated[
        Annotated[str, Field(pattern=REQUEST_ID)] | None, does("Becomes part of the answer's id.")
    ] = None

    use_beam_search: Annotated[Any, only(False), refused("Refused unless false.")] = None
    length_penalty: Annotated[Any, only(1), refused("Refused unless 1.")] = None
    truncate_prompt_tokens: Annotated[Any, only(), refused("Refused: no prompt is cut.")] = None
    allowed_token_ids: Annotated[Any, only(), refused("Refused; use structured_outputs.")] = None
    bad_words: Annotated[Any, only([]), refused("Refused unless empty; use logit_bias.")] = None
    logits_processors: Annotated[Any, only([]), refused("Refused unless empty.")] = None
    return_tokens_as_token_ids: Annotated[
        Any, only(False), refused("Refused unless false; use return_token_ids.")
    ] = None
    thinking_token_budget: Annotated[Any, only(), refused("Refused.")] = None
    kv_transfer_params: Annotated[Any, only(), refused("Refused.")] = None
    regex: Annotated[Any, only(), refused("Refused; use structured_outputs.")] = None
    ebnf: Annotated[Any, only(), refused("Refused; use structured_outputs.")] = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether a stream tells the usage so far in each of its chunks."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Answers wanted."""
        return self.n or 1

    def token_limit(self) -> int | None:
        """Tokens to generate at most; None for as many as fit the window."""
        return self.max_tokens

    def limit_name(self) -> str:
        """The field that says so."""
        return "max_tokens"

    def logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens are told at each place; None tells nothing."""
        return None

    def prompt_logprobs_wanted(self) -> int | None:
        """The same for the prompt."""
        return self.prompt_logprobs

    def form(self) -> OutputForm | None:
        """What the answer must look like.

        Raises:
            InvalidRequestError: If several fields say it.
        """
        old = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        given = [(n, form_of(kind, value)) for n, (kind, value) in old.items() if value is not None]
        if self.structured_outputs is not None:
            given += self.structured_outputs.forms()
        form = self.response_format.form() if self.response_format is not None else None
        return the_only_form(given + ([] if form is None else [("response_format", form)]))

    def check(self) -> None:
        """Refuse fields that exclude each other.

        Raises:
            InvalidRequestError: Names one of them.
        """
        self.form()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs come with whole answers only; leave stream out.",
                param="prompt_logprobs",
            )
        if self.token_limit() == 0 and self.prompt_logprobs_wanted() is None:
            raise InvalidRequestError(
                f"{self.limit_name()} is 0, which answers nothing; it must be at least 1, unless "
                "the prompt is asked back by echo or prompt_logprobs.",
                param=self.limit_name(),
            )

    def sampling(self) -> SamplingParams:
        """The request's fields in the engine's words."""
        return SamplingParams(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),  # -1 means "all" elsewhere, 0 means it here
            min_p=self.min_p or 0.0,
            seed=self.seed,
            max_tokens=self.token_limit(),
            min_tokens=self.min_tokens or 0,
            stop=tuple(self.stop),
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias or (),
            logprobs=self.logprobs_wanted(),
            prompt_logprobs=self.prompt_logprobs_wanted(),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

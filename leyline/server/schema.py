"""The requests of chat and completions as JSON: every field typed, bounded and described."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from leyline.errors import InvalidRequestError
from leyline.server.answer import MAX_CHOICES
from leyline.server.fields import (
    Prompt,
    SessionId,
    Text,
    does,
    only,
    refused,
    several_prompts,
)
from leyline.server.parsers.pieces import ToolUse
from leyline.server.schema_generation import (
    ContextEdits,
    Count,
    EditMode,
    GenerationRequest,
    Tops,
    Variables,
    variables_of,
)
from leyline.server.schema_messages import (
    MAX_MESSAGES,
    ChatMessage,
    ToolChoice,
    Tools,
    tool_use,
)

MAX_PROMPTS = 32
MAX_COMPLETIONS = 64
DEFAULT_COMPLETION_TOKENS = 16
"""Tokens a completion gets without `max_tokens`, as OpenAI has it; a chat gets the window."""


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES),
        does("The conversation."),
    ]
    max_completion_tokens: Annotated[
        Count | None, does("The newer name of max_tokens; wins where both are given.")
    ] = None
    logprobs: Annotated[bool | None, does("Tell the log-probabilities of the answer.")] = None
    top_logprobs: Annotated[
        Tops | None, does("And those of so many of the likeliest tokens; needs logprobs.")
    ] = None
    tools: Annotated[
        Tools | None, does("Functions that the model may call; other kinds of tools are left out.")
    ] = None
    tool_choice: Annotated[
        ToolChoice, does("auto, none, required, or a function that must be called.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, does("false asks for one call at a time.")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        does("Told to the chat template; none turns its enable_thinking off."),
    ] = None
    chat_template_kwargs: Annotated[
        Variables | None, does("More variables for the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, does("false leaves out the head of the answer.")
    ] = None
    continue_final_message: Annotated[
        bool | None, does("Go on where the last message ends; add_generation_prompt must be false.")
    ] = None
    session_id: Annotated[
        SessionId | None, does("The session whose context the conversation goes on from.")
    ] = None
    prompt_cache_key: Annotated[
        Text | None, does("Names a session if one can be had; see docs/directives.md.")
    ] = None
    edit_mode: EditMode = None
    context_management: ContextEdits = None

    functions: Annotated[Any, only([]), refused("Refused unless empty; send tools.")] = None
    function_call: Annotated[
        Any, only("none", "auto"), refused("Refused unless none or auto; send tool_choice.")
    ] = None
    best_of: Annotated[Any, only(1), refused("Refused unless 1.")] = None
    echo: Annotated[Any, only(False), refused("Refused unless false.")] = None
    modalities: Annotated[Any, only(["text"]), refused('Refused unless ["text"].')] = None
    audio: Annotated[Any, only(), refused("Refused.")] = None
    web_search_options: Annotated[Any, only(), refused("Refused: nothing is fetched.")] = None
    chat_template: Annotated[
        Any, only(), refused("Refused: templates come from the model alone.")
    ] = None
    documents: Annotated[Any, only([]), refused("Refused; put them into messages.")] = None
    add_special_tokens: Annotated[
        Any, only(False), refused("Refused unless false: the template writes its own.")
    ] = None
    include_reasoning: Annotated[Any, only(True), refused("Refused unless true.")] = None
    separate_reasoning: Annotated[Any, only(True), refused("Refused unless true.")] = None

    def token_limit(self) -> int | None:
        """The newer name of the limit wins where both are given."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def limit_name(self) -> str:
        """See `GenerationRequest`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def logprobs_wanted(self) -> int | None:
        """See `GenerationRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """See `GenerationRequest`."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt to be false: an answer is "
                "begun anew or gone on with, not both.",
                param="continue_final_message",
            )

    def rendered(self) -> list[dict[str, Any]]:
        """The messages as the chat template gets to see them."""
        return [message.rendered() for message in self.messages]

    def use(self) -> ToolUse:
        """What the request says of its tools."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def variables(self) -> dict[str, Any]:
        """What the chat template is told besides; `chat_template_kwargs` win."""
        return variables_of(self.reasoning_effort, self.chat_template_kwargs)


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`; several prompts make several choices."""

    prompt: Annotated[
        list[Prompt],
        several_prompts,
        Field(min_length=1, max_length=MAX_PROMPTS),
        does("A text or token ids, or up to 32 of them. A text gets the model's first token."),
    ]
    echo: Annotated[bool | None, does("Repeat the prompt in front of the answer.")] = None
    logprobs: Annotated[
        Tops | None,
        does(
            "Log-probabilities of the tokens and of so many likeliest ones; with echo, of the "
            "prompt too."
        ),
    ] = None
    best_of: Annotated[
        Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None, refused("Refused unless equal to n.")
    ] = None

    top_logprobs: Annotated[Any, only(0), refused("Refused unless 0; logprobs is a number.")] = None
    suffix: Annotated[Any, only(""), refused("Refused unless empty.")] = None
    add_special_tokens: Annotated[
        Any, only(True), refused("Refused unless true; send token ids instead.")
    ] = None
    prompt_embeds: Annotated[Any, only(), refused("Refused.")] = None

    def token_limit(self) -> int | None:
        """A completion without a limit is a short one, as OpenAI has it."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def logprobs_wanted(self) -> int | None:
        """See `GenerationRequest`."""
        return self.logprobs

    def prompt_logprobs_wanted(self) -> int | None:
        """An echo has them if the answer has; without an answer, nothing else asks for them."""
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    def check(self) -> None:
        """See `GenerationRequest`."""
        super().check()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequestError(
                "best_of chooses among answers, which this server does not; leave it out or make "
                "it equal to n.",
                param="best_of",
            )
        if len(self.prompt) * self.num_choices > MAX_COMPLETIONS:
            raise InvalidRequestError(
                f"Prompts times n make at most {MAX_COMPLETIONS} completions a request.", param="n"
            )

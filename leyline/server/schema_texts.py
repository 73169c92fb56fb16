"""The requests that turn texts into tokens and back, as JSON."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from leyline.errors import InvalidRequestError
from leyline.sampling import SamplingParams
from leyline.server.ask import Ask
from leyline.server.fields import Name, Text, TokenId, WireModel, does
from leyline.server.schema_generation import ContextEdits, Variables
from leyline.server.schema_messages import MAX_MESSAGES, ChatMessage, Tools, tool_use


class TokenizeRequest(WireModel):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: Annotated[Name | None, does("The served name, or nothing.")] = None
    prompt: Annotated[Text | None, does("A text.")] = None
    messages: Annotated[
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None,
        does("A conversation."),
    ] = None
    add_special_tokens: Annotated[
        bool | None, does("false leaves out the first token that the model wants; texts only.")
    ] = None
    return_token_strs: Annotated[bool | None, does("Tell each token's text too.")] = None
    tools: Annotated[Tools | None, does("Tools that the conversation's prompt tells of.")] = None
    chat_template_kwargs: Annotated[
        Variables | None, does("More variables for the chat template.")
    ] = None
    context_management: ContextEdits = None
    add_generation_prompt: Annotated[
        bool | None, does("false leaves out the head of the answer.")
    ] = None
    continue_final_message: Annotated[
        bool | None, does("End where the last message's text ends.")
    ] = None

    def check(self) -> None:
        """Refuse what is not exactly one of the two.

        Raises:
            InvalidRequestError: Names a field.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt to be false.",
                param="continue_final_message",
            )

    def asked(self) -> Ask:
        """The conversation as one that could be answered."""
        return Ask(
            messages=[message.rendered() for message in self.messages or ()],
            params=SamplingParams(),
            use=tool_use(self.tools, None, None),
            context_management=self.context_management,
            variables=self.chat_template_kwargs or {},
            opens_reply=self.add_generation_prompt is not False,
            continues_reply=bool(self.continue_final_message),
        )


class DetokenizeRequest(WireModel):
    """Body of `POST /detokenize`."""

    model: Annotated[Name | None, does("The served name, or nothing.")] = None
    tokens: Annotated[
        Annotated[list[TokenId], Field(fail_fast=True)],
        does("Token ids; the texts of special tokens are shown."),
    ]

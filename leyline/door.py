"""What is refused before anything has changed: prompts and edits that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leyline.config import EngineConfig
from leyline.context import Context
from leyline.directive import Directive, Mode, checked
from leyline.errors import ContextLengthError, DirectiveError, InvalidRequestError
from leyline.tokenizer import Tokenizer


class Door:
    """Checks requests against one engine's limits.

    Args:
        tokenizer: Turns prompts into ids.
        num_tokens: Ids must be below it.
        max_model_len: Tokens a context holds at most.
        config: The engine's options.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_tokens: int, max_model_len: int, config: EngineConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self._max_model_len = max_model_len
        self._protect_first = config.protect_first

    def prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a plain prompt, with the BOS that the model wants in front of a text.

        Raises:
            InvalidRequestError: If it is neither, or an id is none of the vocabulary's.
        """
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, bos=True)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InvalidRequestError(
                f"The prompt must be a text or a list of token ids, not {type(prompt).__name__}.",
                param="prompt",
            )
        if any(type(token) is not int or not 0 <= token < self._num_tokens for token in prompt):
            raise InvalidRequestError(
                f"Token ids must be integers from 0 to {self._num_tokens - 1}.", param="prompt"
            )
        return list(prompt)

    def room(self, context: Context) -> int:
        """Room for an answer behind a context, in tokens; at least one.

        Raises:
            InvalidRequestError: If the context is empty.
            ContextLengthError: If it fills the window.
        """
        if not len(context):
            raise InvalidRequestError("The prompt is empty; there is nothing to answer.")
        room = self._max_model_len - len(context)
        if room < 1:
            raise ContextLengthError(
                f"The maximum context length is {self._max_model_len} tokens, and the prompt has "
                f"{len(context)}, which leaves no room for an answer; shorten it."
            )
        return room

    def directives(
        self, directives: Sequence[Directive], length: int, to_come: int
    ) -> tuple[Directive, ...]:
        """A set in order of position, if it fits.

        Args:
            directives: The set.
            length: Tokens of the context that it is aimed at.
            to_come: Tokens that may still be generated behind it.

        Raises:
            DirectiveError: If the set does not fit the context.
            ContextLengthError: If the context would outgrow the window.
        """
        if not directives:
            raise DirectiveError("The set of directives is empty.", param="directives")
        ordered = checked(
            [_plain(directive) for directive in directives],
            length,
            vocab_size=self._num_tokens,
            protect_first=self._protect_first,
        )
        after = length + sum(directive.delta for directive in ordered) + to_come
        if after > self._max_model_len:
            raise ContextLengthError(
                f"The edited context and what is still to be generated would have {after} tokens; "
                f"the maximum context length is {self._max_model_len}.",
                param="directives",
            )
        return ordered


def _plain(directive: Any) -> Directive:
    """A directive whose mode may still be a name, with its types checked.

    Raises:
        DirectiveError: If it is none, or its numbers or its mode are not what they should be.
    """
    if not isinstance(directive, Directive):
        raise DirectiveError(
            f"{directive!r} is no Directive; write Directive(start, end, ids, mode).",
            param="directives",
        )
    ids: Any = directive.replacement
    numbers = (directive.start, directive.end, *(ids if isinstance(ids, Sequence) else [ids]))
    if any(type(number) is not int for number in numbers):
        raise DirectiveError(
            "Positions must be integers, and the replacement a tuple of token ids.",
            param="directives",
        )
    return replace(directive, replacement=tuple(ids), mode=named_mode(directive.mode))


def named_mode(name: Any) -> Mode:
    """A mode by its name, or the mode itself.

    Raises:
        DirectiveError: If there is no such mode.
    """
    try:
        return Mode(name)
    except ValueError:
        names = ", ".join(known.value for known in Mode)
        raise DirectiveError(
            f"There is no mode {name!r}; the modes are {names}.", param="mode"
        ) from None

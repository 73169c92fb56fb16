"""What is refused before anything has changed: prompts and edits that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from leyline.config import EngineConfig
from leyline.context import Context, salted
from leyline.directive import Directive, Mode, Source, checked
from leyline.errors import ContextLengthError, DirectiveError, InvalidRequestError
from leyline.sampling import SamplingParams
from leyline.tokenizer import Tokenizer, check_text

MAX_SCORES = 2**19  # log-probabilities of one prompt: some 60 MB
MAX_NAME_LENGTH = 512  # the server's own limits are narrower


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

    def root(self, salt: str) -> bytes:
        """The root of a tenant or cache salt.

        Raises:
            InvalidRequestError: If the salt is no text.
        """
        return salted(check_text(salt, "cache_salt"))

    def name(self, value: str, param: str) -> str:
        """A name that a client chose: of a session, or of a request that may be repeated.

        Raises:
            InvalidRequestError: If it is no text, or an empty or a very long one.
        """
        if not 1 <= len(check_text(value, param)) <= MAX_NAME_LENGTH:
            raise InvalidRequestError(
                f"{param} must have 1 to {MAX_NAME_LENGTH} characters; this one has {len(value)}.",
                param=param,
            )
        return value

    def spelled(self, what: str | Sequence[int]) -> bytes:
        """The bytes of a text or of token ids, special tokens with their names.

        Raises:
            InvalidRequestError: If it is neither, or an id is none of the vocabulary's.
        """
        if isinstance(what, str):
            spelled = check_text(what).encode("utf-8")
        else:
            ids = self.prompt(what)
            spelled = b"".join(self._tokenizer.token_bytes(one, skip_special=False) for one in ids)
        return spelled

    def sampling(self, params: Any, *, in_session: bool = False) -> SamplingParams:
        """Sampling parameters that this model can follow.

        Raises:
            InvalidRequestError: If they are no `SamplingParams`, name ids outside the vocabulary,
                or contradict each other.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"Sampling parameters are a SamplingParams, not {type(params).__name__}.",
                param="params",
            )
        self._known(params.stop_token_ids, "stop_token_ids")
        self._known([token for token, _ in params.logit_bias], "logit_bias")
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}; it must not exceed max_tokens, which is "
                f"{params.max_tokens}.",
                param="min_tokens",
            )
        if params.constraint is not None and params.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos cannot go with a form that the output must have: it ends with the "
                "model's own end-of-turn token. Leave one of them out.",
                param="ignore_eos",
            )
        if params.prompt_logprobs is not None and in_session:
            raise InvalidRequestError(
                "prompt_logprobs computes a whole prompt anew, and a session's context may hold "
                "what was never computed so; ask for it without a session.",
                param="prompt_logprobs",
            )
        return params

    def scored(self, length: int, params: SamplingParams) -> None:
        """Let in a prompt whose tokens are to be scored.

        Raises:
            InvalidRequestError: If its scores would take more memory than one request may.
        """
        num_top = params.prompt_logprobs
        if num_top is not None and length * (num_top + 1) > MAX_SCORES:
            raise InvalidRequestError(
                f"prompt_logprobs {num_top} for {length} tokens would be {length * (num_top + 1)} "
                f"numbers; at most {MAX_SCORES} are told. Ask for fewer, or for a shorter prompt.",
                param="prompt_logprobs",
            )

    def _known(self, ids: Iterable[int], param: str) -> None:
        """Refuse ids that the model never samples."""
        if any(token >= self._num_tokens for token in ids):
            raise InvalidRequestError(
                f"{param} holds an id that the vocabulary lacks; ids run from 0 to "
                f"{self._num_tokens - 1}.",
                param=param,
            )

    def room(self, context: Context, least: int = 1) -> int:
        """Room for an answer behind a context, in tokens; at least so many.

        Raises:
            InvalidRequestError: If the context is empty.
            ContextLengthError: If it fills the window.
        """
        if not len(context):
            raise InvalidRequestError("The prompt is empty; there is nothing to answer.")
        room = self._max_model_len - len(context)
        if room < least:
            raise ContextLengthError(
                f"The maximum context length is {self._max_model_len} tokens, and the prompt has "
                f"{len(context)}, which leaves no room for an answer; shorten it."
            )
        return room

    def directives(
        self, directives: Sequence[Directive], length: int, to_come: int, root: bytes = b""
    ) -> tuple[Directive, ...]:
        """A set in order of position, if it fits.

        Args:
            directives: The set.
            length: Tokens of the context that it is aimed at.
            to_come: Tokens that may still be generated behind it.
            root: That context's root: rows are shared within it only.

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
            root=root,
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
        DirectiveError: If it is none, or its fields are not what they should be.
    """
    if not isinstance(directive, Directive):
        raise DirectiveError(
            f"{directive!r} is no Directive; write Directive(start, end, ids, mode).",
            param="directives",
        )
    ids: Any = directive.replacement
    listed = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray)
    numbers = (directive.start, directive.end, *(ids if listed else [None]))
    if any(type(number) is not int for number in numbers) or not _is_source(directive.source):
        raise DirectiveError(
            "Positions must be integers, the replacement a tuple of token ids, and a source, if "
            "any, a Source(context, start).",
            param="directives",
        )
    return replace(directive, replacement=tuple(ids), mode=named_mode(directive.mode))


def _is_source(source: Any) -> bool:
    """Whether a directive's source is one, or none."""
    if not isinstance(source, Source):
        return source is None
    return isinstance(source.context, Context) and type(source.start) is int


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
            f"There is no mode {name!r:.60}; the modes are {names}.", param="mode"
        ) from None

"""How the next tokens of one request are chosen, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from leyline.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_SHOWN = 64
MAX_BIAS = 100.0
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1


class Constraint(Protocol):
    """Which tokens may come next, as a function of those generated so far.

    It remembers how far it has read, so that a longer list costs only what is new; a list that is
    not a longer one makes it start over. One object serves one request.
    """

    def allowed(self, generated: Sequence[int]) -> npt.NDArray[np.int32]:
        """A bit a token, the lowest first: [ceil(V / 32)] int32. At least one is set.

        Raises:
            LeylineError: If the constraint cannot be followed any further; ends its request only.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens of one request are chosen, and when to stop.

    The order: bias and penalties change the logits, the constraint rules tokens out, then come
    temperature, top_k, top_p and min_p. Log-probabilities are those of the model itself, before
    all of it.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: Smallest set of most likely tokens whose probability reaches it; 1 keeps all.
        top_k: Number of most likely tokens kept; 0 keeps all.
        min_p: Least probability kept, as a part of the most likely token's; 0 keeps all.
        seed: Makes a request reproducible, whatever else runs beside it; None lets the engine draw
            one. Several answers to one request take `seed`, `seed + 1` and so on.
        max_tokens: Tokens to generate at most; None means up to the end of the window, 0 only
            computes the prompt, and needs `prompt_logprobs`.
        min_tokens: Tokens before which neither a stop token nor a stop string ends the reply.
        stop: Strings that end the reply; none of them appears in it.
        include_stop: Show the stop string after all.
        stop_token_ids: Tokens that end the reply besides the model's own.
        ignore_eos: Go on past the model's own end-of-turn tokens (for measuring).
        presence_penalty: Taken off the logits of tokens generated before, and
        frequency_penalty: taken off as often as they were generated.
        repetition_penalty: Divides positive and multiplies negative logits of tokens that the
            prompt or the reply has; 1 changes nothing.
        logit_bias: `(token id, number added to its logit)`.
        logprobs: Report each token's log-probability and those of so many likeliest ones; None
            reports nothing.
        prompt_logprobs: The same for the prompt's tokens; the cache is not read then.
        skip_special_tokens: Leave the texts of special tokens out of the reply, except
        shown: these ones, by their texts: what a parser of the reply must see.
        constraint: Rules out tokens, such as those that a grammar does not allow.
        enough: Told the reply's text, piece by piece; true ends the reply, as its own end would.
            One object serves one request.

    Raises:
        InvalidRequestError: If a value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    shown: tuple[str, ...] = ()
    constraint: Constraint | None = None
    enough: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidRequestError("top_p must be above 0.", param="top_p")
        _integer("top_k", self.top_k, 0, INT32_MAX)
        _number("min_p", self.min_p, 0.0, 1.0)
        _optional("seed", self.seed, -(2**63), 2**63 - 1)
        _optional("max_tokens", self.max_tokens, 0, INT32_MAX)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens is 0, which answers nothing; it must be at least 1.", param="max_tokens"
            )
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _number("repetition_penalty", self.repetition_penalty, low, high)
        _optional("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _optional("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("shown", self.shown, MAX_SHOWN)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        _tokens("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        _biases(self.logit_bias)

    @property
    def penalises(self) -> bool:
        """Whether what was generated before changes the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen: how, and what of the sequence's past has a say in it.

    Attributes:
        params: The sampling parameters, with a concrete seed.
        step: How many tokens the request has sampled before: the index into its random numbers.
        generated: Those tokens, where penalties or a constraint look at them.
        context: The tokens that occur in front, where the repetition penalty looks at them; they
            are not looked through anew for each token, for a context may be long.
        barred: Tokens that may not come yet: those that would end the reply before `min_tokens`.
    """

    params: SamplingParams
    step: int = 0
    generated: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether anything but the model's own logits has a say."""
        params = self.params
        ruled = params.constraint is not None or self.barred
        return bool(ruled or params.logit_bias or params.penalises)


def _number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no finite number between `low` and `high`."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not (numeric and low <= value <= high):
        raise InvalidRequestError(
            f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.", param=name
        )


def _integer(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is no integer between `low` and `high`."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is {value!r}; it must be an integer from {low} to {high}.", param=name
        )


def _flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r}; it must be True or False.", param=name)


def _optional(name: str, value: object, low: int, high: int) -> None:
    """The same, but None is fine."""
    if value is not None:
        _integer(name, value, low, high)


def _strings(name: str, value: Any, most: int) -> None:
    """Refuse what is no tuple of a few non-empty strings."""
    strings = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ("",)
    wrong = any(not isinstance(one, str) or not one for one in strings)
    if wrong or len(strings) > most:
        raise InvalidRequestError(
            f"{name} must be a tuple of at most {most} non-empty strings.", param=name
        )


def _tokens(name: str, value: Any, most: int) -> None:
    """Refuse what is no tuple of a few token ids."""
    ids = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (None,)
    if len(ids) > most or any(type(one) is not int or not 0 <= one <= INT32_MAX for one in ids):
        raise InvalidRequestError(
            f"{name} must be a tuple of at most {most} token ids.", param=name
        )


def _biases(value: Any) -> None:
    """Refuse what is no tuple of a few pairs of a token id and a bias."""
    given = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (None,)
    pairs = [cast("tuple[Any, ...]", one) for one in given if isinstance(one, tuple)]
    if len(given) > MAX_BIASES or len(pairs) < len(given) or any(len(one) != 2 for one in pairs):
        raise InvalidRequestError(
            f"logit_bias must be a tuple of at most {MAX_BIASES} pairs of a token id and a number.",
            param="logit_bias",
        )
    for token, bias in pairs:
        _integer("logit_bias", token, 0, INT32_MAX)
        _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)

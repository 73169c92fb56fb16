"""What a reply must look like: JSON schemas, expressions and grammars, followed token by token.

llguidance compiles a form to a parser and says which tokens it allows next. Whatever it cannot do
exactly is refused, never done by halves: a keyword of JSON Schema that it does not know how to
enforce is an error. Compiling has limits in size and work, and so has every step.

White space between the parts of a JSON text is allowed, but not without end: a small model that
may write a blank may write nothing else. For the same reason a schema that names properties and
says nothing of others lets no others through (`leyline.closing`).
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from leyline.closing import closed
from leyline.errors import InvalidRequestError
from leyline.sampling import Constraint
from leyline.tokenizer import Tokenizer, check_text

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
Mask = npt.NDArray[np.int32]

MAX_SOURCE_BYTES = 64 * 1024
MAX_CACHED = 64
MAX_CHOICES = 1024
MAX_REMAINDERS = 10_000
MAX_REASON = 300  # characters of the library's own words in an error
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
WORD_BITS = 32
# Where a grammar embeds a schema; there may be comments in between.
_EMBEDDED = re.compile(r"%json(?:\s|//[^\n]*\n)*(?=\{)")


def _limits() -> LLParserLimits:
    """Tenths of a second and tens of megabytes to compile at most, milliseconds for a step.

    See llguidance for the units.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Grammar:
    """A compiled form, from which any number of replies can start.

    All of them share what the parser learns as it reads, which has a limit. A reply that reaches
    it goes on with a parser of its own, so that none suffers from what others have read.

    Args:
        make: Compiles the parser.
        num_tokens: Ids that the vocabulary has, V.

    Attributes:
        is_spent: Whether the limit was reached; it should be compiled anew then.
    """

    def __init__(self, make: Callable[[], LLMatcher], num_tokens: int) -> None:
        self.make = make
        self.num_words = -(-num_tokens // WORD_BITS)
        self.is_spent = False
        self._matcher = make()

    def start(self) -> Constraint:
        """A constraint for one reply."""
        return _Follower(self, self._matcher)


class Grammars:
    """Compiles forms for one vocabulary, and remembers the last few.

    All of it may be used from any thread. `compile` takes a while: keep it off an event loop.

    Args:
        tokenizer: Whose ids the replies consist of.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._gate = threading.Lock()

    def compile(self, kind: Kind, value: Any = None) -> Grammar:
        """The grammar of a form.

        Args:
            kind: What `value` is: `json_object` needs none, `json_schema` a mapping, `regex` an
                expression, `choice` a list of texts, `grammar` one in llguidance's Lark dialect.
            value: See above.

        Raises:
            InvalidRequestError: If it is malformed, too large, or asks for what cannot be enforced.
        """
        source = _source(kind, value)
        if len(source.encode("utf-8")) > MAX_SOURCE_BYTES:
            raise _refused(kind, f"it has more than the {MAX_SOURCE_BYTES} bytes allowed")
        with self._gate:
            found = self._compiled.get(source)
            if found is not None and not found.is_spent:
                self._compiled.move_to_end(source)
                return found
        grammar = Grammar(partial(self._matcher, kind, source), self._tokenizer.vocab_size)
        with self._gate:
            self._compiled[source] = grammar
            self._compiled.move_to_end(source)
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def after(self, text: str, constraint: Constraint) -> Constraint:
        """A constraint that begins where a text ends for the first time, such as `</think>`."""
        num_words = -(-self._tokenizer.vocab_size // WORD_BITS)
        return _After(text.encode("utf-8"), constraint, self._tokenizer, num_words)

    def _matcher(self, kind: str, source: str) -> LLMatcher:
        """Compile, and take the first step, which costs most.

        Copies share what they have learned, and only the second may find that it was too much.
        """
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=_limits())
        for _ in range(2):
            step = matcher.deep_copy()
            if not step.is_error():
                step.compute_bitmask()
            if step.is_error():
                raise _refused(kind, _reason(step))
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        if not self._tokenizer.stop_ids:
            raise InvalidRequestError(
                "This model has no token that ends a reply, so that no form can be enforced."
            )
        wrapped = TokenizerWrapper(_Spelling(self._tokenizer))
        return LLTokenizer(
            wrapped,
            n_vocab=self._tokenizer.vocab_size,
            eos_token=sorted(self._tokenizer.stop_ids),
        )


class _Spelling:
    """The vocabulary, in the words that llguidance looks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i, False) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [
            i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # it asks once whether bytes would do
            raise TypeError("only texts can be encoded")
        return self._tokenizer.encode_plain(text)


class _Follower:
    """A parser that has read what was generated."""

    def __init__(self, grammar: Grammar, start: LLMatcher) -> None:
        self._grammar = grammar
        self._is_shared = True
        self._begin(start)

    def _begin(self, start: LLMatcher) -> None:
        """Have read nothing."""
        self._start, self._matcher = start, start.deep_copy()
        self._read: list[int] = []
        self._told: Mask | None = None

    def allowed(self, generated: Sequence[int]) -> Mask:
        """See `leyline.sampling.Constraint`."""
        if list(generated[: len(self._read)]) != self._read:
            self._begin(self._start)
        new = generated[len(self._read) :]
        fits = self._go_on(new)
        if not fits and self._is_shared and self._was_allowed(new):
            self._grammar.is_spent, self._is_shared = True, False
            self._begin(self._grammar.make())
            fits = self._go_on(generated)
        if not fits or self._told is None:  # a form within the limits may grow out of them
            raise InvalidRequestError(
                f"The reply cannot follow its form any further: {_reason(self._matcher)}"
            )
        return self._told

    def _go_on(self, new: Sequence[int]) -> bool:
        """Read more tokens and find out what may follow; whether the parser could."""
        self._read += new
        if self._matcher.consume_tokens([*new]):
            mask = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                self._told = np.frombuffer(mask, dtype=np.int32)[: self._grammar.num_words]
                return True
        return False

    def _was_allowed(self, new: Sequence[int]) -> bool:
        """Whether the parser should have been able to read that, as far as is known."""
        if self._told is None or len(new) != 1:
            return True
        word, bit = divmod(new[0], WORD_BITS)
        return bool(int(self._told[word]) >> bit & 1)


class _After:
    """Allows everything up to a text but to end, and what another constraint allows from there.

    A reply that ends before its form begins has no form.
    """

    def __init__(
        self, text: bytes, constraint: Constraint, tokenizer: Tokenizer, num_words: int
    ) -> None:
        self._text = text
        self._constraint = constraint
        self._tokenizer = tokenizer
        self._before = all_but(tokenizer.stop_ids, num_words)
        self._read: list[int] = []
        self._spelled = b""
        self._begins: int | None = None

    def allowed(self, generated: Sequence[int]) -> Mask:
        """See `leyline.sampling.Constraint`."""
        if list(generated[: len(self._read)]) != self._read:
            self._read, self._spelled, self._begins = [], b"", None
        for token in generated[len(self._read) :]:
            self._read.append(token)
            self._look(token)
        if self._begins is None:
            return self._before
        return self._constraint.allowed(generated[self._begins :])

    def _look(self, token: int) -> None:
        """Note where the text ends: behind the token that completes it."""
        if self._begins is None:
            self._spelled += self._tokenizer.token_bytes(token, skip_special=False)
            if self._text in self._spelled:
                self._begins = len(self._read)
            self._spelled = self._spelled[-len(self._text) :]


def all_but(ids: Iterable[int], num_words: int) -> Mask:
    """A mask of every id but these."""
    mask = np.full(num_words, -1, dtype=np.int32)
    for word, bit in (divmod(one, WORD_BITS) for one in ids):
        mask[word] &= ~np.left_shift(np.int32(1), np.int32(bit))
    return mask


def _source(kind: str, value: Any) -> str:
    """The form as llguidance reads it, the same text for the same form."""
    make = _SOURCES.get(kind)
    if make is None:
        raise _refused(kind, f"the forms are {', '.join(_SOURCES)}")
    try:
        return make(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(kind, str(error)) from error


def _schema(value: Any) -> str:
    if not isinstance(value, Mapping | bool):
        raise TypeError("a schema is a JSON object")
    _check_multiples(value)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(closed(value), ensure_ascii=False, allow_nan=False), overrides=JSON_OPTIONS
    )


def _object(_: Any) -> str:
    return _schema({"type": "object"})


def _regex(value: Any) -> str:
    return LLMatcher.grammar_from_regex(_text(value))


def _choice(value: Any) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TypeError("give a list of texts, at least one")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} choices are allowed")
    texts = (json.dumps(_text(one), ensure_ascii=False) for one in value)
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")


def _lark(value: Any) -> str:
    text = _text(value)
    for schema in _EMBEDDED.finditer(text):
        _check_multiples(json.JSONDecoder().raw_decode(text, schema.end())[0])
    return LLMatcher.grammar_from_lark(text)


def _check_multiples(schema: Any) -> None:
    """Refuse multiples of what is too large: an automaton has a state for each remainder.

    It has one for each of their least common multiple where several schemas speak of one value;
    powers of 2 and 5 cost no more than digits. Building it has no limit of its own.

    Raises:
        ValueError: If there would be too many.
    """
    states = 1
    for multiple in _multiples(schema):
        states = math.lcm(states, abs(Fraction(str(multiple)).numerator) or 1)
        for prime in (2, 5):
            while states % prime == 0:
                states //= prime
        if states > MAX_REMAINDERS:
            raise ValueError(
                f"its multipleOf together have more than the {MAX_REMAINDERS} remainders allowed"
            )


def _multiples(schema: Any) -> Iterator[int | float]:
    """All that anything in a schema has to be a multiple of."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            multiple = one.get("multipleOf")
            if isinstance(multiple, int | float) and multiple:
                yield multiple
        if isinstance(one, Mapping | list):
            left += one.values() if isinstance(one, Mapping) else one


def _text(value: Any) -> str:
    try:
        text = check_text(value)
    except InvalidRequestError as error:
        raise ValueError(error.message) from error
    if not text:
        raise ValueError("it is empty")
    return text


_SOURCES: dict[str, Callable[[Any], str]] = {
    "json_object": _object,
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


def _reason(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:MAX_REASON] or "it ends here"


def _refused(kind: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The {kind} cannot be enforced: {reason[:MAX_REASON]}.", param=kind)

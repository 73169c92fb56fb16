"""What is to happen to a span of a context, as people say it.

A `Change` is a target with a replacement, and compiles to a `Directive`; a `MarkRequest` is a
target with a promise, and compiles to a `Mark`. Both check their own fields when they are made,
so that nothing malformed ever meets a session.

A text seldom ends where a token ends. What is changed is exactly the text that was matched: what
else its outer tokens spell is put back as part of the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from leyline.context import Context, Tokens
from leyline.directive import Directive, Mode, Source
from leyline.door import named_mode
from leyline.errors import DirectiveError
from leyline.marks import Mark, MessageSpan, Of, Verb
from leyline.spelling import Cut, Spelling, plain
from leyline.target import MAX_WHOLE, WAYS, Target, check_whole
from leyline.tokenizer import Tokenizer, check_text

Scope = Literal["context", "cache"]
Sources = Callable[[str], tuple[Context, Sequence[MessageSpan]]]  # of a session, by its id

MAX_TTL_S = 10 * 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class Change:
    """What is to happen to a span.

    Attributes:
        target: Which span.
        replacement: A text or token ids, put in its place; special tokens only as ids.
        mode: What happens to the rows behind it.
        scope: How far a FORGET reaches: this `context`, or every row in the `cache` of the tenant
            that was computed with the span in view.
        source: A session's id and a span of it, whose rows are put in the place (SHARE).

    Raises:
        DirectiveError: If a field is malformed, or they do not go together.
    """

    target: Target
    replacement: str | Sequence[int] = ""
    mode: Mode | str = Mode.AMORTIZE
    scope: Scope = "context"
    source: tuple[str, Target] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.target, Target):
            raise DirectiveError(WAYS, param="target")
        object.__setattr__(self, "mode", named_mode(self.mode))
        object.__setattr__(self, "replacement", _replacement(self.replacement))
        if self.scope not in get_args(Scope):
            raise DirectiveError("scope must be context or cache.", param="scope")
        if self.scope == "cache" and self.mode is not Mode.FORGET:
            raise DirectiveError(
                "scope cache makes the whole cache forget a span; it goes with mode forget.",
                param="scope",
            )
        if self.source is not None:
            self._check_source(self.source)

    def _check_source(self, source: Any) -> None:
        if (
            not isinstance(source, tuple)
            or [type(part) for part in source] != [str, Target]
            or not source[0]
        ):
            raise DirectiveError(
                "A source is a session's id and a target in that session.", param="source"
            )
        check_text(source[0], "source")
        if self.replacement:
            raise DirectiveError(
                "With a source, its tokens are the replacement; leave replacement out.",
                param="replacement",
            )
        if self.mode is Mode.FORGET:
            raise DirectiveError(
                "forget computes rows anew, so there is nothing to share; use amortize or heal.",
                param="mode",
            )

    def compile(
        self,
        tokens: Sequence[int] | Spelling,
        messages: Sequence[MessageSpan],
        tokenizer: Tokenizer,
        sources: Sources,
    ) -> Directive:
        """The directive that this means in a context.

        Args:
            tokens: The context's, or their spelling, which many changes may share.
            messages: Where the content of each message stands in it.
            tokenizer: Turns texts into ids.
            sources: The context and messages of a session by its id; raises what it likes if there
                is none.

        Raises:
            DirectiveError: If a target means no place, or the replacement cannot be put there.
        """
        spelling = Spelling.of(tokens, tokenizer)
        place = self.target.cut(spelling, messages)
        mode = named_mode(self.mode)
        if self.source is not None:
            return self._shared(place, mode, tokenizer, sources)
        place = spelling.whole(place)
        return Directive(place.start, place.end, plain(place, self.replacement, tokenizer), mode)

    def _shared(self, place: Cut, mode: Mode, tokenizer: Tokenizer, sources: Sources) -> Directive:
        """The directive that brings another context's tokens with their rows."""
        assert self.source is not None
        if self.target.match is not None and (place.before or place.after):
            raise DirectiveError(
                "The match begins or ends inside a token, and shared rows cannot be put there; "
                "match the whole words, or point by token range.",
                param="match",
            )
        session_id, target = self.source
        context, messages = sources(session_id)
        start, end = target.resolve(context.tokens, messages, tokenizer)
        return Directive(
            place.start, place.end, context.tokens[start:end], mode, Source(context, start)
        )


@dataclass(frozen=True, slots=True)
class MarkRequest:
    """A promise that somebody wants about a span.

    Attributes:
        verb: `pin` keeps the span's rows, `decay` edits it after some turns, `scratch` takes it
            out when the turn ends.
        target: Which span; None if `of` is not `span`.
        of: With `scratch`, `reasoning` or `tool_output`: all of it in the next turn.
        ttl_s: Seconds after which a pin ends.
        turns: Turns after which a pin ends or a decay fires. A pin with neither lasts as long as
            its session.
        replacement: What a decay or a scratch puts in the span's place.
        mode: In which mode it does so.

    Raises:
        DirectiveError: If a field is malformed, or they do not go together.
    """

    verb: Verb
    target: Target | None = None
    of: Of = "span"
    ttl_s: float | None = None
    turns: int | None = None
    replacement: str | Sequence[int] = ""
    mode: Mode | str = Mode.AMORTIZE

    def __post_init__(self) -> None:
        if self.verb not in get_args(Verb):
            raise DirectiveError("verb must be pin, decay or scratch.", param="verb")
        if self.of not in get_args(Of):
            raise DirectiveError("of must be span, reasoning or tool_output.", param="of")
        object.__setattr__(self, "mode", named_mode(self.mode))
        object.__setattr__(self, "replacement", _replacement(self.replacement))
        check_whole(self.turns, "turns", 1)
        _check_seconds(self.ttl_s)
        self._check_span()
        self._check_fit()

    def _check_span(self) -> None:
        if self.of != "span":
            if self.verb != "scratch" or self.target is not None:
                raise DirectiveError(
                    "of reasoning or tool_output goes with the verb scratch, and has no target.",
                    param="of",
                )
        elif not isinstance(self.target, Target):
            raise DirectiveError(WAYS, param="target")

    def _check_fit(self) -> None:
        if self.verb != "pin" and self.ttl_s is not None:
            raise DirectiveError("Only a pin ends by the clock; leave ttl_s out.", param="ttl_s")
        if self.verb == "pin" and self.replacement:
            raise DirectiveError(
                "A pin changes nothing; leave replacement out.", param="replacement"
            )
        if (self.verb == "decay") is (self.turns is None) and self.verb != "pin":
            raise DirectiveError(
                "A decay needs turns, after which it fires; a scratch has none, since it fires "
                "when the turn ends.",
                param="turns",
            )

    def compile(
        self,
        mark_id: str,
        tokens: Sequence[int] | Spelling,
        messages: Sequence[MessageSpan],
        tokenizer: Tokenizer,
        now: float,
    ) -> Mark:
        """The mark that this asks for in a context.

        Args:
            mark_id: Its name.
            tokens: The context's, or their spelling, which many changes may share.
            messages: Where the content of each message stands in it.
            tokenizer: Turns texts into ids.
            now: Seconds on the engine's clock.

        Raises:
            DirectiveError: If the target means no place.
        """
        spelling = Spelling.of(tokens, tokenizer)
        place = self.target.cut(spelling, messages) if self.target else Cut(0, 0)
        ids: Tokens = ()
        if self.verb != "pin":
            place = spelling.whole(place)
            ids = plain(place, self.replacement, tokenizer)
        return Mark(
            mark_id,
            self.verb,
            place.start,
            place.end,
            None if self.ttl_s is None else now + self.ttl_s,
            1 if self.verb == "scratch" else self.turns,
            ids,
            named_mode(self.mode),
            self.of,
        )


def _replacement(value: Any) -> str | Tokens:
    """A replacement with its types checked."""
    if isinstance(value, str):
        return check_text(value, "replacement")
    listed = isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)
    if listed and all(type(token) is int and 0 <= token <= MAX_WHOLE for token in value):
        return tuple(value)
    raise DirectiveError(
        "replacement must be a text or a list of token ids, which are whole numbers, 0 or more.",
        param="replacement",
    )


def _check_seconds(value: Any) -> None:
    if value is not None and (type(value) not in (int, float) or not 0 < value <= MAX_TTL_S):
        raise DirectiveError(
            f"ttl_s must be a number of seconds above 0, at most {MAX_TTL_S:.0f}.", param="ttl_s"
        )

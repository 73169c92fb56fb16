"""Reasoning: what a model thinks in front of what it says.

Splits what a parser of calls calls content. So tags in a call's arguments are no tags, and a call
ends the reasoning around it even where its model forgot the closing tag: GLM and Kimi do now and
then, and a call that is taken for a thought is never carried out.

White space between the tags and the texts is markup. A reply that thinks to its end has no content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from leyline.server.parsers.calls import Trimmed
from leyline.server.parsers.pieces import CallHead, Content, Parser, Piece, Reasoning
from leyline.server.parsers.source import Script, Source, Stops


class Thinker(Parser, Protocol):
    """A parser that knows whether the reply, as far as it was read, is in its reasoning.

    Attributes:
        is_thinking: Whether it is.
    """

    is_thinking: bool


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its reasoning.

    Attributes:
        name: What `--reasoning-parser` calls it.
        begin: The tag in front, or "" where nothing is reasoning.
        end: The tag behind.
    """

    name: str
    begin: str = ""
    end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of special tokens that the parser must see; see `SamplingParams.shown`."""
        return (self.begin, self.end) if self.begin else ()

    def begins_inside(self, prompt_tail: str) -> bool:
        """Whether a reply to a prompt that ends so begins inside its reasoning."""
        return bool(self.begin) and prompt_tail.rstrip().endswith(self.begin)

    def is_open_in(self, text: str) -> bool:
        """Whether reasoning begins in a text and does not end in it."""
        return bool(self.begin) and text.rfind(self.begin) > text.rfind(self.end)

    def parser(self, calls: Parser, prompt_tail: str = "") -> Thinker:
        """A fresh parser of a reply, around a fresh one of its calls.

        Args:
            calls: Reads the calls.
            prompt_tail: The end of the prompt: its last 100 characters will do.
        """
        if not self.begin:
            return Unthinking(calls)
        return Thinking(calls, self, self.begins_inside(prompt_tail))


NO_REASONING = ReasoningFormat("none")
GLM45 = ReasoningFormat("glm45", "<think>", "</think>")
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", "<think>", "</think>")


class Unthinking:
    """A reply of a model that does not reason."""

    is_thinking = False

    def __init__(self, calls: Parser) -> None:
        self.push = calls.push
        self.flush = calls.flush


class Thinking:
    """Takes the reasoning out of a reply; see the module.

    Args:
        calls: Reads the calls.
        form: The tags.
        is_inside: Whether the reply begins inside its reasoning.

    Attributes:
        is_thinking: See `Thinker`.
    """

    def __init__(self, calls: Parser, form: ReasoningFormat, is_inside: bool) -> None:
        self.is_thinking = is_inside
        self._calls = calls
        self._form = form
        self._said: list[Piece] = []
        self._keeps_space = not is_inside
        self._begin_text()

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return self._read(self._calls.push(text))

    def flush(self) -> list[Piece]:
        """See `Parser`."""
        said = self._read(self._calls.flush())
        self._end_text()
        said += self._said
        self._said = []
        return said

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, Content):
                self._text.add(piece.text)
                next(self._script, None)
                continue
            if isinstance(piece, CallHead):
                self._end_text()
            self._said.append(piece)
        said, self._said = self._said, []
        return said

    def _begin_text(self) -> None:
        self._text = Source()
        self._script = self._run()

    def _end_text(self) -> None:
        """A call begins, or the reply ends: what was held back is what it looks like."""
        self._text.is_over = True
        next(self._script, None)
        self.is_thinking, self._keeps_space = False, not self.is_thinking
        self._begin_text()

    def _run(self) -> Script[None]:
        """The text up to the next call, or to the end of the reply."""
        if self.is_thinking:
            yield from self._think()
        while True:
            space = yield from self._text.skip_space()
            tag = yield from self._text.uses(self._form.begin, self._form.end)
            if tag == self._form.begin:
                yield from self._think()
            elif tag is None:
                break
            self._keeps_space = False
        self._say(space if self._keeps_space else "")
        yield from self._text.until(Stops(), self._say)

    def _think(self) -> Script[None]:
        self.is_thinking = True
        yield from self._text.skip_space()
        stop = yield from self._text.until(Stops(self._form.end), Trimmed(self._reason))
        self._text.take(len(stop or ""))
        self.is_thinking, self._keeps_space = False, False

    def _say(self, text: str) -> None:
        if text:
            self._said.append(Content(text))

    def _reason(self, text: str) -> None:
        if text:
            self._said.append(Reasoning(text))

"""Text that is still coming, read by scripts that wait for more of it.

A parser is written as one script that reads from the front to the end, as if the whole reply were
there: a generator that yields where it has to wait. What it decides depends on the text alone,
never on how the text was cut, because every question here waits until its answer is certain.

Only what is not yet used lies in the buffer, and scripts use all they can before they wait; so the
cost is linear in the text however small its pieces are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Script = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Stops:
    """Texts to look for: the first in a text wins, the longest where two begin together.

    Attributes:
        texts: The texts.
        longest: The length of the longest.
    """

    def __init__(self, *texts: str) -> None:
        self.texts = tuple(sorted(texts, key=len, reverse=True))
        self._any = re.compile("|".join(map(re.escape, self.texts)) if texts else r"(?!)")
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self.longest = max(map(len, texts), default=0)

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        """The first of them that is whole in `text[start:end]`."""
        return self._any.search(text, start, end)

    def num_open(self, text: str, start: int) -> int:
        """Characters at the end of `text` that may be the beginning of one of them."""
        for size in range(min(self.longest - 1, len(text) - start), 0, -1):
            if text[len(text) - size :] in self._beginnings:
                return size
        return 0


class Source:
    """The text of a reply, as far as it has come and has not been used.

    Attributes:
        is_over: Whether no more will come.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None

    def add(self, text: str) -> None:
        """More text has come."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def num_left(self) -> int:
        """Characters that have come and are not used."""
        return len(self._text) - self._at

    def take(self, size: int) -> str:
        """Use the next characters, which must have come."""
        taken = self._text[self._at : self._at + size]
        self._at += size
        if self._held is not None:
            self._held.append(taken)
        return taken

    def feed(self, read: Callable[[str, int], int]) -> str:
        """Use what `read` uses: given the text and where it begins, it returns where it ends."""
        return self.take(read(self._text, self._at) - self._at)

    def hold(self) -> None:
        """What is used from here on can be given back with `rewind`."""
        self._held = []

    def release(self) -> None:
        """What was used stays so."""
        self._held = None

    def rewind(self) -> None:
        """Give back all that was used since `hold`."""
        held, self._held = self._held or [], None
        self.give_back("".join(held))

    def give_back(self, text: str) -> None:
        """Give back the text that was used last."""
        if self._at >= len(text):
            self._at -= len(text)
        else:  # some of it is no longer in the buffer
            self._text, self._at = text + self._text[self._at :], 0
        if text and self._held is not None:
            held = "".join(self._held)
            self._held = [held[: len(held) - len(text)]]

    def more(self) -> Script[bool]:
        """Wait for more text; false if none will come."""
        if self.is_over:
            return False
        yield
        return True

    def peek(self) -> Script[str]:
        """The next character, not used; empty at the end."""
        while not self.num_left:
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def skip_space(self, also: str = "") -> Script[str]:
        """Use white space, and characters of `also`, up to what is neither; returns it."""
        pattern = re.compile(rf"[\s{re.escape(also)}]*") if also else _SPACE
        skipped: list[str] = []
        while True:
            found = pattern.match(self._text, self._at)
            skipped.append(self.take(found.end() - self._at if found else 0))
            if self.num_left or not (yield from self.more()):
                return "".join(skipped)

    def comes(self, *texts: str) -> Script[str | None]:
        """Which of the texts comes next, the longest first; it is not used."""
        longest = sorted(texts, key=len, reverse=True)
        while True:
            if not any(self._may_come(text) for text in longest) or self.is_over:
                return next((one for one in longest if self._text.startswith(one, self._at)), None)
            yield

    def _may_come(self, text: str) -> bool:
        """Whether what has come is a proper beginning of `text`."""
        return self.num_left < len(text) and text.startswith(self._text[self._at :])

    def is_cut_in(self, *texts: str) -> bool:
        """Whether the text has ended in the middle of one of the texts, or just before them."""
        return self.is_over and any(map(self._may_come, texts))

    def uses(self, *texts: str) -> Script[str | None]:
        """The same, and it is used."""
        found = yield from self.comes(*texts)
        if found is not None:
            self.take(len(found))
        return found

    def until(self, stops: Stops, sink: Sink, limit: int | None = None) -> Script[str | None]:
        """Use text up to the first stop, and give it to `sink` as it comes.

        Returns:
            The stop, which is not used; None at the end of the text, or when `limit` characters
            came without one.
        """
        left = sys.maxsize if limit is None else limit
        while True:
            reach = min(len(self._text), self._at + left + stops.longest)
            found = stops.search(self._text, self._at, reach)
            end = found.start() if found else len(self._text)
            if not found and not self.is_over:
                end -= stops.num_open(self._text, self._at)
            if (left := left - (end - self._at)) < 0:
                return None
            if end > self._at:
                sink(self.take(end - self._at))
            if found:
                return found.group()
            if not (yield from self.more()):
                return None

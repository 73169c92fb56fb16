"""Values of a saved file that may be damaged: each is checked when it is read.

A `Field` knows where its value stands, so that a complaint names the place. Nothing is converted
or mended: what is not exactly what was written is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

DIGEST_BYTES = 32
LARGEST = 2**53  # integers beyond it are not the same in every JSON reader


class Damage(Exception):
    """What is wrong with a file: the rest of a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class Field:
    """A JSON value and where it stands.

    Every method returns the value if it is what the method asks for, and raises `Damage` if not.

    Attributes:
        value: The value.
        where: Its path, such as `sessions[3].version`; empty for the whole file.
    """

    value: Any
    where: str

    def wrong(self, wanted: str) -> NoReturn:
        """Complain."""
        raise Damage(f"is damaged: {self.where or 'it'} must be {wanted}")

    def fields(self, *names: str) -> list[Field]:
        """The fields of an object that has just these, in the order asked for."""
        if not isinstance(self.value, dict) or sorted(self.value) != sorted(names):
            self.wrong(f"an object of {', '.join(names)}")
        prefix = f"{self.where}." if self.where else ""
        return [Field(self.value[name], prefix + name) for name in names]

    def items(self, count: int | None = None) -> list[Field]:
        """The items of a list, of just `count` if that is given."""
        if not isinstance(self.value, list) or count not in (None, len(self.value)):
            self.wrong("a list" if count is None else f"a list of {count}")
        return [Field(item, f"{self.where}[{index}]") for index, item in enumerate(self.value)]

    def integer(self, low: int, high: int = LARGEST) -> int:
        """An integer from `low` to `high`; true and false are none."""
        if type(self.value) is not int or not low <= self.value <= high:
            self.wrong(f"an integer from {low} to {high}")
        return self.value

    def seconds(self) -> float:
        """A duration, finite and not negative."""
        if type(self.value) not in (int, float) or not 0 <= self.value <= LARGEST:
            self.wrong(f"a number from 0 to {LARGEST}")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            self.wrong("true or false")
        return self.value

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            self.wrong("a text")
        return self.value

    def one_of(self, words: Iterable[str]) -> Any:
        """One of some words."""
        known = list(words)
        if self.value not in known:
            self.wrong(f"one of {', '.join(known)}")
        return self.value

    def digest(self, *, empty: bool = False) -> bytes:
        """32 bytes, written in hexadecimal; or none, if `empty` allows it."""
        text = self.text()
        length = 0 if empty and not text else 2 * DIGEST_BYTES
        if len(text) != length or set(text) - set("0123456789abcdef"):
            self.wrong(f"{DIGEST_BYTES} bytes in hexadecimal")
        return bytes.fromhex(text)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        """Token ids below `num_tokens`."""
        ids: list[Any] = self.value if isinstance(self.value, list) else [None]
        if any(type(token) is not int or not 0 <= token < num_tokens for token in ids):
            self.wrong(f"a list of token ids from 0 to {num_tokens - 1}")
        return tuple(ids)

    def span(self, length: int) -> tuple[int, int]:
        """Start and end of a span of a context of `length` tokens."""
        start, end = self.items(2)
        last = end.integer(0, length)
        return start.integer(0, last), last

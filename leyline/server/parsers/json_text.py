"""JSON in a text that comes in pieces: where a value ends, and what a string says."""

from __future__ import annotations

import re
from collections.abc import Callable

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SAID = re.compile(r'[^"\\]+')
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = {**dict(zip("bfnrt", "\b\f\n\r\t", strict=True)), **{one: one for one in '"\\/'}}
_HEX = frozenset("0123456789abcdefABCDEF")
BAD_CHARACTER = "\ufffd"


class JsonValue:
    """Follows one value through a text; what it says depends on no cut.

    A machine with a stack, one character a step, a string's plain characters in one.

    Attributes:
        is_over: The value has ended.
        is_broken: What came is no JSON.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.is_broken = False
        self._stack: list[str] = []
        self._state = "value"
        self._word = ""  # of a number or literal, or what is left of an escape

    @classmethod
    def in_object(cls) -> JsonValue:
        """One that goes on behind a value of an object."""
        value = cls()
        value._stack, value._state = ["{"], "after"
        return value

    def read(self, text: str, start: int = 0) -> int:
        """Read on in `text` from `start`; where the value, or the text, ends.

        A number ends only with the character behind it. What breaks a value is not read.
        """
        while start < len(text) and not (self.is_over or self.is_broken):
            start = self._step(text, start)
        return start

    def _step(self, text: str, at: int) -> int:
        if self._state == "string":
            return self._in_string(text, at)
        if self._state in ("number", "word", "escape", "hex"):
            return getattr(self, "_in_" + self._state)(text[at], at)
        at = _space_end(text, at)
        return at if at == len(text) else self._structure(text[at], at)

    def _structure(self, character: str, at: int) -> int:
        """What stands between strings, numbers and words."""
        closes = {"{": "}", "[": "]"}.get(self._stack[-1]) if self._stack else None
        if character == closes and self._state in ("after", "first", "first key"):
            self._stack.pop()
            self._end()
        elif self._state == "after" and character == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif self._state == "colon" and character == ":":
            self._state = "value"
        elif self._state in ("key", "first key") and character == '"':
            self._stack.append("key")
            self._state = "string"
        elif self._state in ("value", "first"):
            return self._value(character, at)
        else:
            return self._break(at)
        return at + 1

    def _value(self, character: str, at: int) -> int:
        """The first character of a value."""
        if character in "{[":
            self._stack.append(character)
            self._state = "first key" if character == "{" else "first"
        elif character == '"':
            self._stack.append("string")
            self._state = "string"
        elif character in "-0123456789":
            self._state, self._word = "number", character
        elif character in _WORDS:
            self._state, self._word = "word", _WORDS[character][1:]
        else:
            return self._break(at)
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return at
        if text[at] == '"':
            is_key = self._stack.pop() == "key"
            if is_key:
                self._state = "colon"
            else:
                self._end()
        elif text[at] == "\\":
            self._state = "escape"
        else:
            return self._break(at)
        return at + 1

    def _in_escape(self, character: str, at: int) -> int:
        if character == "u":
            self._state, self._word = "hex", "...."
        elif character in _ESCAPES:
            self._state = "string"
        else:
            return self._break(at)
        return at + 1

    def _in_hex(self, character: str, at: int) -> int:
        if character not in _HEX:
            return self._break(at)
        self._word = self._word[1:]
        if not self._word:
            self._state = "string"
        return at + 1

    def _in_number(self, character: str, at: int) -> int:
        if character in _NUMBER_CHARACTERS:
            self._word += character
            return at + 1
        if not _NUMBER.fullmatch(self._word):
            return self._break(at)
        self._end()
        return at

    def _in_word(self, character: str, at: int) -> int:
        if character != self._word[0]:
            return self._break(at)
        self._word = self._word[1:]
        if not self._word:
            self._end()
        return at + 1

    def _end(self) -> None:
        """A value has ended: perhaps the whole, else an item of an object or a list."""
        self._state = "after"
        self.is_over = not self._stack

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at


def _space_end(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


class JsonString:
    """Decodes a string's inside, from behind its opening quote to its closing one.

    Lenient: a bare line break stands for itself, an unknown escape for its text. Half of a
    surrogate pair becomes U+FFFD.

    Args:
        sink: What the string's text is given to.

    Attributes:
        is_over: The closing quote was read.
    """

    def __init__(self, sink: Callable[[str], None]) -> None:
        self.is_over = False
        self._sink = sink
        self._escape = ""  # an escape that is not whole
        self._high = ""  # the first half of a pair

    def read(self, text: str, start: int = 0) -> int:
        """Read on in `text` from `start`; where the string, or the text, ends."""
        while start < len(text) and not self.is_over:
            start = self._step(text, start)
        return start

    def _step(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text[at], at)
        if text[at] == "\\":
            self._escape = "\\"
            return at + 1
        if text[at] == '"':
            self.is_over = True
            self._say("")
            return at + 1
        found = _SAID.match(text, at)
        end = found.end() if found else len(text)
        self._say(text[at:end])
        return end

    def _in_escape(self, character: str, at: int) -> int:
        escape = self._escape + character
        is_bad = escape[1] == "u" and len(escape) > 2 and character not in _HEX
        whole = self._escape if is_bad else _unescaped(escape)
        self._escape = escape if whole is None else ""
        if whole is not None:
            self._say(whole)
        return at if is_bad else at + 1

    def _say(self, text: str) -> None:
        if "\udc00" <= text < "\ue000":
            text = _pair(self._high, text)
        elif self._high:
            text = BAD_CHARACTER + text
        self._high = ""
        if text and "\ud800" <= text[-1] < "\udc00":
            self._high, text = text[-1], text[:-1]
        if text:
            self._sink(text)


def _unescaped(escape: str) -> str | None:
    """What an escape stands for; None if it is not whole."""
    if escape[1] != "u":
        return _ESCAPES.get(escape[1], escape)
    return chr(int(escape[2:], 16)) if len(escape) == 6 else None


def _pair(high: str, low: str) -> str:
    """The character that two halves are."""
    if not high:
        return BAD_CHARACTER
    return chr(0x10000 + ((ord(high) - 0xD800) << 10) + (ord(low) - 0xDC00))

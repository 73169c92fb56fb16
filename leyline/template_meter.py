"""How much work a chat template may cause: steps are counted, and values bounded.

A `Meter` goes along with each rendering. It bounds the size of every value that the template makes,
where an operation can enlarge *before* the value is made, and it counts steps, larger values as
more of them. With bounded values a step takes bounded time, and with bounded steps so does the
rendering. No clock is involved: a template is refused or not, whatever else the machine does. Both
bounds grow with the input, so a long conversation is no crime.

What spells a character by several is measured when it is made, not before: `!r`, `%r` and the text
of a list write up to 10 for one, `tojson(ensure_ascii=true)` and `urlencode` up to 12. What it is
made of is within the bound, so for a moment there is a value of at most `ESCAPE_FACTOR` times the
bound, and nothing is ever made of that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

BASE_STEPS = 1_000_000  # a second or two
STEPS_A_CONTAINER = 1_000  # of the input, so that a template may compare each message with each
STEPS_A_CHARACTER = 4  # of the input
CHARACTERS_A_STEP = 16
ELEMENTS_A_STEP = 4
ELEMENT_SIZE = 32  # in characters
BASE_SIZE = 1_000_000  # characters of one value
SIZE_FACTOR = 8  # one value, over the whole input
ESCAPE_FACTOR = 12  # characters that one is spelt with at most
OUTPUT_FACTOR = 32  # all output, over the whole input: a text passes through several macros
MAX_BITS = 4096  # of an integer
MAX_DIGITS = 6  # of a width
MAX_PRECISION = 1_000  # digits to round to
FLOAT_SIZE = 512  # characters that a format may make of a float

_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_PLAIN = (str, int, float, bool, type(None))
_TEXTS = (str, bytes, bytearray)
_FLAT = (*_PLAIN, *_TEXTS, complex)


class WorkLimitError(SecurityError):
    """A template does more than any conversation needs."""


class Meter:
    """What one rendering may still do.

    Args:
        known: Sizes of the containers of the input, by identity; they outlive the meter.
        size: Of the whole input.
    """

    def __init__(self, known: Mapping[int, int], size: int) -> None:
        self._known = known
        self._steps = BASE_STEPS + STEPS_A_CONTAINER * len(known) + STEPS_A_CHARACTER * size
        self._output = BASE_SIZE + OUTPUT_FACTOR * size
        self._max_size = BASE_SIZE + SIZE_FACTOR * size

    def spend(self, steps: int = 1) -> None:
        """Count steps.

        Raises:
            WorkLimitError: There were too many.
        """
        self._steps -= steps
        if self._steps < 0:
            raise WorkLimitError("it takes too many steps (does it loop for ever?)")

    def fits(self, size: int) -> None:
        """Check the size that a value would have.

        Raises:
            WorkLimitError: It is too large.
        """
        if size > self._max_size:
            raise WorkLimitError(f"it makes a value of more than {self._max_size} characters")

    def read(self, *values: Any) -> int:
        """Count a step that looks at some values; returns their size.

        The size of a value is what it would print, more or less: parts that it shares with others,
        or with itself, count each time.
        """
        size = 0
        for value in values:
            if isinstance(value, _FLAT):
                size += _flat_size(value)
                if isinstance(value, _TEXTS):
                    self.spend(len(value) // CHARACTERS_A_STEP)
            else:
                size += self._container(value)
        self.spend()
        return size

    def wrote(self, text: str) -> str:
        """Count a piece of output, and return it."""
        self._output -= len(text)
        if self._output < 0:
            raise WorkLimitError("it writes too much text")
        self.read(text)
        return text

    def made(self, value: Any) -> Any:
        """Check a result, and return it; what is lazy is counted as it is used."""
        if isinstance(value, Iterator):
            return self._counted(value)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise WorkLimitError("it makes a huge number")
        self.fits(self.read(value))
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        total = 0
        for value in values:
            total += ELEMENT_SIZE + self.read(value)
            self.fits(total)
            yield value

    def _container(self, value: Any) -> int:
        known = self._known.get(id(value))
        if known is not None:
            self.spend(len(value) // ELEMENTS_A_STEP)
            return known
        size, visits, waiting = 0, 0, [value]
        while waiting:
            item = waiting.pop()
            visits += 1
            if isinstance(item, _FLAT):
                size += _flat_size(item)
            elif (known := self._known.get(id(item))) is not None:
                size += known
            else:
                parts = _parts(item)
                size += ELEMENT_SIZE * len(parts)
                self.fits(size)
                waiting.extend(parts)
        self.spend(visits // ELEMENTS_A_STEP)
        self.fits(size)
        return size


def _flat_size(value: Any) -> int:
    """The size of what is no container; that of a number is 1, or its bits if it is large."""
    if isinstance(value, _TEXTS):
        return len(value)
    bits = value.bit_length() if isinstance(value, int) else 0
    return bits if bits > ELEMENT_SIZE else 1


def _parts(value: Any) -> Any:
    """What a container would print."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, range)):
        return value
    return list(value) if isinstance(value, _VIEWS) else ()


METER: ContextVar[Meter] = ContextVar("leyline_template_meter")


def plain_copy(value: Any, known: dict[int, int]) -> tuple[Any, int]:
    """Copy what a template will see as plain JSON values: it gets no methods of anybody's objects.

    Args:
        value: What is not JSON becomes a text that names its type.
        known: Gets the sizes of the copy's containers, by identity.

    Returns:
        The copy and its size.
    """
    if value is None or type(value) in _PLAIN:
        return value, _flat_size(value)
    if isinstance(value, str):
        return str.__str__(value), len(value)
    if isinstance(value, (int, float)):
        return (int(value) if isinstance(value, int) else float(value)), _flat_size(value)
    if isinstance(value, Mapping):
        pairs = [(*plain_copy(k, known), *plain_copy(v, known)) for k, v in value.items()]
        copy: Any = {key: item for key, _, item, _ in pairs}
        size = sum(2 * ELEMENT_SIZE + key_size + item_size for _, key_size, _, item_size in pairs)
    elif isinstance(value, (list, tuple)):
        items = [plain_copy(item, known) for item in value]
        copy = [item for item, _ in items]
        size = sum(ELEMENT_SIZE + item_size for _, item_size in items)
    else:
        return f"<{type(value).__name__}>", 1
    known[id(copy)] = size
    return copy, size


# What enlarges ------------------------------------------------------------------------------------


def _replace(meter: Meter, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    meter.fits(meter.read(text) + str(text).count(str(old)) * len(str(new)))


def _pad(meter: Meter, text: Any, width: Any = 80, *_: Any) -> None:
    meter.fits(width)


def _expand_tabs(meter: Meter, text: Any, tabsize: Any = 8) -> None:
    meter.fits(len(text) + text.count("\t") * tabsize)


def _join(meter: Meter, separator: Any, values: Any) -> None:
    meter.fits(meter.read(values) + len(values) * len(str(separator)))


def _join_filter(meter: Meter, values: Any, d: Any = "", *_: Any, **__: Any) -> None:
    _join(meter, d, values)


def _indent(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    step = len(width) if isinstance(width, str) else width
    meter.fits(meter.read(text) + (str(text).count("\n") + 1) * step)


def _batch(meter: Meter, value: Any, linecount: Any, *_: Any, **__: Any) -> None:
    meter.fits(linecount)


def _round(meter: Meter, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if abs(precision) > MAX_PRECISION:
        raise WorkLimitError("it rounds to more digits than there are")


def check_percent(meter: Meter, text: Any, *args: Any, **kwargs: Any) -> None:
    """Check `text % args`."""
    if "*" in text:
        raise WorkLimitError("it formats with a width that it does not name")
    check_fields(meter, text, "%", [*args, *kwargs.values()])


def check_fields(meter: Meter, text: str, mark: str, values: list[Any]) -> None:
    """Check a format: each field may print all the values, as wide as any number in it."""
    widths = re.findall(r"\d+", text)
    if any(len(width) > MAX_DIGITS for width in widths):
        raise WorkLimitError("it formats with a huge width")
    field = meter.read(*values) + max(map(int, widths), default=0)
    numbers = [number for value in values for number in _numbers(value)]
    field += sum(ELEMENT_SIZE if isinstance(number, int) else FLOAT_SIZE for number in numbers)
    meter.fits(len(text) + text.count(mark) * field)


def _numbers(value: Any) -> list[Any]:
    """The numbers that a field may reach, and print in any way."""
    if isinstance(value, Mapping):
        items: Any = value.values()
    else:
        items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, (int, float, complex))]


def check_binop(meter: Meter, operation: str, left: Any, right: Any) -> None:
    """Check an operator, before it is applied."""
    meter.read(left, right)
    if operation == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and not isinstance(other, (int, float)):
                meter.fits(meter.read(other) * one)
    elif operation == "**":
        whole = isinstance(left, int) and isinstance(right, int)
        if whole and left.bit_length() * abs(right) > MAX_BITS:
            raise WorkLimitError("it makes a huge number")
    elif operation == "%" and isinstance(left, _TEXTS):
        text = left if isinstance(left, str) else left.decode("latin-1")
        check_percent(meter, text, right)


STR_CHECKS: Mapping[str, Callable[..., None]] = {
    "replace": _replace,
    "center": _pad,
    "ljust": _pad,
    "rjust": _pad,
    "zfill": _pad,
    "expandtabs": _expand_tabs,
    "join": _join,
}
FILTER_CHECKS: Mapping[str, Callable[..., None]] = {
    "replace": _replace,
    "center": _pad,
    "join": _join_filter,
    "indent": _indent,
    "batch": _batch,
    "round": _round,
    "format": check_percent,
}

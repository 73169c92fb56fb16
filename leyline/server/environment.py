"""Options from the environment: `LEYLINE_MAX_NUM_SEQS` for `--max-num-seqs`, and so on.

As with flags, `_S` for seconds may be left out.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from leyline.errors import ConfigError
from leyline.server.settings import CLOSING_FILES

PREFIX = "LEYLINE_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
# An empty one is no key, and must not leave a server open that somebody meant to close.
_NEVER_EMPTY = frozenset({"api_key", *CLOSING_FILES})
_NO_OPTIONS = frozenset({PREFIX + "HOME"})


def options_in(environ: Mapping[str, str], *configs: type) -> dict[str, Any]:
    """The options of some config dataclasses that an environment sets.

    What may be given more than once stands in one variable, with spaces between. An empty variable
    is the same as none.

    Raises:
        ConfigError: If a variable cannot be read as its option; the value is never told.
    """
    options: dict[str, Any] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for entry in fields(config):
            variable = PREFIX + entry.name.upper()
            text = environ.get(variable.removesuffix("_S"), environ.get(variable))
            if text or (text is not None and entry.name in _NEVER_EMPTY):
                options[entry.name] = _read(entry.name, text, hints[entry.name])
    return options


def unknown_in(environ: Mapping[str, str], *configs: type) -> list[str]:
    """Variables that look like options and are none, such as misspelt ones."""
    names = {PREFIX + entry.name.upper() for config in configs for entry in fields(config)}
    known = names | {name.removesuffix("_S") for name in names} | _NO_OPTIONS
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def plain_type(hint: Any) -> type:
    """`int` for `int | None`, and so on."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _read(name: str, text: str, hint: Any) -> Any:
    """An option from its text."""
    if typing.get_origin(hint) is tuple:
        kind: Any = _words
    elif hint is bool:
        kind = _truth
    else:
        kind = plain_type(hint)
    try:
        return kind(text)
    except ValueError:
        what = {"_words": "a value", "_truth": "true or false", "int": "an integer"}
        raise ConfigError(
            f"The environment variable {PREFIX}{name.upper()} must be "
            f"{what.get(kind.__name__, 'a number')}.",
            param=name,
        ) from None


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError
    return word in _TRUE


def _words(text: str) -> tuple[str, ...]:
    words = tuple(text.split())
    if not words:
        raise ValueError
    return words

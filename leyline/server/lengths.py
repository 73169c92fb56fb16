"""Texts that alone are too long for the model, found out beside the engine.

The engine turns prompts into tokens on its own thread. For a text of the window's size that is
soon done; for one of sixteen megabytes everybody would wait for seconds, only to have it refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from leyline.errors import ContextLengthError
from leyline.server.serving import Serving

LIKELY_CHARS = 8  # a token; few texts that fit have more


def is_long(serving: Serving, num_chars: int) -> bool:
    """Whether a text of so many characters may not fit; others are left to the engine."""
    return num_chars > LIKELY_CHARS * serving.worker.engine.max_model_len


async def check_fits(serving: Serving, texts: Iterable[str], param: str | None = None) -> None:
    """Refuse a text that no context has room for; count the tokens only where that is in doubt.

    Raises:
        ContextLengthError: If one has more tokens than the window.
        InvalidRequestError: If one that is counted is not valid Unicode.
    """
    engine = serving.worker.engine
    for text in texts:
        if not is_long(serving, len(text)):
            continue
        check_count(serving, len(await serving.beside(engine.tokenizer.encode, text)), param)


def check_count(serving: Serving, num_tokens: int, param: str | None = None) -> None:
    """Refuse a text of so many tokens if no context has room for it.

    Raises:
        ContextLengthError: If that is more than the window.
    """
    window = serving.worker.engine.max_model_len
    if num_tokens > window:
        raise ContextLengthError(
            f"The maximum context length is {window} tokens, and the request has a text of "
            f"{num_tokens}; shorten it.",
            param=param,
        )


def strings_in(value: Any) -> Iterator[str]:
    """Every string in lists and the values of mappings, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from strings_in(part)

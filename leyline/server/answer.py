"""From an `Ask` to its answer: submit it, read its markup, put it together.

The one path of all chat APIs; what differs between them is how they spell an `Ask` and an `Answer`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from fastapi import Request

from leyline.events import Completion
from leyline.server.ask import Ask, Over, Reply, Said
from leyline.server.serving import Serving


class Answer:
    """An answer under way: iterate it, inside a `with` block; leaving the block cancels the rest.

    Attributes:
        applied_edits: What the server's policies did to the messages, as they report it.
        completions: Those of the choices that are over.
    """

    applied_edits: Sequence[Mapping[str, Any]]
    completions: list[Completion]

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[Said | Over]:
        raise NotImplementedError


async def ask(serving: Serving, request: Request, asked: Ask) -> Answer:
    """Trim, check, compile and submit; the answer has not begun when this returns.

    Raises:
        LeylineError: If anything is refused; nothing runs then.
    """
    raise NotImplementedError


async def whole(request: Request, answer: Answer) -> list[Reply]:
    """Wait for all choices, in their order; cancels them if the client hangs up.

    Raises:
        LeylineError: If one fails.
    """
    raise NotImplementedError

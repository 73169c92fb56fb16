"""What every route shares: the worker, the served name, and how requests are named and dated."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

from leyline.errors import ModelNotFoundError
from leyline.rendering import PLAIN, Rendering
from leyline.server.constraints import Constraints
from leyline.server.failures import quoted
from leyline.server.parsers.choosing import Chosen, choose
from leyline.server.settings import ServerConfig
from leyline.server.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

_POLICY_THREADS = 16


def _policy_threads() -> ThreadPoolExecutor:
    """Threads for policies alone: a slow policy must not keep a shutdown from its thread."""
    return ThreadPoolExecutor(_POLICY_THREADS, thread_name_prefix="leyline-policies")


@dataclass(frozen=True)
class Serving:
    """The state behind the routes; it does not change while the server runs.

    Attributes:
        worker: The engine's thread.
        config: The server's options.
        started: When the server was built, in whole seconds since 1970.
        policies: Threads that policies run on.

    Raises:
        ConfigError: If the options name a parser that there is not.
    """

    worker: Worker
    config: ServerConfig
    started: int = field(default_factory=lambda: int(time.time()))
    policies: ThreadPoolExecutor = field(default_factory=_policy_threads)

    def __post_init__(self) -> None:
        _ = self.chosen

    @cached_property
    def chosen(self) -> Chosen:
        """What the model writes its calls and its reasoning in."""
        template = self.worker.engine.tokenizer.template
        return choose(
            None if template is None else template.source,
            self.config.tool_call_parser,
            self.config.reasoning_parser,
        )

    @cached_property
    def constraints(self) -> Constraints:
        """Compiles what replies must look like."""
        return Constraints(self.worker.engine.tokenizer, self.chosen)

    @property
    def model_name(self) -> str:
        """The one name that clients may ask for."""
        return self.config.served_model_name or self.worker.engine.model_name

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds of silence in a stream after which a comment is sent; None sends none."""
        return self.config.sse_keep_alive_interval_s or None

    def check_model(self, name: str | None) -> None:
        """Accept the served name or none at all.

        Raises:
            ModelNotFoundError: for any other name.
        """
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(
                f"The model {quoted(name)} is not served here; this server serves "
                f"{quoted(self.model_name)}.",
                param="model",
            )

    async def trimmed(
        self,
        messages: Sequence[Mapping[str, Any]],
        context_management: Any,
        rendering: Rendering = PLAIN,
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
        """What the engine's policies make of messages, and the edits they report."""
        return await self.beside(self.worker.engine.trim, messages, context_management, rendering)

    async def beside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what takes time beside the engine and the event loop, and return its result.

        A policy may be anybody's code, and whoever counts tokens renders and encodes. Cancelling
        leaves it running, with nobody to look at what it returns.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.policies, partial(function, *args, **kwargs))


def new_id(prefix: str, request_id: str | None = None) -> str:
    """An id for an answer: a fresh one, or one that its client chose."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"

"""A user's own policy: any function from messages to messages, found by name and kept in check."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from leyline.errors import ConfigError
from leyline.trimming import Count, Messages, Trimmed, trimmed

ENTRY_POINT_GROUP = "leyline.policies"


def load_policy(name: str, *, limit_s: float = 10.0) -> OwnPolicy:
    """A user's own policy: `module:function`, or an entry point of the group `leyline.policies`.

    The function takes a list of messages, which it may change, and returns the list that goes to
    the model instead.

    Raises:
        ConfigError: If it cannot be imported, is not there, or cannot be called.
    """
    try:
        function = _found(name)
    except Exception as error:  # importing runs foreign code
        raise ConfigError(
            f"The policy {name!r} cannot be loaded ({type(error).__name__}: {error}). Give "
            "module:function, where Python can import the module, or the name of an entry point "
            f"in the group {ENTRY_POINT_GROUP}.",
            param="policy",
        ) from error
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"The policy {name!r} is of type {kind}, not a function.", param="policy")
    return OwnPolicy(name, function, limit_s)


@dataclass(slots=True)
class OwnPolicy:
    """A user's own function from messages to messages; obtained from `load_policy`.

    It is given a deep copy, and runs in a thread of its own: one that has not returned after
    `limit_s` seconds counts as failed, and is not called again until it has ended after all.

    Attributes:
        name: As it was asked for.
        function: Takes a list of messages and returns one.
        limit_s: Seconds it may take.
    """

    name: str
    function: Callable[[list[dict[str, Any]]], Any]
    limit_s: float = 10.0
    _running: threading.Thread | None = field(default=None, init=False, repr=False)

    def __call__(self, messages: Messages, count: Count) -> Trimmed:
        """Return what the function returned.

        Raises:
            TimeoutError: If it takes too long, or still does.
            TypeError: If it returns anything but a list of messages.
            Exception: Whatever it raised.
        """
        if self._running and self._running.is_alive():
            raise TimeoutError("it has still not returned from an earlier request")
        after = self._result([copy.deepcopy(dict(message)) for message in messages])
        after = after.messages if isinstance(after, Trimmed) else after
        if not isinstance(after, list) or not after or not all(map(_is_message, after)):
            raise TypeError("it must return a list of messages, each an object with a role")
        if after == list(messages):
            return Trimmed(list(messages), None)
        return trimmed(self.name, messages, copy.deepcopy(after), count)

    def _result(self, messages: list[dict[str, Any]]) -> Any:
        outcome: list[Any] = []
        failure: list[Exception] = []

        def call() -> None:
            try:
                outcome.append(self.function(messages))
            except Exception as error:
                failure.append(error)
            except BaseException as error:  # it may even ask to exit
                failure.append(RuntimeError(f"it raised {type(error).__name__}"))

        self._running = threading.Thread(target=call, name=f"policy {self.name}", daemon=True)
        self._running.start()
        self._running.join(self.limit_s)
        if failure:
            raise failure[0]
        if not outcome:
            raise TimeoutError(f"it did not return within {self.limit_s:g} seconds")
        return outcome[0]


def _found(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not colon:
        found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        if not found:
            raise LookupError("there is no such entry point")
        return next(iter(found)).load()
    value: Any = importlib.import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    return value


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)

"""A user's own policy: any function from messages to messages, found by name and kept in check."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyline.errors import ConfigError
from leyline.message_cuts import Message
from leyline.trimming import Count, Messages, Trimmed, trimmed

ENTRY_POINT_GROUP = "leyline.policies"
MAX_CALLS = 16  # at a time
MAX_OVERDUE = 4


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


@dataclass(slots=True, eq=False)
class OwnPolicy:
    """A user's own function from messages to messages; obtained from `load_policy`.

    It is given a deep copy, and every call runs in a thread of its own, so that requests do not
    wait for one another. A call that has not returned after `limit_s` seconds counts as failed.
    Python cannot end its thread, so calls are limited: to `MAX_CALLS` at a time, beyond which a
    call waits within its own limit, and to none at all while `MAX_OVERDUE` are overdue.

    Attributes:
        name: As it was asked for.
        function: Takes a list of messages and returns one.
        limit_s: Seconds it may take.
    """

    name: str
    function: Callable[[list[dict[str, Any]]], Any]
    limit_s: float = 10.0
    _free: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(MAX_CALLS), init=False, repr=False
    )
    _overdue: list[threading.Thread] = field(default_factory=list, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __call__(self, messages: Messages, count: Count) -> Trimmed:
        """Return what the function returned.

        Raises:
            TimeoutError: If it takes too long, or earlier calls still do.
            TypeError: If it returns anything but a list of messages.
            Exception: Whatever it raised.
        """
        after = self._result(messages)
        if after == list(messages):
            return Trimmed(list(messages), None)
        return trimmed(self.name, messages, after, count)

    def _result(self, messages: Messages) -> list[Message]:
        """The function's messages, or what it raised, after `limit_s` at the latest."""
        deadline = time.monotonic() + self.limit_s
        call = _Call(self.function, [copy.deepcopy(dict(message)) for message in messages])
        thread = threading.Thread(
            target=self._run, args=(call,), name=f"policy {self.name}", daemon=True
        )
        self._start(thread)
        thread.join(max(deadline - time.monotonic(), 0))
        if not call.done:
            with self._lock:
                self._overdue.append(thread)
            raise TimeoutError(f"it did not return within {self.limit_s:g} seconds")
        return call.result()

    def _start(self, thread: threading.Thread) -> None:
        """Start a call when there is room for it, within the limit."""
        self._refuse_if_stuck()
        if not self._free.acquire(timeout=self.limit_s):
            raise TimeoutError(f"other calls took all of {self.limit_s:g} seconds")
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self._free.release()
            raise

    def _run(self, call: _Call) -> None:
        try:
            call.run()
        finally:
            self._free.release()

    def _refuse_if_stuck(self) -> None:
        with self._lock:
            self._overdue = [thread for thread in self._overdue if thread.is_alive()]
            if len(self._overdue) >= MAX_OVERDUE:
                raise TimeoutError(
                    f"{len(self._overdue)} earlier calls have still not returned; it is called "
                    "again when they have"
                )


def _found(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not colon:
        found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        if not found:
            raise LookupError("there is no such entry point")
        return next(iter(found)).load()
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script leaves out the folder that it is started in
        sys.path.insert(0, folder)
    value: Any = importlib.import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    return value


class _Call:
    """One call in a thread, and what became of it."""

    def __init__(self, function: Callable[[Any], Any], messages: list[dict[str, Any]]) -> None:
        self._function = function
        self._messages = messages
        self._after: list[Message] = []
        self._failure: Exception | None = None
        self.done = False

    def run(self) -> None:
        try:
            self._after = _checked(self._function(self._messages))
        except Exception as error:
            self._failure = error
        except BaseException as error:  # it may even ask to exit
            self._failure = RuntimeError(f"it raised {type(error).__name__}")
        self.done = True

    def result(self) -> list[Message]:
        """Its messages.

        Raises:
            Exception: What it raised.
        """
        if self._failure is not None:
            raise self._failure
        return self._after


def _checked(after: Any) -> list[Message]:
    """A copy of what the function returned, if it is what it should be."""
    after = after.messages if isinstance(after, Trimmed) else after
    if not isinstance(after, list) or not after or not all(map(_is_message, after)):
        raise TypeError("it must return a list of messages, each an object with a role")
    return [copy.deepcopy(dict(message)) for message in after]


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)

"""Policies that shorten histories, as an engine runs them: its own, a request's, and a user's."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline import Engine, SamplingParams
from leyline.errors import ConfigError, InvalidRequestError
from leyline.message_cuts import CLEARED_RESULT
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]
Messages = list[dict[str, Any]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
RESULT = "the weather in the land is 17 and rainy, the wind is north, and all is well " * 4
CLEAR = {
    "edits": [
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 1},
            "keep": {"type": "tool_uses", "value": 1},
        }
    ]
}
TRUNCATE = {"edits": [{"type": "truncate_older_than", "n": 1, "max_chars": 40}]}
NOTHING = {"edits": []}


@pytest.fixture
def policies() -> Iterator[types.ModuleType]:
    """A user's module."""
    module = types.ModuleType("policies_of_a_user")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def history() -> Messages:
    messages: Messages = [{"role": "user", "content": "find out about the weather"}]
    for index in range(3):
        call = {"id": f"c{index}", "function": {"name": "look", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
        content = f"{index}: {RESULT}"
        messages.append({"role": "tool", "tool_call_id": f"c{index}", "content": content})
    return messages


def test_an_engine_clears_by_its_own_policy(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), context_management=json.dumps(CLEAR)) as engine:
        trimmed, applied = engine.trim(history())
        contents = [message["content"] for message in trimmed if message["role"] == "tool"]
        assert contents[:2] == [CLEARED_RESULT] * 2 and RESULT in contents[2]
        (report,) = applied
        assert report["type"] == "clear_tool_uses_20250919" and report["cleared_tool_uses"] == 2
        whole = engine.tokenizer.encode(engine.tokenizer.render(history()))
        short = engine.tokenizer.encode(engine.tokenizer.render(trimmed))
        assert report["cleared_input_tokens"] == len(whole) - len(short) > 200


def test_a_notebook_turn_goes_through_the_policy(tiny_folder: Folder) -> None:
    lengths = {}
    for management in ("", json.dumps(CLEAR)):
        with tiny_engine(tiny_folder("v3"), context_management=management) as engine:
            chat = engine.session("s")
            chat.messages = history()
            lengths[management] = chat.chat("what is it?", GREEDY).usage.prompt_tokens
            assert (CLEARED_RESULT in chat.text) is bool(management)
            assert RESULT in chat.messages[2]["content"], "the client's own history is its own"
    assert lengths[json.dumps(CLEAR)] < lengths[""] - 200


def test_a_policy_and_a_splice_go_together(tiny_folder: Folder) -> None:
    """The paper's experiment: the policy trims, and the rows behind what it cut are carried."""
    management = json.dumps(TRUNCATE)
    with tiny_engine(
        tiny_folder("v3"), context_management=management, edit_mode="amortize", min_run=8
    ) as engine:
        chat = engine.session("s")
        chat.messages = history()[:3]
        chat.chat("go on", GREEDY)
        usage = chat.chat("and now?", GREEDY).usage
        assert "characters removed" in chat.text
        assert usage.spliced_tokens > 20 and usage.state == "spliced"


def test_a_requests_own_edits_replace_those_of_the_engine(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), context_management=json.dumps(CLEAR)) as engine:
        trimmed, applied = engine.trim(history(), TRUNCATE)
        assert [report["type"] for report in applied] == ["truncate_older_than"]
        assert "characters removed" in trimmed[2]["content"]
        untouched, applied = engine.trim(history(), NOTHING)
        assert untouched == history() and applied == []
        with pytest.raises(InvalidRequestError, match="edits"):
            engine.trim(history(), {"edits": 5})


def test_a_users_own_policy_runs_last(tiny_folder: Folder, policies: types.ModuleType) -> None:
    def shout(messages: Messages) -> Messages:
        messages[-1]["content"] = messages[-1]["content"].upper()
        return messages

    policies.shout = shout  # pyright: ignore[reportAttributeAccessIssue]
    with tiny_engine(
        tiny_folder("v3"),
        context_management=json.dumps(CLEAR),
        policy="policies_of_a_user:shout",
    ) as engine:
        sent = history()
        trimmed, applied = engine.trim(sent)
        assert trimmed[-1]["content"] == f"2: {RESULT}".upper()
        assert sent == history(), "it got a copy"
        assert [report["type"] for report in applied] == [
            "clear_tool_uses_20250919",
            "policies_of_a_user:shout",
        ]
        assert [report["type"] for report in engine.trim(sent, NOTHING)[1]] == [
            "policies_of_a_user:shout"
        ]
        chat = engine.session("s")
        chat.chat("hello in there", GREEDY)
        assert "HELLO IN THERE" in chat.text


def raises(_: Messages) -> Messages:
    raise ValueError("no idea what to do")


def returns_nonsense(_: Messages) -> Any:
    return "messages"


def empties(_: Messages) -> Messages:
    return []


def asks_to_exit(_: Messages) -> Messages:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, "ValueError: no idea what to do"),
        (returns_nonsense, "TypeError: it must return a list"),
        (empties, "TypeError: it must return a list"),
        (asks_to_exit, "RuntimeError: it raised SystemExit"),
    ],
)
def test_a_policy_that_fails_leaves_the_request_as_it_was_and_says_so(
    tiny_folder: Folder,
    policies: types.ModuleType,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[Messages], Any],
    said: str,
) -> None:
    policies.broken = function  # pyright: ignore[reportAttributeAccessIssue]
    with tiny_engine(tiny_folder("v3"), policy="policies_of_a_user:broken") as engine:
        trimmed, applied = engine.trim(history())
        assert trimmed == history()
        (report,) = applied
        assert report["type"] == "policies_of_a_user:broken"
        assert report["error"].startswith(said)
        assert "policies_of_a_user:broken failed" in caplog.text
        assert RESULT not in caplog.text
        chat = engine.session("s")
        assert chat.chat("hello in there", GREEDY).usage.completion_tokens == 4
        assert "hello in there" in chat.text


def test_a_policy_that_loops_is_left_behind(
    tiny_folder: Folder, policies: types.ModuleType
) -> None:
    forever = threading.Event()

    def loop(messages: Messages) -> Messages:
        forever.wait()
        return messages

    policies.loop = loop  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with tiny_engine(tiny_folder("v3"), policy="policies_of_a_user:loop") as engine:
            own = engine._own_policy
            assert own is not None
            own.limit_s = 0.05
            trimmed, applied = engine.trim(history())
            assert trimmed == history()
            assert applied[0]["error"] == "TimeoutError: it did not return within 0.05 seconds"
            assert engine.session("s").chat("hello", GREEDY).usage.completion_tokens == 4
    finally:
        forever.set()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"context_management": "{"}, "context_management"),
        (
            {"context_management": '{"edits": [{"type": "forget_all"}]}'},
            r"edits\[0\].type must be one of",
        ),
        ({"policy": "no_such_module_at_all:f"}, "no_such_module_at_all"),
        ({"policy": "json:no_such_function"}, "no_such_function"),
        ({"policy": "json:__name__"}, "not a function"),
        ({"policy": "no such entry point"}, "entry point"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_before_a_model_is_loaded(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        Engine(model="no/such/folder", progress=False, **options)
    assert "\n" not in str(caught.value)

"""A user's own policy: found by name, and kept in check whatever it does."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from leyline import own_policy as module
from leyline.errors import ConfigError
from leyline.own_policy import OwnPolicy, load_policy
from leyline.trimming import apply_policies, truncate_older_than
from tests.test_trimming import agent, count, shorten


class Hanging:
    """A policy that returns when it is released, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.release = threading.Event()

    def __call__(self, messages: Any) -> Any:
        self.calls += 1
        self.release.wait(60)
        return messages[1:]


def fail(_: Any) -> Any:
    raise RuntimeError("no more threads")


class TestOwnPolicy:
    def test_what_it_returns_goes_to_the_model(self):
        messages = agent("rr")
        after, report = OwnPolicy("mine", shorten)(messages, count)
        assert [message["content"] for message in after] == ["short"] * 5
        assert report == {
            "type": "mine",
            "cleared_input_tokens": count(messages) - count(after),
        }

    def test_one_that_changes_nothing_reports_nothing(self):
        messages = agent("r")
        after, report = OwnPolicy("mine", lambda messages: messages)(messages, count)
        assert report is None
        assert all(a is b for a, b in zip(after, messages, strict=True))

    def test_a_ready_made_one_may_be_named(self):
        policy = load_policy("leyline.trimming:truncate_older_than")
        assert policy(agent(), count).messages == truncate_older_than(agent()).messages

    @pytest.mark.parametrize("wrong", [None, [], "x", {}, [1], [{}], [{"role": 3}], agent])
    def test_anything_but_messages_is_refused(self, wrong):
        with pytest.raises(TypeError, match="list of messages"):
            OwnPolicy("mine", lambda _: wrong)(agent(), count)

    def test_what_it_changes_afterwards_is_its_own(self):
        given: list[Any] = []
        policy = OwnPolicy("mine", lambda messages: given.extend(messages[1:]) or messages[1:])
        after, _ = policy(agent("r"), count)
        given[0]["content"] = "changed later"
        assert after[0]["content"] != "changed later"

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
    def test_it_cannot_end_the_process(self, error):
        def leave(_: Any) -> Any:
            raise error

        _, edits = apply_policies(agent(), [OwnPolicy("mine", leave)], count)
        assert edits == [{"type": "mine", "error": f"RuntimeError: it raised {error.__name__}"}]

    def test_calls_do_not_wait_for_one_another(self):
        both = threading.Barrier(2)

        def meet(messages: Any) -> Any:
            both.wait(60)
            return messages[1:]

        policy = OwnPolicy("mine", meet, limit_s=60)
        with ThreadPoolExecutor(2) as pool:
            after = list(pool.map(lambda _: policy(agent(), count).messages, range(2)))
        assert after == [agent()[1:]] * 2

    def test_one_call_at_a_time_would_not_let_them_meet(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_CALLS", 1)
        both = threading.Barrier(2)

        def meet(messages: Any) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.05)
            return messages[1:]

        policy = OwnPolicy("mine", meet, limit_s=60)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: policy(agent(), count), range(2)))
        assert both.broken

    def test_calls_that_loop_are_left_behind_until_there_are_too_many(self):
        hang = Hanging()
        policy = OwnPolicy("mine", hang, limit_s=0.01)
        messages = agent()
        for number in range(module.MAX_OVERDUE + 2):
            after, edits = apply_policies(messages, [policy], count)
            assert after == messages
            looping = number < module.MAX_OVERDUE
            expected = "did not return within 0.01 seconds" if looping else "still not returned"
            assert expected in edits[0]["error"]
        assert hang.calls == module.MAX_OVERDUE
        hang.release.set()
        for thread in policy._overdue:
            thread.join()
        policy.limit_s = 60
        assert policy(messages, count).messages == messages[1:]

    def test_however_many_requests_come_at_once_the_threads_are_bounded(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_CALLS", 3)
        hang = Hanging()
        policy = OwnPolicy("mine", hang, limit_s=0.05)
        with ThreadPoolExecutor(8) as pool:
            edits = list(pool.map(lambda _: apply_policies(agent(), [policy], count)[1], range(8)))
        assert all("TimeoutError" in edit[0]["error"] for edit in edits)
        assert hang.calls <= 3
        hang.release.set()

    def test_a_call_that_cannot_begin_takes_no_room(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_CALLS", 1)
        policy = OwnPolicy("mine", shorten, limit_s=60)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            broken: Any
            for broken in ([object()], agent()):
                with pytest.raises((TypeError, RuntimeError)):
                    policy(broken, count)
        assert policy(agent("rr"), count).report is not None


class TestLoadPolicy:
    @pytest.fixture(autouse=True)
    def their_module(self, monkeypatch):
        theirs = types.ModuleType("their_policies")
        theirs.__dict__.update(shorten=shorten, number=3, Names=types.SimpleNamespace(deep=shorten))
        monkeypatch.setitem(sys.modules, "their_policies", theirs)

    @pytest.mark.parametrize("path", ["shorten", "Names.deep"])
    def test_module_and_function(self, path):
        policy = load_policy(f"their_policies:{path}", limit_s=3)
        assert (policy.name, policy.function, policy.limit_s) == (
            f"their_policies:{path}",
            shorten,
            3,
        )

    def test_entry_point(self, monkeypatch):
        from importlib import metadata

        point = metadata.EntryPoint("brief", "their_policies:shorten", "leyline.policies")

        def entry_points(**wanted: str) -> list[metadata.EntryPoint]:
            return [point] if wanted == {"group": point.group, "name": point.name} else []

        monkeypatch.setattr(metadata, "entry_points", entry_points)
        assert load_policy("brief").function is shorten
        with pytest.raises(ConfigError, match="no such entry point"):
            load_policy("other")

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("no_such_module_here:f", "No module named"),
            ("their_policies:missing", "no attribute 'missing'"),
            ("their_policies:", "AttributeError"),
            (":shorten", "ValueError"),
            (".relative:f", "TypeError"),
            ("", "no such entry point"),
            ("nobody", "no such entry point"),
            ("their_policies:number", "of type int, not a function"),
            (None, "AttributeError"),
        ],
    )
    def test_one_that_cannot_be_had(self, name, reason):
        with pytest.raises(ConfigError, match="The policy") as caught:
            load_policy(name)
        assert reason in caught.value.message
        assert caught.value.param == "policy"

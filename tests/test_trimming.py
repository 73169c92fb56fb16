"""Policies over messages: what each changes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.errors import InvalidRequestError
from leyline.message_cuts import CLEARED_RESULT
from leyline.own_policy import OwnPolicy
from leyline.trimming import (
    MARKER_ROOM,
    ClearThinking,
    ClearToolUses,
    Threshold,
    TruncateOlderThan,
    apply_policies,
    clear_thinking,
    clear_tool_uses,
    described,
    from_wire,
    trim_messages,
    truncate_older_than,
)

LONG = "".join(chr(ord("a") + i % 26) for i in range(1000))
NOW = {"type": "tool_uses", "value": 0}  # a trigger that any tool use exceeds


def count(messages: Any) -> int:
    """A token for four characters, as rough as it is simple."""
    return len(json.dumps(list(messages))) // 4


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def use(number: int, tool: str = "read", **fields: Any) -> list[dict[str, Any]]:
    """A call and its result."""
    function = {"name": tool, "arguments": json.dumps({"path": f"file-{number}"})}
    call = {"id": f"call-{number}", "type": "function", "function": function}
    return [
        say("assistant", None, tool_calls=[call], **fields),
        say("tool", f"{number}: {LONG}", tool_call_id=f"call-{number}"),
    ]


def agent(tools: str = "rrrrr") -> list[dict[str, Any]]:
    """A task and a use a letter: r reads, w writes."""
    names = {"r": "read", "w": "write"}
    uses = [message for i, letter in enumerate(tools) for message in use(i, names[letter])]
    return [say("system", LONG), say("user", "Task: " + LONG), *uses]


def results(messages: Any) -> list[Any]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def cleared(messages: Any) -> list[int]:
    return [at for at, content in enumerate(results(messages)) if content == CLEARED_RESULT]


class TestTruncateOlderThan:
    def test_only_what_is_older_than_the_last_turns_is_cut(self):
        messages = agent()
        after, report = truncate_older_than(messages)
        short = [len(content) < 250 for content in results(after)]
        assert short == [True, True, True, False, False]
        assert report == {"type": "truncate_older_than", "truncated_messages": 3}
        same = [a is b for a, b in zip(messages, after, strict=True)]
        assert same == [True, True, *[True, False] * 3, *[True] * 4]

    def test_head_and_tail_stand_around_the_number_that_is_missing(self):
        text = truncate_older_than([say("user", "x"), say("tool", LONG)], 0, 201).messages[1]
        marker = "[... 799 characters removed ...]"
        assert text["content"] == LONG[:101] + marker + LONG[-100:]

    def test_nothing_may_be_left_but_the_marker(self):
        after, _ = truncate_older_than([say("user", "x"), say("tool", LONG)], 0, 0)
        assert after[1]["content"] == "[... 1000 characters removed ...]"

    @pytest.mark.parametrize(("extra", "cut"), [(MARKER_ROOM, False), (MARKER_ROOM + 1, True)])
    def test_a_marker_that_would_eat_the_gain_is_not_put_in(self, extra, cut):
        messages = [say("user", "x"), say("tool", "y" * (200 + extra))]
        after, report = truncate_older_than(messages, 0)
        assert (report is not None) is cut
        assert len(after[1]["content"]) <= len(messages[1]["content"])

    def test_instructions_and_the_task_stay_and_later_words_of_the_user_do_not(self):
        roles = ["system", "developer", "user", "assistant", "user", "tool", "function"]
        after, _ = truncate_older_than([say(role, LONG) for role in roles], 0)
        assert [m["role"] for m in after if m["content"] == LONG] == ["system", "developer", "user"]

    @pytest.mark.parametrize(("n", "full"), [(0, 0), (1, 1), (4, 4), (5, 5), (6, 5), (999, 5)])
    def test_n_counts_turns(self, n, full):
        after, report = truncate_older_than(agent(), n)
        assert sum(len(content) > 900 for content in results(after)) == full
        assert (report is None) is (full == 5)

    def test_parts_are_cut_one_by_one_and_others_left_alone(self):
        image = {"type": "image_url", "image_url": {"url": LONG}}
        parts = [{"type": "text", "text": LONG}, image, {"type": "text", "text": "short"}]
        after, _ = truncate_older_than([say("user", "x"), say("tool", parts)], 0)
        cut, same, short = after[1]["content"]
        assert len(cut["text"]) < 250
        assert (same, short) == (image, parts[2])

    def test_tokens_are_reported_if_they_can_be_counted(self):
        messages = agent()
        after, report = truncate_older_than(messages, count=count)
        assert report is not None
        assert report["cleared_input_tokens"] == count(messages) - count(after) > 500

    @given(st.integers(0, 4), st.integers(0, 300), st.lists(st.text(max_size=400), max_size=6))
    @settings(max_examples=100, deadline=None)
    def test_twice_is_once_and_no_text_grows(self, n, max_chars, texts):
        roles = ["user", "assistant", "tool"] * 2
        messages = [say(role, text) for role, text in zip(roles, texts, strict=False)]
        once, _ = truncate_older_than(messages, n, max_chars)
        twice, report = truncate_older_than(once, n, max_chars)
        assert (twice, report) == (once, None)
        pairs = zip(messages, once, strict=True)
        assert all(len(b["content"]) <= len(a["content"]) for a, b in pairs)

    def test_a_cut_that_counts_wrong_is_noticed(self):
        marker = "[... 800 characters removed ...]"
        after, _ = truncate_older_than([say("user", "x"), say("tool", LONG)], 0)
        assert after[1]["content"] == LONG[:100] + marker + LONG[-100:]
        assert after[1]["content"] != LONG[:99] + marker + LONG[-101:]


class TestClearToolUses:
    def test_nothing_happens_up_to_the_trigger(self):
        messages = agent()
        tokens = count(messages)
        for value, fires in [(tokens, False), (tokens - 1, True)]:
            trigger = {"type": "input_tokens", "value": value}
            after, report = clear_tool_uses(messages, count, trigger=trigger)
            assert (report is not None) is fires
            assert cleared(after) == ([0, 1] if fires else [])
        for value, fires in [(5, False), (4, True)]:
            trigger = {"type": "tool_uses", "value": value}
            assert (clear_tool_uses(messages, count, trigger=trigger).report is not None) is fires

    def test_without_a_trigger_it_is_100_000_tokens(self):
        messages = agent()
        assert clear_tool_uses(messages, lambda _: 100_000).report is None
        assert clear_tool_uses(messages, lambda _: 100_001).report is not None

    def test_the_report_counts_uses_and_tokens(self):
        messages = agent()
        after, report = clear_tool_uses(messages, count, trigger=NOW)
        assert report is not None
        assert report == {
            "type": "clear_tool_uses_20250919",
            "cleared_tool_uses": 2,
            "cleared_input_tokens": count(messages) - count(after),
        }
        assert report["cleared_input_tokens"] > 400

    @pytest.mark.parametrize(("keep", "gone"), [(0, 5), (1, 4), (5, 0), (9, 0)])
    def test_the_last_uses_are_kept(self, keep, gone):
        limit = {"type": "tool_uses", "value": keep}
        after, report = clear_tool_uses(agent(), count, trigger=NOW, keep=limit)
        assert cleared(after) == list(range(gone))
        assert (report is None) is (gone == 0)

    def test_excluded_tools_are_never_cleared_but_count_as_kept(self):
        keep = {"type": "tool_uses", "value": 2}
        messages = agent("wrwrw")
        after, _ = clear_tool_uses(messages, count, trigger=NOW, keep=keep, exclude_tools=["write"])
        assert cleared(after) == [1]

    def test_too_small_a_gain_is_not_worth_it(self):
        messages = agent()
        tokens = clear_tool_uses(messages, count, trigger=NOW).report
        assert tokens is not None
        for more, fires in [(0, True), (1, False)]:
            least = {"type": "input_tokens", "value": tokens["cleared_input_tokens"] + more}
            after, report = clear_tool_uses(messages, count, trigger=NOW, clear_at_least=least)
            assert (report is not None) is fires
            assert (after == messages) is not fires

    @pytest.mark.parametrize(
        ("inputs", "emptied"), [(None, 0), (False, 0), (True, 2), (["write"], 1), ([], 0)]
    )
    def test_inputs_are_cleared_if_asked(self, inputs, emptied):
        after, report = clear_tool_uses(
            agent("rwrrr"), count, trigger=NOW, clear_tool_inputs=inputs
        )
        calls = [call["function"] for m in after for call in m.get("tool_calls", ())]
        assert [call["arguments"] for call in calls].count("{}") == emptied
        assert report is not None
        assert report["cleared_tool_uses"] == 2

    def test_one_of_several_calls_of_a_message(self):
        (first, one), (second, two) = use(1), use(2)
        caller = say("assistant", "Both.", tool_calls=[*first["tool_calls"], *second["tool_calls"]])
        keep = {"type": "tool_uses", "value": 1}
        messages = [say("user", "x"), caller, one, two]
        after, _ = clear_tool_uses(messages, count, trigger=NOW, keep=keep, clear_tool_inputs=True)
        assert cleared(after) == [0]
        arguments = [call["function"]["arguments"] for call in after[1]["tool_calls"]]
        assert arguments == ["{}", '{"path": "file-2"}']

    def test_arguments_that_are_an_object_stay_one(self):
        messages = agent("rrrr")
        messages[2]["tool_calls"][0]["function"]["arguments"] = {"path": "x"}
        after, _ = clear_tool_uses(messages, count, trigger=NOW, clear_tool_inputs=True)
        assert after[2]["tool_calls"][0]["function"]["arguments"] == {}

    def test_an_id_used_twice_means_the_latest_call(self):
        messages = [say("user", "x"), *use(1, "read"), *use(1, "write")]
        keep = {"type": "tool_uses", "value": 0}
        after, _ = clear_tool_uses(
            messages, count, trigger=NOW, keep=keep, exclude_tools=["read"], clear_tool_inputs=True
        )
        assert cleared(after) == [1]
        assert after[1] is messages[1]
        assert after[3]["tool_calls"][0]["function"]["arguments"] == "{}"

    def test_a_result_without_a_call_goes_by_its_own_name(self):
        messages = [say("function", LONG, name="old"), say("tool", LONG), say("user", "x")]
        keep = {"type": "tool_uses", "value": 0}
        after, _ = clear_tool_uses(messages, count, trigger=NOW, keep=keep, exclude_tools=["old"])
        assert [m["content"] for m in after] == [LONG, CLEARED_RESULT, "x"]

    @pytest.mark.parametrize("content", ["", "ok", None, [], CLEARED_RESULT])
    def test_a_result_shorter_than_the_placeholder_stays(self, content):
        messages = agent("r")
        messages[-1]["content"] = content
        keep = {"type": "tool_uses", "value": 0}
        assert clear_tool_uses(messages, count, trigger=NOW, keep=keep).report is None

    def test_twice_is_once(self):
        once, _ = clear_tool_uses(agent(), count, trigger=NOW, clear_tool_inputs=True)
        twice, report = clear_tool_uses(once, count, trigger=NOW, clear_tool_inputs=True)
        assert (twice, report) == (once, None)


class TestClearThinking:
    def messages(self) -> list[dict[str, Any]]:
        """Three turns: two thoughts in the first, none in the second, one in the third."""
        first = use(1, reasoning_content="hm")
        return [
            say("user", "a"),
            *first,
            say("assistant", "<think>so</think>\n\nDone."),
            say("user", "b"),
            say("assistant", "Yes."),
            say("user", "c"),
            say("assistant", "Well.", reasoning="ah"),
        ]

    def test_the_last_turn_that_thinks_keeps_its_thoughts(self):
        messages = self.messages()
        after, report = clear_thinking(messages, count)
        assert "reasoning_content" not in after[1]
        assert after[1]["tool_calls"] == messages[1]["tool_calls"]
        assert after[3]["content"] == "Done."
        assert all(after[at] is messages[at] for at in (0, 2, 4, 5, 6, 7))
        assert report == {
            "type": "clear_thinking_20251015",
            "cleared_thinking_turns": 1,
            "cleared_input_tokens": count(messages) - count(after),
        }

    @pytest.mark.parametrize(
        ("keep", "turns"),
        [
            (None, 1),
            ("all", 0),
            ({"type": "all"}, 0),
            ({"type": "thinking_turns", "value": 1}, 1),
            ({"type": "thinking_turns", "value": 2}, 0),
        ],
    )
    def test_keep(self, keep, turns):
        report = clear_thinking(self.messages(), count, keep=keep).report
        assert (report or {"cleared_thinking_turns": 0})["cleared_thinking_turns"] == turns

    def test_none_may_be_kept_from_python(self):
        after, report = ClearThinking(0)(self.messages(), count)
        assert report is not None
        assert report["cleared_thinking_turns"] == 2
        assert after[-1] == say("assistant", "Well.")

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("<think>a</think>b", "b"),
            ("a <think>b</think>\n c <think>d</think>", "a c "),
            ("<think>a <think>b</think> c</think> d", "c</think> d"),
            ("<think>never closed", "<think>never closed"),
            ("closed</think> only", "closed</think> only"),
            ("<think></think>", ""),
        ],
    )
    def test_think_tags(self, text, left):
        after, report = ClearThinking(0)([say("user", "x"), say("assistant", text)], count)
        assert after[1]["content"] == left
        assert (report is None) is (text == left)

    def test_many_tags_take_no_more_than_one_pass(self):
        # Quadratic code would take hours here, and the test's time limit would end it.
        for text in ("<think>" * 200_000, "<think></think> " * 200_000):
            ClearThinking(0)([say("assistant", text)], lambda _: 0)

    def test_parts(self):
        parts = [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "<think>so</think>Done."},
        ]
        after, _ = ClearThinking(0)([say("assistant", parts)], count)
        assert after[0]["content"] == [{"type": "text", "text": "Done."}]

    def test_only_the_assistant_thinks(self):
        messages = [say("user", "<think>a</think>b", reasoning="c"), say("assistant", None)]
        assert ClearThinking(0)(messages, count) == (messages, None)

    def test_an_empty_field_is_no_thought(self):
        messages = [say("assistant", "a", reasoning_content=None, reasoning="")]
        after, report = ClearThinking(0)(messages, count)
        assert after[0] is messages[0]
        assert report is None


class TestFromWire:
    def test_nothing_asked_is_nothing_done(self):
        for empty in (None, {}, {"edits": None}, {"edits": []}):
            assert from_wire(empty) == []

    def test_every_field(self):
        edits = [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 9},
                "keep": {"type": "tool_uses", "value": 4},
                "clear_at_least": {"type": "input_tokens", "value": 5000},
                "exclude_tools": ["search"],
                "clear_tool_inputs": ["write"],
            },
            {"type": "truncate_older_than", "n": 3, "max_chars": 50},
        ]
        assert from_wire({"edits": edits}) == [
            ClearThinking(2),
            ClearToolUses(Threshold("tool_uses", 9), 4, 5000, ("search",), ("write",)),
            TruncateOlderThan(3, 50),
        ]

    def test_defaults_also_for_null(self):
        full = {
            "clear_tool_uses_20250919": [
                *("trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs")
            ],
            "clear_thinking_20251015": ["keep"],
            "truncate_older_than": ["n", "max_chars"],
        }
        default = [ClearToolUses(), ClearThinking(), TruncateOlderThan()]
        assert from_wire({"edits": [{"type": kind} for kind in full]}) == default
        nulls = [{"type": kind, **dict.fromkeys(names)} for kind, names in full.items()]
        assert from_wire({"edits": nulls}) == default

    @pytest.mark.parametrize("wrong", [[], "edits", 3, True, {"edit": []}, {"edits": {}}])
    def test_a_malformed_whole(self, wrong):
        self.refused(wrong, "context_management")

    @pytest.mark.parametrize("edits", ["x", 1, {}, True, [{}] * 17])
    def test_malformed_edits(self, edits):
        self.refused({"edits": edits}, "context_management.edits")

    @pytest.mark.parametrize(
        "edit", [None, 1, [], {}, {"type": None}, {"type": ["x"]}, {"type": "compact_20260112"}]
    )
    def test_an_unknown_type(self, edit):
        error = self.refused({"edits": [edit]}, "context_management.edits[0].type")
        assert "clear_tool_uses_20250919, clear_thinking_20251015" in error.message

    @pytest.mark.parametrize(
        "kind", ["clear_tool_uses_20250919", "clear_thinking_20251015", "truncate_older_than"]
    )
    def test_an_unknown_field(self, kind):
        edit = {"type": kind, "\ud800" * 5000: 1}
        error = self.refused({"edits": [edit]}, "context_management.edits[0]")
        assert len(error.message.encode()) < 700  # and it can be encoded

    @pytest.mark.parametrize(
        "value",
        [
            *(0, 3, -1, 1.5, float("nan"), True, "3", [], {}),
            {"type": "input_tokens"},
            {"type": "seconds", "value": 3},
            {"type": ["input_tokens"], "value": 3},
            *({"type": "input_tokens", "value": v} for v in (-1, 1.5, float("nan"), True, "3", [])),
            {"type": "input_tokens", "value": 3, "unit": "k"},
        ],
    )
    @pytest.mark.parametrize("name", ["trigger", "keep", "clear_at_least"])
    def test_a_malformed_threshold(self, name, value):
        edit = {"type": "clear_tool_uses_20250919", name: value}
        self.refused({"edits": [{"type": "truncate_older_than"}, edit]}, f"edits[1].{name}")

    def test_each_threshold_has_its_own_kinds(self):
        tokens, uses = {"type": "input_tokens", "value": 1}, {"type": "tool_uses", "value": 1}
        for name, wrong in (("keep", tokens), ("clear_at_least", uses)):
            edit = {"type": "clear_tool_uses_20250919", name: wrong}
            self.refused({"edits": [edit]}, f"edits[0].{name}.type")

    @pytest.mark.parametrize("name", ["exclude_tools", "clear_tool_inputs"])
    @pytest.mark.parametrize("value", ["read", 1, {}, ["read", 1], [None], [["read"]]])
    def test_malformed_names(self, name, value):
        edit = {"type": "clear_tool_uses_20250919", name: value}
        self.refused({"edits": [edit]}, f"edits[0].{name}")

    @pytest.mark.parametrize(
        "value", ["none", 1, True, [], {"type": "thinking_turns", "value": 0}, {"type": "some"}]
    )
    def test_malformed_thinking(self, value):
        edit = {"type": "clear_thinking_20251015", "keep": value}
        self.refused({"edits": [edit]}, "edits[0].keep")

    @pytest.mark.parametrize("name", ["n", "max_chars"])
    @pytest.mark.parametrize("value", [-1, 1.0, float("nan"), True, "2", [2], {}])
    def test_malformed_numbers(self, name, value):
        edit = {"type": "truncate_older_than", name: value}
        self.refused({"edits": [edit]}, f"edits[0].{name}")
        with pytest.raises(InvalidRequestError, match=name):
            truncate_older_than(agent(), **{name: value})

    def refused(self, wrong: Any, param: str) -> InvalidRequestError:
        with pytest.raises(InvalidRequestError) as caught:
            from_wire(wrong)
        assert param in (caught.value.param or "")
        assert caught.value.status == 400
        return caught.value


def shorten(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A policy that changes what it is given, as a careless one would."""
    for message in messages:
        message["content"] = "short"
    messages.pop()
    return messages


def fail(messages: list[dict[str, Any]]) -> Any:
    shorten(messages)
    raise KeyError("missing")


class TestApplyPolicies:
    def test_one_after_the_other(self):
        messages = agent()
        policies = [ClearToolUses(Threshold("tool_uses", 0)), TruncateOlderThan()]
        after, edits = apply_policies(messages, policies, count)
        assert [edit["type"] for edit in edits] == [policy.name for policy in policies]
        assert cleared(after) == [0, 1]
        assert sum(len(content) > 900 for content in results(after)) == 2
        assert sum(e["cleared_input_tokens"] for e in edits) == count(messages) - count(after)

    def test_no_policies_and_none_that_does_anything(self):
        messages = agent("r")
        for policies in ([], [ClearThinking(), ClearToolUses(), TruncateOlderThan()]):
            after, edits = apply_policies(messages, policies, count)
            assert all(a is b for a, b in zip(after, messages, strict=True))
            assert edits == []

    def test_one_that_fails_costs_its_edit_and_no_other(self):
        messages = agent()
        policies = [OwnPolicy("mine", fail), TruncateOlderThan()]
        after, edits = apply_policies(messages, policies, count)
        assert edits[0] == {"type": "mine", "error": "KeyError: 'missing'"}
        assert after == truncate_older_than(messages).messages
        assert edits[1]["truncated_messages"] == 3

    @pytest.mark.parametrize("broken", [[3], [{"role": "tool", "tool_call_id": []}], [None]])
    def test_malformed_messages_are_the_requests_own_fault(self, broken):
        policies = [ClearToolUses(Threshold("tool_uses", 0)), ClearThinking(), TruncateOlderThan(0)]
        after, _ = apply_policies(broken, policies, lambda _: 0)
        assert after == broken

    def test_a_count_that_raises_is_a_policy_that_raises(self):
        def refuse(_: Any) -> int:
            raise InvalidRequestError("The template refused." + "x" * 2000)

        messages = agent()
        after, edits = apply_policies(messages, [ClearToolUses()], refuse)
        assert after == messages
        assert edits[0]["error"].startswith("InvalidRequestError: The template refused.")
        assert len(edits[0]["error"]) == 500

    def test_messages_are_never_mutated(self):
        messages = [*agent("rwrwr"), say("assistant", "<think>a</think>b", reasoning="c")]
        before = copy.deepcopy(messages)
        policies = [
            OwnPolicy("mine", shorten),
            OwnPolicy("broken", fail),
            ClearThinking(0),
            ClearToolUses(Threshold("tool_uses", 0), 0, clear_tool_inputs=True),
            TruncateOlderThan(0, 0),
        ]
        for policy in policies:
            apply_policies(messages, [policy], count)
            assert messages == before


class TestTrimMessages:
    DEFAULTS = (TruncateOlderThan(),)

    def types(self, edits: Any, own: Any = None, defaults: Any = DEFAULTS) -> list[str]:
        _, reports = trim_messages(agent(), edits, defaults, own, count)
        return [report["type"] for report in reports]

    def test_the_servers_defaults_hold_unless_the_request_says_otherwise(self):
        asked = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": NOW}]}
        assert self.types(None) == ["truncate_older_than"]
        assert self.types(asked) == ["clear_tool_uses_20250919"]
        assert self.types({"edits": []}) == self.types({}) == []

    def test_a_users_own_policy_runs_last_whoever_chose_the_others(self):
        own = OwnPolicy("mine", shorten)
        assert self.types(None, own) == ["truncate_older_than", "mine"]
        assert self.types({"edits": []}, own) == ["mine"]
        assert self.types(None, OwnPolicy("mine", fail)) == ["truncate_older_than", "mine"]

    def test_what_is_malformed_is_the_requests_fault_and_not_a_failed_policy(self):
        with pytest.raises(InvalidRequestError, match="context_management"):
            self.types({"edits": 3})

    def test_the_log_names_a_policy_that_fails_and_does_not_quote_the_user(self, caplog):
        def quote(messages: Any) -> Any:
            raise ValueError(messages[1]["content"])

        with caplog.at_level(logging.WARNING, "leyline.trimming"):
            assert self.types(None, OwnPolicy("mine", quote)) == ["truncate_older_than", "mine"]
        (record,) = caplog.records
        assert "mine failed (ValueError)" in record.getMessage()
        assert LONG[:20] not in record.getMessage()


class TestDescribed:
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (ValueError("a\nb\x00c\ud800d\u2028e"), "ValueError: a b c d e"),
            (ValueError(), "ValueError"),
            (KeyError("x" * 600), "KeyError: '" + "x" * 489),
        ],
    )
    def test_one_bounded_line_of_valid_text(self, error, text):
        assert described(error) == text
        described(error).encode()

    def test_an_error_that_cannot_be_printed_has_a_type(self):
        class Silent(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        assert described(Silent()) == "Silent"

"""Which replies a request's form, tools and reasoning let a model write, character by character."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from leyline.errors import InvalidRequestError, LeylineError
from leyline.sampling import Constraint
from leyline.server import constraints
from leyline.server.ask import OutputForm
from leyline.server.constraints import Constraints, Start, Without
from leyline.server.parsers.choosing import choose
from leyline.server.parsers.pieces import ToolUse
from leyline.server.schema_check import without_notes

from .fake_engine import FakeTemplate, FakeTokenizer

pytestmark = pytest.mark.anyio

PLAIN = FakeTemplate().source
THINKS = PLAIN + "<think>"
END = "\0"
YES = OutputForm("choice", ["yes", "no"])
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1]}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("f", "g")
)


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>'


def made(source: str = PLAIN) -> Constraints:
    tokenizer: Any = FakeTokenizer(FakeTemplate(source))
    return Constraints(tokenizer, choose(source))


def lets(constraint: Constraint, text: str) -> bool:
    """Whether every character of a text is allowed behind those in front of it."""
    ids = list(map(ord, text))
    for at, token in enumerate(ids):
        try:
            mask = constraint.allowed(ids[:at])
        except LeylineError:
            return False
        if not mask[token // 32] >> (token % 32) & 1:
            return False
    return True


def check(start: Start | None, good: list[str], bad: list[str]) -> None:
    assert start is not None
    one = start()
    for text in good:  # one constraint may be asked about another reply: it starts over
        assert lets(one, text + END), text
        assert lets(start(), text + END), text
    for text in bad:
        assert not lets(start(), text + END), text


async def test_a_form() -> None:
    check(await made().of_text(YES), ["yes", "no"], ["", "ye", "yess", " yes"])
    check(await made().of_reply(YES, ToolUse(), ""), ["yes"], ["maybe"])
    assert await made().of_text(None) is None
    assert await made().of_reply(None, ToolUse(TOOLS), "") is None


async def test_calls_that_are_demanded() -> None:
    use = ToolUse(TOOLS, "required")
    both = call("f") + "\n" + call("g")
    check(await made().of_reply(None, use, ""), [call("f"), both], ["", "hi", call("h")])
    named = ToolUse(TOOLS, "required", "g", parallel=False)
    check(await made().of_reply(None, named, ""), [call("g")], [call("f"), both])


async def test_a_form_where_tools_may_be_called() -> None:
    start = await made().of_reply(YES, ToolUse(TOOLS), "")
    check(start, ["yes", "no", call("f")], ["", "hi", "<tool_call>yes", "yes" + call("f")])
    none = await made().of_reply(YES, ToolUse(TOOLS, "none"), "")
    check(none, ["yes"], [call("f")])
    demanded = await made().of_reply(YES, ToolUse(TOOLS, "required"), "")
    check(demanded, [call("f")], ["yes"])


async def test_reasoning_is_free() -> None:
    inside = await made(THINKS).of_reply(YES, ToolUse(), "assistant\n<think>\n")
    check(inside, ["any thing</think>yes", "</think>no"], ["a</think>b"])
    may = await made(THINKS).of_reply(YES, ToolUse(TOOLS), "assistant\n")
    thought = "<think>hm</think>"
    check(
        may,
        ["yes", f"{thought}yes", call("f"), thought + call("f")],
        ["hm", f"{thought}hm", f"hm{thought}yes"],
    )
    done = await made(THINKS).of_reply(YES, ToolUse(), "assistant\n<think></think>")
    check(done, ["yes"], [f"{thought}yes"])


async def test_tools_that_cannot_be_enforced_are_named() -> None:
    strict = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    use = ToolUse(({"type": "function", "function": strict},), "required")
    with pytest.raises(InvalidRequestError) as error:
        await made().of_reply(None, use, "")
    assert error.value.param == "tools"


def test_what_is_said_to_people_is_not_compiled() -> None:
    inner = {"type": "string", "minLength": 1}
    noted = {"description": "x" * 9, "title": "t", "default": 5, "$comment": "c"}
    named = {"description": inner | noted, "title": {"enum": [{"title": 1}]}}
    schema = {"type": "object", "properties": named, "items": [noted | inner], **noted}
    assert without_notes(schema) == {
        "type": "object",
        "properties": {"description": inner, "title": {"enum": [{"title": 1}]}},
        "items": [inner],
    }


async def test_tools_that_are_described_at_length_can_be_demanded() -> None:
    function = TOOLS[0]["function"]
    long = {"type": "object", "properties": {"a": {"enum": [1], "description": "x" * 70_000}}}
    tool = {"type": "function", "function": function | {"description": "y" * 70_000}}
    tool["function"]["parameters"] = function["parameters"] | long
    use = ToolUse((tool,), "required", parallel=False)
    check(await made().of_reply(None, use, ""), [call("f")], [call("g")])
    form = OutputForm("json_schema", {"enum": [1], "description": "x" * 70_000})
    check(await made().of_text(form), ["1"], ["2"])


async def test_row_130_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_SECONDS", 0.01)
    ours, release = made(), threading.Event()
    monkeypatch.setattr(ours._grammars, "compile", lambda *_: release.wait())
    with pytest.raises(InvalidRequestError, match="compile"):
        await ours.of_text(YES)
    release.set()


async def test_a_reply_that_may_not_call_says_anything_but_what_calls_begin_with() -> None:
    use = ToolUse(TOOLS, "none")
    start = await made().without_calls(use)
    assert start is not None and await made().without_calls(ToolUse((), "none")) is None
    assert await made().without_calls(ToolUse(TOOLS)) is None
    for text in ("", "a < b", "<tool_call", "<tool_<tool_", "<tool_response>", "é\n{}"):
        assert lets(start(), text + END), text
    for text in ("<tool_call>", "a<<tool_call>", call("f"), "<tool_<tool_call>"):
        assert not lets(start(), text), text


def test_tokens_that_have_a_text_in_them_or_finish_it_are_not_allowed() -> None:
    words = [b"a", b"ab", b"b", b"bc", b"c", b"xabcx", b"cab", b"bca", b"abc"]

    class Words:
        vocab_size = len(words)

        def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
            return words[token_id]

    constraint = Without(["abc", "cc"], Words())  # type: ignore[arg-type]
    for length in range(4):
        for ids in itertools.product(range(len(words)), repeat=length):
            before = b"".join(words[one] for one in ids)
            if b"abc" in before or b"cc" in before:
                continue
            (mask,) = constraint.allowed(ids)
            for one, word in enumerate(words):
                expected = b"abc" not in before + word and b"cc" not in before + word
                assert bool(int(mask) >> one & 1) is expected, (before, word)

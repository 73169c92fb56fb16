"""Long replies in small pieces cost what is in them, and not its square.

What is counted is every character that is copied into the buffer, searched, or stepped over: no
clock. The replies are those in which a parser has most to hold back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leyline.server.parsers import json_text, source
from tests.server.parsers.corpus import DEEPSEEK_CALL, DEEPSEEK_CALLS, Case, glm, hermes, qwen, v3
from tests.server.parsers.readings import read

SIZE = 200_000
SMALL = SIZE // 4
AT_FULL_SIZE = {"prose", "a string", "raw", "thought"}  # the commonest; the rest says the same
PIECE = 3
MOST = 60  # characters handled for each one read, whatever the reply


def long(text: str, size: int) -> str:
    """A text over and over."""
    return text * (size // len(text))


def replies(size: int) -> Iterator[Case]:
    """Replies of about `size` characters."""
    yield Case("prose", "glm47", long("All is well in a < b. ", size))
    yield Case("white space", "prompted", long(" \n", size))
    yield Case("false tags", "glm47", long("<tool_call>", size))
    yield Case("false names", "glm47", long("<tool_call>wea ", size))
    yield Case("a string", "glm47", glm("write", ("text", long('a "b"\n</arg_v', size))))
    yield Case(
        "false ends", "qwen3_coder", qwen("write", ("text", long("a\n</parameter>\n\n", size)))
    )
    yield Case("a list", "qwen3_coder", qwen("weather", ("tags", f"[{long('1, ', size)}2]")))
    yield Case(
        "raw", "prompted", hermes(f'{{"name": "get", "arguments": {{"a": "{long("x<", size)}"}}}}')
    )
    yield Case("deep", "prompted", hermes('{"name": "get", "arguments": ' + long('{"a":', size)))
    yield Case(
        "early",
        "prompted",
        hermes(f'{{"arguments": {{"a": "{long("x ", size)}"}}, "name": "get"}}'),
    )
    yield Case("early, no call", "prompted", long('<tool_call>{"arguments": {"a": [', size))
    yield Case("early strings", "prompted", long('<tool_call>{"arguments": "', size))
    yield Case("blank in a call", "prompted", '<tool_call>{"name": "get", ' + long(" ", size))
    yield Case(
        "twice", "prompted", hermes('{"name": "get", "arguments": "' + long(r"\u00fc\\", size))
    )
    yield Case(
        "broken", "prompted", hermes('{"name": "get", "arguments": {' + long("</tool \n", size))
    )
    yield Case("sections", "deepseek_v3", long(DEEPSEEK_CALLS[0], size))
    yield Case("false calls", "deepseek_v3", long(DEEPSEEK_CALLS[0] + DEEPSEEK_CALL[0], size))
    yield Case("heads", "deepseek_v3", long(v3("now", "")[:-14], size))
    yield Case("JSON calls", "prompted", long(hermes('{"name": "now"}'), size))
    yield Case("thought", "glm47", long("Hm. </thin \n", size), reasoning="", tail="<think>")
    yield Case("calls", "glm47", long(glm("now") + "\n", size), reasoning="")


NAMES = [case.name for case in replies(SMALL)]


class Count:
    """Counts characters; patched into what handles them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.handled = 0
        add, give_back = source.Source.add, source.Source.give_back
        search, step = source.Stops.search, json_text.JsonValue._step

        def counted_add(this: source.Source, text: str) -> None:
            add(this, text)
            self.handled += len(this._text)

        def counted_give_back(this: source.Source, text: str) -> None:
            before = this._text
            give_back(this, text)
            self.handled += len(text) + sum(map(len, this._held or ()))
            self.handled += 0 if this._text is before else len(this._text)

        def counted_search(this: source.Stops, text: str, start: int, end: int):
            found = search(this, text, start, end)
            self.handled += (found.end() if found else end) - start
            return found

        def counted_step(this: json_text.JsonValue, text: str, at: int) -> int:
            end = step(this, text, at)
            self.handled += max(1, end - at)
            return end

        patch.setattr(source.Source, "add", counted_add)
        patch.setattr(source.Source, "give_back", counted_give_back)
        patch.setattr(source.Stops, "search", counted_search)
        patch.setattr(json_text.JsonValue, "_step", counted_step)


def handled(patch: pytest.MonkeyPatch, case: Case, size_of_piece: int) -> int:
    with patch.context() as inner:
        count = Count(inner)
        text = case.text
        read(case, (text[at : at + size_of_piece] for at in range(0, len(text), size_of_piece)))
        return count.handled


@pytest.mark.parametrize("name", NAMES)
def test_small_pieces_cost_no_square(name: str, monkeypatch: pytest.MonkeyPatch):
    size = SIZE if name in AT_FULL_SIZE else SMALL
    (case,) = (case for case in replies(size) if case.name == name)
    assert len(case.text) > 0.9 * size
    assert handled(monkeypatch, case, PIECE) < MOST * len(case.text)


@pytest.mark.parametrize("name", NAMES)
def test_one_piece_costs_no_square(name: str, monkeypatch: pytest.MonkeyPatch):
    (case,) = (case for case in replies(SMALL) if case.name == name)
    assert handled(monkeypatch, case, SIZE) < MOST * len(case.text)


def test_a_parser_that_keeps_what_it_has_used_is_caught(monkeypatch: pytest.MonkeyPatch):
    def add(this: source.Source, text: str) -> None:
        this._text += text

    monkeypatch.setattr(source.Source, "add", add)
    case = next(replies(SMALL))
    assert handled(monkeypatch, case, PIECE) > MOST * len(case.text)

"""Grammars of replies that call a tool: Lark, in llguidance's dialect.

Where arguments are written as JSON, they follow the tool's schema, spelled as `json.dumps` spells.
Where they are written as bare text between tags, the order of the declared properties, those that
are required, and the values that are no strings follow it. Nobody makes up arguments: a schema that
names some and says nothing of others is closed to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from leyline.closing import closed
from leyline.server.parsers.pieces import ToolUse
from leyline.server.parsers.sections import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALLS,
)
from leyline.server.parsers.values import properties_of, types_of

SpecialIds = Mapping[str, int]
NO_IDS: SpecialIds = {}
_SPELLING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
_DEFINITIONS = ("$defs", "definitions")  # that a part of a schema may point to
_FREE_KEY = r"/[^<>\s]+/"
MAX_CALLS = 16  # that are demanded at once: a small model would go on calling to the end
_ABOUT_SCHEMAS = ("$schema", "$id", "x-guidance")


Function = Mapping[str, Any]


class Grammar:
    """A grammar under way.

    Args:
        special_ids: Ids of the texts that are special tokens: in a grammar they are no text.
    """

    def __init__(self, special_ids: SpecialIds = NO_IDS) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []

    def rule(self, name: str, expression: str) -> str:
        """Add a rule; returns its name."""
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, *parts: str) -> str:
        """An expression for texts in a row; one that is a special token is a part of its own."""
        return " ".join(map(self._terminal, parts))

    def _terminal(self, text: str) -> str:
        special = self._special_ids.get(text)
        return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"

    def json(self, name: str, schema: Any, function: Function) -> str:
        """Add a rule for a JSON value.

        What cannot be expressed is left out; only a strict function is refused for it.
        """
        options = {**_SPELLING, "lenient": not function.get("strict")}
        whole = function["parameters"]
        given = {key: whole[key] for key in _DEFINITIONS if key in whole} | {**schema}
        given = {key: value for key, value in given.items() if key not in _ABOUT_SCHEMAS}
        return self.rule(name, f"%json {json.dumps({**given, 'x-guidance': options})}")

    def text_before(self, name: str, end: str) -> str:
        """Add a rule for any text, and the tag behind it."""
        if end in self._special_ids:
            return self.rule(name, f"/(?s:.*)/ {self.text(end)}")
        self.rule(f"{name}[suffix={json.dumps(end)}]", "/(?s:.*)/")
        return name

    def calls(
        self, use: ToolUse, call: Callable[[int, Function], str], front: str, gap: str, back: str
    ) -> str:
        """The text of a grammar of calls and nothing else.

        Args:
            use: The tools; one call, or with `parallel` up to `MAX_CALLS`.
            call: Makes an expression for a call of the `i`-th function.
            front: An expression in front of the calls,
            gap: between them,
            back: and behind them.
        """
        named = [
            _closed(one["function"])
            for one in use.tools
            if use.name in (None, one["function"]["name"])
        ]
        rules = [self.rule(f"call_{i}", call(i, function)) for i, function in enumerate(named)]
        self.rule("call", " | ".join(rules))
        more = f"({gap} call){{0,{MAX_CALLS - 1}}}" if use.parallel else ""
        self.rule("start", f"{front} call {more} {back}")
        return "\n".join(self._rules) + "\n"


def _closed(function: Function) -> Function:
    """A function whose arguments are an object, with nothing in it that is made up."""
    parameters = {**(function.get("parameters") or {}), "type": "object"}
    return {**function, "parameters": closed(parameters)}


def hermes_grammar(use: ToolUse, special_ids: SpecialIds) -> str:
    """Of what `write_hermes` writes."""
    grammar = Grammar(special_ids)

    def call(index: int, function: Function) -> str:
        head = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        arguments = grammar.json(f"arguments_{index}", function["parameters"], function)
        return (
            f"{grammar.text('<tool_call>', head)} {arguments} "
            f"{grammar.text('}' + chr(10), '</tool_call>')}"
        )

    return grammar.calls(use, call, "", grammar.text("\n"), "")


def deepseek_v3_grammar(use: ToolUse, special_ids: SpecialIds) -> str:
    """Of what `write_deepseek_v3` writes."""
    grammar = Grammar(special_ids)
    begin, end = DEEPSEEK_CALL

    def call(index: int, function: Function) -> str:
        name = f"{function['name']}\n```json\n"
        head = grammar.text(begin, "function", DEEPSEEK_SEPARATOR, name)
        arguments = grammar.json(f"arguments_{index}", function["parameters"], function)
        return f"{head} {arguments} {grammar.text(chr(10) + '```', end)}"

    front, back = map(grammar.text, DEEPSEEK_CALLS)
    return grammar.calls(use, call, front, grammar.text("\n"), back)


def kimi_k2_grammar(use: ToolUse, special_ids: SpecialIds) -> str:
    """Of what `write_kimi_k2` writes."""
    grammar = Grammar(special_ids)
    begin, end = KIMI_CALL

    def call(index: int, function: Function) -> str:
        head = f"{grammar.text(begin, 'functions.' + function['name'] + ':')} /[0-9]{{1,4}}/"
        arguments = grammar.json(f"arguments_{index}", function["parameters"], function)
        return f"{head} {grammar.text(KIMI_ARGUMENTS)} {arguments} {grammar.text(end)}"

    front, back = map(grammar.text, KIMI_CALLS)
    return grammar.calls(use, call, front, "", back)


def glm47_grammar(use: ToolUse, special_ids: SpecialIds) -> str:
    """Of what `write_glm47` writes."""
    grammar = Grammar(special_ids)

    def pair(name: str, key: str | None, schema: Any, function: Function) -> str:
        if key is None:
            some = grammar.rule(f"key_{name}", _FREE_KEY)
            tags = grammar.text("</arg_key>", "<arg_value>")
            front = f"{grammar.text('<arg_key>')} {some} {tags}"
        else:
            front = grammar.text("<arg_key>", key, "</arg_key>", "<arg_value>")
        return f"{front} {_value(grammar, name, schema, function, '</arg_value>')}"

    def call(index: int, function: Function) -> str:
        pairs = _pairs(index, function, pair)
        head, tail = grammar.text("<tool_call>", function["name"]), grammar.text("</tool_call>")
        return f"{head} {pairs} {tail}"

    return grammar.calls(use, call, "", "", "")


def qwen3_coder_grammar(use: ToolUse, special_ids: SpecialIds) -> str:
    """Of what `write_qwen3_coder` writes."""
    grammar = Grammar(special_ids)

    def pair(name: str, key: str | None, schema: Any, function: Function) -> str:
        if key is None:
            some = grammar.rule(f"key_{name}", _FREE_KEY)
            front = f"{grammar.text('<parameter=')} {some} {grammar.text('>' + chr(10))}"
        else:
            front = grammar.text(f"<parameter={key}>\n")
        value = _value(grammar, name, schema, function, "\n</parameter>")
        return f"{front} {value} {grammar.text(chr(10))}"

    def call(index: int, function: Function) -> str:
        head = grammar.text("<tool_call>", f"\n<function={function['name']}>\n")
        tail = grammar.text("</function>\n", "</tool_call>")
        return f"{head} {_pairs(index, function, pair)} {tail}"

    return grammar.calls(use, call, "", grammar.text("\n"), "")


Pair = Callable[[str, "str | None", Any, Function], str]


def _pairs(index: int, function: Function, pair: Pair) -> str:
    """An expression for arguments as bare text: those declared in their order, or any."""
    parameters = function["parameters"]
    declared = properties_of({"function": function})
    required = parameters.get("required")
    required = required if isinstance(required, list) else []
    if not declared:
        is_closed = parameters.get("additionalProperties") is False
        return "" if is_closed else f"({pair(f'any_{index}', None, {}, function)})*"
    pairs = [
        (key, pair(f"value_{index}_{at}", key, schema, function))
        for at, (key, schema) in enumerate(declared.items())
    ]
    return " ".join(one if key in required else f"({one})?" for key, one in pairs)


def _value(grammar: Grammar, name: str, schema: Any, function: Function, end: str) -> str:
    """A bare value and what ends it: text if it may be a string, one of a few if it says so."""
    types = types_of(schema)
    if types and "string" not in types:
        return f"{grammar.json(name, schema, function)} {grammar.text(end)}"
    allowed = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(allowed, list) and allowed and all(isinstance(one, str) for one in allowed):
        texts = " | ".join(map(grammar.text, allowed))
        return f"({texts}) {grammar.text(end)}"
    return grammar.text_before(name, end)

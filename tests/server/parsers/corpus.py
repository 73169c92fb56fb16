"""Replies of models, good and bad, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leyline.server.parsers.pieces import ToolUse
from leyline.server.parsers.sections import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALLS,
    KIMI_CALLS_SINGULAR,
)


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = (
    tool(
        "weather",
        ("city",),
        city=STRING,
        days=INTEGER,
        exact={"type": "boolean"},
        near={"anyOf": [STRING, {"type": "null"}]},
        tags={"type": "array", "items": STRING},
        filter={"type": "object"},
        any={},
    ),
    tool("write", ("text",), text=STRING),
    tool("get", key=STRING),
    tool("get_more"),
    {"type": "function", "function": {"name": "now"}},
)
USE = ToolUse(TOOLS)
ONE_CALL = ToolUse(TOOLS, parallel=False)
NO_CALL = ToolUse(TOOLS, choice="none")
NAMED = ToolUse(TOOLS, choice="required", name="now")

Told = tuple[str, str]
"""A call: its name and arguments. An argument text that ends in `CUT` is not complete."""
CUT = "\N{BLACK SCISSORS}"


@dataclass(frozen=True)
class Case:
    """A reply, and what it says.

    Attributes:
        name: What it is about.
        form: The tool format.
        text: The reply.
        content: What is content in it.
        calls: The calls.
        reasoning: The reasoning, if its parser is to be used.
        tail: The end of the prompt.
        use: The tools.
        ids: The ids of the calls, where the model writes them.
    """

    name: str
    form: str
    text: str
    content: str = ""
    calls: tuple[Told, ...] = ()
    reasoning: str | None = None
    tail: str = ""
    use: ToolUse = USE
    ids: tuple[str, ...] = field(default=())


def content(name: str, form: str, text: str, **fields: Any) -> Case:
    """A reply that is content and nothing else, every character of it."""
    return Case(name, form, text, text, **fields)


def glm(name: str, *pairs: tuple[str, str]) -> str:
    """A call as GLM writes it."""
    tags = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs)
    return f"<tool_call>{name}{''.join(tags)}</tool_call>"


def qwen(name: str, *pairs: tuple[str, str]) -> str:
    """A call as Qwen3-Coder writes it."""
    tags = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    return f"<tool_call>\n<function={name}>\n{''.join(tags)}</function>\n</tool_call>"


def hermes(text: str) -> str:
    """A call as Hermes writes it."""
    return f"<tool_call>\n{text}\n</tool_call>"


def v3(name: str, arguments: str) -> str:
    """A call as DeepSeek-V3 writes it."""
    begin, end = DEEPSEEK_CALL
    return f"{begin}function{DEEPSEEK_SEPARATOR}{name}\n```json\n{arguments}\n```{end}"


def v31(name: str, arguments: str) -> str:
    """A call as DeepSeek-V3.1 writes it."""
    return f"{DEEPSEEK_CALL[0]}{name}{DEEPSEEK_SEPARATOR}{arguments}{DEEPSEEK_CALL[1]}"


def v3_section(*calls: str) -> str:
    """A section of DeepSeek's calls."""
    return DEEPSEEK_CALLS[0] + "\n".join(calls) + DEEPSEEK_CALLS[1]


def kimi(call_id: str, arguments: str) -> str:
    """A call as Kimi-K2 writes it."""
    return f"{KIMI_CALL[0]}{call_id}{KIMI_ARGUMENTS}{arguments}{KIMI_CALL[1]}"


def kimi_section(*calls: str, markers: tuple[str, str] = KIMI_CALLS) -> str:
    """A section of Kimi's calls."""
    return markers[0] + "".join(calls) + markers[1]


PROSE = "In Zürich 🌧️ it's \"wet\" — 漢字, ok?\n\n```py\nx = {'a': [1]}\n```\n<b>bold</b> a < b"

GLM = [
    content("prose", "glm47", PROSE),
    content("nothing", "glm47", ""),
    content("white space", "glm47", " \n\n\t "),
    content("almost a tag at the end", "glm47", "see <tool_cal"),
    content("a tag that is talked of", "glm47", "Write <tool_call> and then a name. </tool_call>"),
    content("tags in a row", "glm47", "<tool_call><tool_call><<tool_call>>"),
    content("an unknown tool", "glm47", glm("weathers", ("city", "Bern"))),
    content("a known tool's beginning", "glm47", glm("weathe")),
    content("a name with something glued to it", "glm47", "<tool_call>now<br></tool_call>"),
    content("cut in the name", "glm47", "<tool_call>weath"),
    content("cut behind the name", "glm47", "<tool_call>weather<arg_key>city</arg_key><arg_val"),
    Case(
        "a call", "glm47", glm("weather", ("city", "Bern")), "", (("weather", '{"city": "Bern"}'),)
    ),
    Case("no arguments", "glm47", glm("now"), "", (("now", "{}"),)),
    Case("no arguments, on lines", "glm47", "<tool_call>now\n</tool_call>\n", "", (("now", "{}"),)),
    Case(
        "on lines, as GLM-4.5 writes",
        "glm47",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n",
        "",
        (("weather", '{"city": "Bern", "days": 3}'),),
    ),
    Case(
        "text around two calls",
        "glm47",
        "Let me see.\n" + glm("get", ("key", "a")) + "\n\n" + glm("get_more") + "\nDone. ",
        "Let me see.\n\nDone. ",
        (("get", '{"key": "a"}'), ("get_more", "{}")),
    ),
    Case(
        "text between calls",
        "glm47",
        f"{glm('now')} and {glm('now')}",
        " and ",
        (("now", "{}"), ("now", "{}")),
    ),
    Case(
        "every type",
        "glm47",
        glm(
            "weather",
            ("city", "12"),
            ("days", " 12\n"),
            ("exact", "True"),
            ("near", "null"),
            ("tags", '["a", "ü"]'),
            ("filter", '{"a": {"b": [1, 2.50, null]}}'),
            ("any", "7e3"),
        ),
        "",
        (
            (
                "weather",
                '{"city": "12", "days": 12, "exact": true, "near": null, "tags": ["a", "ü"], '
                '"filter": {"a": {"b": [1, 2.50, null]}}, "any": 7e3}',
            ),
        ),
    ),
    Case(
        "what does not parse is a string",
        "glm47",
        glm("weather", ("days", "three"), ("tags", "[a"), ("any", "NaN"), ("near", "5"), ("x", "")),
        "",
        (("weather", '{"days": "three", "tags": "[a", "any": "NaN", "near": "5", "x": ""}'),),
    ),
    Case(
        "quotes, escapes and line breaks in a string",
        "glm47",
        glm("write", ("text", ' "a"\\n\t\r\n\n\u2028\x00 🙂👩‍👩‍👧 ')),
        "",
        (("write", '{"text": " \\"a\\"\\\\n\\t\\r\\n\\n\u2028\\u0000 🙂👩‍👩‍👧 "}'),),
    ),
    Case(
        "its own markup in a string",
        "glm47",
        glm("write", ("text", "<tool_call>now</tool_call></arg_value></arg_key> <arg_key>")),
        "",
        (("write", '{"text": "<tool_call>now</tool_call></arg_value></arg_key> <arg_key>"}'),),
    ),
    Case(
        "a call that is not closed, and another",
        "glm47",
        glm("get", ("key", "a")).removesuffix("</tool_call>") + glm("now"),
        "",
        (("get", '{"key": "a"}'), ("now", "{}")),
    ),
    Case(
        "a key without a value",
        "glm47",
        "<tool_call>get<arg_key>key</arg_key><arg_value>a</arg_value><arg_key>k</tool_call> no",
        " no",
        (("get", '{"key": "a"' + CUT),),
    ),
    Case(
        "cut in a string",
        "glm47",
        "<tool_call>write<arg_key>text</arg_key><arg_value>rm -rf </arg_va",
        "",
        (("write", '{"text": "rm -rf </arg_va' + CUT),),
    ),
    Case(
        "cut in a number",
        "glm47",
        "<tool_call>weather<arg_key>days</arg_key><arg_value>1",
        "",
        (("weather", '{"days": ' + CUT),),
    ),
    Case(
        "cut before the end",
        "glm47",
        glm("get", ("key", "a")).removesuffix("l>"),
        "",
        (("get", '{"key": "a' + CUT),),
    ),
    Case("an unknown tool between", "glm47", glm("now") + glm("no"), glm("no"), (("now", "{}"),)),
    Case(
        "one call at most",
        "glm47",
        "a" + glm("now") + "b" + glm("now"),
        "a",
        (("now", "{}"),),
        use=ONE_CALL,
    ),
    content("no call at all", "glm47", "a" + glm("now") + "b", use=NO_CALL),
    Case(
        "the named one",
        "glm47",
        glm("get_more") + glm("now"),
        glm("get_more"),
        (("now", "{}"),),
        use=NAMED,
    ),
]
THINKING = [
    Case(
        "a thought",
        "glm47",
        "<think>\nHm.\n\nSo. \n</think>\n\nYes.\n",
        "Yes.\n",
        reasoning="Hm.\n\nSo.",
    ),
    Case(
        "begun in the prompt",
        "glm47",
        "Hm.</think>Yes.",
        "Yes.",
        reasoning="Hm.",
        tail="<|assistant|><think>",
    ),
    Case(
        "begun in the prompt's line",
        "glm47",
        "\nHm.\n</think>Yes.",
        "Yes.",
        reasoning="Hm.",
        tail="<think>\n",
    ),
    Case("never ended", "glm47", "Hm.\nSo </thin", "", reasoning="Hm.\nSo </thin", tail="<think>"),
    Case(
        "ended in the prompt", "glm47", "Yes.", "Yes.", reasoning="", tail="<|assistant|></think>"
    ),
    Case("an empty thought", "glm47", "<think></think>Yes.", "Yes.", reasoning=""),
    Case("an end without a beginning", "glm47", "\n</think>\nYes.", "Yes.", reasoning=""),
    Case(
        "two thoughts",
        "glm47",
        "a</think>\n<think>b</think>\nc",
        "c",
        reasoning="ab",
        tail="<think>",
    ),
    Case(
        "tags that are talked of",
        "glm47",
        "The tag <think> ends in </think>.",
        "The tag <think> ends in </think>.",
        reasoning="",
    ),
    Case("blank, without a thought", "glm47", " \n", " \n", reasoning=""),
    Case(
        "a call behind a thought",
        "glm47",
        f"Hm.</think>\n\nOk.\n{glm('now')}",
        "Ok.\n",
        (("now", "{}"),),
        reasoning="Hm.",
        tail="<think>",
    ),
    Case(
        "a call right behind a thought",
        "glm47",
        f"Hm.</think>\n{glm('now')}\n",
        "",
        (("now", "{}"),),
        reasoning="Hm.",
        tail="<think>",
    ),
    Case(
        "a call in a thought",
        "glm47",
        f"Hm.\n{glm('now')}\n</think>\nYes.",
        "Yes.",
        (("now", "{}"),),
        reasoning="Hm.",
        tail="<think>",
    ),
    Case(
        "a call that is thought of",
        "glm47",
        "Use <tool_call>? No.</think>Yes.",
        "Yes.",
        reasoning="Use <tool_call>? No.",
        tail="<think>",
    ),
    Case(
        "tags in an argument",
        "glm47",
        "a</think>" + glm("write", ("text", "<think>x</think>")),
        "",
        (("write", '{"text": "<think>x</think>"}'),),
        reasoning="a",
        tail="<think>",
    ),
    Case(
        "text behind a call",
        "glm47",
        glm("now") + "\nYes.",
        "\nYes.",
        (("now", "{}"),),
        reasoning="",
    ),
    Case(
        "with DeepSeek's calls",
        "deepseek_v3",
        "<think>\nHm.\n</think>\n\n" + v3_section(v3("now", "{}")),
        "",
        (("now", "{}"),),
        reasoning="Hm.",
    ),
]
QWEN = [
    content("prose", "qwen3_coder", PROSE),
    content("an unknown tool", "qwen3_coder", qwen("rm", ("path", "/"))),
    content("cut in the name", "qwen3_coder", "<tool_call>\n<function=wea"),
    content(
        "a tag that is talked of", "qwen3_coder", "<tool_call>\n<function> is how. <function=x>"
    ),
    Case(
        "a call",
        "qwen3_coder",
        qwen("weather", ("city", "Bern"), ("days", "3")),
        "",
        (("weather", '{"city": "Bern", "days": 3}'),),
    ),
    Case("no arguments", "qwen3_coder", qwen("now"), "", (("now", "{}"),)),
    Case(
        "in one line",
        "qwen3_coder",
        "<tool_call><function=get><parameter=key>a b</parameter></function></tool_call>",
        "",
        (("get", '{"key": "a b"}'),),
    ),
    Case(
        "without the outer tag",
        "qwen3_coder",
        "So:\n<function=get>\n<parameter=key>\na\n</parameter>\n</function>\n",
        "So:\n",
        (("get", '{"key": "a"}'),),
    ),
    Case(
        "two functions in a tag",
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        "",
        (("now", "{}"), ("now", "{}")),
    ),
    Case(
        "text around calls",
        "qwen3_coder",
        f"a\n\n{qwen('now')}\n{qwen('get')}\nb",
        "a\n\n\nb",
        (("now", "{}"), ("get", "{}")),
    ),
    Case(
        "blank lines of a value are its own",
        "qwen3_coder",
        qwen("write", ("text", "\n\n  a\n\n")),
        "",
        (("write", '{"text": "\\n\\n  a\\n\\n"}'),),
    ),
    Case(
        "its own markup in a string",
        "qwen3_coder",
        qwen("write", ("text", "<parameter=a>\n</parameter>\n\n</parameter> x </function>")),
        "",
        (("write", '{"text": "<parameter=a>\\n</parameter>\\n\\n</parameter> x </function>"}'),),
    ),
    Case(
        "Python's spelling",
        "qwen3_coder",
        qwen("weather", ("exact", "False"), ("near", "None"), ("any", "x")),
        "",
        (("weather", '{"exact": false, "near": null, "any": "x"}'),),
    ),
    Case(
        "an empty string",
        "qwen3_coder",
        qwen("write", ("text", "")),
        "",
        (("write", '{"text": ""}'),),
    ),
    Case(
        "cut in a value",
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\na\n</param",
        "",
        (("write", '{"text": "a\\n</param' + CUT),),
    ),
    Case(
        "cut behind a value",
        "qwen3_coder",
        qwen("get", ("key", "a"))[:-24],
        "",
        (("get", '{"key": "a' + CUT),),
    ),
    Case(
        "cut before the outer tag",
        "qwen3_coder",
        qwen("now").removesuffix("</tool_call>"),
        "",
        (("now", "{}"),),
    ),
    Case(
        "one call at most",
        "qwen3_coder",
        qwen("now") + qwen("now"),
        "",
        (("now", "{}"),),
        use=ONE_CALL,
    ),
]
HERMES = [
    content("prose", "prompted", PROSE),
    content("an unknown tool", "prompted", hermes('{"name": "rm", "arguments": {"path": "/"}}')),
    content("no JSON", "prompted", "<tool_call>\nweather in Bern\n</tool_call>"),
    content("no name", "prompted", hermes('{"arguments": {"a": 1}}')),
    content("no such key", "prompted", hermes('{"tool": "now"}')),
    content("a name that is no string", "prompted", hermes('{"name": 5}')),
    content("cut in the name", "prompted", '<tool_call>\n{"name": "no'),
    content("cut behind the name", "prompted", '<tool_call>\n{"name": "now", "argum'),
    content("cut before the arguments", "prompted", '<tool_call>\n{"name": "now", "arguments": '),
    content(
        "early arguments that are no JSON", "prompted", hermes('{"arguments": {a}, "name": "now"}')
    ),
    content("an empty list", "prompted", "<tool_call>[]</tool_call>"),
    Case(
        "a call",
        "prompted",
        hermes('{"name": "weather", "arguments": {"city": "Zürich 🙂"}}'),
        "",
        (("weather", '{"city": "Zürich 🙂"}'),),
    ),
    Case(
        "spaced as the model likes",
        "prompted",
        '\n<tool_call> { "name" :"get" ,\n"arguments":{"key":"a" , "b":[ 1,2 ]}\n} </tool_call>',
        "",
        (("get", '{"key":"a" , "b":[ 1,2 ]}'),),
    ),
    Case("no arguments", "prompted", hermes('{"name": "now"}'), "", (("now", "{}"),)),
    Case(
        "null arguments",
        "prompted",
        hermes('{"name": "now", "arguments": null}'),
        "",
        (("now", "{}"),),
    ),
    Case(
        "empty arguments",
        "prompted",
        hermes('{"name": "now", "arguments": ""}'),
        "",
        (("now", "{}"),),
    ),
    Case(
        "arguments first",
        "prompted",
        hermes('{"arguments": {"key": "}\\""}, "name": "get"}'),
        "",
        (("get", '{"key": "}\\""}'),),
    ),
    Case(
        "arguments first, in a string",
        "prompted",
        hermes('{"arguments": "{}", "name": "get"}'),
        "",
        (("get", "{}"),),
    ),
    Case(
        "parameters",
        "prompted",
        hermes('{"type": "function", "name": "get", "parameters": {"key": "a"}}'),
        "",
        (("get", '{"key": "a"}'),),
    ),
    Case(
        "more than a call",
        "prompted",
        hermes('{"id": 7, "name": "get", "arguments": {}, "why": {"a": ["</tool_call>"]}}'),
        "",
        (("get", "{}"),),
    ),
    Case(
        "encoded twice",
        "prompted",
        hermes(r'{"name": "get", "arguments": "{\"key\": \"a\\n\\u00fc \ud83d\ude42 \u00fc\"}"}'),
        "",
        (("get", r'{"key": "a\n\u00fc 🙂 ü"}'),),
    ),
    Case(
        "encoded twice, half a pair",
        "prompted",
        hermes(r'{"name": "get", "arguments": "{\"key\": \"\ud83dx\u12g\udc00\"}"}'),
        "",
        (("get", '{"key": "\ufffdx\\u12g\ufffd"}'),),
    ),
    Case(
        "a list",
        "prompted",
        '<tool_call>[\n{"name": "now", "arguments": {}},\n'
        '{"name": "get", "arguments": {"key": "b"}}\n]</tool_call>',
        "",
        (("now", "{}"), ("get", '{"key": "b"}')),
    ),
    Case(
        "an unknown tool in a list",
        "prompted",
        '<tool_call>[{"name": "now"}, {"name": "rm"}]</tool_call>',
        ', {"name": "rm"}]</tool_call>',
        (("now", "{}"),),
    ),
    Case(
        "two calls and text",
        "prompted",
        "Ok.\n"
        + hermes('{"name": "now"}')
        + "\nthen\n"
        + hermes('{"name": "now", "arguments": {}}')
        + " ok",
        "Ok.\n\nthen\n ok",
        (("now", "{}"), ("now", "{}")),
    ),
    Case(
        "markup and fences in a string",
        "prompted",
        hermes('{"name": "write", "arguments": {"text": "</tool_call>\\n```json\\n<tool_call>"}}'),
        "",
        (("write", '{"text": "</tool_call>\\n```json\\n<tool_call>"}'),),
    ),
    Case(
        "nested JSON in a string",
        "prompted",
        hermes(r'{"name": "write", "arguments": {"text": "{\"a\": [\"\\\"\"]}"}}'),
        "",
        (("write", r'{"text": "{\"a\": [\"\\\"\"]}"}'),),
    ),
    Case(
        "a brace too few",
        "prompted",
        hermes('{"name": "get", "arguments": {"key": "a"}'),
        "",
        (("get", '{"key": "a"}'),),
    ),
    Case(
        "a brace too many",
        "prompted",
        hermes('{"name": "get", "arguments": {"key": "a"}}}') + "x",
        "x",
        (("get", '{"key": "a"}'),),
    ),
    Case(
        "no closing tag",
        "prompted",
        '<tool_call>{"name": "now", "arguments": {}}\nIt is noon.',
        "\nIt is noon.",
        (("now", "{}"),),
    ),
    Case(
        "broken arguments, closed",
        "prompted",
        hermes('{"name": "get", "arguments": {\'key\': \'a\'}}'),
        "",
        (("get", "{'key': 'a'}}"),),
    ),
    Case(
        "a list that is none",
        "prompted",
        hermes('{"name": "get", "arguments": {"key": [1, [2, 3], x]}}') + "ok",
        "ok",
        (("get", '{"key": [1, [2, 3], x]}}'),),
    ),
    Case(
        "a bare line break in a string",
        "prompted",
        hermes('{"name": "write", "arguments": {"text": "a\nb"}}'),
        "",
        (("write", '{"text": "a\nb"}}'),),
    ),
    Case(
        "numbers and words",
        "prompted",
        hermes('{"name": "weather", "arguments": {"a": -1.5e-3, "b": [true, false, null, 0]}}'),
        "",
        (("weather", '{"a": -1.5e-3, "b": [true, false, null, 0]}'),),
    ),
    Case(
        "a number that is none",
        "prompted",
        hermes('{"name": "weather", "arguments": {"a": 01}}'),
        "",
        (("weather", '{"a": 01}}'),),
    ),
    Case(
        "cut in a string",
        "prompted",
        '<tool_call>\n{"name": "write", "arguments": {"text": "rm -rf',
        "",
        (("write", '{"text": "rm -rf' + CUT),),
    ),
    Case(
        "cut in broken arguments",
        "prompted",
        '<tool_call>\n{"name": "write", "arguments": {text}</tool',
        "",
        (("write", "{text}</tool" + CUT),),
    ),
    Case(
        "cut behind the arguments",
        "prompted",
        '<tool_call>\n{"name": "get", "arguments": {"key": "a"}',
        "",
        (("get", '{"key": "a"}'),),
    ),
    Case(
        "the same, of a model's own",
        "hermes",
        hermes('{"name": "now", "arguments": {}}'),
        "",
        (("now", "{}"),),
    ),
    Case(
        "one call at most",
        "prompted",
        '<tool_call>[{"name": "now"}, {"name": "get"}]</tool_call>',
        "",
        (("now", "{}"),),
        use=ONE_CALL,
    ),
]
DEEPSEEK = [
    content("prose", "deepseek_v3", PROSE),
    content("an unknown tool", "deepseek_v3", v3_section(v3("rm", "{}"))),
    content("a section without calls", "deepseek_v3", v3_section()),
    content("cut in the name", "deepseek_v3", DEEPSEEK_CALLS[0] + v3("weather", "")[:30]),
    Case(
        "a call",
        "deepseek_v3",
        v3_section(v3("weather", '{"city": "Bern"}')),
        "",
        (("weather", '{"city": "Bern"}'),),
    ),
    Case(
        "two calls and text",
        "deepseek_v3",
        "So.\n" + v3_section(v3("now", "{}"), v3("get", '{"key": "ü"}')) + "\nok",
        "So.\n\nok",
        (("now", "{}"), ("get", '{"key": "ü"}')),
    ),
    Case(
        "fences in a string",
        "deepseek_v3",
        v3_section(v3("write", '{"text": "```json\\n{}\\n```' + DEEPSEEK_CALL[1] + '"}')),
        "",
        (("write", '{"text": "```json\\n{}\\n```' + DEEPSEEK_CALL[1] + '"}'),),
    ),
    Case(
        "over many lines",
        "deepseek_v3",
        v3_section(v3("weather", '{\n  "city": "Bern",\n  "tags": [\n    "a"\n  ]\n}')),
        "",
        (("weather", '{\n  "city": "Bern",\n  "tags": [\n    "a"\n  ]\n}'),),
    ),
    Case("no arguments", "deepseek_v3", v3_section(v3("now", "")), "", (("now", "{}"),)),
    Case(
        "no fence",
        "deepseek_v3",
        v3_section(v3("get", '{"key": "a"}').replace("```json\n", "").replace("\n```", "")),
        "",
        (("get", '{"key": "a"}'),),
    ),
    Case("no section", "deepseek_v3", v3("now", "{}") + "ok", "ok", (("now", "{}"),)),
    Case(
        "V3.1",
        "deepseek_v3",
        v3_section(v31("get", '{"key": "a"}'), v31("now", "{}")),
        "",
        (("get", '{"key": "a"}'), ("now", "{}")),
    ),
    Case("V3.1, no arguments", "deepseek_v3", v3_section(v31("now", "")), "", (("now", "{}"),)),
    Case(
        "encoded twice",
        "deepseek_v3",
        v3_section(v3("get", '"{\\"key\\": 1}"')),
        "",
        (("get", '{"key": 1}'),),
    ),
    Case(
        "broken arguments, closed",
        "deepseek_v3",
        v3_section(v3("get", '{"key": a}'), v3("now", "{}")),
        "",
        (("get", '{"key": a}'), ("now", "{}")),
    ),
    Case(
        "an unknown tool behind",
        "deepseek_v3",
        v3_section(v3("now", "{}"), v3("rm", "{}")),
        "\n" + v3("rm", "{}") + DEEPSEEK_CALLS[1],
        (("now", "{}"),),
    ),
    Case(
        "cut in a string",
        "deepseek_v3",
        DEEPSEEK_CALLS[0] + v3("get", '{"key": "a"}')[:-14],
        "",
        (("get", '{"key": "a"}'),),
    ),
    Case(
        "one call at most",
        "deepseek_v3",
        v3_section(v3("now", "{}"), v3("now", "{}")),
        "",
        (("now", "{}"),),
        use=ONE_CALL,
    ),
]
KIMI = [
    content("prose", "kimi_k2", PROSE),
    content("an unknown tool", "kimi_k2", kimi_section(kimi("functions.rm:0", "{}"))),
    content("cut in the id", "kimi_k2", KIMI_CALLS[0] + KIMI_CALL[0] + "functions.now:"),
    Case(
        "a call",
        "kimi_k2",
        kimi_section(kimi("functions.weather:3", '{"city": "Bern"}')),
        "",
        (("weather", '{"city": "Bern"}'),),
        ids=("functions.weather:3",),
    ),
    Case(
        "two calls and text",
        "kimi_k2",
        "a "
        + kimi_section(kimi("functions.now:0", "{}"), kimi("functions.get:1", '{"key": "<|"}'))
        + "b",
        "a b",
        (("now", "{}"), ("get", '{"key": "<|"}')),
        ids=("functions.now:0", "functions.get:1"),
    ),
    Case(
        "the singular",
        "kimi_k2",
        kimi_section(kimi("functions.now:0", "{}"), markers=KIMI_CALLS_SINGULAR),
        "",
        (("now", "{}"),),
        ids=("functions.now:0",),
    ),
    Case(
        "no section, other ids",
        "kimi_k2",
        kimi(" now:12 ", " {} ") + kimi("get_more", ""),
        "",
        (("now", "{}"), ("get_more", "{}")),
        ids=("now:12", "functions.get_more:1"),
    ),
    Case(
        "markers in a string",
        "kimi_k2",
        kimi_section(kimi("functions.write:0", '{"text": "<|tool_call_end|>"}')),
        "",
        (("write", '{"text": "<|tool_call_end|>"}'),),
        ids=("functions.write:0",),
    ),
    Case(
        "broken arguments, closed",
        "kimi_k2",
        kimi_section(kimi("functions.get:0", "{key}")),
        "",
        (("get", "{key}"),),
        ids=("functions.get:0",),
    ),
    Case(
        "cut",
        "kimi_k2",
        KIMI_CALLS[0] + kimi("functions.get:0", '{"key": "a').removesuffix(KIMI_CALL[1]),
        "",
        (("get", '{"key": "a' + CUT),),
        ids=("functions.get:0",),
    ),
]
CASES = [*GLM, *THINKING, *QWEN, *HERMES, *DEEPSEEK, *KIMI]

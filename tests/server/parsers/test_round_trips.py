"""What a chat template writes of a call is read as that call, and so is what is told in text."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from leyline.errors import InvalidRequestError
from leyline.server.parsers.choosing import choose
from leyline.server.parsers.formats import DEEPSEEK_V3, GLM47, PROMPTED, TOOL_FORMATS
from leyline.server.parsers.pieces import ToolUse
from leyline.template import ChatTemplate
from tests.real_tokenizers import MOONLIGHT_TEMPLATE
from tests.server.parsers.corpus import NO_CALL, TOOLS, USE, Case
from tests.server.parsers.readings import Read, joined, read
from tests.test_real_templates import ASK, EOS, PUBLISHED, RESULT, SYSTEM, TOKENS, V2, say
from tests.tiny_models import TEMPLATE

ASSISTANT = "<\uff5cAssistant\uff5c>"
HEADS = {
    "glm-4.7-flash": "<|assistant|>",
    "glm-4.5v": "<|assistant|>",
    "glm-4.6v-flash": "<|assistant|>",
    "glm-5": "<|assistant|>",
    "glm-5.2": "<|assistant|>",
    "deepseek-v2.5": ASSISTANT,
    "deepseek-v3": ASSISTANT,
    "deepseek-v3.1": ASSISTANT,
    "deepseek-r1": ASSISTANT,
    "qwen-2.5": "<|im_start|>assistant\n",
    "qwen-3": "<|im_start|>assistant\n",
    "qwen-3.5": "<|im_start|>assistant\n",
    "qwen-3.6": "<|im_start|>assistant\n",
    "jt-coder-8b-base": "<|im_start|>assistant\n",
}
ENDS = (EOS, "<|im_end|>\n")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"city": "Zürich", "days": 2},
    "none": {},
    "odd strings": {
        "city": ' "a"\\n\n\n<b>&amp;</b> 🙂👩‍👩‍👧 日本 {{x}} ',
        "near": "null and void",
    },
    "markup": {"city": "</tool_call></arg_key> ```json <parameter=a> </think>"},
    "empty": {"city": ""},
    "types": {"days": -3, "exact": True, "near": None, "tags": ["a", "ü"], "any": 2.5},
    "nested": {"filter": {"a": [{"b": None}, [], {"c": "}"}]}, "tags": ["</tool_call>", '"']},
    "a number in a string": {"city": "12", "near": "true"},
}


def call(name: str, arguments: Any, call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@functools.cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENS)


def reread(model: str, *calls: Mapping[str, Any], text: str = "") -> Read:
    """What is read of a reply with calls, as a model's template writes it."""
    reply = say("assistant", text, tool_calls=list(calls))
    written = template(PUBLISHED[model]).render(
        [ASK, reply], tools=list(TOOLS), add_generation_prompt=False
    )
    _, found, written = written.rpartition(HEADS[model])
    assert found
    for end in ENDS:
        written = written.removesuffix(end)
    parser = choose(PUBLISHED[model]).parser(USE, "")
    pieces = joined([*parser.push(written), *parser.flush()])
    return Read(pieces, parser.complete)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("model", HEADS)
def test_what_a_published_template_writes_is_read_as_the_same_call(model: str, arguments: str):
    said = reread(model, call("weather", dumps(ARGUMENTS[arguments])))
    ((name, text),) = said.calls
    assert (name, json.loads(text)) == ("weather", ARGUMENTS[arguments])
    assert not said.content and not said.reasoning


@pytest.mark.parametrize("model", HEADS)
def test_several_calls_behind_a_text_are_read_as_they_were(model: str):
    calls = [call("now", "{}"), call("get", '{"key": "a"}'), call("now", "{}")]
    said = reread(model, *calls, text="Let me see.")
    if model in ("deepseek-v2.5", "deepseek-v3"):  # their templates lose calls beside a text
        assert said.content == "Let me see."
        said = reread(model, *calls)
    else:
        assert said.content.strip() == "Let me see."
    assert [(name, json.loads(text)) for name, text in said.calls] == [
        ("now", {}),
        ("get", {"key": "a"}),
        ("now", {}),
    ]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_format_writes_is_read_as_the_same_calls(name: str, arguments: str):
    told = [("functions.weather:0", "weather", dumps(ARGUMENTS[arguments]))] * 2
    said = read(Case("", name, ""), [TOOL_FORMATS[name].write(told)])
    assert [(one, json.loads(text)) for one, text in said.calls] == [
        ("weather", ARGUMENTS[arguments])
    ] * 2
    assert not said.content


# Templates without tools --------------------------------------------------------------------------

WITHOUT_TOOLS = {"V2": V2, "Moonlight": MOONLIGHT_TEMPLATE, "ChatML": TEMPLATE}
FIRST = '{"city":"Zürich" , "days": 2}'  # spelled as no library spells
HISTORY = [
    SYSTEM,
    ASK,
    say("assistant", "Let me see.\n", tool_calls=[call("weather", FIRST), call("now", "")]),
    RESULT,
    say("tool", [{"type": "text", "text": "noon"}], tool_call_id="call_1"),
    say("assistant", None, tool_calls=[call("get", {"key": "ü"})]),
    say("tool", "a", tool_call_id="call_2"),
    say("assistant", "Rainy."),
    say("user", "Thanks."),
]
TURNS = [2, 5, 7, 9]  # where a prompt may end
without_tools = pytest.mark.parametrize("source", WITHOUT_TOOLS.values(), ids=list(WITHOUT_TOOLS))


def rendered(source: str, messages: Any, **given: Any) -> str:
    return template(source).render(messages, **given)


@without_tools
def test_tools_calls_and_results_are_told_to_a_template_without_tools(source: str):
    told = PROMPTED.prompted(HISTORY, USE)
    assert [message["role"] for message in told] == [
        *("system", "user", "assistant", "user", "assistant", "user", "assistant", "user")
    ]
    assert not any("tool_calls" in message for message in told)
    text = rendered(source, told)
    assert text.count(SYSTEM["content"].strip()) == 1
    for tool in TOOLS:
        assert dumps(tool["function"]) in text
    assert FIRST in text and "12 °C, rain" in text and "noon" in text


@without_tools
def test_a_longer_history_begins_with_the_shorter_one(source: str):
    texts = [
        rendered(source, PROMPTED.prompted(HISTORY[:end], USE), add_generation_prompt=False)
        for end in TURNS
    ]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter) and longer != shorter
    assert texts == [
        rendered(source, PROMPTED.prompted(HISTORY[:end], USE), add_generation_prompt=False)
        for end in TURNS
    ]


@without_tools
def test_a_call_is_told_as_its_model_wrote_it(source: str):
    wrote = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>'
    said = read(Case("", "prompted", wrote), [wrote])
    ((name, arguments),) = said.calls
    assert arguments == FIRST
    reply = say("assistant", said.content, tool_calls=[call(name, arguments)])
    prompt = rendered(source, PROMPTED.prompted([ASK], USE))
    text = rendered(source, PROMPTED.prompted([ASK, reply], USE), add_generation_prompt=False)
    assert wrote in text
    if source != V2:  # which writes a space behind "Assistant:" that its prompt has not
        assert text.startswith(prompt + wrote)


def test_without_a_system_message_there_is_one_and_without_tools_there_is_none():
    (system, ask) = PROMPTED.prompted([ASK], USE)
    assert system["role"] == "system" and ask == ASK
    assert "<tool_call>" in system["content"] and '"arguments"' in system["content"]
    assert PROMPTED.prompted([ASK], ToolUse()) == [ASK]
    assert PROMPTED.prompted([ASK], NO_CALL) == [system, ask]
    for use in (ToolUse(), NO_CALL):
        assert not any("tool_calls" in one for one in PROMPTED.prompted(HISTORY, use))


def test_what_is_demanded_changes_nothing_that_is_told():
    # The grammar sees to it; a prompt that says it too would be another prompt for the cache.
    required = ToolUse(TOOLS, choice="required", name="now", parallel=False)
    assert PROMPTED.prompted(HISTORY, required) == PROMPTED.prompted(HISTORY, USE)


def test_a_native_format_gives_the_messages_back():
    assert GLM47.prompted(HISTORY, USE) == HISTORY
    assert DEEPSEEK_V3.prompted(HISTORY, USE) == HISTORY
    assert GLM47.telling(USE) is None


def test_what_is_told_of_some_tools_is_a_function_of_the_messages():
    told = PROMPTED.telling(USE)
    assert told is not None and told(HISTORY) == PROMPTED.prompted(HISTORY, USE)
    form = choose(PUBLISHED["deepseek-v3"]).tool
    assert (told := form.telling(USE)) is not None
    assert told(HISTORY) == form.prompted(HISTORY, USE)


def test_a_template_that_writes_calls_but_tells_no_tools_is_told_those_alone():
    form = choose(PUBLISHED["deepseek-v3"]).tool
    system, *rest = form.prompted(HISTORY, USE)
    assert rest == HISTORY[1:]
    assert dumps(TOOLS[0]["function"]) in system["content"]
    assert DEEPSEEK_V3.markers[0] in system["content"]
    assert "<tool_response>" not in system["content"]  # its template has tokens of its own for them
    assert "<tool_response>" in PROMPTED.prompted(HISTORY, USE)[0]["content"]


def test_arguments_that_are_no_object_are_told_as_a_string_that_is_read_again():
    broken = say("assistant", "", tool_calls=[call("get", '{"key": a')])
    (told,) = PROMPTED.prompted([broken], ToolUse())
    said = read(Case("", "prompted", told["content"]), [told["content"]])
    assert said.calls == (("get", '{"key": a'),)


def test_a_part_that_is_no_text_is_refused_by_its_place():
    result = say("tool", [{"type": "image_url"}], tool_call_id="call_0")
    with pytest.raises(InvalidRequestError) as caught:
        PROMPTED.prompted([ASK, result], USE)
    assert caught.value.param == "messages[1].content[0]"

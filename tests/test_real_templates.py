"""Published chat templates on twelve conversations, against transformers' renderer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from leyline.errors import InvalidRequestError
from leyline.template import ChatTemplate, plain_messages
from tests.real_tokenizers import DATA, MOONLIGHT_TEMPLATE
from tests.tiny_models import byte_tokenizer

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
TOKENS = {"bos_token": BOS, "eos_token": EOS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <how> it is, “in” Zürich & elsewhere.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calls(*wanted: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(wanted)
    ]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ASK, SYSTEM = say("user", "What is it like in Zürich?"), say("system", "Be brief.\n")
CALL = say("assistant", "", tool_calls=calls(("weather", {"city": "Zürich", "days": 2})))
RESULT = say("tool", "12 °C, rain", tool_call_id="call_0")
TWELVE: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [ASK]},
    "system": {"messages": [SYSTEM, ASK]},
    "no prompt to go on": {
        "messages": [SYSTEM, ASK, say("assistant", "Rainy.")],
        "add_generation_prompt": False,
    },
    "unicode": {
        "messages": [
            say("user", "日本語 🙂👩‍👩‍👧 ﷽ e\u0301 \u200b\x00"),
            say("assistant", "مرحبا"),
            say("user", "ok\r\n\tok"),
        ]
    },
    "empty content": {"messages": [say("user", ""), say("assistant", ""), say("user", " \n ")]},
    "markup": {
        "messages": [
            say("user", "<b>&amp;\"'</b> {{ 7 * 7 }} {% if %} <|user|> " + EOS),
            say("assistant", "\n\n  ```py\nx = '<think>'\n```  \n"),
            say("user", "\\n"),
        ]
    },
    "tools": {"messages": [SYSTEM, ASK], "tools": TOOLS},
    "a call": {"messages": [ASK, CALL, RESULT], "tools": TOOLS},
    "two calls at once": {
        "messages": [
            ASK,
            say(
                "assistant",
                "Let me see.",
                tool_calls=calls(("now", {}), ("weather", {"city": "<Zürich>", "list": [1, None]})),
            ),
            RESULT,
            say("tool", "noon", tool_call_id="call_1"),
            say("assistant", "Noon, and rainy."),
            say("user", "And Bern?"),
        ],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [
            ASK,
            say("assistant", "Rainy.", reasoning_content="\nIt is\nOctober. "),
            say("user", "And Bern?"),
            say("assistant", "", reasoning_content="Hm.", tool_calls=calls(("now", {}))),
            say("tool", "noon", tool_call_id="call_0"),
        ],
    },
    "reasoning in tags": {
        "messages": [ASK, say("assistant", "<think>\nHm.\n</think>\n\nRainy."), ASK],
        "enable_thinking": False,
    },
    "parts": {
        "messages": [
            say("system", parts("Be brief.", "Be kind.")),
            say("user", parts("What is it like ", "in Zürich?")),
            say("assistant", parts("Rainy.")),
            say("user", parts("And", "", "Bern?")),
        ]
    },
}


def published() -> dict[str, str]:
    """Every chat template of the package, by model."""
    found = {}
    for folder in sorted(DATA.iterdir()):
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        source = file.read_text(encoding="utf-8") if file.is_file() else None
        if source is None and config.is_file():
            source = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(source, str):
            found[folder.name] = source
    return found


PUBLISHED = published()
GLM, V2, V3 = (PUBLISHED[name] for name in ("glm-4.7-flash", "deepseek-v2", "deepseek-v3"))


def theirs(source: str, messages: Any, **given: Any) -> str:
    """What transformers' tokenizer makes of it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **TOKENS)
    text = tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, **{"add_generation_prompt": True, **given}
    )
    assert isinstance(text, str)
    return text


def flattened(messages: list[dict[str, Any]], separator: str) -> list[dict[str, Any]]:
    """The same with strings for parts."""
    return [
        {**m, "content": separator.join(part["text"] for part in m["content"])}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]


@pytest.mark.parametrize("name", TWELVE)
def test_glm_is_written_as_transformers_writes_it(name):
    assert len(TWELVE) == 12
    text = ChatTemplate(GLM, TOKENS).render(**TWELVE[name])
    assert text == theirs(GLM, **TWELVE[name])
    assert text.startswith("[gMASK]<sop>")
    changed = [*TWELVE[name]["messages"][:-1], ASK, say("user", "More.")]
    assert text != theirs(GLM, **{**TWELVE[name], "messages": changed})


@pytest.mark.parametrize("source", [V2, MOONLIGHT_TEMPLATE], ids=["V2", "Moonlight"])
@pytest.mark.parametrize("name", TWELVE)
def test_v2_and_moonlight_are_written_as_transformers_writes_them(source, name):
    # They cannot read lists of parts: transformers has to be given the text.
    given = TWELVE[name]
    text = ChatTemplate(source, TOKENS).render(**given)
    assert text == theirs(source, **{**given, "messages": flattened(given["messages"], "\n")})
    changed = [say("user", "x"), *given["messages"]]
    assert text != theirs(source, **{**given, "messages": flattened(changed, "\n")})


@pytest.mark.parametrize("model", PUBLISHED)
def test_every_published_template_is_written_as_transformers_writes_it(model):
    # Given the form that the template was found to want; what it refuses, it refuses in both.
    template = ChatTemplate(PUBLISHED[model], TOKENS)
    written = 0
    for given in TWELVE.values():
        variables = {"add_generation_prompt": True, **given}
        messages = plain_messages(variables.pop("messages"), template.form)
        try:
            (wanted,), _ = render_jinja_template(
                [messages], chat_template=PUBLISHED[model], **TOKENS, **variables
            )
        except Exception:
            with pytest.raises(InvalidRequestError, match="chat template"):
                template.render(messages, **variables)
            continue
        assert template.render(messages, **variables) == wanted
        written += 1
    assert written >= 7


def test_the_templates_of_the_four_families_want_what_they_want():
    forms = {name: ChatTemplate(source).form for name, source in PUBLISHED.items()}
    assert forms["glm-4.7-flash"].part_separator == ""
    assert not forms["glm-4.7-flash"].text_arguments
    assert forms["deepseek-v3"].null_content and forms["deepseek-v3"].text_arguments
    assert forms["deepseek-v2"].part_separator == "\n"


@pytest.mark.parametrize("source", [GLM, V3], ids=["GLM", "V3"])
def test_null_absent_and_empty_contents_are_written_alike_beside_calls(source):
    # bug-cases 25: GLM's template writes a null as "None", DeepSeek-V3's loses the call beside "".
    template = ChatTemplate(source, TOKENS)
    texts = set()
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        for arguments in ({"city": "Zürich"}, '{"city": "Zürich"}'):
            function = {"name": "weather", "arguments": arguments}
            call = [{"id": "call_0", "type": "function", "function": function}]
            reply = {"role": "assistant", **content, "tool_calls": call}
            texts.add(template.render([ASK, reply, RESULT]))
    (text,) = texts
    assert "weather" in text and "Zürich" in text and "None" not in text


def test_glms_reply_begins_inside_or_behind_its_reasoning():
    template = ChatTemplate(GLM)
    assert template.render([ASK]).endswith("<|assistant|><think>")
    assert template.render([ASK], enable_thinking=False).endswith("<|assistant|></think>")
    kept = [ASK, say("assistant", "Rainy.", reasoning_content="Hm."), ASK]
    assert "Hm." not in template.render(kept)
    assert "<think>Hm.</think>Rainy." in template.render(kept, clear_thinking=False)


@pytest.mark.parametrize(
    ("source", "end", "appends"),
    [(V2, EOS, True), (MOONLIGHT_TEMPLATE, "<|im_end|>", True), (GLM, "", False)],
    ids=["V2", "Moonlight", "GLM"],
)
def test_which_templates_only_append_from_turn_to_turn(source, end, appends):
    # bug-cases 54: GLM drops the reasoning of earlier turns, so its second prompt does not begin
    # with the first one and the reply: that is a session's edit, or reuse at shifted positions.
    template = ChatTemplate(source, TOKENS)
    reply = "Rainy."
    first = template.render([ASK])
    second = template.render([ASK, say("assistant", reply), say("user", "And Bern?")])
    said = first + reply + end
    if not appends:
        said = first + "Hm.</think>" + reply
    else:
        assert not second.startswith(said[:-1] + "?")
    assert second.startswith(said.replace("Assistant:", "Assistant: ")) == appends

import json
import re

import pytest

from leyline.errors import InvalidRequestError, ModelError
from leyline.template import ChatTemplate, Form, content_text, plain_messages
from leyline.tokenizer import Tokenizer
from tests.embedded_fixtures import embedded_model

USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
# What templates do with tool calls: GLM's way, DeepSeek-V3's, and Qwen's.
ITEMS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "[{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}"
    "{% endfor %}]{% endfor %};{% endfor %}"
)
NULL_AND_TEXT = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is none %}"
    "{% for c in m['tool_calls'] %}{{ c['function']['name'] + c['function']['arguments'] }}"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
)
TOJSON = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


def render(source: str, messages=(USER,), **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages), **variables)


def calling(arguments: object, **fields: object) -> dict[str, object]:
    """A reply that calls a function."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", **fields, "tool_calls": [{"id": "1", "function": function}]}


# The embedded model's template --------------------------------------------------------------


def test_the_embedded_template_writes_the_turns_and_the_generation_prompt():
    tokenizer = Tokenizer.load(embedded_model())
    messages = [{"role": "system", "content": "Be brief."}, USER]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.render(messages, add_generation_prompt=False) == turns
    assert tokenizer.render(messages) == turns + "<|im_start|>assistant\n"


def test_the_embedded_template_starts_with_its_own_system_turn():
    text = Tokenizer.load(embedded_model()).render([USER])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_the_embedded_template_only_appends_from_turn_to_turn():
    # bug-cases 54: what turn 2 renders must start with turn 1 and its reply.
    tokenizer = Tokenizer.load(embedded_model())
    first = tokenizer.render([USER])
    reply = {"role": "assistant", "content": "Hello."}
    second = tokenizer.render([USER, reply, USER])
    assert second.startswith(first + "Hello.<|im_end|>\n")


# Messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "a"}, "user:a;"),
        ({"role": "user", "content": ""}, "user:;"),
        ({"role": "user", "content": None}, "user:;"),
        ({"role": "user"}, "user:;"),
        ({"role": "tool", "content": []}, "tool:;"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "user:a;"),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
            "user:a\nb;",
        ),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "assistant:;"),
    ],
)
def test_content_may_be_a_string_null_absent_or_text_parts(message, text):
    assert render(PLAIN, [message]) == text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        (["Hi"], "messages[0]"),
        ([USER, {"content": "Hi"}], "messages[1].role"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "messages[0].content"),
        ([{"role": "user", "content": b"Hi"}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
        ),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, param):
    with pytest.raises(InvalidRequestError) as caught:
        plain_messages(messages)
    assert caught.value.param == param
    assert "must" in caught.value.message or "send" in caught.value.message


def test_messages_are_not_changed_in_place():
    parts = [{"type": "text", "text": "a"}]
    message = {"role": "user", "content": parts}
    render(PLAIN, [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}
    call = calling('{"a": 1}')
    render(ITEMS, [call])
    assert call == calling('{"a": 1}')


def test_content_text_keeps_null():
    assert content_text(None) is None


def test_templates_see_plain_values_and_no_objects():
    class Sly(str):
        def secret(self) -> str:
            return "secret"

    class Odd:
        pass

    message = {"role": "user", "content": Sly("Hi"), "odd": Odd(), "fine": (1, 2.5, None)}
    source = "{{ messages[0].odd }} {{ messages[0].fine }} {{ messages[0].content.secret }}"
    assert render(source, [message]) == "<Odd> [1, 2.5, None] "


def test_deep_nesting_is_refused():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(PLAIN, [{**USER, "deep": deep}])


# The form that a template wants -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (PLAIN, Form()),
        (ITEMS, Form(only_objects=True)),
        (TOJSON, Form()),
        (NULL_AND_TEXT, Form(null_content=True, text_arguments=True)),
        ("{{ messages[-1].tool_calls[0].function | string }}", Form(text_arguments=True)),
        ("{{ messages[0].content }}", Form()),
        (
            "{{ messages[0].content | map(attribute='text') | join('') }}",
            Form("", list_content=True),
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
            Form(part_separator=""),
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{{ m.content | map(attribute='text') | join(' ') }}{% endif %}{% endfor %}",
            Form(part_separator=" "),
        ),
        ("{{ raise_exception('never') }}", Form()),
    ],
)
def test_a_template_is_asked_for_its_form(source, form):
    assert ChatTemplate(source).form == form


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ITEMS, "user:Hi;assistant:[f a=1];"),
        (NULL_AND_TEXT, 'user:Hi;assistant:f{"a": 1};'),
        (TOJSON, 'user:Hi;assistant:f{"a": 1};'),
    ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_calls_render_alike_however_they_are_sent(source, text, content, arguments):
    # bug-cases 25 and 26: null, absent and empty content; arguments as text or as an object.
    assert render(source, [USER, calling(arguments, **content)]) == text


def test_a_form_that_the_template_does_not_want_fails():
    # The twin: what the two kinds of templates make of each other's form.
    messages = plain_messages([USER, calling('{"a": 1}')], Form(text_arguments=True))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    empty = plain_messages([calling({})], Form())
    assert (
        empty[0]["content"] == ""
        and plain_messages([calling({})], Form("", True))[0]["content"] is None
    )
    program = ChatTemplate(ITEMS)._default
    with pytest.raises(Exception, match="items"):
        program.text({"messages": messages})


def test_odd_arguments_are_left_alone():
    for odd in ("[1]", "{", "5"):
        plain = plain_messages([calling(odd)])
        assert plain[0]["tool_calls"][0]["function"]["arguments"] == odd
    for nothing in ("", None):
        plain = plain_messages([calling(nothing)])
        assert plain[0]["tool_calls"][0]["function"]["arguments"] == {}
    calls = ["no", {"function": "no"}, {}]
    assert plain_messages([{"role": "a", "tool_calls": calls}])[0]["tool_calls"] == calls


@pytest.mark.parametrize(
    "odd", ["[1]", "{", '{"bird": "ow', "5", '{"a":' * 2000 + "1" + "}" * 2000]
)
def test_a_call_that_a_model_left_broken_can_be_sent_back(odd):
    assert f" INVALID_JSON={odd}]" in render(ITEMS, [calling(odd)])
    assert json.dumps(odd) in render(TOJSON, [calling(odd)])


def test_what_no_prompt_can_spell_is_replaced_in_arguments():
    half = calling(r'{"a\udc00": ["\ud83d", "\ud83d\ude42", 1e2]}')
    arguments = plain_messages([half])[0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"a\ufffd": ["\ufffd", "🙂", 100.0]}


def test_text_arguments_are_given_as_they_were_sent():
    assert render(NULL_AND_TEXT, [calling('{"ä":1}')]) == 'assistant:f{"ä":1};'
    assert render(NULL_AND_TEXT, [calling({"ä": 1})]) == 'assistant:f{"ä": 1};'


def test_a_template_that_reads_only_parts_gets_them():
    source = "{% for m in messages %}{{ m.role }}:{{ m.content[0].text }};{% endfor %}"
    assert render(source, [USER, {"role": "user", "content": ""}]) == "user:Hi;user:;"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content[0]['text'] }}", [{"role": "user", "content": parts}]) == (
        "a\nb"
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_all_its_names(name):
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert render(source, [{**USER, name: "hm", "other": None}]) == "hm hm"
    assert render(source, [{**USER, name: None}]) == " "


# What transformers offers to templates ---------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}x", "<s>x"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(sort_keys=true) }}", '{"a": [1], "b": 1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}", "2"),
        ("{% set n = namespace(x=[]) %}{% set n.x = n.x + [1] %}{{ n.x }}", "[1]"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ enable_thinking is defined }}", "False"),
        ("{{ dict(a=1).items() | list }}", "[('a', 1)]"),
        (
            "{{ {'a': 1} | items | list }}{{ {'b': 1, 'a': 2} | dictsort }}",
            "[('a', 1)][('a', 2), ('b', 1)]",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='role') | join('-') }}", "user"),
        ("{{ messages[::-1][0].content }}{{ messages[1:] | length }}", "Hi0"),
        (
            "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{% endfor %}",
            "1TrueTrue",
        ),
        (
            "{% for i in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}"
            "{{ loop.length }}{% endfor %}",
            "2313323",
        ),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for i in [3, 1] if i > 1 %}{{ i }}{% endfor %}", "3"),
        (
            "{% for i in [1, [2, [3]]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}",
            "123",
        ),
        (
            "{% macro f(x, y='b') %}{{ x }}{{ y }}{{ caller() if caller else '' }}"
            "{% endmacro %}{{ f('a') }}",
            "ab",
        ),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}b{% endfilter %}", "A1B"),
        (
            "{{ 'a' ~ 1 ~ none }}{{ 'a' + 'b' }}{{ 'ab' * 2 }}{{ '%s-%d' % ('a', 3) }}"
            "{{ 7 // 2 }}{{ 2 ** 3 }}",
            "a1Noneabababa-338",
        ),
        ("{{ '{} {x:>3}'.format('a', x=1) }}{{ '%s' | format('b') }}", "a   1b"),
        ("{{ ' a '.strip() + 'b,c'.split(',')[1] + 'x'.replace('x', 'y') }}", "acy"),
        (
            "{{ 'a' in 'ab' }}{{ 1 in [1, 2] }}{{ 'role' in messages[0] }}{{ 1 < 2 < 3 }}",
            "TrueTrueTrueTrue",
        ),
        ("{{ [1, 2] == [1, 2] }}{{ (1, 2)[0] }}{{ {'a': messages[0].role}.a }}", "True1user"),
        (
            "{{ 'abc' | replace('b', 'x') | indent(2) | trim }}{{ '<' | e }}{{ 1.25 | round(1) }}",
            "axc&lt;1.2",
        ),
        ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% with c = 3 %}{{ c }}{% endwith %}", "123"),
        ("{{ cycler('a', 'b').next() }}{{ joiner(', ')() }}{{ [3, 1] | sort | first }}", "a1"),
        (
            "{{ messages | groupby('role') | length }}{{ [1, 1] | unique | list }}"
            "{{ [1] | batch(2) | list }}",
            "1[1][[1]]",
        ),
        ("{{ none | default('x', true) }}{{ nothing | d('y') }}{{ 5 is divisibleby 5 }}", "xyTrue"),
        ("{{ messages | selectattr('role', 'equalto', 'none') | first is defined }}", "False"),
        ("{{ (messages | selectattr('role', 'equalto', 'none')) is iterable }}", "True"),
    ],
)
def test_helpers_of_transformers_are_there_and_do_what_they_do_there(source, text):
    from transformers.utils.chat_template_utils import render_jinja_template

    assert render(source) == text
    given = {"bos_token": "<s>", "add_generation_prompt": True}
    (theirs,), _ = render_jinja_template([[USER]], chat_template=source, **given)
    assert theirs == text


def test_variables_reach_the_template_but_do_not_replace_the_messages():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_a_template_for_tools_is_taken_where_there_are_tools():
    template = ChatTemplate("plain", tool_source="with {{ tools | length }}")
    assert template.render([USER]) == template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=[{"name": "f"}]) == "with 1"


def test_a_template_that_refuses_says_why():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="refused these messages: roles must alternate"):
        render(source)


def test_a_refusal_is_one_line_of_bounded_length():
    source = "{{ raise_exception('no\\n\\nway ' * 1000) }}"
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert re.search(r": no way no way .*\.\.\.$", caught.value.message)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[0].nothing.deeper }}", "{{ 1 + 'a' }}", "{{ f() }}"]
)
def test_any_failure_of_a_template_is_a_clear_error(source):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["a\n{% for %}", "a\n{{ x | nothing }}", "{{ " + "(" * 9_999 + " }}", "{% for i in a %}" * 30],
)
def test_an_invalid_template_is_a_model_error(source):
    with pytest.raises(ModelError, match="is not valid"):
        ChatTemplate(source)


def test_an_invalid_template_is_named_by_its_line():
    with pytest.raises(ModelError, match=re.escape("(line 2)")):
        ChatTemplate("a\n{% for %}")


def test_json_with_long_lines_of_white_space_is_what_json_writes():
    value = {"a": [1, {"b": ["c"] * 3}], "d": None}
    source = f"{{{{ {value!r} | tojson(indent=4) }}}}"
    assert render(source.replace("None", "none")) == json.dumps(value, indent=4)

import re

import pytest

from leyline.errors import InvalidRequestError, ModelError
from leyline.template import ChatTemplate, content_text, plain_messages
from leyline.tokenizer import Tokenizer
from tests.embedded_fixtures import embedded_model

USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"


def render(source: str, messages=(USER,), **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages), **variables)


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


def test_content_text_keeps_null():
    assert content_text(None) is None


def test_null_stays_null_beside_tool_calls_for_templates_that_look_for_it():
    source = "{{ messages[0]['content'] is none }}"
    assert render(source, [{"role": "assistant", "tool_calls": [{}]}]) == "True"
    assert render(source, [{"role": "assistant"}]) == "False"


def test_tool_call_arguments_become_mappings_where_they_are_objects():
    source = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{k}}={{v}}{% endfor %}"  # noqa: E501
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == "a=1"
    assert call["function"]["arguments"] == '{"a": 1}'
    for odd in ("[1]", "{", ""):
        call = {"function": {"name": "f", "arguments": odd}}
        plain = plain_messages([{"role": "assistant", "tool_calls": [call, "no"]}])
        assert plain[0]["tool_calls"] == [call, "no"]


# What transformers offers to templates ---------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}x", "<s>x"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}", "2"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ enable_thinking is defined }}", "False"),
    ],
)
def test_helpers_of_transformers_are_there(source, text):
    assert render(source) == text


def test_variables_reach_the_template_but_do_not_replace_the_messages():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_a_template_that_refuses_says_why():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="refused these messages: roles must alternate"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[0].nothing.deeper }}", "{{ 1 + 'a' }}", "{{ f() }}"]
)
def test_any_failure_of_a_template_is_a_clear_error(source):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_an_invalid_template_is_a_model_error_with_its_line():
    with pytest.raises(ModelError, match=re.escape("(line 2)")):
        ChatTemplate("a\n{% for %}")


# The sandbox (bug-cases 142) -------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set x = messages[0].pop('role') %}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/hostname') }}",
    ],
)
def test_the_sandbox_refuses(source):
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)

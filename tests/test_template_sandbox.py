"""What no template may do: reach for Python, loop for ever, write a terabyte."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable

import pytest

from leyline import template_meter
from leyline.errors import InvalidRequestError, ModelError
from leyline.template import ChatTemplate

USER = {"role": "user", "content": "Hi"}


def grown(step: str, start: str = "'aaaaaaaaaa'", turns: int = 60) -> str:
    """A template that replaces x by something larger, again and again."""
    head = f"{{% set n = namespace(x={start}) %}}{{% for i in range({turns}) %}}"
    return head + f"{{% set n.x = {step} %}}{{% endfor %}}{{{{ n.x }}}}"


def repeated(body: str, x: str = "range(20000) | list") -> str:
    """A template that does something to a large value, often."""
    return f"{{% set x = {x} %}}{{% for i in range(9999) %}}{body}{{% endfor %}}"


# Python's internals (bug-cases 142) ---------------------------------------------------------------


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
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages | map('attr', '__class__') | list }}",
        "{{ messages | groupby('content.__class__') }}",
        "{{ messages | sort(attribute='__class__') }}",
        "{% if false %}{{ ''.__class__ }}{% endif %}",
        "{% macro never() %}{{ x.__class__ }}{% endmacro %}",
        "{{ dict.mro }}",
        "{{ (messages | map(attribute='x')).gi_frame }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{% from 'os' import path %}",
        "{% extends 'base' %}",
        "{% autoescape true %}{{ messages }}{% endautoescape %}",
    ],
)
def test_what_reaches_for_python_files_or_html_is_refused_when_it_is_loaded(source):
    with pytest.raises(ModelError, match=r"^The model's chat template is refused: line 1 "):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set x = messages[0].pop('role') %}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ ''['__cla' ~ 'ss__'] }}",
        "{{ '' | attr('__cla' ~ 'ss__') }}",
        "{{ messages | map(attribute='__cla' ~ 'ss__') | list }}",
        "{{ namespace(_x=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ (1).to_bytes(10 ** 10, 'big') }}",
        "{{ 'a'.encode().zfill(10 ** 10) }}",
        "{{ 'aaa'.translate({97: 'a' * 1000}) }}",
        "{% set x = 'a'.encode() * 30000000 %}",
        "{% set x = '%30000000d'.encode() % 1 %}",
        "{% set x = ('a' | attr('encode'))() * 30000000 %}",
    ],
)
def test_what_reaches_for_them_in_disguise_is_refused_by_the_probes(source):
    with pytest.raises(ModelError, match=r"^The model's chat template is refused: "):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    ["{{ open('/etc/hostname') }}", "{{ lipsum() }}", "{{ dict.mro() }}", "{{ cycler.x.y }}"],
)
def test_what_is_not_there_fails_when_it_is_used(source):
    with pytest.raises((InvalidRequestError, ModelError), match="chat template"):
        ChatTemplate(source).render([USER])


def test_what_only_a_message_brings_about_is_refused_then():
    source = "{% if messages[0].content == 'evil' %}{{ ''['__cla' ~ 'ss__'] }}{% endif %}ok"
    template = ChatTemplate(source)
    assert template.render([USER]) == "ok"
    with pytest.raises(InvalidRequestError, match="'__class__' of a str is not allowed"):
        template.render([{"role": "user", "content": "evil"}])


def test_names_that_only_look_alike_are_no_offence():
    source = "{{ messages[0].__x }}{{ messages[0]['_id'] }}{{ '__init__' }}{{ messages[0].mroo }}"
    assert ChatTemplate(source).render([{**USER, "_id": 7}]) == "7__init__"


# Work ---------------------------------------------------------------------------------------------

ENDLESS = {
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "branches": "{% for i in range(9999) %}{% for j in range(9999) %}"
    + "{% if i %}{% endif %}" * 1000
    + "{% endfor %}{% endfor %}",
    "static text": "{% for i in range(9999) %}" + "a" * 200_000 + "{% endfor %}",
    "two calls a call": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive loop, long": "{% for i in [1] recursive %}{% if loop.depth < 2 %}"
    "{% set x = loop(range(300)) %}{% else %}" + "{% if i %}{% endif %}" * 2000 + "{% endif %}"
    "{% endfor %}",
    "recursive loop, its test": "{% for i in [1] if i == 1 " + "== 1 " * 3000 + "recursive %}"
    "{% if loop.depth < 2 %}{% set x = loop([1] * 300) %}{% endif %}{% endfor %}",
    "recursive loop, its else": "{% for i in [1] recursive %}"
    + "{% set x = loop([]) %}" * 300
    + "{% else %}"
    + "{% if i %}{% endif %}" * 3000
    + "{% endfor %}",
    "block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "sums": repeated("{{ range(20000) | sum }}"),
    "lazy sums": repeated("{{ x | reverse | sum }}"),
    "slices": repeated("{% if x[1:] %}{% endif %}"),
    "search": repeated("{% if -1 in x %}{% endif %}"),
    "sort": repeated("{% if x | sort %}{% endif %}"),
    "literal": repeated("{% if [" + "1," * 20_000 + "] %}{% endif %}"),
    "split": repeated("{% if x.split('a') %}{% endif %}", "'a' * 9999"),
    "title": repeated("{% if x | title %}{% endif %}", "'a b' * 200000"),
    "text search": repeated("{% if 'zz' in x %}{% endif %}", "'a b' * 200000"),
    "comparison": repeated("{% if x + 'a' == x + 'b' %}{% endif %}", "'a b' * 200000"),
}
HUGE = {
    "times": "{{ 'a' * 10 ** 12 }}",
    "times, turned": "{{ 10 ** 12 * 'a' }}",
    "list times": "{{ [1] * 10 ** 12 }}",
    "power": "{{ 2 ** (10 ** 10) }}",
    "squares": grown("n.x * n.x", "3"),
    "doubled number": grown("n.x + n.x", "1", 9999),
    "concat": grown("n.x ~ n.x"),
    "plus": grown("n.x + n.x"),
    "list plus": grown("n.x + n.x", "[1]"),
    "shared lists": grown("[n.x, n.x]", "[1]"),
    "shared mappings": grown("dict(a=n.x, b=n.x)", "[1]"),
    "shared, from a filter": grown("(n.x + n.x) | batch(9) | list", "[1]"),
    "compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "set block": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}{{ n.x }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent often": "{{ ('%(a)s' * 10000) % {'a': 'a' * 100000} }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format field": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format often": "{{ ('{0}' * 10000).format('a' * 100000) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10 ** 9) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000) | replace('', 'a' * 100000) }}",
    "join": "{{ ('a' * 100000).join('a' * 100000) }}",
    "join lazily": "{{ range(20000) | map('string') | join('a' * 100000) }}",
    "join lazily, method": "{{ ('a' * 100000).join(range(20000) | map('string')) }}",
    "map": "{{ range(20000) | map('replace', '1', 'a' * 100000) | list }}",
    "indent": "{{ ('a\\n' * 100000) | indent(10 ** 6) }}",
    "indent by text": "{{ ('a\\n' * 100000) | indent('a' * 100000) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "json": "{% set n = namespace(x=[1]) %}{% for i in range(400) %}{% set n.x = [n.x] %}"
    "{% endfor %}{{ ([n.x] * 40) | tojson(indent=64) }}",
    "json indent": "{{ [1] | tojson(indent=900000) | length }}",
    "json indent by text": "{{ [1] | tojson(indent='a' * 900000) | length }}",
    "json separators": "{{ ([1] * 9) | tojson(separators=('x' * 90000, ':')) | length }}",
    "format number": "{{ ('{0:b}' * 10000).format(2 ** 2000) | length }}",
    "format float": "{{ ('{0:f}' * 100000).format(1e308) | length }}",
    "percent number": "{{ ('%(a)d' * 50000) % {'a': 2 ** 2000} }}",
    "percent float": "{{ ('%(a)f' * 100000) % {'a': 1e308} }}",
    "format field of a namespace": "{% set n = namespace(x='a' * 90000) %}"
    "{{ ('{0.x}' * 300).format(n) | length }}",
    "format item of a namespace": "{% set n = namespace(x='a' * 90000) %}"
    "{{ ('{0[x]}' * 300).format(n) | length }}",
    "huge numbers in a list": "{{ ([2 ** 4000] * 20000) | string | length }}",
    "date": "{{ strftime_now('%c' * 100000) }}",
    "source": "a" * 300_000,
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_work_is_refused_when_the_template_is_loaded(source, monkeypatch):
    monkeypatch.setattr(template_meter, "BASE_STEPS", 50_000)  # what takes long takes longer
    with pytest.raises(ModelError, match=r"steps|itself without end|too much text"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_huge_values_are_refused_before_they_are_made(source):
    start = time.perf_counter()
    with pytest.raises(ModelError, match=r"makes a|writes too|formats with|rounds to|is longer"):
        ChatTemplate(source)
    assert time.perf_counter() - start < 5


def test_output_is_refused_before_its_pieces_are_joined():
    source = "{% set x = 'a' * 900000 %}" + "{{ x }}" * 100
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="writes too much"):
            ChatTemplate(source)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


ESCAPES = {
    "repr": "{{ '{!r}'.format(x) | length }}",
    "repr in percent": "{{ ('%r' % x) | length }}",
    "ascii": "{{ '{!a}'.format(x) | length }}",
    "ascii in percent": "{{ ('%a' % x) | length }}",
    "json": "{{ x | tojson(ensure_ascii=true) | length }}",
    "json, indented": "{{ [x] | tojson(ensure_ascii=true, indent=1) | length }}",
    "a list's text": "{{ [x] | string | length }}",
    "a list's output": "{{ [x] }}",
    "a list, joined": "{{ ([x] ~ 'a') | length }}",
    "a list in a list, joined": "{{ [[x]] | join('a') | length }}",
    "an address": "{{ x | urlencode | length }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_what_spells_a_character_by_several_is_bounded_by_that_factor(source, monkeypatch):
    assert len(json.dumps("\U0010ffff")) - 2 == template_meter.ESCAPE_FACTOR
    monkeypatch.setattr(template_meter, "BASE_SIZE", 100_000)
    bound = 100_000 * template_meter.ESCAPE_FACTOR
    ends = "{% set x = '\U0010ffff' * 90000 %}", "{% set x = 'a' * 90000 %}"
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"makes a value|writes too much"):
            ChatTemplate(ends[0] + source)
        # Four bytes a character, and once more while pieces are joined.
        assert tracemalloc.get_traced_memory()[1] < 2 * 4 * bound
    finally:
        tracemalloc.stop()
    assert ChatTemplate(ends[1] + source).render([USER])  # the twin: plain letters


def test_bytes_and_numbers_have_a_size():
    meter = template_meter.Meter({}, 0)
    assert meter.read(b"abc", bytearray(4)) == 7
    assert meter.read([b"abc"]) == template_meter.ELEMENT_SIZE + 3
    assert meter.read(2**2000) == 2001
    for operation, left in (("*", b"a"), ("%", b"%5000000d"), ("%", bytearray(b"%5000000d"))):
        with pytest.raises(template_meter.WorkLimitError):
            template_meter.check_binop(meter, operation, left, 30_000_000)


def test_the_real_limit_is_a_matter_of_seconds():
    start = time.perf_counter()
    with pytest.raises(ModelError, match="does it loop for ever"):
        ChatTemplate(ENDLESS["nested loops"])
    assert time.perf_counter() - start < 30


def test_what_only_a_message_makes_endless_is_refused_then():
    source = "{% if messages | length > 2 %}" + ENDLESS["nested loops"] + "{% endif %}ok"
    template = ChatTemplate(source)
    assert template.render([USER]) == "ok"
    with pytest.raises(InvalidRequestError, match="does it loop for ever"):
        template.render([USER, USER, USER])


def test_a_namespace_that_holds_itself_can_be_printed():
    source = "{% set n = namespace() %}{% set n.x = [n, n] %}{{ n }}{{ n.x }}"
    assert ChatTemplate(source).render([USER]) == "<Namespace>[<Namespace>, <Namespace>]"


# What honest templates may do ---------------------------------------------------------------------

JOINED = "{% for m in messages %}{{ m.role + ': ' + m.content.strip() + '\n' }}{% endfor %}"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "word " * 120}] * 3000,
        [{"role": "user", "content": "word " * 800_000}],
        [{"role": "user", "content": "x"}] * 20_000,
        [{"role": "user", "content": "<" * 500_000}],
    ],
    ids=["many messages", "a long one", "many short ones", "markup"],
)
def test_long_conversations_are_no_crime(messages):
    wanted = "".join(f"user: {m['content'].strip()}\n" for m in messages)
    assert ChatTemplate(JOINED).render(messages) == wanted
    escaped = JOINED.replace("m.content.strip()", "m.content | tojson(indent=1) | e | trim")
    assert len(ChatTemplate(escaped).render(messages)) > len(wanted)


def test_a_template_may_look_at_all_messages_for_each():
    source = (
        "{% for m in messages %}{{ messages[loop.index0:] | selectattr('role', 'equalto', 'tool') "
        "| list | length }}{{ messages | length }} {% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 120}] * 400
    assert ChatTemplate(source).render(messages) == "0400 " * 400


def test_large_tools_may_be_written_out():
    schema = {f"field{i}": {"type": "string", "description": "d" * 50} for i in range(2000)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}] * 10
    source = "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ tools | tojson }}"
    assert len(ChatTemplate(source).render([USER], tools=tools)) > 3_000_000


def test_two_renderings_at_once_have_a_meter_each():
    from concurrent.futures import ThreadPoolExecutor

    template = ChatTemplate(JOINED)
    texts = [f"{i} " + "word " * 2000 for i in range(16)]
    work: Callable[[str], str] = lambda text: template.render([{"role": "u", "content": text}])  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, texts)) == [f"u: {text.strip()}\n" for text in texts]

"""Rewriting a context to another text, and finding messages and reasoning in one."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leyline import rewriting as module
from leyline.context import Context
from leyline.directive import Directive, Mode, apply
from leyline.marks import MessageSpan
from leyline.rendering import Rendering
from leyline.rendering import rendered as rendered_as
from leyline.rewriting import Rewriting, message_spans, reasoning_span, rewrite
from leyline.server.parsers.formats import PROMPTED
from leyline.server.parsers.pieces import ToolUse
from leyline.template import ChatTemplate
from leyline.tokenizer import Tokenizer
from tests.embedded_fixtures import embedded_model

TOKENIZER = Tokenizer.load(embedded_model())
SPELLED = [TOKENIZER.token_bytes(i, skip_special=False) for i in range(TOKENIZER.vocab_size)]
ID_OF = {spelled: token for token, spelled in reversed(list(enumerate(SPELLED))) if token > 16}
TURN = "<|im_end|>\n<|im_start|>"
PIECES = [
    "The cat",
    " sat on",
    " unbelievable",
    "\n\n",
    "  ",
    "é",
    "日本",
    "🙂",
    ".",
    "ing",
    "42",
    TURN,
]


def spelled(ids: Any) -> bytes:
    return b"".join(SPELLED[token] for token in ids)


def split_by_hand(ids: list[int], source: random.Random, often: float = 0.3) -> list[int]:
    """The same bytes in other tokens: some are cut where both halves are in the vocabulary."""
    return [half for token in ids for half in halves(token, source, often)]


def halves(token: int, source: random.Random, often: float) -> list[int]:
    data = SPELLED[token]
    cuts = [at for at in range(1, len(data)) if {data[:at], data[at:]} <= ID_OF.keys()]
    if token <= 16 or not cuts or source.random() > often:
        return [token]
    at = source.choice(cuts)
    return [ID_OF[data[:at]], ID_OF[data[at:]]]


def complaints(old: list[int], rendered: str, min_run: int, made: Rewriting) -> list[str]:
    """What `rewrite` promises of every result and this one breaks."""
    found: list[str] = []
    after = list(apply(Context.of(old), made.directives).after.append(made.append).tokens)
    if spelled(after) != rendered.encode():
        found.append("it does not spell the text")
    if after != list(made.new_tokens):
        found.append("new_tokens are others")
    for change in made.directives:
        removed = old[change.start : change.end]
        if shares_an_end(removed, list(change.replacement)):
            found.append("a difference of tokenisation is left")
    if any(left.end > right.start for left, right in pairwise(made.directives)):
        found.append("directives overlap or are not in order")
    tail = len(old) - made.directives[-1].end if made.directives else 0
    last = made.directives[-1] if made.directives else None
    if 0 < tail < min_run:
        found.append("a tail is kept that is too short")
    if last and not tail and last.replacement:
        found.append("a replacement at the end is no append")
    if made.first_difference != (made.directives[0].start if last else len(old)):
        found.append("the first difference is elsewhere")
    return found


def shares_an_end(left: list[int], right: list[int]) -> bool:
    """Whether both begin or end with the same bytes, at a border that both have."""
    heads = {spelled(left[:n]) for n in range(1, len(left) + 1)} & {
        spelled(right[:n]) for n in range(1, len(right) + 1)
    }
    tails = {spelled(left[n:]) for n in range(len(left))} & {
        spelled(right[n:]) for n in range(len(right))
    }
    return bool(heads | tails) or spelled(left) == spelled(right)


texts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
seeds = st.integers(0, 2**32).map(random.Random)


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, str]:
    """A text, and slices of it in order with other text between them."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    new = "".join(
        text[a:b] + draw(st.sampled_from(["", " dog", "ing", "\n"])) for a, b in pairwise(cuts)
    )
    return text, new + text[cuts[-1] if cuts else 0 :]


@given(edited(), seeds, st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_what_is_promised_of_any_text(pair, source, min_run):
    old_text, new_text = pair
    old = split_by_hand(TOKENIZER.encode(old_text), source)
    made = rewrite(old, new_text, TOKENIZER, Mode.AMORTIZE, min_run)
    assert complaints(old, new_text, min_run, made) == []


@given(edited(), seeds, st.data())
@settings(max_examples=100, deadline=None)
def test_a_twin_that_is_a_little_wrong_is_noticed(pair, source, data):
    old_text, new_text = pair
    old = split_by_hand(TOKENIZER.encode(old_text), source)
    made = rewrite(old, new_text, TOKENIZER, Mode.FORGET, 4)
    assume(made.directives)
    index = data.draw(st.integers(0, len(made.directives) - 1))
    one = made.directives[index]
    others = [
        Directive(one.start, one.end, (*one.replacement, ID_OF[b"x"]), one.mode),
        Directive(one.start - 1, one.end, (old[one.start - 1], *one.replacement), one.mode),
    ]
    for other in others[: 2 if one.start else 1]:
        directives = (*made.directives[:index], other, *made.directives[index + 1 :])
        twin = Rewriting(directives, made.append, made.first_difference, made.new_tokens)
        assert complaints(old, new_text, 4, twin)


@given(texts, seeds)
@settings(max_examples=200, deadline=None)
def test_a_text_that_did_not_change_changes_nothing_however_it_was_tokenised(text, source):
    old = split_by_hand(TOKENIZER.encode(text), source)
    made = rewrite(old, text, TOKENIZER, Mode.AMORTIZE)
    assert made == Rewriting((), (), len(old), tuple(old))


def test_without_the_comparison_of_bytes_it_would(monkeypatch):
    text = "The unbelievable cat sat on. " * 8
    old = split_by_hand(TOKENIZER.encode(text), random.Random(1))
    assert old != TOKENIZER.encode(text)
    assert not rewrite(old, text, TOKENIZER, Mode.AMORTIZE, 4).directives
    monkeypatch.setattr(module, "_real", lambda change, *_: change)
    assert rewrite(old, text, TOKENIZER, Mode.AMORTIZE, 4).directives


def test_a_reply_beside_a_real_edit_keeps_its_ids():
    question = TOKENIZER.encode("<|im_start|>user\nIt is Monday.<|im_end|>\n")
    reply = split_by_hand(TOKENIZER.encode("An unbelievable reply"), random.Random(3), 1.0)
    rest = TOKENIZER.encode("<|im_end|>\n<|im_start|>user\n" + "And so on and on. " * 9)
    old = [*question, *reply, *rest]
    text = TOKENIZER.decode(old, skip_special=False).replace("Monday", "Tuesday")
    made = rewrite(old, text, TOKENIZER, Mode.HEAL)
    (change,) = made.directives
    assert spelled(old[change.start : change.end]).strip() == b"Monday"
    assert spelled(change.replacement).strip() == b"Tuesday"
    assert change.mode is Mode.HEAL
    assert made.first_difference == change.start


@pytest.mark.parametrize(
    ("old", "new", "directives", "append", "first"),
    [
        ("", "", [], "", 0),
        ("", "a b", [], "a b", 0),
        ("a b c", "a b c d", [], " d", 3),
        ("a b c d", "a b", [(2, 4)], "", 2),
        ("a b c d", "", [(0, 4)], "", 0),
        ("a b c d", "a x c d", [(1, 4)], " x c d", 1),  # a tail of two tokens is not kept
        ("a b c d e f g", "a x c d e f g", [(1, 2)], "", 1),
        ("a b c d e f g", "a x c d e f g h", [(1, 2)], " h", 1),
    ],
)
def test_small_texts(old, new, directives, append, first):
    made = rewrite(TOKENIZER.encode(old), new, TOKENIZER, Mode.FORGET, 4)
    assert [(one.start, one.end) for one in made.directives] == directives
    assert spelled(made.append).decode() == append
    assert made.first_difference == first


# Messages -----------------------------------------------------------------------------------


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def with_template(source: str) -> Tokenizer:
    return Tokenizer(TOKENIZER._bpe, template=ChatTemplate(source, {"bos_token": "<|endoftext|>"}))


def found_texts(tokenizer: Tokenizer, messages: Any, text: str | None = None) -> list[str]:
    """What the spans cover, white space around it left out."""
    rendered = tokenizer.render(messages) if text is None else text
    ids = tokenizer.encode(rendered)
    spans = message_spans(messages, rendered, ids, tokenizer, 1000)
    assert [span.role for span in spans] == [message["role"] for message in messages]
    ends = [1000, *(place for span in spans for place in (span.start, span.end))]
    assert all(1000 <= place <= 1000 + len(ids) for place in ends)
    return [spelled(ids[s.start - 1000 : s.end - 1000]).decode().strip() for s in spans]


def chatml_places(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Byte ranges of the contents in SmolLM2's template, as it writes them."""
    places: list[tuple[int, int]] = []
    head = TOKENIZER.render([say("user", "")], add_generation_prompt=False)
    at = 0 if messages[0]["role"] == "system" else head.index("<|im_start|>user")
    for message in messages:
        content = message["content"]
        at += len(f"<|im_start|>{message['role']}\n")
        shown = content.rpartition("</think>")[2] if message["role"] == "assistant" else content
        first = at + len((content[: len(content) - len(shown)]).encode())
        first += len(shown) - len(shown.lstrip())
        places.append((first, first + len(shown.strip().encode())))
        at += len(content.encode()) + len("<|im_end|>\n")
    return places


contents = st.one_of(
    st.sampled_from(["a", "help", "user", "ok", "<think>hm</think>\n\nok", " padded ", "é", "\n"]),
    st.sampled_from(["", "<|im_end|>", "<|im_start|>user\na", "You are", "a<|im_end|>\nb"]),
    texts.map(lambda text: text.replace("<|", "<")),
)
roles = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(st.builds(say, roles, contents), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_every_content_is_found_where_the_template_wrote_it(messages):
    rendered = TOKENIZER.render(messages)
    ids = TOKENIZER.encode(rendered)
    edges = [0]
    for token in ids:
        edges.append(edges[-1] + len(SPELLED[token]))
    spans = message_spans(messages, rendered, ids, TOKENIZER)
    for span, (first, last) in zip(spans, chatml_places(messages), strict=True):
        assert (span.start == span.end) is (first == last)
        if first < last:
            assert edges[span.start] <= first < edges[span.start + 1]
            assert edges[span.end - 1] < last <= edges[span.end]


def test_a_search_for_the_content_alone_would_find_it_elsewhere():
    messages = [say("user", "help"), say("assistant", "a"), say("user", "a")]
    rendered = TOKENIZER.render(messages)
    assert rendered.index("help") < rendered.index("user")  # in the template's own system prompt
    assert found_texts(TOKENIZER, messages) == ["help", "a", "a"]


def test_what_a_span_says():
    messages = [
        say("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]),
        say("assistant", None, tool_calls=[{"id": "c", "function": {"name": "f"}}]),
        say("tool", "result", tool_call_id="c"),
        say("tool", "other", tool_call_id=7),
    ]
    rendered = TOKENIZER.render(messages)
    ids = TOKENIZER.encode(rendered)
    one, two, three, four = message_spans(messages, rendered, ids, TOKENIZER, 50)
    assert TOKENIZER.decode(ids[one.start - 50 : one.end - 50]) == "one\ntwo"
    assert two == MessageSpan("assistant", None, one.end, one.end)
    assert (three.role, three.tool_call_id) == ("tool", "c")
    assert four.tool_call_id is None
    assert message_spans([], "", [], TOKENIZER) == []


def test_the_end_of_a_conversation_is_found_by_itself():
    before = [say("user", "a"), say("assistant", "ok")]
    new = [say("user", "ok"), say("tool", "ok", tool_call_id="x")]
    whole = TOKENIZER.render([*before, *new])
    added = whole[whole.index("ok") + len("ok") :]
    assert found_texts(TOKENIZER, new, added) == ["ok", "ok"]
    # The reply is among the messages, and its text in front of those that were added.
    assert found_texts(TOKENIZER, [before[1], *new], added) == ["", "ok", "ok"]


STRIPPING = """
{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content|trim }}{% endif %}
{{- '\n\n# Tools\nThey help.<|im_end|>\n' }}{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- set content = message.content or '' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' and '</think>' in content and not loop.last %}
{{- '<|im_start|>assistant\n' + content.split('</think>')[-1]|trim + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + content|trim }}
{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' + call|tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_a_template_that_trims_wraps_adds_tools_and_drops_reasoning():
    messages = [
        say("system", "  Be brief."),
        say("user", "help\n"),
        say("assistant", "<think>help</think>\n\nyes", tool_calls=[{"id": "c", "name": "help"}]),
        say("tool", "{help}", tool_call_id="c"),
        say("tool", "tool_response", tool_call_id="d"),
        say("assistant", "<think>\nso\n</think>\n\nhelp"),
    ]
    expected = ["Be brief.", "help", "yes", "{help}", "tool_response", "help"]
    assert found_texts(with_template(STRIPPING), messages) == expected


def test_a_system_prompt_that_is_moved_behind_other_messages():
    template = """{{ bos_token }}{% for m in messages if m.role != 'system' %}
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- m.content }}{{ '<|im_end|>' if m.role == 'assistant' else '<|im_start|>' }}{% endfor %}"""
    messages = [say("system", "S"), say("user", "u"), say("assistant", "S"), say("user", "u")]
    assert found_texts(with_template(template), messages) == ["S", "u", "S", "u"]


FRAMELESS = """{% if messages[0].content != 'first' %}{{ raise_exception('no') }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"""


def test_without_hints_only_a_text_that_cannot_be_mistaken_is_found():
    told, twice = "A text that is long enough to be told.", "Twice the same, and long enough."
    messages = [say("user", text) for text in ("first", "a", told, twice, "", twice, "gone")]
    rendered = with_template(FRAMELESS).render(messages)
    expected = ["", "", told, "", "", "", ""]
    assert found_texts(with_template(FRAMELESS), messages, rendered) == expected


def test_a_content_that_is_changed_left_out_or_there_twice_does_not_break_those_behind():
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}{{ m.content|upper }}{% elif m.role == 'user' %}{{ m.content }}
{%- elif m.role == 'assistant' %}{{ m.content + m.content }}{% endif %}<|im_end|>{% endfor %}"""
    roles = ["user", "tool", "system", "assistant", "user", "user"]
    messages = [say(role, f"{role} {at}") for at, role in enumerate(roles)]
    expected = ["user 0", "", "", "", "user 4", "user 5"]
    assert found_texts(with_template(template), messages) == expected


def test_what_the_vocabulary_lacks_moves_no_message():
    messages = [say("user", "a\x16b"), say("assistant", "\x16"), say("user", "c\x16d")]
    assert found_texts(TOKENIZER, messages) == ["ab", "", "cd"]


def test_stand_ins_in_a_message_lose_that_message_at_most():
    messages = [say("user", "\ue0001\ue001"), say("assistant", "yes"), say("user", "no")]
    assert found_texts(TOKENIZER, messages)[2] == "no"


CALLS = [
    {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sky"}'}},
    {"id": "d", "type": "function", "function": {"name": "look", "arguments": "{}"}},
]
TOLD = [
    say("user", "look"),
    say("assistant", "I look.", tool_calls=CALLS),
    say("tool", "look", tool_call_id="c"),
    say("tool", "the sky", tool_call_id="d"),
    say("assistant", "", tool_calls=CALLS[:1]),
    say("tool", "\n grey\n", tool_call_id="e"),
    say("user", "look"),
]
USE = ToolUse(({"type": "function", "function": {"name": "look", "parameters": {}}},))


@pytest.mark.parametrize("first", [0, 2])  # from the front, and behind a reply that has called
@pytest.mark.parametrize("use", [USE, ToolUse()], ids=["tools", "no tools"])
def test_messages_keep_their_places_where_a_template_is_told_others(use, first):
    messages = TOLD[first:]
    rendering = Rendering(told=PROMPTED.telling(use))
    text = rendered_as(TOKENIZER, TOLD, rendering)
    if first:
        text = text[text.index("<tool_response>") - len("<|im_start|>user\n") :]
    ids = TOKENIZER.encode(text)
    spans = message_spans(messages, text, ids, TOKENIZER, rendering=rendering)
    assert [(one.role, one.tool_call_id) for one in spans] == [
        (one["role"], one.get("tool_call_id")) for one in messages
    ]
    found = [TOKENIZER.decode(ids[one.start : one.end], skip_special=False) for one in spans]
    expected = ["look", "I look.", "look", "the sky", "", "grey", "look"]
    assert [one.strip() for one in found] == expected[first:]
    # The twin: by the messages that it was not told, a result is not found where it stands.
    assert spans != message_spans(messages, text, ids, TOKENIZER)


# Reasoning ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reasoning"),
    [
        ("just so", None),
        ("", None),
        ("<think>\nhm\n</think>\n\nyes", "<think>\nhm\n</think>\n\n"),
        ("<think>hm</think> yes", "<think>hm</think>"),
        ("I <think>hm</think>yes <think>b</think>", " <think>hm</think>"),
        ("hm\n</think>\n\nyes", "hm\n"),  # the prompt has opened it
        ("hm</think> yes <think>", "hm"),
        ("</think>\n\nyes", None),
        ("<think>\nhm, and", "<think>\nhm, and"),
        ("<think>\nhm, and<|im_end|>", "<think>\nhm, and"),
    ],
)
def test_reasoning(reply, reasoning):
    ids = TOKENIZER.encode(reply)
    span = reasoning_span(ids, TOKENIZER)
    assert (span and TOKENIZER.decode(ids[slice(*span)], skip_special=False)) == reasoning

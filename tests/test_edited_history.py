"""Clients that edit their message list and send it again, as agent frameworks do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline import Directive, Engine, SamplingParams
from leyline.conversation import Conversation
from leyline.directive import Mode
from leyline.errors import CancelledError, ContextLengthError, DirectiveError
from leyline.events import Completion, Failure, Usage
from leyline.pointing import Target
from leyline.rewriting import rewrite
from tests.engine_state import assert_at_rest, state_digest
from tests.hand_cache import HandCache
from tests.lockstep import TOLERANCE, relative_error, tiny_engine
from tests.probes import (
    completed,
    drain,
    first_logits,
    force,
    fresh_logits,
    rows_of,
    same_rows,
    slots_of,
)
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
Messages = list[dict[str, Any]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STOPPED = SamplingParams(temperature=0.0, max_tokens=60)
MODES = ("forget", "amortize", "heal")
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
NEXT = "and then?"
STUB = "[cleared]"
STOP = 2


@pytest.fixture(scope="module")
def family() -> str:
    return "v2_yarn"


@pytest.fixture(scope="module")
def oracle(tiny_folder: Folder, family: str) -> Any:
    return load_oracle(tiny_folder(family))


@pytest.fixture
def engine(tiny_folder: Folder, family: str) -> Iterator[Engine]:
    with tiny_engine(tiny_folder(family), min_run=8) as engine:
        yield engine


def agent(engine: Engine, name: str = "s") -> Conversation:
    """A conversation as agents have them: a system prompt with a date, and tool results."""
    chat = engine.session(name)
    chat.messages = [
        {"role": "system", "content": f"Today is Monday the 1st. You are in the inn, {name}."},
        {"role": "user", "content": "find out about the weather in the land, and then the wind"},
        {"role": "assistant", "content": "I will look at it at once, and then tell you."},
        {"role": "tool", "content": f"first: {TOOL}", "tool_call_id": "c1"},
        {"role": "assistant", "content": "And now the wind, which is another matter."},
        {"role": "tool", "content": f"second: {TOOL}, or so they say", "tool_call_id": "c2"},
    ]
    chat.chat("what do you think of it?", GREEDY)
    return chat


# -- what clients do to their histories -----------------------------------------------------------


def new_date(messages: Messages) -> None:
    content = messages[0]["content"]
    messages[0]["content"] = content.replace("Monday the 1st", "Tuesday the 22nd")


def cleared_result(messages: Messages) -> None:
    messages[3]["content"] = STUB


def shortened_results(messages: Messages) -> None:
    for index in (3, 5):
        messages[index]["content"] = messages[index]["content"][:20] + "..."


def dropped_messages(messages: Messages) -> None:
    del messages[2:4]


def swapped(messages: Messages) -> None:
    messages[3]["content"], messages[5]["content"] = (
        messages[5]["content"],
        messages[3]["content"],
    )


def dropped_reply(messages: Messages) -> None:
    del messages[-1]


def everything_at_once(messages: Messages) -> None:
    new_date(messages)
    cleared_result(messages)
    del messages[4]


EDITS = [
    new_date,
    cleared_result,
    shortened_results,
    dropped_messages,
    swapped,
    dropped_reply,
    everything_at_once,
]
Edit = Callable[[Messages], None]


def edited(chat: Conversation, edit: Edit) -> Messages:
    """The client's next request: its history as it has edited it, and a new message."""
    chat.messages = copy.deepcopy(chat.messages)
    edit(chat.messages)
    return [*chat.messages, {"role": "user", "content": NEXT}]


def ask(engine: Engine, messages: Messages, mode: str | None, name: str = "s") -> int:
    return engine.submit_chat(messages, GREEDY, session_id=name, edit_mode=mode)


def adds_up(usage: Usage) -> bool:
    kinds = (usage.spliced_tokens, usage.cached_tokens, usage.recomputed_tokens)
    whole = usage.cached_tokens + usage.recomputed_tokens == usage.prompt_tokens
    return whole and min(kinds) >= 0 and usage.spliced_tokens <= usage.cached_tokens


# -- the three modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", EDITS)
def test_forget_is_exact_prefix_caching(engine: Engine, oracle: Any, edit: Edit) -> None:
    chat = agent(engine)
    messages = edited(chat, edit)
    before, first = chat.tokens, first_difference(engine, chat, messages)
    completion, logits = first_logits(engine, ask(engine, messages, "forget"))
    usage = completion.usage
    assert adds_up(usage) and usage.first_difference == first < len(before)
    assert first - 1 <= usage.cached_tokens <= first
    assert (usage.spliced_tokens, usage.state, usage.degraded) == (0, "exact", False)
    assert chat.text.startswith(engine.tokenizer.render(messages))
    assert relative_error(logits, fresh_logits(oracle, chat.tokens[:-4])) < TOLERANCE
    assert (completion.receipts, completion.version) == ((), 1)
    assert chat.info.versions == ((0, len(before), True),)
    assert_at_rest(engine)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["amortize", "heal"])
def test_amortize_carries_what_the_client_left_alone(
    engine: Engine, oracle: Any, edit: Edit, mode: str
) -> None:
    chat = agent(engine)
    messages = edited(chat, edit)
    hand = HandCache(oracle, list(chat.tokens))
    hand.compute(engine.sessions.get("s").computed)
    change = rewrite(
        hand.tokens, engine.tokenizer.render(messages), engine.tokenizer, Mode(mode), 8
    )
    completion, logits = first_logits(engine, ask(engine, messages, mode))
    hand.edit([(one.start, one.end, one.replacement, "amortize") for one in change.directives])
    hand.tokens += change.append
    assert tuple(hand.tokens) == chat.tokens[:-4]
    hand.forget_rows(min(hand.num_rows, len(hand.tokens) - 1))
    assert relative_error(logits, hand.compute()[-1]) < TOLERANCE
    usage = completion.usage
    assert adds_up(usage) and usage.first_difference == change.first_difference
    grafts = sum(one.kept for one in completion.receipts)
    assert grafts > 60 or edit is dropped_reply
    # Without a new token behind them the last of them is computed again, for its logits.
    assert usage.spliced_tokens == grafts - (not change.append)
    assert usage.spliced_tokens + change.first_difference == usage.cached_tokens
    new = len(change.append) + sum(len(one.replacement) for one in change.directives)
    assert new <= usage.recomputed_tokens <= new + 1, "what was changed or added, and no more"
    assert len(completion.receipts) == len(change.directives)
    if grafts:
        assert usage.state == {"heal": "healing", "amortize": "spliced"}[mode]
        fresh = fresh_logits(oracle, chat.tokens[:-4])
        assert relative_error(logits, fresh) > 10 * TOLERANCE, "the check sees no graft"
    engine.settle()
    assert (chat.info.state == "exact") is (mode == "heal" or not grafts)
    assert_at_rest(engine)


def first_difference(engine: Engine, chat: Conversation, messages: Messages) -> int:
    """The first token of the context with a byte that the new text does not have there."""
    text, start = engine.tokenizer.render(messages).encode(), 0
    for position, token in enumerate(chat.tokens):
        spelled = engine.tokenizer.token_bytes(token, skip_special=False)
        if text[start : start + len(spelled)] != spelled:
            return position
        start += len(spelled)
    return len(chat.tokens)


def test_the_engines_own_mode_is_the_default(tiny_folder: Folder) -> None:
    for mode in MODES:
        with tiny_engine(tiny_folder("v3"), edit_mode=mode, min_run=8) as engine:
            chat = agent(engine)
            usage = completed(engine, ask(engine, edited(chat, new_date), None)).usage
            assert (usage.spliced_tokens > 100) is (mode != "forget")
            assert usage.state == {"forget": "exact", "amortize": "spliced"}.get(mode, "healing")


def test_an_unknown_mode_changes_nothing(engine: Engine) -> None:
    chat = agent(engine)
    digest = state_digest(engine)
    with pytest.raises(DirectiveError, match="forget"):
        ask(engine, edited(chat, new_date), "forgive")
    assert state_digest(engine) == digest


def test_a_history_that_only_goes_on_is_no_edit(engine: Engine) -> None:
    chat = agent(engine)
    length = len(chat.tokens)
    reply = completed(engine, ask(engine, edited(chat, lambda _: None), "amortize"))
    assert reply.usage.first_difference is None and reply.version == 0
    assert reply.usage.cached_tokens == length - 1 and reply.usage.spliced_tokens == 0


def test_edits_of_many_turns_follow_one_another(engine: Engine) -> None:
    """A client that clears one more result and changes the date before every turn."""
    chat = agent(engine)
    for turn in range(6):
        chat.messages.append({"role": "tool", "content": f"{turn}th: {TOOL}"})
        for message in [one for one in chat.messages if one["role"] == "tool"][:-2]:
            message["content"] = STUB
        chat.messages[0]["content"] = f"Today is the day number {turn} in the inn."
        messages = [*chat.messages, {"role": "user", "content": f"{NEXT} {turn}"}]
        reply = completed(engine, ask(engine, messages, "amortize"))
        assert adds_up(reply.usage) and not reply.usage.degraded
        assert reply.usage.recomputed_tokens < reply.usage.prompt_tokens // 3 + 60
        chat.messages = [*messages, {"role": "assistant", "content": reply.text}]
        assert chat.text.startswith(engine.tokenizer.render(messages))
        engine.settle()
        assert_at_rest(engine)


def test_an_edit_of_the_protected_head_is_carried_out_exactly(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), protect_first=40, min_run=8) as engine:
        chat = agent(engine)
        messages = edited(chat, new_date)
        usage = completed(engine, ask(engine, messages, "amortize")).usage
        assert usage.first_difference is not None and usage.first_difference < 40
        assert (usage.spliced_tokens, usage.state) == (0, "exact")
        assert chat.text.startswith(engine.tokenizer.render(messages))


def test_an_edited_history_that_is_too_long_changes_nothing(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), max_model_len=500) as engine:
        chat = agent(engine)
        digest = state_digest(engine)
        messages = edited(chat, new_date)
        messages[-1]["content"] = "x" * 500
        for mode in MODES:
            with pytest.raises(ContextLengthError):
                ask(engine, messages, mode)
        assert state_digest(engine) == digest and not engine.has_work


# -- generated ids --------------------------------------------------------------------------------


def odd_reply(engine: Engine) -> tuple[int, ...]:
    """A reply whose text the tokenizer would encode otherwise."""
    ids = [token for letter in "then the hen and the inn" for token in _single(engine, letter)]
    assert ids != engine.tokenizer.encode("then the hen and the inn")
    return (*ids, STOP)


def _single(engine: Engine, letter: str) -> list[int]:
    return engine.tokenizer.encode_plain(letter)


@pytest.mark.parametrize("mode", MODES)
def test_generated_ids_are_kept_though_the_text_would_be_encoded_otherwise(
    engine: Engine, mode: str
) -> None:
    chat = agent(engine)
    ids = odd_reply(engine)
    force(engine, ids)
    chat.chat("say something odd", STOPPED)
    assert chat.tokens[-len(ids) :] == ids
    messages = edited(chat, new_date)
    usage = completed(engine, ask(engine, messages, mode)).usage
    text = engine.tokenizer.render(messages)
    assert chat.text.startswith(text)
    assert chat.tokens[: usage.prompt_tokens] != tuple(engine.tokenizer.encode(text))
    at = "".join(map(chr, chat.tokens)).find("".join(map(chr, ids)))
    assert at > 0, "the reply's own ids"
    assert (usage.spliced_tokens > len(ids)) is (mode != "forget")


def test_an_unedited_odd_reply_costs_nothing(engine: Engine) -> None:
    chat = agent(engine)
    ids = odd_reply(engine)
    force(engine, ids)
    chat.chat("say something odd", STOPPED)
    length = len(chat.tokens)
    usage = chat.chat(NEXT, GREEDY).usage
    assert usage.first_difference is None and usage.cached_tokens == length - 1


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_mends_half_a_character_is_answered_in_full(
    engine: Engine, mode: str
) -> None:
    """The text only goes on from what the context spells, and still is none of its texts."""
    chat = engine.session("s")
    force(engine, engine.tokenizer.encode_plain("€")[:2])
    two = SamplingParams(temperature=0.0, max_tokens=2)
    reply = chat.chat("how much is it, and how much was it, in the inn and in the land?", two)
    assert reply.text == "\ufffd"
    before = chat.tokens
    chat.messages[-1]["content"] = "€"
    messages = [*chat.messages, {"role": "user", "content": NEXT}]
    answer = completed(engine, ask(engine, messages, mode))
    assert chat.text.startswith(engine.tokenizer.render(messages))
    assert answer.usage.prompt_tokens + 4 == len(chat.tokens)
    assert answer.usage.cached_tokens > answer.usage.prompt_tokens - 40
    assert answer.version == 0 and answer.usage.first_difference == len(before)


# -- the last turn once more ----------------------------------------------------------------------


def test_regenerating_a_turn_keeps_the_splice_however_often(engine: Engine) -> None:
    chat = agent(engine)
    chat.replace(f"second: {TOOL}", STUB)
    history = list(chat.messages)
    first = chat.chat(NEXT, GREEDY)
    length = first.usage.prompt_tokens
    for seed in range(3):
        messages = [*history, {"role": "user", "content": NEXT}]
        params = SamplingParams(seed=seed, max_tokens=5, ignore_eos=True)
        again = completed(engine, engine.submit_chat(messages, params, session_id="s"))
        assert again.usage.spliced_tokens == first.usage.spliced_tokens > 5
        assert again.usage.prompt_tokens == length and again.version == 1
        assert again.usage.cached_tokens >= first.usage.cached_tokens
        assert again.usage.first_difference is None
        assert len(chat.tokens) == length + 5
    chat.messages = [*messages, {"role": "assistant", "content": again.text}]
    assert chat.chat("go on", GREEDY).usage.cached_tokens >= length + 4
    assert_at_rest(engine)


@pytest.mark.parametrize("mode", MODES)
def test_regenerating_a_turn_whose_client_edited_keeps_that_splice(
    engine: Engine, mode: str
) -> None:
    chat = agent(engine)
    messages = edited(chat, new_date)
    first = completed(engine, ask(engine, messages, mode))
    engine.settle()
    again = completed(engine, ask(engine, messages, mode))
    if mode == "heal":
        assert again.usage.spliced_tokens == 0
    else:
        assert again.usage.spliced_tokens == first.usage.spliced_tokens
    assert again.usage.recomputed_tokens <= 2
    assert chat.text.startswith(engine.tokenizer.render(messages))


def test_marks_of_a_reply_that_is_replaced_go_with_it(engine: Engine) -> None:
    chat = agent(engine)
    history = list(chat.messages)
    chat.chat(NEXT, GREEDY)
    length = len(chat.tokens)
    chat.decay(Target(start=length - 3, end=length - 1), turns=5)
    stays = chat.decay(Target(match="in the inn"), turns=5)
    messages = [*history, {"role": "user", "content": NEXT}]
    completed(engine, ask(engine, messages, None))
    assert [mark.mark_id for mark in chat.info.marks] == [stays.mark_id]


# -- together with others -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_sessions_that_run_meanwhile_are_untouched(
    engine: Engine, tiny_folder: Folder, family: str, mode: str
) -> None:
    with tiny_engine(tiny_folder(family)) as quiet:
        messages = edited(agent(quiet, "twin"), lambda _: None)
        alone = completed(quiet, ask(quiet, messages, None, "twin"))
    chat, twin = agent(engine), agent(engine, "twin")
    context = engine.sessions.get("twin").context
    slots, rows = slots_of(engine, context), rows_of(engine, context)
    running = ask(engine, edited(twin, lambda _: None), None, "twin")
    engine.step()
    request = ask(engine, edited(chat, everything_at_once), mode)
    ended = drain(engine)
    other = ended[running]
    assert isinstance(other, Completion) and isinstance(ended[request], Completion)
    assert other.text == alone.text and other.version == 0
    had = context.prefix(len(slots))
    assert (slots_of(engine, had) == slots).all()
    assert same_rows(rows_of(engine, had), rows)
    assert_at_rest(engine)


@pytest.mark.parametrize("mode", ["amortize", "heal"])
def test_an_edited_history_that_a_twin_needs_is_copied(engine: Engine, mode: str) -> None:
    chat = agent(engine)
    fork = ask(engine, [*chat.messages, {"role": "user", "content": "wait"}], None, "fork")
    completed(engine, fork)
    context = engine.sessions.get("s").context
    rows = rows_of(engine, context)
    reply = completed(engine, ask(engine, edited(chat, new_date), mode))
    assert sum(one.moved_in_place for one in reply.receipts) == 0
    assert sum(one.copied for one in reply.receipts) > 100
    assert same_rows(rows_of(engine, context), rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_cancelled_edit_of_the_history_is_done_or_not_done(
    engine: Engine, mode: str, steps: int
) -> None:
    chat = agent(engine)
    before = chat.info
    messages = edited(chat, everything_at_once)
    request = ask(engine, messages, mode)
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    last = drain(engine)[request]
    assert isinstance(last, Failure) and isinstance(last.error, CancelledError)
    text = engine.tokenizer.render(messages)
    after = chat.info
    assert after == before or (after.text, after.version) == (text, 1)
    reply = completed(engine, ask(engine, messages, mode))
    assert chat.text == text + engine.tokenizer.decode(reply.token_ids, skip_special=False)
    engine.settle()
    assert_at_rest(engine)


def test_an_edit_of_the_context_while_the_edited_history_is_answered(engine: Engine) -> None:
    chat = agent(engine)
    request = ask(engine, edited(chat, new_date), "amortize")
    edit = engine.submit_directives("s", [Directive(3, 5, (9,))])
    ended = drain(engine)
    assert isinstance(ended[request], Completion)
    assert ended[edit].version == 2  # pyright: ignore
    assert "Tuesday" in chat.text and chat.tokens[3] == 9
    assert_at_rest(engine)

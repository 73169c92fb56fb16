"""PIN, DECAY, SCRATCH and SHARE, as a client of an engine sees them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline import Engine, SamplingParams
from leyline.context import Context, salted
from leyline.conversation import Conversation
from leyline.directive import Mode
from leyline.errors import (
    DirectiveError,
    MarkNotFoundError,
    QuotaError,
    SessionBusyError,
    SessionNotFoundError,
)
from leyline.events import Completion
from leyline.pointing import Change, MarkRequest, Target
from leyline.receipts import SHARE_LOST
from tests.engine_state import assert_at_rest, state_digest
from tests.hand_cache import HandCache
from tests.lockstep import TOLERANCE, relative_error, tiny_engine
from tests.probes import (
    PlanLog,
    completed,
    drain,
    evict_everything,
    first_logits,
    force,
    fresh_logits,
    rows_of,
    same_rows,
    slots_of,
)
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TALK = SamplingParams(temperature=0.0, max_tokens=80)  # up to a stop token
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
TOLD = f"look: ({TOOL}) what now? " + "the man in the hat and the hen in the inn and so on" * 2
STUB = "[evicted]"
NEXT = "and then?"
STOP = 2


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with tiny_engine(tiny_folder("v3")) as engine:
        yield engine


@pytest.fixture
def small(tiny_folder: Folder) -> Iterator[Engine]:
    """An engine whose cache a few requests fill; a tenant may pin 150 rows, all of them 300."""
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=600, max_model_len=400) as engine:
        yield engine


def told(engine: Engine, name: str = "s") -> Conversation:
    chat = engine.session(name)
    chat.chat(TOLD, GREEDY)
    return chat


def flood(engine: Engine, seed: int = 0) -> None:
    """Requests that need the whole cache, one after the other."""
    rng = random.Random(seed)
    for _ in range(4):
        engine.generate([rng.randrange(3, 250) for _ in range(250)], GREEDY)


def resident(engine: Engine, name: str = "s", salt: str = "") -> int:
    context = engine.sessions.get(name, salted(salt)).context
    return engine.parts.scheduler.prefix.resident(context)


# -- PIN ------------------------------------------------------------------------------------------


def test_a_pin_survives_what_evicts_everything_else(small: Engine) -> None:
    chat = told(small)
    context = small.sessions.get("s").context
    mark = chat.pin(Target(match=TOOL))
    assert (mark.verb, mark.until, mark.turns_left) == ("pin", None, None)
    assert chat.info.marks == (mark,)
    slots, rows = slots_of(small, context), rows_of(small, context)
    assert len(slots) > mark.end + 30
    flood(small)
    assert (slots_of(small, context) == slots[: mark.end]).all(), "what is behind the pin is gone"
    now = rows_of(small, context)
    assert same_rows(now, (rows[0][:, : mark.end], rows[1][:, : mark.end]))
    assert chat.chat(NEXT, GREEDY).usage.cached_tokens == mark.end
    assert_at_rest(small)


def test_without_a_pin_it_is_gone(small: Engine) -> None:
    chat = told(small)
    flood(small)
    assert resident(small) == 0
    assert chat.chat(NEXT, GREEDY).usage.cached_tokens == 0


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_grafts_stay_and_their_turn_is_not_degraded(small: Engine, pinned: bool) -> None:
    chat = small.session("s")
    chat.chat(f"look: ({TOOL})", GREEDY)
    chat.replace("look", "see")
    mark = chat.pin(Target(start=0, end=len(chat.tokens) - 1))
    if not pinned:
        chat.unmark(mark)
    evict_everything(small)
    usage = chat.chat(NEXT, GREEDY).usage
    assert usage.degraded is not pinned
    assert (usage.spliced_tokens > 60) is pinned


def test_a_pin_ends_by_the_clock(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, now = told(small), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mark = chat.pin(Target(match=TOOL), ttl_s=60)
    assert mark.until == now + 60
    now += 59
    flood(small)
    assert resident(small) == mark.end
    now += 2
    flood(small, seed=1)
    assert resident(small) == 0
    chat.chat(NEXT, GREEDY)
    assert chat.info.marks == ()


def test_a_pin_ends_by_turns(small: Engine) -> None:
    chat = told(small)
    mark = chat.pin(Target(match=TOOL), turns=2)
    chat.chat(NEXT, GREEDY)
    flood(small)
    assert [one.turns_left for one in chat.info.marks] == [1]
    assert resident(small) >= mark.end
    chat.chat(NEXT, GREEDY)
    assert chat.info.marks == ()
    flood(small, seed=1)
    assert resident(small) == 0


def test_a_pin_that_is_taken_back_holds_nothing(small: Engine) -> None:
    chat = told(small)
    mark = chat.pin(Target(match=TOOL))
    chat.unmark(mark)
    flood(small)
    assert resident(small) == 0
    with pytest.raises(MarkNotFoundError):
        chat.unmark(mark)


def test_a_tenant_pins_no_more_than_its_share(small: Engine) -> None:
    chats = [told(small, f"s{index}") for index in range(3)]
    ends = [chat.pin(Target(match=TOOL)).end for chat in chats[:2]]
    assert sum(ends) <= 150 < sum(ends) + ends[0]
    digest = state_digest(small)
    with pytest.raises(QuotaError) as caught:
        chats[2].pin(Target(match=TOOL))
    assert caught.value.status == 429 and caught.value.details["limit"] == 150
    assert state_digest(small) == digest and chats[2].info.marks == ()
    chats[0].unmark(chats[0].info.marks[0])
    chats[2].pin(Target(match=TOOL))


def test_another_tenant_has_a_share_of_its_own_and_all_have_half(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=600, pin_share=0.13) as small:
        ends = list[int]()
        pin = MarkRequest("pin", Target(match=TOOL))
        for salt in "abcde":
            messages = [{"role": "user", "content": TOLD}]
            completed(small, small.submit_chat(messages, GREEDY, session_id="s", salt=salt))
            if salt != "e":
                ends.append(small.mark("s", pin, salt=salt).end)
        assert sum(ends) <= 300 < sum(ends) + ends[0]
        with pytest.raises(QuotaError, match="All tenants"):
            small.mark("s", pin, salt="e")
        flood(small)
        assert [resident(small, "s", salt) for salt in "abcde"] == [*ends, 0]


def test_a_pin_follows_an_edit_in_front_of_it(small: Engine) -> None:
    chat = told(small)
    mark = chat.pin(Target(match=TOOL))
    chat.replace("look", "look at this")
    (moved,) = chat.info.marks
    assert moved.end - mark.end == moved.start - mark.start > 0
    assert resident(small) > moved.end + 30
    evict_everything(small)
    assert resident(small) == moved.end


def test_a_busy_session_takes_no_mark(engine: Engine) -> None:
    told(engine)
    engine.submit_chat([{"role": "user", "content": TOLD}], GREEDY, session_id="s")
    engine.step()
    digest = state_digest(engine)
    with pytest.raises(SessionBusyError):
        engine.session("s").pin(Target(match=TOOL))
    assert state_digest(engine) == digest


# -- DECAY ----------------------------------------------------------------------------------------


def test_a_decay_fires_by_itself(engine: Engine) -> None:
    chat = told(engine)
    mark = chat.decay(Target(match=TOOL), turns=2, replacement=STUB)
    assert mark.turns_left == 2
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert TOOL in chat.text and [one.turns_left for one in chat.info.marks] == [1]
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert f"look: ({STUB}) what now?" in chat.text and chat.info.marks == ()
    assert chat.info.state == "spliced" and chat.version == 1
    usage = chat.chat(NEXT, GREEDY).usage
    assert usage.spliced_tokens > 100, "the client goes on as if nothing had happened"
    assert TOOL not in chat.text
    assert_at_rest(engine)


def test_a_turn_right_behind_a_decay_that_fires_goes_on_from_the_edited_context(
    engine: Engine,
) -> None:
    chat = told(engine)
    chat.decay(Target(match=TOOL), turns=1, replacement=STUB)
    chat.chat(NEXT, GREEDY)
    usage = chat.chat(NEXT, GREEDY).usage
    assert TOOL not in chat.text and usage.spliced_tokens > 100


def test_a_decay_moves_with_edits_in_front_of_it(engine: Engine) -> None:
    chat = told(engine)
    mark = chat.decay(Target(match=TOOL), turns=1, replacement=STUB)
    chat.replace("look", "look at all of this")
    assert chat.info.marks[0].start > mark.start
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert f"look at all of this: ({STUB}) what now?" in chat.text


def test_a_decay_whose_span_was_cut_out_has_nothing_to_do(engine: Engine) -> None:
    chat = told(engine)
    chat.decay(Target(match="the wind is north"), turns=1, replacement=STUB)
    chat.replace(TOOL, "")
    assert chat.info.marks == ()
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert STUB not in chat.text and chat.version == 1


@pytest.mark.parametrize(("mode", "state"), [("forget", "exact"), ("heal", "exact")])
def test_a_decay_fires_in_its_mode(engine: Engine, mode: str, state: str) -> None:
    chat = told(engine)
    chat.decay(Target(match=TOOL), turns=1, replacement=STUB, mode=mode)
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert STUB in chat.text and chat.info.state == state
    assert_at_rest(engine)


def test_a_decay_that_is_taken_back_does_not_fire(engine: Engine) -> None:
    chat = told(engine)
    chat.unmark(chat.decay(Target(match=TOOL), turns=1, replacement=STUB))
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert TOOL in chat.text and chat.version == 0


def test_several_decays_fire_as_one_edit(engine: Engine) -> None:
    chat = told(engine)
    chat.decay(Target(match=TOOL), turns=1, replacement=STUB)
    chat.decay(Target(match="the wind is north"), turns=1, replacement="calm")
    chat.decay(Target(match="what now?"), turns=1, replacement="well?")
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert f"look: ({STUB}) well?" in chat.text and chat.version == 1


def test_a_cancelled_turn_does_not_count(engine: Engine) -> None:
    chat = told(engine)
    chat.decay(Target(match=TOOL), turns=1, replacement=STUB)
    turn = engine.submit_chat(
        [*chat.messages, {"role": "user", "content": NEXT}], GREEDY, session_id="s"
    )
    engine.step()
    engine.cancel(turn)
    engine.settle()
    assert TOOL in chat.text and [mark.turns_left for mark in chat.info.marks] == [1]


def test_a_decay_that_could_never_fire_is_refused(engine: Engine) -> None:
    chat = told(engine)
    with pytest.raises(DirectiveError):
        chat.decay(Target(start=5, end=8), turns=1, replacement=[10**6])
    assert chat.info.marks == ()


# -- SCRATCH --------------------------------------------------------------------------------------


def thinking(engine: Engine, thought: str, said: str) -> list[int]:
    """The ids of a reply that thinks before it speaks."""
    return [*engine.tokenizer.encode_plain(f"<think>{thought}</think>\n\n{said}"), STOP]


def test_a_scratched_span_is_gone_when_the_turn_ends(engine: Engine) -> None:
    chat = told(engine)
    chat.scratch(Target(match=TOOL))
    turn = engine.submit_chat(
        [*chat.messages, {"role": "user", "content": NEXT}], GREEDY, session_id="s"
    )
    engine.step()
    assert TOOL in chat.text, "the turn still sees it"
    completed(engine, turn)
    engine.settle()
    assert "look: () what now?" in chat.text and chat.info.marks == ()
    assert chat.version == 1


def test_reasoning_is_scratched_and_the_answer_stays(engine: Engine) -> None:
    chat = told(engine)
    chat.scratch(of="reasoning")
    force(engine, thinking(engine, "the hen or the man?", "the hen"))
    reply = chat.chat(NEXT, TALK)
    assert "the hen or the man?" in reply.text, "the client is shown it"
    engine.settle()
    assert chat.text.endswith("<|im_start|>assistant\nthe hen<|im_end|>")
    spoken = chat.info.messages[-1]
    assert engine.tokenizer.decode(chat.tokens[spoken.start : spoken.end]) == "the hen"
    force(engine, thinking(engine, "no, the man", "the man"))
    usage = chat.chat("are you sure?", TALK).usage
    assert usage.spliced_tokens >= 5, "the answer's rows have seen the reasoning and are kept"
    assert usage.first_difference is None, "the client's own history still fits"
    engine.settle()
    assert "the hen or the man?" not in chat.text
    assert "no, the man" in chat.text, "one turn was asked for"


def test_a_turn_without_reasoning_loses_nothing(engine: Engine) -> None:
    chat = told(engine)
    chat.scratch(of="reasoning")
    force(engine, [*engine.tokenizer.encode_plain("the hen"), STOP])
    chat.chat(NEXT, TALK)
    engine.settle()
    assert chat.text.endswith("the hen<|im_end|>") and chat.version == 0
    assert chat.info.marks == ()


@pytest.mark.parametrize("edited", [False, True])
def test_tool_output_is_scratched_when_it_was_read(engine: Engine, edited: bool) -> None:
    chat = engine.session("s")
    chat.chat("read the letter in the hat", GREEDY)
    chat.messages.append({"role": "tool", "content": "an older result", "tool_call_id": "c0"})
    chat.chat("go on", GREEDY)
    chat.scratch(of="tool_output", replacement=STUB)
    if edited:
        chat.edit_mode = "amortize"
        chat.messages[0]["content"] = "read the paper in the hat"
        del chat.messages[1:3]  # fewer messages than before, and still a new one among them
        chat.messages.insert(1, {"role": "assistant", "content": "well"})
    chat.messages.append({"role": "tool", "content": TOOL, "tool_call_id": "c1"})
    chat.chat(NEXT, GREEDY)
    assert TOOL in chat.text or not engine.has_work
    engine.settle()
    assert f"<|im_start|>tool\n{STUB}<|im_end|>" in chat.text and TOOL not in chat.text
    assert ("an older result" in chat.text) is not edited
    assert NEXT in chat.text and chat.info.marks == ()


# -- SHARE ----------------------------------------------------------------------------------------

DOCUMENT = "the inn in the land has ten beds, and the hen has none, and that is the end of it"


def lender(engine: Engine) -> Conversation:
    chat = engine.session("lender")
    chat.chat(f"here is the paper: ({DOCUMENT}) what is it about?", GREEDY)
    return chat


def borrower(engine: Engine) -> Conversation:
    chat = engine.session("borrower")
    chat.chat("somebody else was sent a paper, namely <here>. how many beds are there?", GREEDY)
    return chat


SHARED = Change(Target(match="<here>"), source=("lender", Target(match=DOCUMENT)), mode="amortize")


def by_hand(oracle: Any, engine: Engine) -> HandCache:
    """The borrower with the lender's rows, moved by hand in `transformers`' cache."""
    hands = {}
    for name in ("lender", "borrower"):
        hands[name] = HandCache(oracle, list(engine.session_info(name).token_ids))
        hands[name].compute(engine.sessions.get(name).computed)
    ((start, end),) = engine.tokenizer.find(hands["borrower"].tokens, "<here>")
    ((first, last),) = engine.tokenizer.find(hands["lender"].tokens, DOCUMENT)
    whole = hands["borrower"].clone(start)
    hands["lender"].clone(last)._carry(whole, first, start - first)
    whole.tokens += hands["lender"].tokens[first:last]
    hands["borrower"]._carry(whole, end, last - first - (end - start))
    whole.tokens += hands["borrower"].tokens[end:]
    return whole


@pytest.mark.parametrize("family", ["v2_yarn", "glm"])
def test_a_shared_span_comes_with_its_rows(tiny_folder: Folder, family: str) -> None:
    oracle = load_oracle(tiny_folder(family))
    with tiny_engine(tiny_folder(family)) as engine:
        lender(engine)
        chat = borrower(engine)
        hand = by_hand(oracle, engine)
        log = PlanLog(engine)
        result = chat.edit([SHARED])
        (receipt,) = result.receipts
        num = len(engine.tokenizer.encode(DOCUMENT))
        assert (receipt.shared, receipt.inserted) == (num, num)
        assert sum(batch.num_tokens for batch in log) == 0, "carried, not computed"
        assert result.state == "spliced" and chat.tokens == tuple(hand.tokens)
        before = len(chat.tokens)
        turn = engine.submit_chat(
            [*chat.messages, {"role": "user", "content": NEXT}], GREEDY, session_id="borrower"
        )
        completion, logits = first_logits(engine, turn)
        assert completion.usage.cached_tokens >= before - 1
        hand.tokens += chat.tokens[before:-4]
        assert relative_error(logits, hand.compute()[-1]) < TOLERANCE
        fresh = fresh_logits(oracle, chat.tokens[:-4])
        assert relative_error(logits, fresh) > 100 * TOLERANCE, "the check sees no graft"


def test_shared_rows_are_never_taken_for_exact(engine: Engine) -> None:
    lender(engine)
    chat = borrower(engine)
    chat.edit([SHARED])
    start = engine.tokenizer.find(chat.tokens, DOCUMENT)[0][0]
    usage = engine.generate(chat.tokens, GREEDY).usage
    assert (usage.cached_tokens, usage.spliced_tokens) == (start, 0)
    chat.edit([Change(Target(match="how many"), "what", "heal")])
    engine.settle()
    assert chat.info.state == "exact"
    assert engine.generate(chat.tokens, GREEDY).usage.cached_tokens >= len(chat.tokens) - 1


def test_the_source_is_left_alone_and_goes_on(engine: Engine) -> None:
    source = lender(engine)
    context, info = engine.sessions.get("lender").context, source.info
    slots, rows = slots_of(engine, context), rows_of(engine, context)
    chat = borrower(engine)
    chat.edit([SHARED])
    chat.replace("ten beds", "two beds")
    assert (slots_of(engine, context) == slots).all()
    assert same_rows(rows_of(engine, context), rows) and source.info == info
    usage = source.chat(NEXT, GREEDY).usage
    assert usage.cached_tokens == len(info.token_ids) - 1 and usage.spliced_tokens == 0
    source.delete()
    assert chat.chat(NEXT, GREEDY).usage.spliced_tokens > len(DOCUMENT) // 3


def test_a_span_of_a_source_that_is_in_the_middle_of_a_turn(engine: Engine) -> None:
    source, chat = lender(engine), borrower(engine)
    turn = engine.submit_chat(
        [*source.messages, {"role": "user", "content": NEXT}], TALK, session_id="lender"
    )
    for _ in range(3):
        engine.step()
    assert source.info.busy
    assert chat.edit([SHARED]).receipts[0].shared > 30
    assert isinstance(drain(engine)[turn], Completion)


def test_a_span_of_the_session_itself(engine: Engine) -> None:
    chat = lender(engine)
    change = Change(
        Target(match="what is it about?"), source=("lender", Target(match="ten beds, and the hen"))
    )
    assert chat.plan([change]).receipts[0].shared > 5
    result = chat.share(
        Target(match="what is it about?"), "lender", Target(match="ten beds, and the hen")
    )
    assert result.receipts[0].shared == result.receipts[0].inserted > 5
    assert f"({DOCUMENT}) ten beds, and the hen<|im_end|>" in chat.text


def test_rows_that_were_lost_are_computed_and_that_is_said(engine: Engine) -> None:
    lender(engine)
    evict_everything(engine)
    chat = borrower(engine)
    log = PlanLog(engine)
    (receipt,) = chat.edit([SHARED]).receipts
    assert receipt.shared == 0 and receipt.inserted > 30 and receipt.reason == SHARE_LOST
    assert receipt.mode is Mode.AMORTIZE
    assert sum(batch.num_tokens for batch in log) == receipt.inserted
    assert DOCUMENT in chat.text


def test_another_tenants_session_is_not_there(engine: Engine) -> None:
    chat = borrower(engine)
    messages = [{"role": "user", "content": f"here is the paper: ({DOCUMENT})"}]
    completed(engine, engine.submit_chat(messages, GREEDY, session_id="lender", salt="other"))
    digest = state_digest(engine)
    with pytest.raises(SessionNotFoundError):
        chat.edit([SHARED])
    assert state_digest(engine) == digest
    lender(engine)
    assert chat.edit([SHARED]).receipts[0].shared > 30
    root = engine.sessions.get("borrower").context.root
    assert root == Context().root != salted("other")

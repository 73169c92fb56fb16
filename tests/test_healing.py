"""HEAL: carried rows now, exact ones later, and nobody has to wait for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline import Directive, Engine, Mode, SamplingParams
from leyline.context import Context
from leyline.events import Completion, EditResult, EngineEvent
from leyline.pointing import Change, Target
from tests.engine_state import assert_at_rest
from tests.lockstep import TOLERANCE, relative_error, terminals, tiny_engine
from tests.probes import (
    PlanLog,
    completed,
    drain,
    evict_everything,
    first_logits,
    fresh_logits,
    plain_engine,
    rows_of,
    same_rows,
)
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
TOLD = (
    f"look: ({TOOL}) what now? " + "the man in the hat and the hen in the inn and so on " * 3 + "!"
)
STUB = "[evicted]"
NEXT = "and then?"


@pytest.fixture(scope="module", params=["v2_yarn", "glm"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(tiny_folder: Folder, family: str) -> Any:
    return load_oracle(tiny_folder(family))


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with tiny_engine(tiny_folder("v3")) as engine:
        yield engine


def edit(engine: Engine, mode: str, name: str = "s", target: str = TOOL) -> EditResult:
    """Put the stub in the tool output's place and drive the engine no further than needed."""
    return engine.session(name).replace(target, STUB, mode)


def talk(engine: Engine, name: str = "s", told: str = TOLD) -> None:
    engine.session(name).chat(told, GREEDY)


def next_turn(engine: Engine, name: str = "s") -> int:
    """Submit what a client sends that knows nothing of edits."""
    text = engine.tokenizer.decode(engine.session_info(name).token_ids, skip_special=False)
    history = text.removeprefix("<|im_start|>user\n").split("<|im_end|>\n<|im_start|>assistant\n")
    messages = [
        {"role": "user", "content": history[0]},
        {"role": "assistant", "content": history[1]},
        {"role": "user", "content": NEXT},
    ]
    return engine.submit_chat(messages, GREEDY, session_id=name)


# -- exact in the end -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["heal", "amortize"])
def test_a_healed_session_is_what_a_fresh_prefill_gives(
    tiny_folder: Folder, family: str, oracle: Any, mode: str
) -> None:
    with tiny_engine(tiny_folder(family)) as engine:
        talk(engine)
        result = edit(engine, mode)
        (receipt,) = result.receipts
        assert result.state == ("healing" if mode == "heal" else "spliced")
        assert receipt.kept > 100
        assert receipt.recomputed == 1, "the last token of a reply that met its limit has no row"
        assert (receipt.mode, receipt.mode_done) == (Mode(mode), Mode(mode))
        engine.settle()
        info = engine.session_info("s")
        assert info.state == ("exact" if mode == "heal" else "spliced")
        completion, logits = first_logits(engine, next_turn(engine))
        error = relative_error(
            logits, fresh_logits(oracle, engine.session_info("s").token_ids[:-4])
        )
        if mode == "heal":
            assert error < TOLERANCE
            assert completion.usage.spliced_tokens == 0
        else:
            assert error > 100 * TOLERANCE, "the comparison would not notice a graft"
            assert completion.usage.spliced_tokens > 100


def test_at_once_it_is_amortize(tiny_folder: Folder, family: str) -> None:
    seen = []
    for mode in ("heal", "amortize"):
        with tiny_engine(tiny_folder(family)) as engine:
            talk(engine)
            result = edit(engine, mode)
            rows = rows_of(engine, engine.sessions.get("s").context)
            completion, logits = first_logits(engine, next_turn(engine))
            (receipt,) = result.receipts
            counts = (receipt.kept, receipt.moved_in_place, receipt.copied, receipt.freed)
            usage = completion.usage
            numbers = (usage.prompt_tokens, usage.cached_tokens, usage.spliced_tokens)
            seen.append((counts, numbers, completion.text, rows, logits))
    assert seen[0][:3] == seen[1][:3]
    assert same_rows(seen[0][3], seen[1][3])
    assert (seen[0][4] == seen[1][4]).all()


def test_healed_rows_are_in_the_exact_path_for_everybody(engine: Engine) -> None:
    talk(engine)
    edit(engine, "heal")
    tokens = engine.session_info("s").token_ids
    assert engine.parts.scheduler.prefix.resident(Context.of(tokens)) < 30
    engine.settle()
    # The last token of a reply that met its limit has no row in any session.
    assert engine.parts.scheduler.prefix.resident(Context.of(tokens)) == len(tokens) - 1
    assert engine.session_info("s").pieces == ((0, len(tokens), True),)
    plain = engine.generate(list(tokens), GREEDY).usage
    assert (plain.cached_tokens, plain.spliced_tokens) == (len(tokens) - 1, 0)
    turn = completed(engine, next_turn(engine)).usage
    assert (turn.spliced_tokens, turn.state) == (0, "exact")
    assert turn.cached_tokens == len(tokens)


def test_without_healing_a_plain_request_finds_nothing_behind_the_edit(engine: Engine) -> None:
    talk(engine)
    edit(engine, "amortize")
    engine.settle()
    tokens = engine.session_info("s").token_ids
    assert engine.generate(list(tokens), GREEDY).usage.cached_tokens < 40


# -- what is told meanwhile -----------------------------------------------------------------------


def test_a_session_says_healing_until_it_is_exact(engine: Engine) -> None:
    talk(engine)
    assert engine.session_info("s").state == "exact"
    edit(engine, "amortize", target="so on !")
    assert engine.session_info("s").state == "spliced"
    edit(engine, "heal")
    states = [engine.session_info("s").state]
    while engine.has_work:
        engine.step()
        states.append(engine.session_info("s").state)
    assert states[0] == "healing" and states[-1] == "exact"
    assert states == sorted(states, reverse=True), "healing, then exact, and not back"
    assert engine.session_info("s").version == 2, "healing is no edit"


def test_a_turn_while_healing_is_told_so_and_the_session_heals_behind_it(
    tiny_folder: Folder, family: str, oracle: Any
) -> None:
    with tiny_engine(tiny_folder(family)) as engine:
        talk(engine)
        edit(engine, "heal")
        for _ in range(2):
            engine.step()
        assert not engine.session_info("s").busy, "healing keeps nobody out"
        usage = completed(engine, next_turn(engine)).usage
        assert usage.state == "healing" and usage.spliced_tokens > 100
        assert engine.session_info("s").state == "healing"
        engine.settle()
        info = engine.session_info("s")
        assert info.state == "exact"
        completion, logits = first_logits(engine, engine.submit_prompt(info.token_ids, GREEDY))
        assert completion.usage.cached_tokens == len(info.token_ids) - 1
        assert relative_error(logits, fresh_logits(oracle, info.token_ids)) < TOLERANCE


@pytest.mark.parametrize("mode", ["amortize", "heal"])
def test_a_new_edit_while_healing_composes(
    tiny_folder: Folder, family: str, oracle: Any, mode: str
) -> None:
    with tiny_engine(tiny_folder(family)) as engine:
        talk(engine)
        edit(engine, "heal")
        engine.step()
        result = engine.session("s").replace("what now?", "well?", mode)
        assert result.state == "healing", "the first edit still heals"
        assert result.receipts[0].kept > 100
        engine.settle()
        info = engine.session_info("s")
        assert info.state == "exact" and info.version == 2
        assert f"({STUB}) well?" in info.text
        completion, logits = first_logits(engine, engine.submit_prompt(info.token_ids, GREEDY))
        assert completion.usage.cached_tokens == len(info.token_ids) - 1
        assert relative_error(logits, fresh_logits(oracle, info.token_ids)) < TOLERANCE
        assert_at_rest(engine)


def test_a_forget_in_front_of_what_heals_leaves_nothing_to_heal(engine: Engine) -> None:
    talk(engine)
    edit(engine, "heal")
    result = engine.session("s").replace("look", "see", "forget")
    assert result.state == "exact" and engine.session_info("s").state == "exact"
    engine.settle()
    assert_at_rest(engine)


def test_healing_goes_on_where_a_turn_interrupted_it(engine: Engine) -> None:
    talk(engine)
    edit(engine, "heal")
    log = PlanLog(engine)
    for _ in range(3):
        engine.step()
    begun = sum(batch.num_tokens for batch in log)
    assert begun >= 48, "some steps of healing"
    completed(engine, next_turn(engine))
    log.clear()
    engine.settle()
    length = engine.session_info("s").context_length
    assert sum(batch.num_tokens for batch in log) <= length - begun


def test_healing_whose_grafts_were_lost_meanwhile_still_ends(engine: Engine) -> None:
    talk(engine)
    edit(engine, "heal")
    evict_everything(engine)
    usage = completed(engine, next_turn(engine)).usage
    assert usage.degraded and usage.spliced_tokens == 0 and usage.state == "exact"
    engine.settle()
    assert engine.session_info("s").state == "exact"
    assert_at_rest(engine)


def test_regenerating_the_last_turn_after_healing_stays_exact(engine: Engine) -> None:
    chat = engine.session("s")
    chat.chat(TOLD, GREEDY)
    edit(engine, "heal")
    chat.chat(NEXT, GREEDY)
    engine.settle()
    assert chat.info.state == "exact"
    again = engine.submit_chat(chat.messages[:-1], GREEDY, session_id="s")
    usage = completed(engine, again).usage
    assert (usage.state, usage.spliced_tokens) == ("exact", 0)
    assert usage.cached_tokens >= usage.prompt_tokens - 1
    engine.settle()
    assert engine.session_info("s").state == "exact"


def test_a_client_edit_in_mode_heal_heals_after_the_turn(engine: Engine) -> None:
    chat = engine.session("s")
    chat.chat(TOLD, GREEDY)
    chat.edit_mode = "heal"
    chat.messages[0]["content"] = TOLD.replace(TOOL, STUB)
    usage = chat.chat(NEXT, GREEDY).usage
    assert usage.state == "healing" and usage.spliced_tokens > 100
    engine.settle()
    assert chat.info.state == "exact"
    plain = engine.generate(chat.tokens, GREEDY).usage
    assert plain.cached_tokens == len(chat.tokens) - 1


# -- nothing is left behind -----------------------------------------------------------------------


def _deleted(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.delete_session("s")


def _expired(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    later = engine.sessions.get("s").last_used + engine.config.session_ttl_s + 1
    monkeypatch.setattr("time.monotonic", lambda: later)
    engine.submit_chat([{"role": "user", "content": "hi"}], GREEDY, session_id="another")


def _displaced(engine: Engine, _: pytest.MonkeyPatch) -> None:
    for name in ("other", "another"):
        engine.submit_chat([{"role": "user", "content": "hi"}], GREEDY, session_id=name)


@pytest.mark.parametrize("end", [_deleted, _expired, _displaced])
def test_a_session_that_goes_while_it_heals_leaves_nothing_behind(
    tiny_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Engine, pytest.MonkeyPatch], None],
) -> None:
    with tiny_engine(tiny_folder("v3"), max_sessions=2) as engine:
        talk(engine)
        edit(engine, "heal")
        engine.step()
        healer = engine.sessions.get("s").heal_id
        assert healer is not None
        end(engine, monkeypatch)
        assert "s" not in engine.session_ids()
        log = PlanLog(engine)
        drain(engine)
        assert not any(healer in log.owners(batch) for batch in log)
        assert_at_rest(engine)


def test_closing_the_engine_ends_healing(tiny_folder: Folder) -> None:
    engine = tiny_engine(tiny_folder("v3"))
    talk(engine)
    edit(engine, "heal")
    engine.close()
    assert not engine.has_work


# -- in the background ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_request_waits_for_healing(tiny_folder: Folder, seed: int) -> None:
    rng = random.Random(seed)
    with plain_engine(tiny_folder("v3"), max_num_batched_tokens=8) as engine:
        for name in ("s", "t"):
            talk(engine, name, TOLD + name)
            edit(engine, "heal", name)
        log, submitted_at = PlanLog(engine), dict[int, int]()
        background, ended = set[int](), set[int]()
        idle_steps = 0
        while engine.has_work or len(submitted_at) < 12:
            background |= {s.heal_id for s in engine.sessions if s.heal_id is not None}
            if rng.random() < 0.15 and len(submitted_at) < 12:
                submitted_at[_request(engine, rng)] = len(log)
            ended |= {event.request_id for event in terminals(engine.step())}
            idle_steps += 1
            assert idle_steps < 2000
        assert ended == set(submitted_at)
        _never_mixed(log, background)
        for request, first in submitted_at.items():
            waited = _background_batches_in_front_of(log, first, request, background)
            assert waited <= 1
        assert sum(bool(log.owners(batch) & background) for batch in log) > 3
        assert {info.state for info in engine.sessions_info()} == {"exact"}
        assert_at_rest(engine)


def _request(engine: Engine, rng: random.Random) -> int:
    """A completion, a turn of a session that heals, or an edit of it."""
    idle = [name for name in ("s", "t") if not engine.session_info(name).busy]
    kind = rng.choice(["prompt", "turn", "edit"]) if idle else "prompt"
    if kind == "prompt":
        ids = [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))]
        return engine.submit_prompt(ids, GREEDY)
    name = rng.choice(idle)
    if kind == "turn":
        messages = [{"role": "user", "content": f"{TOLD}{name}"}]
        return engine.submit_chat(messages, GREEDY, session_id=name, edit_mode="heal")
    start = rng.randrange(5, 30)
    changes = [Directive(start, start + 3, (rng.randrange(3, 250),), Mode.HEAL)]
    return engine.submit_directives(name, changes)


def _never_mixed(log: PlanLog, background: set[int]) -> None:
    for batch in log:
        owners = log.owners(batch)
        assert owners <= background or not owners & background


def _background_batches_in_front_of(
    log: PlanLog, first: int, request: int, background: set[int]
) -> int:
    """Background batches between a request's arrival and its first op."""
    waited = 0
    for batch in log[first:]:
        owners = log.owners(batch)
        if request in owners:
            break
        waited += bool(owners & background)
    return waited


def test_the_check_of_the_background_sees_a_mixed_batch(tiny_folder: Folder) -> None:
    with plain_engine(tiny_folder("v3"), max_num_batched_tokens=8) as engine:
        talk(engine)
        edit(engine, "heal")
        healer = engine.sessions.get("s").heal_id
        assert healer is not None
        sequence = engine.parts.scheduler.find(healer)
        assert sequence is not None
        sequence.background = False  # now it is one like all others
        log = PlanLog(engine)
        engine.step()
        engine.submit_prompt([5, 6, 7], GREEDY)
        drain(engine)
        with pytest.raises(AssertionError):
            _never_mixed(log, {healer})


def test_an_edit_by_message_heals_like_any_other(engine: Engine) -> None:
    talk(engine)
    result = engine.edit("s", [Change(Target(message=0), STUB, "heal")])
    assert result.state == "healing"
    engine.settle()
    assert engine.session_info("s").text.startswith(f"<|im_start|>user\n{STUB}<|im_end|>")


def test_events_of_healing_are_nobodys(engine: Engine) -> None:
    talk(engine)
    edit(engine, "heal")
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
    assert events == []
    assert not any(isinstance(event, Completion) for event in events)

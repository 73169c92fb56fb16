"""What comes after a splice: who goes on from it, who must not find it, and what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline import Engine, SamplingParams
from leyline.events import Completion
from tests.hand_cache import HandCache
from tests.lockstep import (
    TOLERANCE,
    Lockstep,
    chat_text,
    record,
    relative_error,
    tiny_engine,
)
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
STUB = "[evicted]"
NEXT = "and then?"


@pytest.fixture(scope="module")
def oracle(tiny_folder: Folder) -> Any:
    return load_oracle(tiny_folder("v2_yarn"))


@pytest.fixture
def spliced(tiny_folder: Folder, oracle: Any) -> Iterator[Lockstep]:
    """A session "s" whose first message's tool output became a stub, AMORTIZE."""
    with tiny_engine(tiny_folder("v2_yarn")) as engine:
        lockstep = Lockstep(engine, oracle)
        lockstep.turn("s", f"look: ({TOOL}) what now?", GREEDY)
        lockstep.run()
        ((start, end),) = engine.tokenizer.find(engine.session_info("s").token_ids, TOOL)
        stub = engine.tokenizer.encode_plain(STUB)
        lockstep.edit("s", [(start, end, stub, "amortize")])
        lockstep.run()
        yield lockstep


def answer(lockstep: Lockstep, request: int) -> Completion:
    lockstep.run()
    completion = lockstep.events[request][-1]
    assert isinstance(completion, Completion)
    return completion


def first_logits(engine: Engine, request: int) -> tuple[Completion, Any]:
    """Run one request alone; its completion, and the logits of its first token."""
    recording = record(engine)
    completion: Completion | None = None
    while completion is None:
        found = [event for event in engine.step() if event.request_id == request]
        completion = next((event for event in found if isinstance(event, Completion)), None)
    return completion, recording.samples[0].logits


def test_a_client_that_sends_its_unedited_history_goes_on_from_the_splice(
    spliced: Lockstep,
) -> None:
    before = spliced.tracks["s"].hand
    length, grafted = len(before.tokens), sum(before.grafted)
    completion = answer(spliced, spliced.turn("s", NEXT, GREEDY))
    usage = completion.usage
    added = f"<|im_end|>\n{chat_text('user', NEXT)}<|im_start|>assistant\n"
    assert usage.prompt_tokens == length + len(spliced.engine.tokenizer.encode(added))
    assert length - 2 <= usage.cached_tokens <= length
    assert usage.spliced_tokens == grafted > 20
    assert not usage.degraded
    assert completion.version == 1
    assert spliced.error < TOLERANCE


def test_a_client_that_made_the_same_edit_goes_on_from_the_splice(spliced: Lockstep) -> None:
    track = spliced.tracks["s"]
    length, grafted = len(track.hand.tokens), sum(track.hand.grafted)
    track.messages[0]["content"] = track.messages[0]["content"].replace(TOOL, STUB)
    usage = answer(spliced, spliced.turn("s", NEXT, GREEDY)).usage
    assert length - 2 <= usage.cached_tokens <= length
    assert usage.spliced_tokens == grafted
    assert spliced.error < TOLERANCE


def test_a_history_edited_otherwise_is_exact_prefix_caching(spliced: Lockstep, oracle: Any) -> None:
    engine, track = spliced.engine, spliced.tracks["s"]
    track.messages[0]["content"] = track.messages[0]["content"].replace(TOOL, "nothing to see")
    messages = [*track.messages, {"role": "user", "content": NEXT}]
    tokens = engine.tokenizer.encode(engine.tokenizer.render(messages))
    common = engine.tokenizer.encode("<|im_start|>user\nlook: (")
    request = engine.submit_chat(messages, GREEDY, session_id="s")
    completion, logits = first_logits(engine, request)
    assert completion.usage.prompt_tokens == len(tokens)
    assert completion.usage.spliced_tokens == 0
    assert len(common) - 1 <= completion.usage.cached_tokens <= len(common)
    assert relative_error(logits, HandCache(oracle, tokens).compute()[-1]) < TOLERANCE
    info = engine.session_info("s")
    assert [exact for _, _, exact in info.pieces] == [True]
    assert info.token_ids == (*tokens, *completion.token_ids)


def test_a_plain_request_with_the_edited_tokens_finds_nothing_behind_the_edit(
    spliced: Lockstep, oracle: Any
) -> None:
    engine = spliced.engine
    info = engine.session_info("s")
    assert [exact for _, _, exact in info.pieces] == [True, False, True]
    edit_start = engine.tokenizer.find(info.token_ids, STUB)[0][0]
    stub_end = info.pieces[0][1]
    request = engine.submit_prompt(list(info.token_ids), GREEDY)
    completion, logits = first_logits(engine, request)
    assert edit_start <= completion.usage.cached_tokens <= stub_end
    assert completion.usage.spliced_tokens == 0
    uncached = HandCache(oracle, list(info.token_ids)).compute()[-1]
    assert relative_error(logits, uncached) < TOLERANCE
    tail = spliced.tracks["s"].hand.clone()
    tail.forget_rows(len(tail.tokens) - 1)
    assert relative_error(logits, tail.compute()[-1]) > 10 * TOLERANCE, "the check sees no graft"


def test_what_is_generated_behind_a_graft_is_out_of_reach_too(spliced: Lockstep) -> None:
    answer(spliced, spliced.turn("s", NEXT, GREEDY))
    engine = spliced.engine
    info = engine.session_info("s")
    completion, _ = first_logits(engine, engine.submit_prompt(list(info.token_ids), GREEDY))
    assert completion.usage.cached_tokens <= info.pieces[0][1]


def test_a_second_session_that_is_edited_alike_shares_the_grafts(spliced: Lockstep) -> None:
    told = spliced.tracks["s"].messages[0]["content"]
    spliced.turn("twin", told, GREEDY)
    spliced.run()
    engine = spliced.engine
    ((start, end),) = engine.tokenizer.find(engine.session_info("twin").token_ids, TOOL)
    spliced.edit("twin", [(start, end, engine.tokenizer.encode_plain(STUB), "amortize")])
    spliced.run()
    assert engine.session_info("twin").pieces == engine.session_info("s").pieces
    first = answer(spliced, spliced.turn("s", NEXT, GREEDY))
    second = answer(spliced, spliced.turn("twin", NEXT, GREEDY))
    assert second.text == first.text
    assert second.usage.cached_tokens > first.usage.cached_tokens
    assert spliced.error < TOLERANCE


def test_another_salt_finds_nothing(spliced: Lockstep) -> None:
    engine = spliced.engine
    ids = list(engine.session_info("s").token_ids)
    completion, _ = first_logits(engine, engine.submit_prompt(ids, GREEDY, salt="somebody"))
    assert completion.usage.cached_tokens == 0


def test_after_a_reply_with_hidden_special_tokens_the_client_still_goes_on(
    tiny_folder: Folder, oracle: Any
) -> None:
    with tiny_engine(tiny_folder("v2_yarn")) as engine:
        lockstep = Lockstep(engine, oracle)
        lockstep.turn("s", "hi", SamplingParams(max_tokens=300, seed=1, ignore_eos=True))
        lockstep.run()
        tokens = tuple(lockstep.tracks["s"].hand.tokens)
        assert 2 in tokens[-300:], "the case needs a special token within the reply"
        usage = answer(lockstep, lockstep.turn("s", NEXT, GREEDY)).usage
        assert usage.cached_tokens >= len(tokens) - 2

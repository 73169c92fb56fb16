"""The engine as a notebook holds it: answers, streams, sessions, and everything that is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline import Directive, Engine, EngineConfig, LeylineError, Mode, SamplingParams
from leyline.batch import Batch, StepOutput
from leyline.errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    DirectiveError,
    EngineClosedError,
    InvalidRequestError,
    ModelError,
    SessionBusyError,
    SessionNotFoundError,
)
from leyline.events import Completion, Delta, EditResult, EngineEvent, Failure
from leyline.idempotency import Answers
from leyline.rendering import rendered
from tests.engine_state import assert_at_rest, state_digest
from tests.lockstep import terminals, tiny_engine

Folder = Callable[[str], Path]
HELLO = [{"role": "user", "content": "hello"}]
LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with tiny_engine(tiny_folder("v3"), max_model_len=200, protect_first=1) as engine:
        yield engine


def drain(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
    assert_at_rest(engine)
    return events


def ending(events: list[EngineEvent], request: int) -> EngineEvent:
    (last,) = (event for event in terminals(events) if event.request_id == request)
    return last


# -- answers ------------------------------------------------------------------------------------


def test_a_question_and_a_list_of_messages_are_the_same(engine: Engine) -> None:
    first = engine.chat("hello", temperature=0, max_tokens=8)
    second = engine.chat(HELLO, SamplingParams(temperature=0, max_tokens=8))
    assert first.text == second.text
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
    assert first.finish_reason == "length" and first.usage.completion_tokens == 8


def test_a_text_and_its_ids_are_the_same_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("once in the land")
    by_text = engine.generate("once in the land", temperature=0, max_tokens=8)
    assert engine.generate(ids, temperature=0, max_tokens=8).token_ids == by_text.token_ids


def test_a_stream_is_the_answer_in_pieces(engine: Engine) -> None:
    pieces = list(engine.stream("hello", LONG))
    assert len(pieces) > 5
    assert "".join(pieces) == engine.chat("hello", LONG).text


def test_a_stream_that_is_closed_early_cancels_the_rest(engine: Engine) -> None:
    stream = engine.stream("hello", LONG)
    next(stream)
    assert engine.has_work
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    drain(engine)
    assert engine.session_ids() == []


def test_requests_that_were_submitted_go_on_while_another_is_driven(engine: Engine) -> None:
    request = engine.submit_prompt("once", LONG)
    engine.chat("hello", LONG)
    engine.chat("hello", LONG)
    assert request not in engine._jobs


def test_a_reply_ends_at_a_stop_token_unless_told_otherwise(engine: Engine) -> None:
    texts = [engine.chat("hello", seed=seed, max_tokens=150) for seed in range(8)]
    stopped = [one for one in texts if one.finish_reason == "stop"]
    assert stopped
    for one in stopped:
        assert one.token_ids[-1] == 2 and one.usage.completion_tokens == len(one.token_ids)
        assert "<|im_end|>" not in one.text
    endless = engine.chat("hello", seed=0, max_tokens=150, ignore_eos=True)
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 150)


def test_a_stop_string_ends_the_reply_and_its_tokens_leave_the_context(engine: Engine) -> None:
    session = engine.session("s")
    whole = engine.chat("hello", LONG).text
    stop = whole[6:8]
    reply = session.chat("hello", LONG, stop=stop)
    assert reply.finish_reason == "stop"
    assert reply.text == whole[: whole.index(stop)]
    assert session.tokens[-len(reply.token_ids) :] == reply.token_ids
    assert stop not in engine.tokenizer.decode(reply.token_ids)
    again = session.chat("and?", LONG)
    assert again.usage.cached_tokens >= len(session.tokens) - 60
    assert session.text.startswith("<|im_start|>user\nhello")


def test_a_reply_that_is_enough_ends_and_its_session_goes_on_from_there(engine: Engine) -> None:
    session = engine.session("s")
    whole = engine.chat("hello", LONG)
    heard: list[str] = []

    def enough(text: str) -> bool:
        heard.append(text)
        return len("".join(heard)) >= 6

    reply = session.chat("hello", LONG, enough=enough)
    assert (reply.finish_reason, reply.stopped_by) == ("stop", None)
    assert reply.text == "".join(heard) and whole.text.startswith(reply.text)
    assert 0 < len(reply.token_ids) == reply.usage.completion_tokens < len(whole.token_ids)
    assert session.tokens[-len(reply.token_ids) :] == reply.token_ids
    length = len(session.tokens)
    again = session.chat("and?", LONG)
    assert again.usage.cached_tokens >= length - 1 and again.usage.first_difference is None


def test_who_knows_a_prompts_tokens_gets_the_same_answer(engine: Engine) -> None:
    ids = engine.tokenizer.encode(rendered(engine.tokenizer, HELLO))
    requests = [engine.submit_chat(HELLO, LONG), engine.submit_chat(HELLO, LONG, prompt=ids)]
    other = engine.submit_chat(HELLO, LONG, prompt=[5, 6, 7])  # the twin: it is what is read
    named = engine.submit_chat(HELLO, LONG, prompt=[5, 6, 7], session_id="s")  # but in no session
    events = drain(engine)
    done = [ending(events, request) for request in (*requests, other, named)]
    plain, known, another, in_session = [one for one in done if isinstance(one, Completion)]
    assert plain.prompt_token_ids == known.prompt_token_ids == tuple(ids)
    assert plain.token_ids == known.token_ids and plain.usage == known.usage
    assert another.prompt_token_ids == (5, 6, 7)
    assert in_session.prompt_token_ids == tuple(ids)


def test_without_max_tokens_a_reply_goes_on_to_the_end_of_the_window(engine: Engine) -> None:
    reply = engine.generate([5, 6, 7], temperature=0, ignore_eos=True)
    assert (reply.finish_reason, reply.usage.completion_tokens) == ("length", 197)
    reply = engine.generate([5] * 199, temperature=0, max_tokens=2**31 - 1, ignore_eos=True)
    assert reply.usage.completion_tokens == 1


# -- the same seed, the same tokens ---------------------------------------------------------------


def test_a_seeded_request_gets_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12, top_p=0.9) for seed in range(6)]
    alone = [engine.generate("once in the", one).token_ids for one in params]
    requests = [engine.submit_prompt("once in the", one) for one in params]
    requests += [engine.submit_chat(HELLO, LONG) for _ in range(4)]
    events = drain(engine)
    together = [ending(events, request) for request in requests[:6]]
    assert [one.token_ids for one in together if isinstance(one, Completion)] == alone
    assert len(set(alone)) > 1


def test_an_engine_seed_makes_requests_without_one_reproducible(tiny_folder: Folder) -> None:
    def texts(seed: int | None) -> list[tuple[int, ...]]:
        with tiny_engine(tiny_folder("v3"), seed=seed) as engine:
            return [engine.generate("once", max_tokens=10).token_ids for _ in range(3)]

    assert texts(7) == texts(7) != texts(8)
    assert len(set(texts(7))) == 3


# -- sessions -------------------------------------------------------------------------------------


def test_a_session_is_chatted_with_looked_at_edited_and_deleted(engine: Engine) -> None:
    session = engine.session()
    session.chat("the magic number is (4711) you see", temperature=0, max_tokens=5)
    start, end = session.find("4711")
    assert engine.tokenizer.decode(session.tokens[start:end]) == "4711"
    before = session.tokens
    result = session.splice(start, end, "gone")
    assert session.tokens == (*before[:start], *engine.tokenizer.encode("gone"), *before[end:])
    assert "number is (gone) you see" in session.text
    assert (result.version, result.length_before) == (1, len(before))
    assert result.length_after == len(session.tokens)
    assert session.version == 1
    assert [exact for _, _, exact in session.info.pieces][:2] == [True, False]
    with pytest.raises(InvalidRequestError, match="0 times"):
        session.find("4711")
    forgotten = session.splice(start, end, (), mode="forget")
    assert forgotten.receipts[0].mode_done is Mode.FORGET
    assert [exact for _, _, exact in session.info.pieces] == [True]
    session.delete()
    assert engine.session_ids() == [] and session.messages == []
    with pytest.raises(SessionNotFoundError):
        _ = session.info


def test_a_text_that_stands_twice_is_not_found(engine: Engine) -> None:
    session = engine.session()
    session.chat("rain rain", temperature=0, max_tokens=2)
    with pytest.raises(InvalidRequestError, match="2 times"):
        session.find("rain")


def test_a_text_of_a_special_token_is_put_in_as_mere_characters(engine: Engine) -> None:
    session = engine.session()
    session.chat("the rain", temperature=0, max_tokens=2)
    before = session.tokens.count(2)
    session.splice(*session.find("rain"), "<|im_end|>")
    assert "the <|im_end|><|im_end|>" in session.text
    assert session.tokens.count(2) == before


def test_sessions_of_engines_have_names_of_their_own(engine: Engine) -> None:
    assert engine.session().session_id != engine.session().session_id
    assert engine.session("mine").session_id == "mine"


def test_a_busy_session_refuses_a_second_turn_and_takes_an_edit(engine: Engine) -> None:
    turn = engine.submit_chat(HELLO, LONG, session_id="s")
    for _ in range(4):
        engine.step()
    digest = state_digest(engine)
    with pytest.raises(SessionBusyError) as caught:
        engine.submit_chat(HELLO, LONG, session_id="s")
    assert caught.value.status == 409
    assert state_digest(engine) == digest
    assert engine.session_info("s").busy
    edit = engine.submit_directives("s", [Directive(3, 5, (9,))])
    events = drain(engine)
    assert isinstance(ending(events, turn), Completion)
    assert isinstance(ending(events, edit), EditResult)
    assert not engine.session_info("s").busy


def test_edits_of_a_turn_that_has_not_begun_wait_their_turn(engine: Engine) -> None:
    turn = engine.submit_chat(HELLO, SamplingParams(temperature=0, max_tokens=1), session_id="s")
    edits = [engine.submit_directives("s", [Directive(3, 5, (9,) * n)]) for n in range(3)]
    events = drain(engine)
    answer = ending(events, turn)
    assert isinstance(answer, Completion)
    results = [ending(events, edit) for edit in edits]
    assert [one.version for one in results if isinstance(one, EditResult)] == [1, 2, 3]
    info = engine.session_info("s")
    assert info.context_length == answer.usage.prompt_tokens + 1 - 2 - 1
    assert info.token_ids[3] == 9


def test_elapsed_time_and_lengths_are_reported(engine: Engine) -> None:
    session = engine.session()
    session.chat("hello", LONG)
    result = session.splice(3, 5)
    assert result.elapsed_ms > 0
    assert result.length_before - result.length_after == 2


# -- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_a_cancelled_turn_leaves_its_session_as_it_was(engine: Engine, steps: int) -> None:
    session = engine.session("s")
    session.chat("hello", LONG)
    before = session.info
    history = [*session.messages, {"role": "user", "content": "and?"}]
    request = engine.submit_chat(history, LONG, session_id="s")
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    last = ending(drain(engine), request)
    assert isinstance(last, Failure) and isinstance(last.error, CancelledError)
    assert session.info == before
    assert session.chat("and?", LONG).usage.cached_tokens >= len(before.token_ids) - 1


def test_a_cancelled_first_turn_leaves_no_session(engine: Engine) -> None:
    engine.cancel(engine.submit_chat(HELLO, LONG, session_id="s"))
    drain(engine)
    assert engine.session_ids() == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_cancelled_edit_is_done_or_not_done(engine: Engine, steps: int) -> None:
    session = engine.session("s")
    session.chat("hello", LONG)
    before = session.info
    request = engine.submit_directives("s", [Directive(3, 9, (8,) * 30)])
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    last = ending(drain(engine), request)
    assert isinstance(last, Failure) and isinstance(last.error, CancelledError)
    assert session.info == before


def test_cancelling_an_edit_ends_those_behind_it_which_counted_on_it(engine: Engine) -> None:
    chat = engine.session("s")
    chat.chat("tell me something long", max_tokens=4, temperature=0)
    length, before = len(chat.tokens), chat.tokens
    first = engine.submit_directives("s", [Directive(2, 2, tuple(range(65, 75)))])
    behind = engine.submit_directives("s", [Directive(length + 5, length + 9)])
    engine.cancel(first)
    events = drain(engine)
    assert [e.request_id for e in events if isinstance(e, Failure)] == [first, behind]
    assert chat.tokens == before and not chat.info.busy
    assert_at_rest(engine)


def test_a_session_is_free_at_once_when_its_last_waiting_edit_is_cancelled(engine: Engine) -> None:
    chat = engine.session("s")
    chat.chat("tell me something long", max_tokens=4, temperature=0)
    done = engine.submit_directives("s", [Directive(2, 4)])
    taken_back = engine.submit_directives("s", [Directive(2, 3)])
    events = engine.step()
    while chat.version == 0:
        events += engine.step()
    engine.cancel(taken_back)
    events += engine.step() + engine.step()
    assert isinstance(ending(events, done), EditResult)
    assert isinstance(ending(events, taken_back), Failure)
    assert not engine.has_work and not chat.info.busy
    assert_at_rest(engine)


def test_a_session_whose_turn_ended_at_a_long_stop_string_can_be_edited(engine: Engine) -> None:
    chat = engine.session("s")
    text = engine.session("probe").chat("tell me something", max_tokens=12, temperature=0).text
    assert len(text) > 6
    chat.chat("tell me something", max_tokens=12, temperature=0, stop=text[3:6])
    session = engine.sessions.get("s")
    assert session.computed <= len(session.context)
    assert chat.splice(2, 4).version == 1
    assert not engine.has_work
    assert_at_rest(engine)


def test_a_retry_of_a_cancelled_turn_keeps_the_edit_that_committed_during_it(
    engine: Engine,
) -> None:
    messages = [{"role": "user", "content": "tell me something long"}]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    turn = engine.submit_chat(messages, params, session_id="s")
    for _ in range(6):
        engine.step()
    edit = engine.submit_directives("s", [Directive(2, 6)])
    events: list[EngineEvent] = []
    while not any(isinstance(e, EditResult) and e.request_id == edit for e in events):
        events += engine.step()
    engine.cancel(turn)
    drain(engine)
    rendered = len(engine.tokenizer.encode(engine.tokenizer.render(messages)))
    info = engine.session_info("s")
    assert info.version == 1 and info.context_length == rendered - 4
    again = engine.submit_chat(messages, params, session_id="s")
    answer = ending(drain(engine), again)
    assert isinstance(answer, Completion)
    assert answer.usage.prompt_tokens == rendered - 4 and answer.usage.spliced_tokens > 0
    assert_at_rest(engine)


def test_an_edit_of_a_turn_whose_rows_were_evicted_says_why_it_kept_less(engine: Engine) -> None:
    chat = engine.session("s")
    chat.chat("tell me something " * 8, max_tokens=4, temperature=0)
    prefix = engine.parts.scheduler.prefix
    prefix.reclaim(prefix.ledger.num_slots)
    messages = [*chat.messages, {"role": "user", "content": "and then?"}]
    engine.submit_chat(messages, SamplingParams(max_tokens=2, temperature=0), session_id="s")
    engine.step()
    edit = engine.submit_directives("s", [Directive(2, 6)])
    result = ending(drain(engine), edit)
    assert isinstance(result, EditResult)
    (receipt,) = result.receipts
    assert receipt.recomputed > 20 and receipt.reason is not None


def test_an_interrupted_step_lands_nothing_and_leaks_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Batch) -> StepOutput:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.executor, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.chat("tell me something")
    drain(engine)
    assert_at_rest(engine)
    assert engine.chat("tell me something", max_tokens=2).usage.completion_tokens <= 2


def test_an_unknown_or_finished_request_is_cancelled_in_vain(engine: Engine) -> None:
    request = engine.submit_chat(HELLO, LONG, session_id="s")
    drain(engine)
    digest = state_digest(engine)
    for one in (request, 10**9, -1):
        engine.cancel(one)
    assert state_digest(engine) == digest and not engine.has_work


def test_deleting_a_busy_session_ends_its_turn_and_its_edits(engine: Engine) -> None:
    turn = engine.submit_chat(HELLO, LONG, session_id="s")
    engine.step()
    edit = engine.submit_directives("s", [Directive(3, 5)])
    engine.delete_session("s")
    events = drain(engine)
    for request in (turn, edit):
        last = ending(events, request)
        assert isinstance(last, Failure) and isinstance(last.error, CancelledError)
    assert engine.session_ids() == []


# -- what is refused ------------------------------------------------------------------------------

Call = Callable[[Engine], Any]
REFUSED: dict[str, tuple[type[LeylineError], Call]] = {
    "over-long prompt": (ContextLengthError, lambda e: e.generate([5] * 200)),
    "over-long text": (ContextLengthError, lambda e: e.generate("x" * 10_000)),
    "over-long chat": (ContextLengthError, lambda e: e.session("new").chat("x" * 10_000)),
    "empty prompt": (InvalidRequestError, lambda e: e.generate("")),
    "no ids": (InvalidRequestError, lambda e: e.generate([])),
    "id outside the vocabulary": (InvalidRequestError, lambda e: e.generate([266])),
    "negative id": (InvalidRequestError, lambda e: e.generate([-1])),
    "a prompt of another kind": (InvalidRequestError, lambda e: e.generate(5)),  # pyright: ignore
    "no messages": (InvalidRequestError, lambda e: e.chat([])),
    "no messages in a session": (
        InvalidRequestError,
        lambda e: e.submit_chat([], SamplingParams(), session_id="new"),
    ),
    "a message without a role": (InvalidRequestError, lambda e: e.chat([{"content": "a"}])),
    "a message that is none": (InvalidRequestError, lambda e: e.chat([5])),  # pyright: ignore
    "unknown option": (InvalidRequestError, lambda e: e.chat("a", heat=1)),
    "negative temperature": (InvalidRequestError, lambda e: e.chat("a", temperature=-1)),
    "huge top_k": (InvalidRequestError, lambda e: e.chat("a", top_k=10**20)),
    "huge max_tokens": (InvalidRequestError, lambda e: e.chat("a", max_tokens=10**20)),
    "no max_tokens": (InvalidRequestError, lambda e: e.chat("a", max_tokens=0)),
    "empty stop": (InvalidRequestError, lambda e: e.chat("a", stop="")),
    "a stop that is none": (InvalidRequestError, lambda e: e.chat("a", stop=5)),
    "unknown session": (SessionNotFoundError, lambda e: e.session("x").splice(1, 2)),
    "unknown session's info": (SessionNotFoundError, lambda e: e.session_info("x")),
    "deleting an unknown session": (SessionNotFoundError, lambda e: e.delete_session("x")),
    "a session of another tenant": (
        SessionNotFoundError,
        lambda e: e.session_info("s", salt="other"),
    ),
    "unknown mode": (DirectiveError, lambda e: e.session("s").splice(1, 2, mode="burn")),
    "a mode that is none": (DirectiveError, lambda e: e.edit("s", [Directive(1, 2, (), "x")])),  # pyright: ignore
    "start > end": (DirectiveError, lambda e: e.session("s").splice(5, 4)),
    "span behind the end": (DirectiveError, lambda e: e.session("s").splice(5, 1000)),
    "huge span": (DirectiveError, lambda e: e.session("s").splice(10**30, 10**31)),
    "negative start": (DirectiveError, lambda e: e.session("s").splice(-1, 4)),
    "protected head": (DirectiveError, lambda e: e.session("s").splice(0, 4)),
    "no position": (DirectiveError, lambda e: e.session("s").splice(None, 4)),  # pyright: ignore
    "overlap": (DirectiveError, lambda e: e.edit("s", [Directive(2, 6), Directive(5, 8)])),
    "replacement id": (DirectiveError, lambda e: e.session("s").splice(5, 6, [266])),
    "no directives": (DirectiveError, lambda e: e.edit("s", [])),
    "over-long replacement": (
        ContextLengthError,
        lambda e: e.session("s").splice(5, 6, [7] * 500),
    ),
    "half a surrogate": (InvalidRequestError, lambda e: e.session("s").splice(5, 6, "\ud800")),
    "half a surrogate in a chat": (InvalidRequestError, lambda e: e.chat("\ud800")),
    "an empty text to find": (InvalidRequestError, lambda e: e.session("s").find("")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing_and_nobody_else_notices(engine: Engine, case: str) -> None:
    kind, call = REFUSED[case]
    engine.session("s").chat("hello", LONG)
    expected = engine.chat("once in the land", LONG).text
    other = engine.submit_chat([{"role": "user", "content": "once in the land"}], LONG)
    for _ in range(5):
        engine.step()
    digest = state_digest(engine)
    with pytest.raises(kind) as caught:
        call(engine)
    assert type(caught.value) is kind
    assert len(caught.value.message) > 15
    assert state_digest(engine) == digest
    last = ending(drain(engine), other)
    assert isinstance(last, Completion) and last.text == expected


def test_the_digest_notices_a_change(engine: Engine) -> None:
    digests = [state_digest(engine)]
    engine.session("s").chat("hello", LONG)
    digests.append(state_digest(engine))
    engine.session("s").splice(3, 4)
    digests.append(state_digest(engine))
    engine.submit_prompt("once", LONG)
    digests.append(state_digest(engine))
    engine.step()
    digests.append(state_digest(engine))
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"model": "no/such/folder"}, ModelError),
        ({"device": "warp:0"}, ConfigError),
        ({"max_model_len": 100_000}, ConfigError),
        ({"dtype": "int4"}, ConfigError),
        ({"heat": 1}, InvalidRequestError),
    ],
)
def test_an_engine_that_cannot_be_says_why(
    tiny_folder: Folder, options: dict[str, Any], kind: type[LeylineError]
) -> None:
    defaults = {"model": str(tiny_folder("v3")), "progress": False, "kv_cache_tokens": 100}
    with pytest.raises(kind):
        Engine(**{**defaults, **options})


def test_options_by_name_go_before_the_config(tiny_folder: Folder) -> None:
    config = EngineConfig(
        model=str(tiny_folder("v3")), progress=False, kv_cache_tokens=90, dtype="float32"
    )
    with Engine(config, max_num_seqs=2) as engine:
        assert (engine.config.max_num_seqs, engine.config.kv_cache_tokens) == (2, 90)
        assert engine.max_model_len == 90
        assert engine.model_name == tiny_folder("v3").name


# -- trouble --------------------------------------------------------------------------------------


def test_a_batch_that_fails_ends_its_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.session("s")
    session.chat("hello", LONG)
    before = session.info
    twin = engine.session("twin")
    twin.chat("hello", LONG)
    expected = twin.chat("and?", LONG).text
    history = [*session.messages, {"role": "user", "content": "and?"}]
    request = engine.submit_chat(history, LONG, session_id="s")
    for _ in range(3):
        engine.step()

    def broken(_: Batch) -> StepOutput:
        raise RuntimeError("secret of the tensor library")

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.executor, "run", broken)
        events = engine.step()
    last = ending(events, request)
    assert isinstance(last, Failure) and "secret" not in last.error.message
    drain(engine)
    assert session.info == before
    assert session.chat("and?", LONG).text == expected


def test_an_edit_whose_batch_fails_leaves_the_session_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.session("s")
    session.chat("hello", LONG)
    before = session.info

    def broken(_: Batch) -> StepOutput:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.executor, "run", broken)
        with pytest.raises(LeylineError):
            session.splice(3, 6)
    drain(engine)
    assert session.info == before
    session.splice(3, 6)
    assert len(session.tokens) == len(before.token_ids) - 3


def test_a_closed_engine_says_so(tiny_folder: Folder) -> None:
    engine = tiny_engine(tiny_folder("v3"))
    engine.submit_prompt("once", LONG)
    engine.close()
    engine.close()
    assert not engine.has_work
    for call in (engine.step, lambda: engine.chat("hello"), lambda: engine.generate("a")):
        with pytest.raises(EngineClosedError):
            call()


def test_deltas_add_up_to_the_completion(engine: Engine) -> None:
    requests = [engine.submit_chat(HELLO, SamplingParams(seed=n, max_tokens=20)) for n in range(5)]
    events = drain(engine)
    for request in requests:
        mine = [event for event in events if event.request_id == request]
        *deltas, last = mine
        assert isinstance(last, Completion)
        assert "".join(one.text for one in deltas if isinstance(one, Delta)) == last.text
        assert len(deltas) == sum(isinstance(one, Delta) for one in deltas)


def test_the_digest_notices_a_change_of_any_field_of_a_session(engine: Engine) -> None:
    engine.session("s").chat("hello", LONG)
    session, digest = engine.sessions.get("s"), state_digest(engine)
    for entry in dataclasses.fields(session):
        before = getattr(session, entry.name)
        setattr(session, entry.name, Answers() if entry.name == "answers" else "something else")
        if entry.name == "answers":
            session.answers.ask("k", "asked")
        if entry.name != "context":
            assert state_digest(engine) != digest, entry.name
        setattr(session, entry.name, before)
        assert state_digest(engine) == digest
    prefix = engine.parts.scheduler.prefix
    prefix.acquire(session.context)
    assert state_digest(engine) != digest

"""A request that comes again with its key gets its first answer, and is not done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leyline import Directive, Engine, LeylineError, Mode, SamplingParams
from leyline.errors import (
    CancelledError,
    DirectiveError,
    IdempotencyError,
    RequestPendingError,
    VersionConflictError,
)
from leyline.events import EditResult, EngineEvent, Failure
from leyline.idempotency import MAX_KEYS, Answers
from leyline.pointing import Change, Target
from tests.engine_state import assert_at_rest, state_digest
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]
HELLO = [{"role": "user", "content": "the rain in the land is over"}]
LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
EDIT = (Directive(3, 6, (7, 8)),)

# -- the record -----------------------------------------------------------------------------------


def test_a_key_is_new_then_pending_then_answered_then_forgotten() -> None:
    answers = Answers[str]()
    assert answers.earlier("k", "asked") is None
    answers.ask("k", "asked")
    with pytest.raises(RequestPendingError) as pending:
        answers.earlier("k", "asked")
    assert (pending.value.status, pending.value.code) == (409, "request_pending")
    answers.answer("k", "done")
    assert answers.earlier("k", "asked") == "done"
    answers.drop("k")
    answers.drop("k")
    assert answers.earlier("k", "something else") is None


@pytest.mark.parametrize("answered", [False, True])
def test_a_key_stands_for_one_request(answered: bool) -> None:
    answers = Answers[str]()
    answers.ask("k", ("a", None))
    if answered:
        answers.answer("k", "done")
    with pytest.raises(IdempotencyError) as caught:
        answers.earlier("k", ("a", 0))
    assert (caught.value.status, caught.value.code) == (422, "idempotency_mismatch")
    assert caught.value.param == "idempotency_key"


def test_the_oldest_answers_are_forgotten() -> None:
    answers = Answers[int]()
    for number in range(MAX_KEYS + 3):
        answers.ask(str(number), number)
        answers.answer(str(number), number)
    known = [number for number in range(MAX_KEYS + 3) if answers.earlier(str(number), number)]
    assert known == list(range(3, MAX_KEYS + 3))


def test_a_request_under_way_is_never_forgotten() -> None:
    answers = Answers[int]()
    answers.ask("pending", 0)
    for number in range(2 * MAX_KEYS):
        answers.ask(str(number), number)
        answers.answer(str(number), number)
    with pytest.raises(RequestPendingError):
        answers.earlier("pending", 0)
    for number in range(2 * MAX_KEYS):
        answers.ask(f"more {number}", number)
    assert all(answers.earlier(str(number), number) is None for number in range(2 * MAX_KEYS))


def test_an_answer_to_a_key_that_is_gone_is_nobodys() -> None:
    answers = Answers[int]()
    answers.answer("k", 5)
    assert answers.earlier("k", "asked") is None


def test_half_a_surrogate_is_told_apart_too() -> None:
    answers = Answers[int]()
    answers.ask("k", "\ud800")
    with pytest.raises(IdempotencyError):
        answers.earlier("k", "\ud801")


# -- the engine -----------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with tiny_engine(tiny_folder("v3"), max_model_len=300) as engine:
        engine.session("s").chat(HELLO[0]["content"], LONG)
        yield engine


def drain(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
    assert_at_rest(engine)
    return events


def ending(events: list[EngineEvent], request: int) -> EngineEvent:
    (last,) = (event for event in events if event.request_id == request)
    return last


def submit(engine: Engine, edit: tuple[Directive, ...] = EDIT, key: str = "k") -> int:
    return engine.submit_directives("s", edit, idempotency_key=key)


def test_a_repeat_gets_the_first_result_and_edits_nothing(engine: Engine) -> None:
    first = engine.edit("s", EDIT, idempotency_key="k")
    before, info = state_digest(engine), engine.session_info("s")
    again = submit(engine)
    result = ending(drain(engine), again)
    assert isinstance(result, EditResult)
    assert result.request_id == again != first.request_id
    assert (result.receipts, result.version) == (first.receipts, first.version)
    assert (result.elapsed_ms, result.length_after) == (first.elapsed_ms, first.length_after)
    assert state_digest(engine) == before and engine.session_info("s") == info


def test_without_a_key_the_same_edit_is_done_twice(engine: Engine) -> None:
    before = engine.session_info("s").context_length
    for _ in range(2):
        engine.edit("s", EDIT)
    assert engine.session_info("s").context_length == before - 2


def test_a_repeat_counts_even_if_its_version_is_not_the_present_one(engine: Engine) -> None:
    first = engine.edit("s", EDIT, idempotency_key="k", expected_version=0)
    engine.edit("s", EDIT)
    again = engine.edit("s", EDIT, idempotency_key="k", expected_version=0)
    assert again.version == first.version == 1 and engine.session_info("s").version == 2


@pytest.mark.parametrize(
    "other",
    [
        {"changes": (Directive(3, 6, (7, 9)),)},
        {"changes": (Directive(3, 6, (7, 8), Mode.FORGET),)},
        {"changes": (Change(Target(3, 6), (7, 8)),)},
        {"changes": (*EDIT, Directive(8, 9))},
        {"changes": EDIT, "expected_version": 1},
    ],
)
def test_another_request_with_the_key_is_refused(engine: Engine, other: dict[str, object]) -> None:
    engine.edit("s", EDIT, idempotency_key="k")
    before = state_digest(engine)
    with pytest.raises(IdempotencyError):
        engine.submit_directives("s", idempotency_key="k", **other)  # pyright: ignore
    assert state_digest(engine) == before


def test_a_repeat_before_the_answer_is_told_to_wait(engine: Engine) -> None:
    request = submit(engine)
    before = state_digest(engine)
    while engine.has_work:
        with pytest.raises(RequestPendingError):
            submit(engine)
        assert state_digest(engine) == before
        if any(event.request_id == request for event in engine.step()):
            break
        before = state_digest(engine)
    assert engine.submit_directives("s", EDIT, idempotency_key="k") > request
    drain(engine)
    assert engine.session_info("s").version == 1


def test_a_key_is_free_again_after_a_cancel(engine: Engine) -> None:
    request = submit(engine)
    engine.cancel(request)
    last = ending(drain(engine), request)
    assert isinstance(last, Failure) and isinstance(last.error, CancelledError)
    assert engine.edit("s", (Directive(3, 5),), idempotency_key="k").version == 1


def test_a_key_is_free_again_after_a_failure(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.executor, "run", lambda _: 1 // 0)
        with pytest.raises(LeylineError):
            engine.edit("s", EDIT, idempotency_key="k")
    assert engine.edit("s", EDIT, idempotency_key="k").version == 1
    assert engine.edit("s", EDIT, idempotency_key="k").version == 1


def test_a_refused_request_leaves_its_key_free(engine: Engine) -> None:
    for wrong in ([Directive(3, 10**6)], []):
        with pytest.raises(DirectiveError):
            engine.submit_directives("s", wrong, idempotency_key="k")
    with pytest.raises(VersionConflictError):
        engine.submit_directives("s", EDIT, expected_version=4, idempotency_key="k")
    assert engine.edit("s", EDIT, idempotency_key="k").version == 1


def test_a_turn_that_fails_frees_the_keys_of_the_edits_that_waited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = engine.submit_chat(HELLO * 3, LONG, session_id="s")
    engine.step()
    edit = submit(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.executor, "run", lambda _: 1 // 0)
        events = engine.step()
    assert all(isinstance(ending(events, request), Failure) for request in (turn, edit))
    drain(engine)
    version = engine.session_info("s").version
    assert engine.edit("s", EDIT, idempotency_key="k").version == version + 1


def test_keys_are_those_of_one_session_and_one_tenant(engine: Engine) -> None:
    for session, salt in (("t", ""), ("s", "tenant")):
        engine.submit_chat(HELLO, LONG, session_id=session, salt=salt)
        drain(engine)
    first = engine.edit("s", EDIT, idempotency_key="k")
    for session, salt in (("t", ""), ("s", "tenant")):
        request = engine.submit_directives(session, EDIT, salt=salt, idempotency_key="k")
        result = ending(drain(engine), request)
        assert isinstance(result, EditResult) and result.session_id == session
        assert engine.session_info(session, salt=salt).version == 1
    assert engine.session_info("s").version == first.version


def test_a_session_that_is_made_anew_knows_no_keys(engine: Engine) -> None:
    engine.edit("s", EDIT, idempotency_key="k")
    engine.delete_session("s")
    engine.session("s").chat("something else entirely", LONG)
    assert engine.edit("s", [Directive(2, 3)], idempotency_key="k").version == 1


def test_a_session_remembers_so_many_keys_and_no_more(engine: Engine) -> None:
    for number in range(MAX_KEYS + 1):
        engine.edit("s", [Directive(3, 4, (9,))], idempotency_key=f"key {number}")
    version = engine.session_info("s").version
    again = engine.edit("s", [Directive(3, 4, (9,))], idempotency_key="key 1")
    assert again.version == 2 and engine.session_info("s").version == version
    engine.edit("s", [Directive(3, 4, (9,))], idempotency_key="key 0")
    assert engine.session_info("s").version == version + 1

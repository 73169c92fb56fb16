"""A set of edits is one commit: all of it or nothing, for the version it was made for, whenever it
is cancelled and whoever else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyline import Directive, Engine, LeylineError, Mode, SamplingParams
from leyline.batch import Batch, StepOutput
from leyline.context import Context
from leyline.errors import (
    CancelledError,
    DirectiveError,
    SessionNotFoundError,
    VersionConflictError,
)
from leyline.events import Completion, EditResult, EngineEvent, Failure
from leyline.pointing import Change, Target
from tests.engine_state import assert_at_rest, assert_books_in_order, session_rows, state_digest
from tests.lockstep import terminals, tiny_engine

Folder = Callable[[str], Path]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TOLD = "the rain in the land is over and all is well in there"
SET = [(6, 9, tuple(range(70, 100))), (14, 20, ()), (30, 31, (65, 66))]
MODES = [Mode.AMORTIZE, Mode.FORGET, Mode.HEAL]


@pytest.fixture(params=[0, 4])
def engine(tiny_folder: Folder, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"max_model_len": 400, "kv_cache_tokens": 900, "keep_versions": request.param}
    with tiny_engine(tiny_folder("v3"), session_share=1.0, **options) as engine:
        engine.session("s").chat(TOLD, PARAMS)
        engine.session("fork").chat(TOLD, PARAMS)
        yield engine


def edits(mode: Mode = Mode.AMORTIZE) -> list[Directive]:
    return [Directive(start, end, new, mode) for start, end, new in SET]


def applied(tokens: tuple[int, ...]) -> tuple[int, ...]:
    for start, end, new in reversed(SET):
        tokens = (*tokens[:start], *new, *tokens[end:])
    return tokens


def drain(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
        assert_books_in_order(engine)
    assert_at_rest(engine)
    return events


def ending(events: list[EngineEvent], request: int) -> EngineEvent:
    (last,) = (event for event in terminals(events) if event.request_id == request)
    return last


def next_turn(engine: Engine, content: str = "and then?", name: str = "s") -> int:
    """Submit a session's next turn, in a history that says what the session does."""
    text = engine.session_info(name).text.removeprefix("<|im_start|>user\n")
    user, _, reply = text.partition("<|im_end|>\n<|im_start|>assistant\n")
    told = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": reply.removesuffix("<|im_end|>")},
        {"role": "user", "content": content},
    ]
    return engine.submit_chat(told, PARAMS, session_id=name)


# -- one commit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_set_is_one_commit_and_one_version(engine: Engine, mode: Mode) -> None:
    before = engine.session_info("s")
    result = engine.edit("s", list(reversed(edits(mode))))
    assert result.version == engine.session_info("s").version == 1
    assert engine.session_info("s").token_ids == applied(before.token_ids)
    assert [one.start for one in result.receipts] == [start for start, _, _ in SET]
    assert len(engine.session_info("s").versions) == min(1, engine.config.keep_versions)


def test_a_set_of_which_one_does_not_fit_changes_nothing(engine: Engine) -> None:
    digest = state_digest(engine)
    for wrong in (Directive(8, 10), Directive(50, 10**6), Directive(40, 41, (266,))):
        with pytest.raises(DirectiveError):
            engine.submit_directives("s", [*edits(), wrong])
        with pytest.raises(DirectiveError):
            engine.submit_directives("s", [wrong, *edits()])
        assert state_digest(engine) == digest


def test_the_version_before_a_set_comes_back_whole(engine: Engine) -> None:
    before, rows = engine.session_info("s"), session_rows(engine, "s")
    engine.edit("s", edits())
    if engine.config.keep_versions:
        engine.revert("s")
        assert engine.session_info("s").token_ids == before.token_ids
        assert session_rows(engine, "s") == rows
    else:
        with pytest.raises(LeylineError):
            engine.revert("s")


# -- the version it was made for ------------------------------------------------------------------


def refused(engine: Engine, expected: int, version: int) -> None:
    """The edit is refused because of its version, and nothing has changed."""
    digest = state_digest(engine)
    for ask in (engine.submit_directives, engine.plan_directives):
        with pytest.raises(VersionConflictError) as caught:
            ask("s", edits(), expected_version=expected)
        assert (caught.value.status, caught.value.code) == (412, "version_conflict")
        assert caught.value.details == {"version": version}
        assert caught.value.param == "expected_version"
    assert state_digest(engine) == digest


def test_an_edit_made_for_another_version_is_refused(engine: Engine) -> None:
    refused(engine, 1, 0)
    assert engine.edit("s", [Directive(3, 4)], expected_version=0).version == 1
    refused(engine, 0, 1)
    assert engine.edit("s", [Directive(3, 4)], expected_version=1).version == 2


def test_edits_that_wait_count_too(engine: Engine) -> None:
    first = engine.submit_directives("s", edits(), expected_version=0)
    refused(engine, 0, 1)
    second = engine.submit_directives("s", [Directive(3, 4)], expected_version=1)
    refused(engine, 1, 2)
    engine.step()
    refused(engine, 0, 2)
    engine.cancel(second)
    refused(engine, 2, 1)
    third = engine.submit_directives("s", [Directive(4, 5)], expected_version=1)
    events = drain(engine)
    versions = [ending(events, request) for request in (first, third)]
    assert [one.version for one in versions if isinstance(one, EditResult)] == [1, 2]


@pytest.mark.parametrize("mode", ["forget", "amortize"])
def test_what_the_client_edits_in_its_own_history_counts_too(engine: Engine, mode: str) -> None:
    told = [{"role": "user", "content": TOLD.replace("land", "sea and the land")}]
    turn = engine.submit_chat(told, PARAMS, session_id="s", edit_mode=mode)
    refused(engine, 0, 1)
    while engine.session_info("s").busy:
        plan = engine.plan_directives("s", [Directive(3, 4)])
        assert plan.version == 1
        events = engine.step()
    answer = ending([*events, *drain(engine)], turn)
    assert isinstance(answer, Completion) and answer.version == 1
    assert engine.session_info("s").version == 1


def test_a_plan_names_the_version_that_the_real_edit_expects(engine: Engine) -> None:
    engine.edit("s", [Directive(8, 9)])
    next_turn(engine)
    engine.step()
    engine.submit_directives("s", [Directive(8, 9)])
    plan = engine.plan_directives("s", edits())
    assert plan.version == 2
    edit = engine.submit_directives("s", edits(), expected_version=plan.version)
    result = ending(drain(engine), edit)
    assert isinstance(result, EditResult) and result.version == 3
    assert result.receipts == plan.receipts


# -- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_edit_is_cancelled_whole_at_every_step_or_not_at_all(engine: Engine, mode: Mode) -> None:
    seen: set[str] = set()
    for steps in range(40):
        before, rows = engine.session_info("s"), session_rows(engine, "s")
        fork = session_rows(engine, "fork")
        digest, last_used = state_digest(engine), engine.sessions.get("s").last_used
        edit = engine.submit_directives("s", edits(mode))
        events: list[EngineEvent] = []
        for _ in range(steps):
            events += engine.step()
        engine.cancel(edit)
        assert_books_in_order(engine)
        if steps == 0:
            engine.sessions.get("s").last_used = last_used
            events, engine._outbox = engine._outbox, []
            assert state_digest(engine) == digest
        last = ending([*events, *drain(engine)], edit)
        assert session_rows(engine, "fork") == fork
        if isinstance(last, EditResult):
            seen.add("done")
            assert engine.session_info("s").token_ids == applied(before.token_ids)
            if steps and engine.session_info("s").version > 2:
                break
            continue
        seen.add("not done")
        assert isinstance(last, Failure) and isinstance(last.error, CancelledError)
        assert engine.session_info("s") == before
        assert session_rows(engine, "s")[: len(rows)] == rows
    assert seen == {"done", "not done"}


@pytest.mark.parametrize("mode", MODES)
def test_an_edit_during_a_turn_is_cancelled_whole_or_not_at_all(engine: Engine, mode: Mode) -> None:
    turn_before = engine.session_info("fork").token_ids
    seen: set[str] = set()
    for steps in range(8):
        name = f"turn {steps}"
        engine.session(name).chat(TOLD, PARAMS)
        turn = next_turn(engine, name=name)
        for _ in range(4):
            engine.step()
        before = engine.session_info(name).token_ids
        edit = engine.submit_directives(name, edits(mode))
        behind = engine.submit_directives(name, [Directive(3, 4, (99,))])
        events: list[EngineEvent] = []
        for _ in range(steps):
            events += engine.step()
        engine.cancel(edit)
        events += drain(engine)
        last, later = ending(events, edit), ending(events, behind)
        answer = ending(events, turn)
        assert isinstance(answer, Completion)
        tokens = engine.session_info(name).token_ids
        if isinstance(last, Failure):
            seen.add("not done")
            assert isinstance(later, Failure), "its positions counted on the edit before it"
            assert tokens[: len(before)] == before and engine.session_info(name).version == 0
        else:
            seen.add("done")
            assert isinstance(later, EditResult)
            kept = applied(before[:31])
            assert tokens[: len(kept)] == (*kept[:3], 99, *kept[4:])
            assert engine.session_info(name).version == 2
    assert seen == {"done", "not done"}
    assert engine.session_info("fork").token_ids == turn_before


def test_a_cancelled_edit_behind_a_mark_that_fired_leaves_what_the_mark_did(
    engine: Engine,
) -> None:
    engine.session("s").decay(Target(6, 14), turns=1, mode="forget")
    turn = next_turn(engine)
    events: list[EngineEvent] = []
    while not terminals(events):
        events += engine.step()
    assert isinstance(ending(events, turn), Completion)
    before = engine.session_info("s")
    assert before.busy, "the mark fires"
    edit = engine.submit_directives("s", [Directive(3, 4)])
    while engine.session_info("s").version == before.version:
        engine.step()
    engine.cancel(edit)
    last = ending(drain(engine), edit)
    assert isinstance(last, Failure)
    session = engine.sessions.get("s")
    tokens = (*before.token_ids[:6], *before.token_ids[14:])
    assert session.context.tokens == tokens and session.version == before.version + 1
    assert session.computed <= len(session.context)
    assert engine.edit("s", edits()).length_before == len(tokens)
    turn = next_turn(engine)
    assert isinstance(ending(drain(engine), turn), Completion)


def test_an_interrupt_at_any_step_leaves_an_edit_done_or_not_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Batch) -> StepOutput:
        raise KeyboardInterrupt

    seen: set[bool] = set()
    for steps in range(12):
        before = engine.session_info("s")
        edit = engine.submit_directives("s", edits(Mode.FORGET))
        events: list[EngineEvent] = []
        for _ in range(steps):
            events += engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.parts.executor, "run", interrupt)
            if engine.has_work:
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
        done = isinstance(ending([*events, *drain(engine)], edit), EditResult)
        seen.add(done)
        expected = applied(before.token_ids) if done else before.token_ids
        assert engine.session_info("s").token_ids == expected
        assert engine.session_info("s").version == before.version + done
        engine.delete_session("s")
        engine.session("s").chat(TOLD, PARAMS)
    assert seen == {True, False}


# -- a session that goes --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_an_edit_of_a_session_that_is_deleted_ends_and_later_ones_are_refused(
    engine: Engine, steps: int
) -> None:
    fork, info = session_rows(engine, "fork"), engine.session_info("fork")
    edit = engine.submit_directives("s", edits(), idempotency_key="k")
    events: list[EngineEvent] = []
    for _ in range(steps):
        events += engine.step()
    engine.delete_session("s")
    for ask in (engine.submit_directives, engine.plan_directives):
        with pytest.raises(SessionNotFoundError):
            ask("s", edits())
    last = ending([*events, *drain(engine)], edit)
    assert isinstance(last, Failure | EditResult)
    assert engine.session_ids() == ["fork"]
    assert (session_rows(engine, "fork"), engine.session_info("fork")) == (fork, info)
    engine.session("s").chat(TOLD, PARAMS)
    assert engine.edit("s", edits(), idempotency_key="k").version == 1


def test_rows_are_shared_within_one_tenant_only(engine: Engine) -> None:
    request = engine.submit_chat(
        [{"role": "user", "content": TOLD}], PARAMS, session_id="s", salt="tenant"
    )
    assert isinstance(ending(drain(engine), request), Completion)
    stolen = Change(Target(3, 4), source=("fork", Target(5, 9)))
    context = engine.sessions.get("fork").context
    by_hand = Directive(3, 4, context.tokens[5:9], source=_source(context, 5))
    digest = state_digest(engine)
    for change, kind in ((stolen, SessionNotFoundError), (by_hand, DirectiveError)):
        with pytest.raises(kind):
            engine.submit_directives("s", [change], salt="tenant")
    assert state_digest(engine) == digest
    own = Change(Target(3, 4), source=("s", Target(5, 9)))
    request = engine.submit_directives("s", [own], salt="tenant")
    result = ending(drain(engine), request)
    assert isinstance(result, EditResult) and result.receipts[0].shared == 4


def _source(context: Context, start: int) -> Any:
    from leyline.directive import Source

    return Source(context, start)


def test_the_rows_that_are_compared_are_rows(engine: Engine) -> None:
    rows = session_rows(engine, "s")
    numbers = np.frombuffer(rows, np.float32)
    assert len(numbers) > 1000 and np.isfinite(numbers).all()
    engine.edit("s", edits())
    assert session_rows(engine, "s") != rows

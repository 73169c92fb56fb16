"""Going back: exact and free where the rows were kept, and honest where they were not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leyline import Engine, SamplingParams
from leyline.conversation import Conversation
from leyline.errors import SessionBusyError, SessionNotFoundError, VersionNotFoundError
from leyline.events import Completion, Reverted
from tests.engine_state import assert_at_rest, state_digest
from tests.lockstep import tiny_engine
from tests.probes import (
    PlanLog,
    completed,
    drain,
    evict_everything,
    first_logits,
    rows_of,
    same_rows,
    slots_of,
)

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
TOLD = f"look: ({TOOL}) what now? " + "the man in the hat and the hen in the inn and so on" * 3
STUB = "[evicted]"
NEXT = "and then?"


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with tiny_engine(tiny_folder("v2_yarn")) as engine:
        yield engine


def told(engine: Engine, name: str = "s") -> Conversation:
    chat = engine.session(name)
    chat.chat(TOLD, GREEDY)
    return chat


def ask(chat: Conversation) -> int:
    messages = [*chat.messages, {"role": "user", "content": NEXT}]
    return chat._engine.submit_chat(messages, GREEDY, session_id=chat.session_id)


def numbers(reverted: Reverted) -> tuple[int, int]:
    return reverted.kept, reverted.recomputed


@pytest.mark.parametrize("mode", ["amortize", "forget", "heal"])
def test_going_back_to_kept_rows_is_exact_and_free(
    engine: Engine, tiny_folder: Folder, mode: str
) -> None:
    chat = told(engine)
    before, context = chat.info, engine.sessions.get("s").context
    slots, rows = slots_of(engine, context), rows_of(engine, context)
    chat.replace(TOOL, STUB, mode)
    assert chat.info.versions == ((0, len(before.token_ids), True),)
    assert STUB in chat.text
    log = PlanLog(engine)
    reverted = chat.revert()
    assert (reverted.restored, reverted.version) == (0, 2)
    assert numbers(reverted) == (len(rows[0][0]), 0)
    assert reverted.state == "exact" and not log
    assert chat.info.token_ids == before.token_ids and chat.info.pieces == before.pieces
    assert chat.info.messages == before.messages
    assert (slots_of(engine, context) == slots).all(), "the very slots"
    assert same_rows(rows_of(engine, context), rows), "bit for bit"
    completion, logits = first_logits(engine, ask(chat))
    assert completion.usage.spliced_tokens == 0 and not completion.usage.degraded
    with tiny_engine(tiny_folder("v2_yarn")) as never_edited:
        twin = told(never_edited)
        expected, unedited = first_logits(never_edited, ask(twin))
    assert (logits == unedited).all() and completion.usage == expected.usage
    assert_at_rest(engine)


def test_the_comparison_sees_the_edit_that_was_not_taken_back(
    engine: Engine, tiny_folder: Folder
) -> None:
    chat = told(engine)
    chat.replace(TOOL, STUB, "amortize")
    _, logits = first_logits(engine, ask(chat))
    with tiny_engine(tiny_folder("v2_yarn")) as never_edited:
        _, unedited = first_logits(never_edited, ask(told(never_edited)))
    assert not (logits == unedited).all()


def test_going_back_and_forth(engine: Engine) -> None:
    chat = told(engine)
    chat.replace(TOOL, STUB, "amortize")
    edited = engine.sessions.get("s").context
    rows = rows_of(engine, edited)
    chat.revert()
    redone = chat.revert(1)
    assert (redone.restored, redone.version, redone.state) == (1, 3, "spliced")
    assert redone.recomputed == 0 and redone.kept == len(rows[0][0])
    assert engine.sessions.get("s").context == edited
    assert same_rows(rows_of(engine, edited), rows)
    assert [number for number, _, _ in chat.info.versions] == [0, 1, 2]
    usage = chat.chat(NEXT, GREEDY).usage
    assert usage.spliced_tokens > 100 and not usage.degraded


def test_turns_since_a_version_go_too_and_their_text_is_new_again(engine: Engine) -> None:
    chat = told(engine)
    before = chat.tokens
    chat.replace(TOOL, STUB, "amortize")
    chat.chat("something else", GREEDY)
    chat.revert()
    assert chat.tokens == before
    usage = chat.chat(NEXT, GREEDY).usage
    assert "something else" in chat.text and TOOL in chat.text
    assert len(before) - 1 <= usage.cached_tokens <= len(before)


def test_what_was_evicted_is_said_and_computed_again(engine: Engine) -> None:
    chat = told(engine)
    length = len(chat.tokens)
    chat.replace(TOOL, STUB, "amortize")
    evict_everything(engine)
    reverted = chat.revert()
    assert numbers(reverted) == (0, length - 1) and reverted.state == "exact"
    usage = chat.chat(NEXT, GREEDY).usage
    assert usage.cached_tokens == 0 and not usage.degraded


def test_lost_grafts_of_a_version_are_said_and_the_text_goes_on_exact(engine: Engine) -> None:
    chat = told(engine)
    chat.replace(TOOL, STUB, "amortize")
    spliced = chat.tokens
    chat.replace("what now?", "well?", "forget")
    evict_everything(engine)
    reverted = chat.revert()
    assert reverted.restored == 1 and reverted.state == "exact"
    assert numbers(reverted) == (0, len(spliced) - 1)
    assert chat.tokens == spliced
    assert chat.chat(NEXT, GREEDY).usage.spliced_tokens == 0


def test_beyond_the_quota_no_rows_are_kept_and_going_back_says_so(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v2_yarn"), session_share=0.01) as engine:
        chat = told(engine)
        before = chat.tokens
        result = chat.replace(TOOL, STUB, "amortize")
        assert result.receipts[0].moved_in_place > 100 and result.receipts[0].copied == 0
        assert chat.info.versions == ((0, len(before), False),)
        reverted = chat.revert()
        assert reverted.kept < 30 and reverted.recomputed == len(before) - 1 - reverted.kept
        assert chat.tokens == before
        usage = chat.chat(NEXT, GREEDY).usage
        assert usage.cached_tokens == reverted.kept
        assert_at_rest(engine)


def test_only_the_last_versions_are_kept(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), keep_versions=2) as engine:
        chat = told(engine)
        for index in range(4):
            chat.replace("look" if not index else f"look{index}", f"look{index + 1}")
        assert [number for number, _, _ in chat.info.versions] == [2, 3]
        with pytest.raises(VersionNotFoundError, match="2, 3"):
            chat.revert(0)
        chat.revert(2)
        assert "look2:" in chat.text


def test_without_versions_there_is_nothing_to_go_back_to(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), keep_versions=0) as engine:
        chat = told(engine)
        result = chat.replace(TOOL, STUB, "amortize")
        assert result.receipts[0].moved_in_place > 100, "nobody needs the old rows"
        for version in (None, 0):
            with pytest.raises(VersionNotFoundError, match="none"):
                chat.revert(version)


@pytest.mark.parametrize("version", [1, 7])
def test_an_unknown_version_changes_nothing(engine: Engine, version: int) -> None:
    chat = told(engine)
    chat.replace(TOOL, STUB)
    digest = state_digest(engine)
    with pytest.raises(VersionNotFoundError) as caught:
        chat.revert(version)
    assert caught.value.status == 404 and caught.value.details["versions"] == [0]
    assert state_digest(engine) == digest


def test_a_busy_session_does_not_go_back(engine: Engine) -> None:
    chat = told(engine)
    chat.replace(TOOL, STUB)
    turn = ask(chat)
    engine.step()
    digest = state_digest(engine)
    with pytest.raises(SessionBusyError):
        chat.revert()
    assert state_digest(engine) == digest
    assert isinstance(drain(engine)[turn], Completion)
    chat.revert()


def test_an_unknown_session_does_not_go_back(engine: Engine) -> None:
    with pytest.raises(SessionNotFoundError):
        engine.revert("nobody")
    told(engine).replace(TOOL, STUB)
    with pytest.raises(SessionNotFoundError):
        engine.revert("s", salt="another tenant")


def test_going_back_from_healing_and_to_it(engine: Engine) -> None:
    chat = told(engine)
    chat.replace(TOOL, STUB, "heal")
    engine.step()
    assert chat.info.state == "healing"
    assert chat.revert().state == "exact"
    assert not engine.has_work, "nothing is healed that nobody has"
    assert chat.revert(1).state == "healing"
    engine.settle()
    assert chat.info.state == "exact" and STUB in chat.text
    assert_at_rest(engine)


def test_a_client_edit_in_mode_forget_keeps_its_version_too(engine: Engine) -> None:
    chat = told(engine)
    before, context = chat.tokens, engine.sessions.get("s").context
    rows = rows_of(engine, context)
    chat.messages[0]["content"] = TOLD.replace(TOOL, STUB)
    chat.chat(NEXT, GREEDY)
    assert chat.info.versions == ((0, len(before), True),)
    reverted = chat.revert()
    assert numbers(reverted) == (len(before) - 1, 0) and chat.tokens == before
    assert same_rows(rows_of(engine, context), rows)


def test_kept_versions_stay_when_others_edit_the_same_text(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v2_yarn"), session_share=0.08) as engine:
        chat, other = told(engine), told(engine, "other")
        context = engine.sessions.get("s").context
        context = context.prefix(len(context) - 1)
        rows = rows_of(engine, context)
        chat.replace(TOOL, STUB)
        assert [kept for _, _, kept in chat.info.versions] == [True]
        other.chat("and so on and on and on " * 6, GREEDY)
        result = other.replace("what now?", "well?", "amortize")
        assert [kept for _, _, kept in other.info.versions] == [False], "beyond its quota"
        assert result.receipts[0].copied > 80, "what the version of s needs"
        assert result.receipts[0].moved_in_place > 80, "what nobody else has"
        assert numbers(chat.revert()) == (len(context), 0)
        assert same_rows(rows_of(engine, context), rows)


def test_a_completion_tells_the_version_that_the_session_has(engine: Engine) -> None:
    for mode in ("forget", "amortize", "heal"):
        chat = told(engine, mode)
        chat.edit_mode = mode
        chat.messages[0]["content"] = TOLD.replace(TOOL, STUB)
        reply = completed(
            engine,
            engine.submit_chat(
                [*chat.messages, {"role": "user", "content": NEXT}],
                GREEDY,
                session_id=mode,
                edit_mode=mode,
            ),
        )
        assert reply.version == chat.version == 1

"""What edits, purges and sessions leave behind: nothing that drives out what others need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline import Change, Engine, SamplingParams, Target
from leyline.desk import MAX_WAITING_EDITS
from leyline.errors import LeylineError, QuotaError
from leyline.events import EditResult, EngineEvent, Failure
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]

SECRET = "zebra-42-quagga"
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def run(engine: Engine) -> list[EngineEvent]:
    """Step until nothing is left to do."""
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
    return events


def say(engine: Engine, session_id: str, text: str, params: SamplingParams = SHORT) -> None:
    """The first turn of a session."""
    engine.submit_chat([{"role": "user", "content": text}], params, session_id=session_id)
    run(engine)


def change(engine: Engine, session_id: str, **fields: Any) -> list[EngineEvent]:
    """One edit of a session, to its end."""
    key = fields.pop("key", None)
    engine.submit_directives(session_id, [Change(**fields)], idempotency_key=key)
    return run(engine)


def num_tree_tokens(engine: Engine) -> int:
    """Tokens that the nodes of the tree hold."""
    return sum(len(node.tokens) for node in engine.parts.scheduler.prefix.tree.nodes())


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("num_tokens", [4, 6])
def test_a_purge_finds_a_session_whose_turn_ends_in_its_step(
    tiny_folder: Folder, offset: int, num_tokens: int
) -> None:
    text = f"the code is {SECRET} and some more text behind it to carry along"
    with tiny_engine(tiny_folder("v3"), max_num_batched_tokens=256) as engine:
        for name in "ab":
            say(engine, name, f"{name} {text}")
        change(engine, "b", target=Target(match=SECRET), replacement="x")
        assert engine.session_info("b").state == "spliced"
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        engine.submit_chat(
            [{"role": "user", "content": f"b {text}"}], params, session_id="b", edit_mode="amortize"
        )
        for _ in range(offset):
            engine.step()
        change(
            engine, "a", target=Target(match=SECRET), replacement="y", mode="forget", scope="cache"
        )
        found = engine.find_in_cache(SECRET)
        spelled = SECRET in engine.session_info("b").text  # b's own text, if it was sent again
        assert spelled or (found.rows, found.sessions) == (0, ())
        assert engine.find_in_cache("never said by anybody").sessions == ()


@pytest.mark.parametrize("length", [1, 2])
def test_edit_after_edit_fills_neither_the_cache_nor_the_tree(
    tiny_folder: Folder, length: int
) -> None:
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=1024) as engine:
        say(engine, "innocent", "an innocent prompt that somebody will send again")
        innocent = engine.sessions.get("innocent").context
        resident = engine.parts.scheduler.prefix.resident(innocent)
        say(engine, "edited", "hello " * 12)
        sizes: list[int] = []
        for turn in range(30):
            end = 20 + length if turn % 2 else 21
            replacement = [40 + turn] if turn % 2 else [40 + turn] * length
            change(engine, "edited", target=Target(20, end), replacement=replacement)
            sizes.append(num_tree_tokens(engine))
        assert max(sizes[10:]) <= 1.2 * max(sizes[5:10])
        assert engine.parts.scheduler.prefix.resident(innocent) == resident


def test_without_letting_go_the_tree_does_grow(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=1024) as engine:
        monkeypatch.setattr(engine.parts.scheduler, "forget_grafts", lambda context: None)
        say(engine, "edited", "hello " * 12)
        sizes: list[int] = []
        for turn in range(30):
            change(engine, "edited", target=Target(20, 21), replacement=[40 + turn])
            sizes.append(num_tree_tokens(engine))
        assert max(sizes[10:]) > 1.2 * max(sizes[5:10])


def test_carried_rows_of_sessions_that_went_make_room(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3"), kv_cache_tokens=1024, max_sessions=2) as engine:
        for index in range(4):
            say(engine, f"s{index}", f"{index} " + "some words to carry along " * 3)
            change(engine, f"s{index}", target=Target(10, 14), replacement=[40])
        nodes = engine.parts.scheduler.prefix.tree.nodes()
        carried = {node.start for node in nodes if node.origin is not None}
        owners = [session for session in engine.sessions if session.state == "spliced"]
        assert len(owners) == 2
        grafted = [node for node in engine.parts.scheduler.prefix.tree.nodes() if node.origin]
        rows = sum(len(node.tokens) for node in grafted)
        assert carried and rows <= sum(len(session.context) for session in owners)


@pytest.mark.parametrize("mode", ["heal", "amortize"])
def test_a_healed_session_leaves_no_carried_rows(tiny_folder: Folder, mode: str) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        say(engine, "a", "some words that are carried along behind the edit")
        change(engine, "a", target=Target(10, 14), replacement=[40], mode=mode)
        carried = any(node.origin for node in engine.parts.scheduler.prefix.tree.nodes())
        assert carried == (mode == "amortize")


def test_a_deleted_session_leaves_no_carried_rows(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        say(engine, "a", "some words that are carried along behind the edit")
        for token in (40, 41):
            change(engine, "a", target=Target(10, 14 - (token == 41)), replacement=[token])
        engine.delete_session("a")
        assert not any(node.origin for node in engine.parts.scheduler.prefix.tree.nodes())


def test_a_kept_version_that_spells_a_text_is_found(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        say(engine, "a", f"the code is {SECRET}")
        change(engine, "a", target=Target(match=SECRET), replacement="x", mode="forget")
        assert engine.find_in_cache(SECRET).sessions == ("a",)
        engine.revert("a")
        assert SECRET in engine.session_info("a").text


def test_an_edit_whose_purge_failed_is_not_done_again_by_a_repeat(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {
        "target": Target(20, 26),
        "mode": "forget",
        "scope": "cache",
        "key": "a key of the client's",
    }
    with tiny_engine(tiny_folder("v3")) as engine, caplog.at_level(logging.CRITICAL):
        say(engine, "a", "abcdefghij secret klmnopqrstuvwxyz")

        def broken(*_: Any) -> None:
            raise RuntimeError("the cache is stuck")

        with monkeypatch.context() as patch:
            patch.setattr(engine._reach, "purge", broken)
            (failure,) = change(engine, "a", **asked)
        assert isinstance(failure, Failure)
        length = len(engine.session_info("a").token_ids)
        with pytest.raises(LeylineError, match="could not be purged"):
            change(engine, "a", **asked)
        assert len(engine.session_info("a").token_ids) == length
        (done,) = change(engine, "a", **{**asked, "key": "another"})
        assert isinstance(done, EditResult) and done.purged is not None


@pytest.mark.parametrize("room", [30, 60])
def test_a_mark_that_does_not_fit_takes_no_other_along(tiny_folder: Folder, room: int) -> None:
    with tiny_engine(tiny_folder("v3"), max_model_len=160, kv_cache_tokens=1024) as engine:
        chat = engine.session("a")
        chat.chat("first words, then others", SHORT)
        length = len(chat.tokens)
        chat.scratch(Target(match="first"))
        chat.decay(Target(length - 6, length - 5), 1, [40] * (160 - length - room))
        chat.chat("and some more of them, as many as there are", SHORT)
        engine.settle()
        fits = room == 60
        assert "first" not in chat.text and chat.info.marks == ()
        assert (chat.tokens.count(40) > 20) == fits


def test_only_so_many_edits_wait_for_a_busy_session(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        engine.submit_chat([{"role": "user", "content": "abc " * 9}], long, session_id="a")
        engine.step()
        edit = [Change(Target(20, 21), [40])]
        for _ in range(MAX_WAITING_EDITS):
            engine.submit_directives("a", edit)
        with pytest.raises(QuotaError, match="wait already"):
            engine.submit_directives("a", edit)
        done = [event for event in run(engine) if isinstance(event, EditResult)]
        assert len(done) == MAX_WAITING_EDITS

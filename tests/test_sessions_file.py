"""A restart: sessions come back, rows do not, and everybody is told."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline import Engine, SamplingParams
from leyline.conversation import Conversation
from leyline.errors import ConfigError, EngineClosedError
from leyline.events import Completion
from leyline.pointing import Target
from leyline.receipts import EVICTED
from tests.engine_state import assert_at_rest
from tests.lockstep import TOLERANCE, relative_error, tiny_engine
from tests.probes import completed, drain, first_logits, fresh_logits
from tests.tiny_models import load_oracle

Folder = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TOOL = "the weather in the land is 17 and rainy, the wind is north, and all is well in there"
TOLD = f"look: ({TOOL}) what now? " + "the man in the hat and the hen in the inn and so on"
STUB = "[evicted]"
NEXT = "and then?"


@pytest.fixture
def serve(tiny_folder: Folder, tmp_path: Path) -> Callable[..., Engine]:
    """Starts an engine with the sessions file; what is closed before is restored."""

    def started(**options: Any) -> Engine:
        family = options.pop("family", "v3")
        file = options.pop("sessions_file", str(tmp_path / "sessions.json"))
        return tiny_engine(tiny_folder(family), sessions_file=file, **options)

    return started


def told(engine: Engine, name: str = "s") -> Conversation:
    chat = engine.session(name)
    chat.chat(TOLD, GREEDY)
    return chat


def resumed(engine: Engine, chat: Conversation) -> Conversation:
    """The same client after the restart."""
    again = engine.session(chat.session_id)
    again.messages = chat.messages
    return again


Serve = Callable[..., Engine]


def test_a_turn_after_a_restart_goes_on_and_says_that_rows_were_computed(
    serve: Serve, tiny_folder: Folder
) -> None:
    with serve() as engine:
        chat = told(engine)
        info = chat.info
    with serve() as engine:
        assert engine.session_ids() == ["s"] and engine.session_info("s") == info
        chat = resumed(engine, chat)
        length = len(chat.tokens)
        request = engine.submit_chat(
            [*chat.messages, {"role": "user", "content": NEXT}], GREEDY, session_id="s"
        )
        completion, logits = first_logits(engine, request)
        usage = completion.usage
        assert (usage.cached_tokens, usage.degraded, usage.state) == (0, False, "exact")
        assert usage.recomputed_tokens == usage.prompt_tokens > length
        assert chat.tokens[:length] == info.token_ids, "the generated ids"
        fresh = fresh_logits(load_oracle(tiny_folder("v3")), chat.tokens[:-4])
        assert relative_error(logits, fresh) < TOLERANCE
        assert_at_rest(engine)


def test_an_edit_after_a_restart_says_why_it_kept_nothing(serve: Serve) -> None:
    with serve() as engine:
        told(engine)
    with serve() as engine:
        (receipt,) = engine.session("s").replace(TOOL, STUB).receipts
        assert receipt.kept == 0 and receipt.recomputed > 50
        assert receipt.reason == EVICTED and receipt.mode_done.value == "forget"
        assert engine.session_info("s").state == "exact"
        assert_at_rest(engine)


def test_carried_rows_do_not_come_back_and_the_next_turn_says_so(serve: Serve) -> None:
    with serve() as engine:
        chat = told(engine)
        chat.replace(TOOL, STUB)
        assert chat.info.state == "spliced"
    with serve() as engine:
        chat = resumed(engine, chat)
        assert STUB in chat.text and chat.version == 1
        usage = chat.chat(NEXT, GREEDY).usage
        assert usage.degraded and usage.state == "exact"
        assert (usage.cached_tokens, usage.spliced_tokens) == (0, 0)


def test_a_session_that_was_healing_heals_on(serve: Serve) -> None:
    with serve() as engine:
        chat = told(engine)
        chat.replace(TOOL, STUB, "heal")
        assert chat.info.state == "healing"
    with serve() as engine:
        chat = resumed(engine, chat)
        assert chat.info.state == "healing" and engine.has_work
        engine.settle()
        assert chat.info.state == "exact"
        usage = chat.chat(NEXT, GREEDY).usage
        assert not usage.degraded and usage.cached_tokens > 50
        assert_at_rest(engine)


def test_versions_marks_and_messages_come_back(serve: Serve) -> None:
    with serve() as engine:
        chat = told(engine)
        before = chat.tokens
        chat.replace(TOOL, STUB)
        chat.decay(Target(match="the hen"), turns=1, replacement="a hen")
        chat.pin(Target(message=0), ttl_s=1000)
        info = chat.info
    with serve() as engine:
        chat = resumed(engine, chat)
        assert chat.info.versions == ((0, len(before), False),)
        assert [mark.mark_id for mark in chat.info.marks] == [m.mark_id for m in info.marks]
        assert chat.info.messages == info.messages
        assert "a hen" not in chat.text
        chat.chat(NEXT, GREEDY)
        engine.settle()
        assert "a hen" in chat.text
        reverted = chat.revert(0)
        assert reverted.state == "exact" and reverted.recomputed > 50
        assert chat.tokens == before


def test_tenants_come_back_apart(serve: Serve) -> None:
    messages = [{"role": "user", "content": TOLD}]
    with serve() as engine:
        told(engine)
        completed(engine, engine.submit_chat(messages, GREEDY, session_id="s", salt="other"))
    with serve() as engine:
        assert len(engine.session_ids()) == 2
        assert [one.session_id for one in engine.sessions_info(salt="other")] == ["s"]
        history = [*messages, {"role": "assistant", "content": "x"}]
        assert len(engine.sessions_info(salt="nobody")) == 0
        completed(engine, engine.submit_chat(history, GREEDY, session_id="s", salt="other"))
        assert engine.session_info("s").version == 0


def test_saving_on_demand_and_in_the_middle_of_a_turn(serve: Serve, tmp_path: Path) -> None:
    engine = serve()
    chat, other = told(engine), told(engine, "other")
    messages = [*chat.messages, {"role": "user", "content": NEXT}]
    turn = engine.submit_chat(messages, GREEDY, session_id="s")
    engine.step()
    assert engine.save_sessions() == 2
    text = (tmp_path / "sessions.json").read_bytes()
    assert isinstance(drain(engine)[turn], Completion)
    engine.close()
    (tmp_path / "sessions.json").write_bytes(text)  # as if it had been killed after the save
    with serve() as engine:
        chat = resumed(engine, chat)
        assert NEXT not in chat.text
        chat.chat(NEXT, GREEDY)
        assert NEXT in chat.text and resumed(engine, other).info.version == 0


def test_a_turn_that_edited_its_history_is_not_saved_in_halves(
    serve: Serve, tmp_path: Path
) -> None:
    engine = serve(min_run=8)
    chat = told(engine)
    chat.messages[0]["content"] = TOLD.replace(TOOL, STUB)
    messages = [*chat.messages, {"role": "user", "content": NEXT}]
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    turn = engine.submit_chat(messages, long, session_id="s", edit_mode="amortize")
    while engine.session_info("s").version == 0:
        engine.step()
    assert engine.save_sessions() == 1
    text = (tmp_path / "sessions.json").read_bytes()
    assert isinstance(drain(engine)[turn], Completion)
    engine.close()
    (tmp_path / "sessions.json").write_bytes(text)
    with serve() as engine:
        completed(engine, engine.submit_chat(messages, GREEDY, session_id="s"))
        rendered = engine.tokenizer.render(messages)
        assert engine.session_info("s").text.startswith(rendered), "what was asked is there"
        assert engine.session_info("s").version == 1


def test_the_file_is_its_owners_and_replaced_as_a_whole(serve: Serve, tmp_path: Path) -> None:
    with serve() as engine:
        told(engine)
        assert engine.save_sessions() == 1
        file = tmp_path / "sessions.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        inode = file.stat().st_ino
        engine.save_sessions()
        assert file.stat().st_ino != inode
        assert os.listdir(tmp_path) == ["sessions.json"]


def test_without_a_file_nothing_is_saved(tiny_folder: Folder) -> None:
    with (
        tiny_engine(tiny_folder("v3")) as engine,
        pytest.raises(ConfigError, match="--sessions-file"),
    ):
        engine.save_sessions()


def _of_another_model(file: Path) -> None:
    document = json.loads(file.read_text())
    document["model"] = "another-model"
    file.write_text(json.dumps(document))


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def _of_another_format(file: Path) -> None:
    document = json.loads(file.read_text())
    document["format"] = 99
    file.write_text(json.dumps(document))


def _with_an_impossible_token(file: Path) -> None:
    document = json.loads(file.read_text())
    document["sessions"][0]["state"]["pieces"][0][1][0] = 10**6
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "damage", [_of_another_model, _cut_short, _of_another_format, _with_an_impossible_token]
)
def test_a_file_that_does_not_fit_is_refused_in_one_line_before_serving(
    serve: Serve, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with serve() as engine:
        told(engine)
    file = tmp_path / "sessions.json"
    damage(file)
    text = file.read_bytes()
    with pytest.raises(ConfigError) as caught:
        serve()
    message = str(caught.value)
    assert "\n" not in message and "sessions.json" in message and "move it away" in message
    assert TOOL not in message, "a log is no place for conversations"
    assert file.read_bytes() == text, "it is still there, to be looked at"


def test_another_model_is_named(serve: Serve, tiny_folder: Folder) -> None:
    with serve() as engine:
        told(engine)
    with pytest.raises(ConfigError) as caught:
        serve(family="glm")
    for family in ("v3", "glm"):
        assert repr(tiny_folder(family).name) in str(caught.value)


def test_a_file_that_cannot_be_written_costs_no_session(serve: Serve, tmp_path: Path) -> None:
    engine = serve(sessions_file=str(tmp_path / "no such folder" / "sessions.json"))
    chat = told(engine)
    with pytest.raises(ConfigError, match="cannot be written"):
        engine.save_sessions()
    assert chat.chat(NEXT, GREEDY).usage.cached_tokens > 50
    with pytest.raises(ConfigError, match="cannot be written"):
        engine.close()
    with pytest.raises(EngineClosedError):
        chat.chat(NEXT, GREEDY)

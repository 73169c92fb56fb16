"""Side requests under an agent's key are answered without disturbing its session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from leyline import Engine, SamplingParams
from leyline.errors import InvalidRequestError
from leyline.events import Completion
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
TASK = [{"role": "user", "content": "find the fault in this program and tell me where it is"}]
TITLE = [{"role": "user", "content": "0123456789 " * 6}]


def answered(engine: Engine, messages: list[dict[str, str]], tentative: bool) -> Completion:
    """One turn under the key."""
    request_id = engine.submit_chat(messages, GREEDY, session_id="key", tentative=tentative)
    while True:
        for event in engine.step():
            if isinstance(event, Completion) and event.request_id == request_id:
                return event


@pytest.mark.parametrize("tentative", [True, False])
def test_another_history_under_the_same_key_leaves_the_session_alone(
    tiny_folder: Folder, tentative: bool
) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        said = answered(engine, TASK, tentative)
        before = engine.session_info("key")
        aside = answered(engine, TITLE, tentative)
        untouched = engine.session_info("key").token_ids == before.token_ids
        assert untouched == tentative == (aside.session_id is None)  # a twin that must not
        follow = [*TASK, {"role": "assistant", "content": said.text}, *TASK]
        then = answered(engine, follow, tentative)
        assert (then.usage.cached_tokens >= before.context_length - 1) == tentative
        assert (then.usage.first_difference is None) == tentative


@pytest.mark.parametrize("edit", ["shortened", "longer"])
def test_an_edited_history_is_still_the_sessions_own(tiny_folder: Folder, edit: str) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        said = answered(engine, TASK * 3, True)
        reply = {"role": "assistant", "content": said.text}
        messages = TASK * 2 if edit == "shortened" else [*TASK * 2, *TITLE, reply, *TASK]
        then = answered(engine, messages, True)
        assert then.session_id == "key" and engine.session_info("key").version == 1


def test_a_request_that_cannot_be_had_in_a_session_is_answered_without_a_guessed_one(
    tiny_folder: Folder,
) -> None:
    scored = replace(GREEDY, prompt_logprobs=0)
    with tiny_engine(tiny_folder("v3")) as engine:
        answered(engine, TASK, True)
        before = engine.session_info("key")
        request_id = engine.submit_chat(TASK, scored, session_id="key", tentative=True)
        engine.settle()
        assert request_id and engine.session_info("key") == before
        with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
            engine.submit_chat(TASK, scored, session_id="key")

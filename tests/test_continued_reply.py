"""A session's reply that is gone on with is one message, as its client will send it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyline import Engine, Rendering, SamplingParams
from leyline.events import Completion
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]
Message = dict[str, Any]

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
GOES_ON = Rendering(opens_reply=False, continues_reply=True)


@pytest.fixture
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    with tiny_engine(tiny_folder("v3")) as engine:
        yield engine


class Says:
    """A constraint that leaves nothing but a text, and then its end."""

    def __init__(self, engine: Engine, text: str) -> None:
        self.tokens = [*engine.tokenizer.encode(text), min(engine.tokenizer.stop_ids)]
        self.num_words = -(-engine.tokenizer.vocab_size // 32)

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        token = self.tokens[len(generated)]
        mask = np.zeros(self.num_words, dtype=np.uint32)
        mask[token // 32] = np.uint32(1) << np.uint32(token % 32)
        return mask.view(np.int32)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def answered(engine: Engine, messages: list[Message], *, goes_on: bool = False) -> Completion:
    rendering = GOES_ON if goes_on else Rendering()
    *_, last = engine.turn(messages, GREEDY, {}, "agent", rendering=rendering)
    assert isinstance(last, Completion)
    return last


def said(engine: Engine) -> list[tuple[str, str]]:
    """The session's messages, as its context spells them."""
    info, decode = engine.session_info("agent"), engine.tokenizer.decode
    spans = [(one.role, info.token_ids[one.start : one.end]) for one in info.messages]
    return [(role, decode(tokens, skip_special=False)) for role, tokens in spans]


def test_the_beginning_and_what_follows_are_one_message(engine: Engine) -> None:
    history = [user("where does the land end"), assistant("the land ends in the")]
    reply = answered(engine, history, goes_on=True)
    whole = [history[0], assistant("the land ends in the" + reply.text)]
    assert said(engine) == [(one["role"], one["content"]) for one in whole]

    history = [*whole, user("and the sea"), user("tell me")]
    after = answered(engine, history)
    assert after.usage.first_difference is None
    expected = [*history, assistant(after.text)]
    assert said(engine) == [(one["role"], one["content"]) for one in expected]


def test_a_reply_that_was_cut_goes_on_from_its_own_rows(engine: Engine) -> None:
    history = [user("where does the land end")]
    first = answered(engine, history)
    history.append(assistant(first.text))
    second = answered(engine, history, goes_on=True)
    assert second.usage.first_difference is None
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
    expected = [history[0], assistant(first.text + second.text)]
    assert said(engine) == [(one["role"], one["content"]) for one in expected]
    assert engine.session_info("agent").version == 0


def test_asking_for_the_rest_again_begins_where_the_first_one_did(engine: Engine) -> None:
    history = [user("where does the land end"), assistant("the land ends in the")]
    for _ in range(2):
        reply = answered(engine, history, goes_on=True)
        expected = [history[0], assistant("the land ends in the" + reply.text)]
        assert said(engine) == [(one["role"], one["content"]) for one in expected]


def test_a_reply_that_begins_with_nothing_is_a_message_of_its_own(engine: Engine) -> None:
    reply = answered(engine, [user("where does the land end"), assistant("")], goes_on=True)
    assert said(engine) == [("user", "where does the land end"), ("assistant", reply.text)]


def test_a_reply_that_had_ended_goes_on_behind_an_edit_that_stays(engine: Engine) -> None:
    ends = SamplingParams(temperature=0.0, constraint=Says(engine, "the land"))
    history = [user("0123456789 where 0123456789")]
    *_, first = engine.turn(history, ends, {}, "agent")
    assert isinstance(first, Completion) and first.finish_reason == "stop"
    engine.session("agent").replace("where", "the")
    second = answered(engine, [*history, assistant(first.text)], goes_on=True)
    edited = user("0123456789 the 0123456789")
    expected = [edited, assistant(first.text + second.text)]
    assert said(engine) == [(one["role"], one["content"]) for one in expected]
    assert "<|im_end|>" not in said(engine)[-1][1]

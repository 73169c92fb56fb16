"""Texts that fit no context are refused before the engine's thread has to look at them."""

from __future__ import annotations

from typing import Any

import pytest

from leyline.server.lengths import LIKELY_CHARS, strings_in

from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

WINDOW = 40
LONG = "x" * (WINDOW * LIKELY_CHARS + 1)
SHORTER = LONG[:-5]  # a message has a role too
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


BODIES = [
    (CHAT, said(LONG)),
    (CHAT, said(SHORTER)),
    (CHAT, said(LONG) | {"session_id": "s"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * WINDOW}] * (LIKELY_CHARS + 1)}),
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": ["fine", LONG]}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/messages", said(LONG) | {"max_tokens": 1}),
    (
        "/v1/directives",
        {"session_id": "s", "directives": [{"start": 1, "end": 2, "replacement": LONG}]},
    ),
    (
        "/v1/sessions/s/marks",
        {"verb": "decay", "turns": 1, "start": 1, "end": 2, "replacement": LONG},
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_what_fits_no_context_never_reaches_the_engine(
    path: str, body: dict[str, Any], connect: Connect
) -> None:
    client = connect(FakeEngine(max_model_len=WINDOW))
    answer = await client.post(path, body)
    assert answer.status == 400
    assert "maximum context length is 40 tokens" in answer.json["error"]["message"]
    assert client.engine.seen == []


IN_SESSION = said(SHORTER) | {"session_id": "s"}


@pytest.mark.parametrize(("path", "body"), [(CHAT, IN_SESSION), (COMPLETIONS, {"prompt": "x"})])
async def test_what_may_fit_is_left_to_the_engine(
    path: str, body: dict[str, Any], connect: Connect
) -> None:
    client = connect(FakeEngine(max_model_len=WINDOW))
    await client.post(path, body)
    assert len(client.engine.seen) == 1


async def test_a_history_that_its_session_has_shortened_is_left_to_the_engine(
    connect: Connect,
) -> None:
    history = [{"role": "user", "content": "x" * WINDOW}] * (LIKELY_CHARS + 1)
    client = connect(FakeEngine(max_model_len=WINDOW))
    await client.post(CHAT, {"messages": history, "session_id": "s"})
    assert len(client.engine.seen) == 1


async def test_what_the_template_leaves_out_does_not_count(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=WINDOW))
    thought = {"role": "assistant", "content": "ok", "reasoning_content": LONG}
    answer = await client.post(CHAT, {"messages": [thought, *said("hi")["messages"]]})
    assert answer.status == 200 and len(client.engine.seen) == 1


async def test_long_texts_of_few_tokens_are_let_in(connect: Connect) -> None:
    client = connect(FakeEngine(max_model_len=WINDOW))
    client.engine.tokenizer.encode = lambda text, bos=False: [1] * (len(text) // 100)
    answer = await client.post(COMPLETIONS, {"prompt": LONG, "max_tokens": 1})
    assert answer.status == 200 and len(client.engine.seen) == 1


def test_strings_are_found_wherever_they_stand() -> None:
    value = {"a": "1", "b": ["2", {"c": ("3", None, 4)}], "5": True}
    assert list(strings_in(value)) == ["1", "2", "3"]

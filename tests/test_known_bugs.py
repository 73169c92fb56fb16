"""What went wrong for others inside their engines, by the row of our list of it.

docs/known-bugs.md has the place of every row; those of the routes are tested in tests/server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from leyline import Engine, SamplingParams
from leyline.events import Completion
from tests.engine_state import assert_at_rest
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]
CHUNK = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
USER = {"role": "user", "content": "hi"}
BOS = 0  # <|endoftext|>


def finished(engine: Engine, requests: Sequence[int]) -> list[Completion]:
    """The completions of requests that run together."""
    found: dict[int, Completion] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Completion):
                found[event.request_id] = event
    return [found[request] for request in requests]


def prompt(length: int, start: int = 5) -> list[int]:
    return [start + (7 * at) % 200 for at in range(length)]


@pytest.fixture(scope="module")
def engine(tiny_folder: Folder) -> Iterator[Engine]:
    """One that computes a few tokens a step."""
    with tiny_engine(tiny_folder("v3"), max_num_batched_tokens=CHUNK) as engine:
        yield engine


@pytest.mark.parametrize("lengths", [(8, 8), (16, 24, 8), (7, 8, 9), (1, 8, 64, 1), (15, 17)])
def test_row_87_prompts_that_fill_their_chunks_run_side_by_side(
    engine: Engine, lengths: tuple[int, ...]
) -> None:
    prompts = [prompt(length, 5 + at) for at, length in enumerate(lengths)]
    salts = [f"{lengths} {at}" for at in range(len(lengths))]
    alone = [
        finished(engine, [engine.submit_prompt(ids, GREEDY, salt="alone" + salt)])[0]
        for ids, salt in zip(prompts, salts, strict=True)
    ]
    asked = [engine.submit_prompt(ids, GREEDY, salt=salt)
             for ids, salt in zip(prompts, salts, strict=True)]  # fmt: skip
    together = finished(engine, asked)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert all(one.usage.cached_tokens == 0 for one in together)
    assert_at_rest(engine)


def test_row_97_rows_are_gone_back_to_at_any_token(engine: Engine) -> None:
    """A page is one token: whatever part of a long turn is kept, all of it is found again."""
    whole = prompt(40, 9)
    finished(engine, [engine.submit_prompt(whole, GREEDY)])
    for kept in range(1, 40):
        ids = [*whole[:kept], 260, 261, 262]
        (found,) = finished(engine, [engine.submit_prompt(ids, GREEDY)])
        assert found.usage.cached_tokens == kept
        (fresh,) = finished(engine, [engine.submit_prompt(ids, GREEDY, salt=f"s{kept}")])
        assert fresh.usage.cached_tokens == 0 and fresh.token_ids == found.token_ids


def test_row_56_a_session_encodes_only_what_is_new(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = engine.tokenizer.encode

    def counted(text: str, *, bos: bool = False) -> list[int]:
        encoded.append(text)
        return encode(text, bos=bos)

    history: list[dict[str, Any]] = [USER | {"content": "in the land " * 20}]
    for _ in range(3):
        request = engine.submit_chat(history, GREEDY, session_id="long")
        (reply,) = finished(engine, [request])
        history += [{"role": "assistant", "content": reply.text}, USER]
    monkeypatch.setattr(engine.tokenizer, "encode", counted)
    (reply,) = finished(engine, [engine.submit_chat(history, GREEDY, session_id="long")])
    assert 0 < sum(map(len, encoded)) < 100 < reply.usage.prompt_tokens
    rendered = engine.tokenizer.render(history)
    assert len(rendered) > 300  # which is what would have been encoded
    tail = encode(rendered)[-20:]
    assert reply.prompt_token_ids[-20:] == tuple(tail)  # as if all had been


# -- row 52: the first token ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_bos(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model whose tokenizer puts a first token in front, and whose template writes it too."""
    folder = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(tiny_folder("v3"), folder)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    template = folder / "chat_template.jinja"
    template.write_text("{{ bos_token }}" + template.read_text())
    with tiny_engine(folder) as engine:
        yield engine


def test_row_52_every_prompt_begins_with_the_first_token_once(with_bos: Engine) -> None:
    engine = with_bos
    asked = [
        engine.submit_chat([USER], GREEDY),
        engine.submit_chat([USER], GREEDY, session_id="s"),
        engine.submit_prompt("hi", GREEDY),
        engine.submit_prompt("<|endoftext|>hi", GREEDY),  # the user's own stays the only one
        engine.submit_prompt(engine.tokenizer.encode("hi", bos=True), GREEDY),
    ]
    for done in finished(engine, asked):
        ids = done.prompt_token_ids
        assert ids[0] == BOS and ids.count(BOS) == 1, ids
    history = [USER, {"role": "assistant", "content": "x"}, USER]
    for session in (None, "s"):
        (done,) = finished(engine, [engine.submit_chat(history, GREEDY, session_id=session)])
        assert done.prompt_token_ids.count(BOS) == 1


def test_row_52_ids_are_taken_as_they_are(with_bos: Engine) -> None:
    """The twin, and what is documented: who sends ids has the say over all of them."""
    for ids in ([40, 41], [BOS, BOS, 40]):
        (done,) = finished(with_bos, [with_bos.submit_prompt(ids, GREEDY)])
        assert list(done.prompt_token_ids) == ids

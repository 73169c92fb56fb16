"""Answers of the Messages API that were written beforehand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from leyline.errors import LeylineError
from leyline.events import Completion, FinishReason, Usage
from leyline.server import answer
from leyline.server.ask import Ask, EndReason, Over, Said
from leyline.server.parsers.pieces import CallArguments, CallHead, Content, Piece, Reasoning

from .fake_engine import FakeEngine, FakeTokenizer

PATH = "/v1/messages"
Script = list[Said | Over | LeylineError]
LETTERS = 'ab \n"\\{}é👋\u2028<|'


def body_of(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1000, **fields}


def knowing_tools(**fields: Any) -> FakeEngine:
    """An engine whose chat template writes tools, calls, results and reasoning by itself."""
    tokenizer = FakeTokenizer()
    source = '<think></think>{{ tools }}{{ tool_calls }}<tool_call>{"arguments'
    tokenizer.template = SimpleNamespace(source=source)  # type: ignore[assignment]
    return FakeEngine(tokenizer=tokenizer, **fields)


class Scripted(AbstractContextManager["Scripted"]):
    """An `Answer` that says what a script says."""

    def __init__(self, script: Script, edits: Sequence[Mapping[str, Any]] = ()) -> None:
        self.applied_edits = edits
        self.is_left = False
        self._script = script

    def __exit__(self, *_: object) -> None:
        self.is_left = True

    async def __aiter__(self) -> AsyncIterator[Said | Over]:
        for one in self._script:
            if isinstance(one, LeylineError):
                raise one
            yield one


def script_answers(patch: pytest.MonkeyPatch, scripted: Callable[[Ask], Scripted]) -> None:
    """Let every ask have a scripted answer."""

    async def ask(_: Any, __: Any, asked: Ask) -> Scripted:
        return scripted(asked)

    patch.setattr(answer, "ask", ask)


def over(
    reason: EndReason = "stop",
    *,
    stopped_by: str | int | None = None,
    completion_tokens: int = 9,
    session_id: str | None = None,
    **usage: Any,
) -> Over:
    finish: FinishReason = "length" if reason == "length" else "stop"
    counts = Usage(20, completion_tokens, 15, 4, **usage)
    completion = Completion(
        request_id=1,
        text="",
        token_ids=(),
        finish_reason=finish,
        usage=counts,
        session_id=session_id,
        version=None if session_id is None else 3,
        stopped_by=stopped_by,
    )
    return Over(0, reason, completion, reasoning_tokens=2)


def said(*pieces: Piece) -> Said:
    return Said(0, pieces)


def called(index: int, name: str, *arguments: str) -> list[Piece]:
    return [
        CallHead(index, f"call_{index}", name),
        *(CallArguments(index, text) for text in arguments),
    ]


def random_text(random: Random, most: int = 9) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randrange(most)))


def random_object(random: Random) -> dict[str, Any]:
    def value(depth: int) -> Any:
        kind = random.randrange(6 if depth < 3 else 4)
        if kind == 4:
            return [value(depth + 1) for _ in range(random.randrange(3))]
        if kind == 5:
            return {random_text(random): value(depth + 1) for _ in range(random.randrange(3))}
        return [random_text(random), random.randrange(-9, 9), None, random.random()][kind]

    return {random_text(random): value(0) for _ in range(random.randrange(4))}


def random_script(random: Random) -> Script:
    """A reply of reasoning, content and whole calls, in any order and cut anywhere."""
    pieces: list[Piece] = []
    calls = 0
    for _ in range(random.randrange(6)):
        kind = random.randrange(3)
        if kind == 2:
            text = json.dumps(random_object(random), ensure_ascii=random.random() < 0.5)
            empty = random.random() < 0.2
            pieces += called(calls, f"tool_{calls}", *([] if empty else cut(random, text)))
            calls += 1
        else:
            pieces += [
                (Reasoning, Content)[kind](text) for text in cut(random, random_text(random))
            ]
    length = random.random() < 0.2 and not (pieces and isinstance(pieces[-1], CallHead))
    reason: EndReason = "length" if length else ("tool_calls" if calls else "stop")
    stop = random.choice(["<|", None]) if reason == "stop" else None
    end = over(reason, stopped_by=stop, completion_tokens=random.choice([7, 1000]))
    return [*(said(*some) for some in grouped(random, pieces)), end]


def cut(random: Random, text: str) -> list[str]:
    """A text in pieces, some of them empty."""
    places = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(4)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def grouped(random: Random, pieces: Sequence[Piece]) -> Iterable[Sequence[Piece]]:
    """Pieces as they might come: several at once, or none."""
    at = 0
    while at < len(pieces):
        size = random.randrange(4)
        yield pieces[at : at + size]
        at += size

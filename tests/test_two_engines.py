"""Two engines in one process, 32 requests under way, cancellations and edits at random."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from leyline import Directive, Engine, Mode, SamplingParams
from leyline.errors import CancelledError, CapacityError, DirectiveError, SessionBusyError
from leyline.events import Failure
from tests.engine_state import assert_at_rest, counted_afresh
from tests.lockstep import terminals, tiny_engine

Folder = Callable[[str], Path]
REQUESTS = 32
SESSIONS = tuple(f"s{index}" for index in range(12))
EXPECTED = (CancelledError, CapacityError, DirectiveError)


class Crowd:
    """Random clients of one engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.submitted: list[int] = []
        self.ended: Counter[int] = Counter()
        self.failures: list[Failure] = []
        self.most_at_once = 0

    @property
    def done(self) -> bool:
        return len(self.submitted) >= REQUESTS and not self.engine.has_work

    def act(self) -> None:
        """Submit something while there is something left to submit, cancel at times, step."""
        for _ in range(self.rng.randint(0, 12)):
            if len(self.submitted) < REQUESTS:
                self.submit()
        if self.submitted and self.rng.random() < 0.15:
            self.engine.cancel(self.rng.choice(self.submitted))
        if self.rng.random() < 0.02 and self.engine.session_ids():
            self.engine.delete_session(self.rng.choice(self.engine.session_ids()))
        self.most_at_once = max(self.most_at_once, len(self.engine._jobs))
        for event in terminals(self.engine.step()):
            self.ended[event.request_id] += 1
            if isinstance(event, Failure):
                self.failures.append(event)
        ledger = self.engine.parts.scheduler.prefix.ledger
        assert (counted_afresh(self.engine) == ledger.counts).all()

    def submit(self) -> None:
        """One request; one that is refused leaves nothing behind."""
        kind = self.rng.choice((self.prompt, self.chat, self.chat, self.edit, self.edit))
        with contextlib.suppress(SessionBusyError, DirectiveError, IndexError):
            self.submitted.append(kind())

    def params(self) -> SamplingParams:
        stop = ("the",) if self.rng.random() < 0.3 else ()
        return SamplingParams(max_tokens=self.rng.randint(5, 40), stop=stop)

    def prompt(self) -> int:
        ids = [self.rng.randrange(3, 250) for _ in range(self.rng.randint(1, 40))]
        return self.engine.submit_prompt(ids, self.params())

    def chat(self) -> int:
        content = "the rain in the land " * self.rng.randint(1, 3)
        messages = [{"role": "user", "content": content}]
        return self.engine.submit_chat(
            messages, self.params(), session_id=self.rng.choice(SESSIONS)
        )

    def edit(self) -> int:
        name = self.rng.choice(self.engine.session_ids())
        length = self.engine.session_info(name).context_length
        start = self.rng.randint(1, length)
        end = min(length, start + self.rng.randint(0, 20))
        new = tuple(self.rng.randrange(3, 250) for _ in range(self.rng.randint(0, 5)))
        directive = Directive(start, end, new, self.rng.choice(list(Mode)))
        return self.engine.submit_directives(name, [directive])


@pytest.mark.parametrize("slots", [4096, 320], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_exactly_once_and_every_slot_is_accounted_for(
    tiny_folder: Folder, seed: int, slots: int
) -> None:
    with (
        tiny_engine(tiny_folder("v3"), kv_cache_tokens=slots, max_num_seqs=16) as left,
        tiny_engine(tiny_folder("glm"), kv_cache_tokens=slots, max_num_seqs=16) as right,
    ):
        crowds = [Crowd(left, 2 * seed), Crowd(right, 2 * seed + 1)]
        for _ in range(5000):
            for crowd in crowds:
                crowd.act()
            if all(crowd.done for crowd in crowds):
                break
        for crowd in crowds:
            assert crowd.done
            assert crowd.ended == Counter(crowd.submitted)
            assert all(isinstance(failure.error, EXPECTED) for failure in crowd.failures)
            assert_at_rest(crowd.engine)
        assert any(crowd.failures for crowd in crowds)


def test_two_engines_answer_as_they_would_alone(tiny_folder: Folder) -> None:
    def alone(family: str) -> str:
        with tiny_engine(tiny_folder(family)) as engine:
            return engine.chat("hello", temperature=0, max_tokens=12).text

    expected = [alone("v3"), alone("glm")]
    with tiny_engine(tiny_folder("v3")) as left, tiny_engine(tiny_folder("glm")) as right:
        streams = [engine.stream("hello", temperature=0, max_tokens=12) for engine in (left, right)]
        texts = ["", ""]
        waiting = [0, 1]
        while waiting:
            for index in list(waiting):
                piece = next(streams[index], None)
                if piece is None:
                    waiting.remove(index)
                else:
                    texts[index] += piece
    assert texts == expected
    assert texts[0] != texts[1]

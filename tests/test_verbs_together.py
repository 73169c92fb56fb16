"""Turns, edits in every mode, marks, shares, reverts and purges at random, all at once.

Afterwards every row that the cache calls exact is compared with a fresh prefill of its tokens: that
is what provenance promises, whoever edited, shared, healed or went back, and in whatever order.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leyline import Engine, LeylineError, SamplingParams
from leyline.cache.radix import Node
from leyline.context import Context
from leyline.errors import (
    CancelledError,
    CapacityError,
    ContextLengthError,
    DirectiveError,
    SessionNotFoundError,
)
from leyline.events import Completion, EngineEvent, Failure
from leyline.pointing import Change, MarkRequest, Target
from tests.engine_state import assert_at_rest, counted_afresh
from tests.lockstep import RecordingExecutor, terminals, tiny_engine
from tests.probes import plain_engine, rows_of

Folder = Callable[[str], Path]
NAMES = ("a", "b", "c", "d")
SENTENCE = "the hen and the man in the inn then went on in the rain to the land and the sea"
WORDS = SENTENCE.split()
EXPECTED = (
    CancelledError,
    CapacityError,
    ContextLengthError,
    DirectiveError,
    SessionNotFoundError,
)
MODES = ("forget", "amortize", "heal")


class Agents:
    """Random clients of one engine, who know their sessions as real ones do.

    Attributes:
        ended: How often each request ended.
        done: What was done how often.
        states: What sessions were seen to be.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.histories: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
        self.asked: dict[int, str] = {}
        self.submitted: list[int] = []
        self.ended: Counter[int] = Counter()
        self.done: Counter[str] = Counter()
        self.states: Counter[str] = Counter()

    def act(self) -> None:
        """Something happens."""
        acts = [self.turn] * 5 + [self.edit] * 4 + [self.share] * 2 + [self.mark] * 2
        acts += [
            self.revert,
            self.revert,
            self.purge,
            self.prompt,
            self.cancel,
            self.delete,
            self.rewrite,
        ]
        act = self.rng.choice(acts)
        with contextlib.suppress(LeylineError, IndexError):
            act()
            self.done[act.__name__] += 1

    def step(self) -> None:
        """One step of the engine, and a look at its books."""
        for event in terminals(self.engine.step()):
            self.ended[event.request_id] += 1
            self._told(event)
        scheduler = self.engine.parts.scheduler
        assert (counted_afresh(self.engine) == scheduler.prefix.ledger.counts).all()
        self.states.update(info.state for info in self.engine.sessions_info())
        executor = self.engine.parts.executor
        assert isinstance(executor, RecordingExecutor)
        assert all(sample.logits.isfinite().all() for sample in executor.samples), "a freed row"
        executor.samples.clear()

    def _told(self, event: EngineEvent) -> None:
        if isinstance(event, Failure):
            assert isinstance(event.error, EXPECTED), event.error
        if isinstance(event, Completion) and event.request_id in self.asked:
            name = self.asked.pop(event.request_id)
            usage = event.usage
            assert 0 <= usage.spliced_tokens <= usage.cached_tokens < usage.prompt_tokens
            self.histories[name].append({"role": "assistant", "content": event.text})

    # -- what clients do ------------------------------------------------------------------------

    def turn(self) -> None:
        name, content = self._name(), self._text(4, 30)
        role = self.rng.choice(["user", "user", "tool"])
        messages = [*self.histories[name], {"role": role, "content": content}]
        self._ask(name, messages)

    def rewrite(self) -> None:
        """A client that edits its own history, and asks on."""
        name = self._name()
        messages = [dict(message) for message in self.histories[name]]
        self.rng.choice(messages)["content"] = self._text(2, 12)
        if self.rng.random() < 0.3:
            del messages[self.rng.randrange(len(messages))]
        self._ask(name, [*messages, {"role": "user", "content": self._text(2, 8)}])

    def _ask(self, name: str, messages: list[dict[str, Any]]) -> None:
        mode = self.rng.choice([None, *MODES])
        request = self.engine.submit_chat(messages, self._params(), session_id=name, edit_mode=mode)
        self.asked[request] = name
        self.histories[name] = messages
        self.submitted.append(request)

    def edit(self) -> None:
        """A set of one to three changes, apart from each other, some of them shares."""
        changes = list[Change]()
        for index in range(self.rng.randint(1, 3)):
            start = 1 + 25 * index + self.rng.randint(0, 10)
            target = Target(start=start, end=start + self.rng.randint(0, 10))
            if self.rng.random() < 0.2:
                source = (self._name(), self._target(30))
                changes.append(Change(target, mode="amortize", source=source))
            else:
                text = self._text(0, self.rng.choice([6, 6, 30]))
                changes.append(Change(target, text, self.rng.choice(MODES)))
        self.submitted.append(self.engine.submit_directives(self._name(), changes))

    def purge(self) -> None:
        text = " ".join(self.rng.sample(WORDS, 2))
        target = Target(match=text, occurrence=0)
        changes = [Change(target, "", "forget", scope="cache")]
        self.submitted.append(self.engine.submit_directives(self._name(), changes))

    def share(self) -> None:
        source = (self._name(), self._target(8))
        changes = [Change(self._target(), mode=self.rng.choice(MODES[1:]), source=source)]
        self.submitted.append(self.engine.submit_directives(self._name(), changes))

    def mark(self) -> None:
        kind = self.rng.choice(["pin", "decay", "scratch", "tool_output"])
        if kind == "pin":
            request = MarkRequest("pin", self._target(), turns=self.rng.randint(1, 3))
        elif kind == "decay":
            replacement = self._text(0, 4)
            turns, mode = self.rng.randint(1, 3), self.rng.choice(MODES)
            request = MarkRequest("decay", self._target(), "span", None, turns, replacement, mode)
        elif kind == "scratch":
            request = MarkRequest("scratch", self._target())
        else:
            request = MarkRequest("scratch", of="tool_output", replacement="gone")
        self.engine.mark(self._name(), request)

    def revert(self) -> None:
        self.engine.revert(self._name())

    def prompt(self) -> None:
        info = self.engine.session_info(self._name())
        ids = info.token_ids[: self.rng.randint(1, info.context_length)]
        self.submitted.append(self.engine.submit_prompt(list(ids), self._params()))

    def cancel(self) -> None:
        self.engine.cancel(self.rng.choice(self.submitted[-5:]))

    def delete(self) -> None:
        if self.rng.random() < 0.3:
            name = self._name()
            self.engine.delete_session(name)
            self.histories[name] = []

    def _name(self) -> str:
        return self.rng.choice(NAMES)

    def _text(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(low, high)))

    def _target(self, longest: int = 20) -> Target:
        start = self.rng.randint(1, 60)
        return Target(start=start, end=start + self.rng.randint(1, longest))

    def _params(self) -> SamplingParams:
        return SamplingParams(seed=self.rng.randrange(99), max_tokens=self.rng.randint(1, 12))


def exact_paths(engine: Engine) -> Iterator[Context]:
    """The longest contexts in the tree whose every row is called exact."""
    tree = engine.parts.scheduler.prefix.tree
    root = tree.roots.get(b"")
    waiting: list[tuple[Node, tuple[int, ...]]] = [(root, ())] if root else []
    while waiting:
        node, tokens = waiting.pop()
        exact = [child for child in node.children.values() if child.origin is None]
        waiting += [(child, tokens + child.tokens) for child in exact]
        if not exact and tokens:
            yield Context.of(tokens)


def assert_exact_rows_are_exact(engine: Engine, folder: Path) -> int:
    """Every row that the cache calls exact is what a fresh prefill gives; how many there are."""
    num_rows = 0
    with plain_engine(folder, kv_cache_tokens=4096, max_num_batched_tokens=256) as fresh:
        for context in exact_paths(engine):
            fresh.parts.scheduler.prefix.clear()
            # The last token of a prompt is computed for its logits, so that its row is there too.
            fresh.generate(context.tokens, temperature=0, max_tokens=1, ignore_eos=True)
            for ours, theirs in zip(rows_of(engine, context), rows_of(fresh, context), strict=True):
                assert ours.shape == theirs.shape
                # float32 in another order of summation; rows are of size 1
                assert torch.allclose(ours, theirs, atol=1e-3)
            num_rows += len(context)
    return num_rows


@pytest.mark.parametrize("slots", [4096, 500], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_exact_rows_are_exact(tiny_folder: Folder, seed: int, slots: int) -> None:
    folder = tiny_folder(("v3", "v2_yarn")[seed % 2])
    options: dict[str, Any] = {"kv_cache_tokens": slots, "max_model_len": 400, "min_run": 6}
    with tiny_engine(folder, protect_first=1, **options) as engine:
        agents = Agents(engine, seed)
        for _ in range(150):
            agents.act()
            for _ in range(agents.rng.randint(0, 6)):
                agents.step()
        for _ in range(5000):
            if not engine.has_work:
                break
            agents.step()
        assert_at_rest(engine)
        assert agents.ended == Counter(agents.submitted), "every request ends exactly once"
        assert {"turn", "edit", "share", "mark", "revert", "prompt"} <= set(agents.done)
        assert set(agents.states) == {"exact", "healing", "spliced"}
        assert not any(session.heal_id for session in engine.sessions)
        assert assert_exact_rows_are_exact(engine, folder) > 50


def test_the_comparison_sees_a_row_that_is_not_exact(tiny_folder: Folder) -> None:
    folder = tiny_folder("v3")
    with tiny_engine(folder) as engine:
        engine.session("s").chat(" ".join(WORDS), temperature=0, max_tokens=4)
        assert assert_exact_rows_are_exact(engine, folder) > 50
        context = next(exact_paths(engine))
        slots = engine.parts.scheduler.prefix.tree.match(context)
        engine.parts.cache.ckv[0, int(slots[30])] *= 1.01
        with pytest.raises(AssertionError):
            assert_exact_rows_are_exact(engine, folder)

"""What a trace is made of: a scheduler, its rows, the sessions, and the books beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.directive import Directive
from leyline.policy import DEFAULT, Policy
from leyline.reach import Reach
from leyline.scheduler import Scheduler
from leyline.sessions import Sessions
from tests.simulation.cast import Talk, Twin
from tests.simulation.machine import Machine
from tests.simulation.promises import pinned_rows
from tests.simulation.symbols import SPELLING, Letters, require

TENANTS = (b"", b"another tenant")


def random_policy(random: Random) -> Policy:
    """Four decisions of no taste at all."""
    patience = random.randrange(6)
    keys = [
        DEFAULT.evict,
        lambda node: (node.origin is not None, random.random()),
        lambda node: random.random(),
    ]
    return Policy(
        admit=lambda needed, available, num_running: (
            num_running == 0 or (needed <= available and random.random() < 0.8)
        ),
        victim=random.choice([DEFAULT.victim, lambda candidates: random.choice(candidates)]),
        evict=random.choice(keys),
        degrade=lambda num_running, waited: num_running == 1 or waited > patience,
    )


class World:
    """The state of one random life of a scheduler.

    Args:
        seed: Decides everything.
        log: Called with a line for all that happens.

    Attributes:
        calm: Whether callers mostly wait for each other.
        now: The time, which passes only when somebody acts.
        lossy: Whether rows have left the tree, since the laws were last checked, because nobody
            needs to keep them.
        tally: How often it went where it hurts.
        guarded: For a context whose rows must be left alone, its slots as of the last check.
    """

    def __init__(self, seed: int, log: object = None) -> None:
        self.random = random = Random(seed)
        self.log = print if log else lambda *_: None
        self.roomy = random.random() < 0.15
        self.num_slots = 3000 if self.roomy else random.choice([12, 16, 24, 40, 64])
        self.max_len = min(self.num_slots, random.choice([12, 16, 30]))
        self.calm = random.random() < 0.4
        self.faulty = not self.roomy and random.random() < 0.3
        self.machine = Machine(self.num_slots, random)
        self.machine.num_tokens = random.choice([len(SPELLING), *[self.machine.num_tokens] * 4])
        self.ledger = Ledger(self.num_slots, self.machine.free)
        policy = random_policy(random) if random.random() < 0.8 else DEFAULT
        self.foreseeable = policy.evict is DEFAULT.evict
        self.sessions = self.random_sessions()
        self.prefix = PrefixCache(self.ledger, policy.evict, lambda: self.sessions.pinned(self.now))
        self.reclaim = self.prefix.reclaim
        self.prefix.reclaim = self.watch_reclaim
        self.scheduler = Scheduler(
            self.prefix,
            policy,
            max_batch_tokens=random.choice([1, 4, 9, 50]),
            max_sequences=random.choice([1, 2, 4, 8]),
            keepers=lambda number: self.sessions.others(number),
        )
        parts: Any = SimpleNamespace(scheduler=self.scheduler, cache=self, tokenizer=Letters())
        self.reach = Reach(parts, self.sessions)
        self.now = 0.0
        self.talks: list[Talk] = []
        self.live: dict[int, Twin] = {}
        self.ended: dict[int, str] = {}
        self.answers: dict[int, str] = {}
        self.origins: dict[bytes, int] = {}
        self.asked: list[tuple[Directive, ...]] = []
        self.lossy = False
        self.guarded: dict[tuple[Talk, int], tuple[Context, list[int]]] = {}
        self.num_ids = 0
        self.num_names = 0
        self.num_tags = 0
        self.texts: dict[int, int] = {}
        self.num_losses = 0
        self.empty_plans = 0
        self.tally: Counter[str] = Counter()

    def random_sessions(self) -> Sessions:
        """Sessions with narrow limits; whatever is pinned leaves room for the longest context."""
        random = self.random
        return Sessions(
            random.choice([2, 6, 6]),
            random.choice([math.inf, math.inf, 8.0]),
            keep_versions=random.choice([0, 0, 1, 4, 4]),
            session_slots=random.choice([None, self.max_len, self.max_len * 2]),
            pin_slots=(self.num_slots - self.max_len) // len(TENANTS),
            max_tokens=random.choice([None, None, 60]),
            num_slots=self.num_slots,
        )

    # What a purge needs of a cache's tensors.

    ckv = SimpleNamespace(device="cpu")

    def fill(self, slots: Any, value: float) -> None:
        """Overwrite slots."""
        require("purge", value == 0, "a slot is filled with something")
        self.machine.scrub(slots.numpy())

    # Books.

    def watch_reclaim(self, num_free: int) -> int:
        """Evict, and see that nothing goes which is pinned."""
        before, self.lossy = pinned_rows(self), True
        freed = self.reclaim(num_free)
        require("pin", pinned_rows(self) == before, "a pinned row was evicted")
        self.tally["evictions beside pins"] += any(before)
        return freed

    def new_id(self) -> int:
        """The next sequence or request."""
        self.num_ids += 1
        return self.num_ids

    def new_name(self, what: str) -> str:
        """A name for a session or a mark."""
        self.num_names += 1
        return f"{what} {self.num_names}"

    def new_tags(self, tokens: Iterable[int]) -> list[int]:
        """A tag for each of these new tokens."""
        start = self.num_tags
        for token in tokens:
            self.texts[self.num_tags] = token
            self.num_tags += 1
        return [*range(start, self.num_tags)]

    def surprise(self) -> None:
        """Something has come between dry runs and what they are about."""
        for twin in self.live.values():
            twin.forecast = None

    def census(self) -> None:
        """Forget sessions that had to go."""
        self.talks = [
            talk
            for talk in self.talks
            if self.sessions.find(talk.session.session_id, talk.context.root) is talk.session
        ]

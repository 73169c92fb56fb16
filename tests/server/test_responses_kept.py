"""Kept responses: bounded, divided by owner, forgotten after a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leyline.server.responses_kept import (
    KeptResponses,
    Owner,
    PreviousResponseNotFoundError,
    ResponseNotFoundError,
)
from leyline.server.wire import encode

ADA, BOB = Owner("ada", "ada"), Owner("bob", "bob")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Shelf:
    max_kept: int = 9
    max_bytes: int = 10_000
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.kept = KeptResponses(self.max_kept, self.max_bytes, 60.0, self.clock)

    def put(self, owner: Owner, name: str, size: int = 0) -> None:
        self.kept.keep(owner, {"id": name}, [{"content": "x" * size}], f"session of {name}")

    def holds(self, owner: Owner, name: str) -> bool:
        try:
            self.kept.past(owner, name)
        except PreviousResponseNotFoundError:
            return False
        return True


def test_what_is_kept_comes_back_as_it_was() -> None:
    shelf = Shelf()
    body: dict[str, Any] = {"id": "r", "output": ["é\u2028"]}
    shelf.kept.keep(ADA, body, [{"role": "user", "content": "é"}], "s")
    assert shelf.kept.body(ADA, "r") == encode(body)
    past = shelf.kept.past(ADA, "r")
    assert past.messages == ({"role": "user", "content": "é"},) and past.session_id == "s"
    shelf.kept.forget(ADA, "r")
    assert not shelf.holds(ADA, "r") and shelf.kept.num_bytes == 0
    for gone in (shelf.kept.body, shelf.kept.forget):
        with pytest.raises(ResponseNotFoundError):
            gone(ADA, "r")


@pytest.mark.parametrize("other", [BOB, Owner("ada", "ada:salt"), Owner("bob", "ada")])
def test_nobody_else_has_it(other: Owner) -> None:
    shelf = Shelf()
    shelf.put(ADA, "r")
    assert not shelf.holds(other, "r")
    with pytest.raises(ResponseNotFoundError):
        shelf.kept.forget(other, "r")
    assert shelf.holds(ADA, "r")


def test_the_longest_unused_makes_room() -> None:
    shelf = Shelf(max_kept=2)
    shelf.put(ADA, "a")
    shelf.put(ADA, "b")
    assert shelf.holds(ADA, "a")
    shelf.put(ADA, "c")
    assert [shelf.holds(ADA, name) for name in "abc"] == [True, False, True]


def test_bytes_are_bounded_and_what_is_too_large_pushes_nothing_out() -> None:
    shelf = Shelf(max_bytes=1000)
    shelf.put(ADA, "a", 400)
    shelf.put(ADA, "b", 400)
    shelf.put(ADA, "large", 1000)
    assert [shelf.holds(ADA, name) for name in ("a", "b", "large")] == [True, True, False]
    shelf.put(ADA, "c", 400)
    assert [shelf.holds(ADA, name) for name in "abc"] == [False, True, True]


def test_whoever_holds_most_makes_room() -> None:
    shelf = Shelf(max_bytes=1000)
    shelf.put(BOB, "mine", 100)
    for number in range(20):
        shelf.put(Owner("ada", f"salt {number}"), f"flood {number}", 100)
    assert shelf.holds(BOB, "mine")


def test_a_response_is_forgotten_after_a_while_unless_it_is_used() -> None:
    shelf = Shelf()
    shelf.put(ADA, "a")
    shelf.put(ADA, "b")
    shelf.clock.now = 59.0
    assert shelf.holds(ADA, "a")
    shelf.clock.now = 60.0
    assert shelf.holds(ADA, "a") and not shelf.holds(ADA, "b")
    shelf.clock.now = 200.0
    shelf.put(BOB, "c")
    assert len(shelf.kept) == 1, "what has expired takes no room"


class Against(RuleBasedStateMachine):
    """Against a list of everything in the order of its use."""

    owners = st.sampled_from([ADA, BOB, Owner("ada", "salt")])
    names = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(max_kept=3, max_bytes=300)
        self.used: list[tuple[Owner, str, float, int]] = []

    @rule(owner=owners, name=names, size=st.sampled_from([0, 50, 150, 500]))
    def keep(self, owner: Owner, name: str, size: int) -> None:
        if self.find(owner, name):
            return  # ids are never used twice
        self.shelf.put(owner, name, size)
        num_bytes = len(encode({"id": name})) + len(encode([{"content": "x" * size}]))
        if num_bytes <= 300:
            self.used.append((owner, name, self.shelf.clock.now, num_bytes))
        while len(self.used) > 3 or sum(one[3] for one in self.used) > 300:
            self.make_room()

    def make_room(self) -> None:
        held = {one[0].tenant: 0 for one in self.used}
        for one in self.used:
            held[one[0].tenant] += one[3]
        most = max(held.values())
        largest = {tenant for tenant, num_bytes in held.items() if num_bytes == most}
        gone = [one for one in self.used if one[0].tenant in largest]
        if len(largest) > 1:  # either may go; ask which it was
            gone = [one for one in gone if not self.is_there(one)]
        self.used.remove(gone[0])

    def is_there(self, one: tuple[Owner, str, float, int]) -> bool:
        shelf = self.shelf.kept._shelves.get(one[0].tenant)
        return shelf is not None and (one[0].salt, one[1]) in shelf.kept

    @rule(owner=owners, name=names)
    def use(self, owner: Owner, name: str) -> None:
        found = self.find(owner, name)
        assert self.shelf.holds(owner, name) == bool(found)
        for one in found:
            self.used.remove(one)
            self.used.append((owner, name, self.shelf.clock.now, one[3]))

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.shelf.clock.now += seconds
        self.used = [one for one in self.used if one[2] + 60.0 > self.shelf.clock.now]

    @invariant()
    def bounded(self) -> None:
        assert len(self.shelf.kept) <= 3 and self.shelf.kept.num_bytes <= 300

    def find(self, owner: Owner, name: str) -> list[tuple[Owner, str, float, int]]:
        return [one for one in self.used if one[:2] == (owner, name)]


Against.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAgainstAList = Against.TestCase

"""The simulation notices every seeded bug soon.

A mutant that lives is a defect of the simulator. Beside each stand the laws that may catch it
(`error` for an exception of the mind itself).
"""

from __future__ import annotations

import pytest

from tests.seeded_bugs import MUTANTS, in_edits, in_sessions
from tests.simulation import Trace, Violation

MAX_TRACES = 1500
MODULES = {in_edits.__name__, in_sessions.__name__}

LAWS = {
    "gap",
    "one op",
    "write",
    "read",
    "last row",
    "ledger",
    "provenance",
    "degrade",
    "atomic",
    "terminal",
    "score",
    "background",
    "kept",
    "usage",
    "purge",
    "pin",
    "marks",
    "versions",
    "heal",
    "rehearsal",
}


def hunt(limit: int = MAX_TRACES) -> tuple[int, str] | None:
    """The first seed that breaks a law, and the law; None if the mutant lives."""
    for seed in range(limit):
        try:
            Trace(seed).run()
        except Violation as violation:
            return seed, str(violation).split(":")[0]
        except Exception:
            return seed, "error"
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_bug, laws = MUTANTS[name]
    seed_bug(monkeypatch)
    found = hunt()
    assert found, f"{name} lived through {MAX_TRACES} traces"
    assert found[1] in laws, f"{name} was caught by {found[1]}, seed {found[0]}"


def test_every_law_is_broken_by_a_mutant() -> None:
    assert set().union(*(laws for _, laws in MUTANTS.values())) - {"error"} == LAWS


def test_every_module_of_bugs_is_hunted() -> None:
    assert {seed_bug.__module__ for seed_bug, _ in MUTANTS.values()} == MODULES


def test_without_a_mutant_nothing_is_caught() -> None:
    assert hunt(30) is None

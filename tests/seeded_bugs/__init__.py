"""Seeded bugs: each breaks a law on purpose. Importing a module of them registers its bugs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[Callable[[Patch], None], set[str]]] = {}


def mutant(*laws: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a seeded bug with the laws that may catch it."""

    def register(seed_bug: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[seed_bug.__name__] = seed_bug, set(laws)
        return seed_bug

    return register

"""What all rooms of the tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family (see `tests.tiny_models`), made once, not changed."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder

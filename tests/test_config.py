from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from leyline import EngineConfig
from leyline.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None),
        ("model", 5),
        ("dtype", "float8"),
        ("dtype", None),
        ("device", 0),
        ("kv_rope_dtype", "float16"),
        ("max_model_len", 0),
        ("max_model_len", -1),
        ("max_model_len", 1.5),
        ("kv_cache_tokens", 0),
        ("kv_cache_tokens", "many"),
        ("num_threads", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", None),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_sessions", -3),
        ("session_ttl_s", 0),
        ("session_ttl_s", -1.0),
        ("session_ttl_s", math.nan),
        ("session_ttl_s", "long"),
        ("protect_first", -1),
        ("seed", "one"),
        ("seed", 1.5),
        ("progress", "yes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


def test_every_option_has_a_help_text_that_is_a_sentence() -> None:
    for entry in fields(EngineConfig):
        assert entry.metadata["help"].endswith("."), entry.name
        assert len(entry.metadata["help"]) > 15, entry.name


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().dtype = "float32"  # pyright: ignore[reportAttributeAccessIssue]

from __future__ import annotations

import math
from typing import Any

import pytest

from leyline import SamplingParams
from leyline.errors import InvalidRequestError
from leyline.sampling import MAX_STOP_STRINGS, MAX_TEMPERATURE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", MAX_TEMPERATURE + 1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("top_k", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "one"),
        ("seed", 0.5),
        ("max_tokens", -1),
        ("max_tokens", -5),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("max_tokens", 1.0),
        ("stop", "the"),
        ("stop", ["the"]),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", ("a",) * (MAX_STOP_STRINGS + 1)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e-30, "top_p": 1e-9},
        {"temperature": MAX_TEMPERATURE, "top_k": 2**31 - 1},
        {"seed": 2**63 - 1, "max_tokens": 2**31 - 1},
        {"seed": -(2**63), "stop": ("a",) * MAX_STOP_STRINGS},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(options: dict[str, Any]) -> None:
    SamplingParams(**options)

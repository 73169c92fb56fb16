from __future__ import annotations

import math
from typing import Any

import pytest

from leyline import SamplingParams
from leyline.errors import InvalidRequestError
from leyline.sampling import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SHOWN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)


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
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("min_tokens", None),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", MIN_REPETITION_PENALTY / 2),
        ("repetition_penalty", MAX_REPETITION_PENALTY + 1),
        ("repetition_penalty", -1.0),
        ("logprobs", -1),
        ("logprobs", True),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", 0.5),
        ("shown", "<think>"),
        ("shown", (1,)),
        ("shown", ("a",) * (MAX_SHOWN + 1)),
        ("include_stop", 1),
        ("ignore_eos", "no"),
        ("skip_special_tokens", None),
        ("stop_token_ids", [1]),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", ("1",)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKENS + 1)),
        ("logit_bias", {1: 1.0}),
        ("logit_bias", (1,)),
        ("logit_bias", ((1, 1.0, 1.0),)),
        ("logit_bias", ((1, 1.0), 2)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1.0, 1.0),)),
        ("logit_bias", (("1", 1.0),)),
        ("logit_bias", ((1, MAX_BIAS + 1),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, "1"),)),
        ("logit_bias", ((1, 1.0),) * (MAX_BIASES + 1)),
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
        {"min_p": 0, "min_tokens": 0, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"min_p": 1.0, "min_tokens": 2**31 - 1, "repetition_penalty": MIN_REPETITION_PENALTY},
        {"repetition_penalty": MAX_REPETITION_PENALTY, "logprobs": 0, "prompt_logprobs": 0},
        {"logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS, "max_tokens": 0},
        {"stop_token_ids": (0, 2**31 - 1) * (MAX_STOP_TOKENS // 2)},
        {"logit_bias": ((0, -MAX_BIAS), (2**31 - 1, MAX_BIAS)) * (MAX_BIASES // 2)},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(options: dict[str, Any]) -> None:
    SamplingParams(**options)

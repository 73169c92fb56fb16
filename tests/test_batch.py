"""The batch: what its ops say about themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leyline.batch import Batch, Extend, Move, StepOutput
from leyline.errors import InvalidRequestError
from leyline.sampling import MAX_STOP_STRINGS, SamplingParams


def extend(start: int, *tokens: int) -> Extend:
    return Extend(1, start, tokens, np.arange(10, 10 + start + len(tokens)))


def move(num: int) -> Move:
    slots = np.arange(num)
    return Move(1, slots, slots + 5, np.full(num, -2))


def test_an_extend_knows_what_it_writes() -> None:
    op = extend(3, 7, 8)
    assert op.end == 5 and op.written_slots.tolist() == [13, 14]


def test_a_move_knows_its_size() -> None:
    assert move(4).num_rows == 4


def test_only_computed_tokens_count_against_the_budget() -> None:
    batch = Batch((move(4),), (extend(0, 1, 2), extend(3, 4)))
    assert batch.num_tokens == 3 and batch


def test_an_empty_batch_is_false_and_a_move_of_no_rows_is_work() -> None:
    assert not Batch() and Batch((move(0),)) and Batch().num_tokens == 0


def test_an_output_of_nothing_holds_no_token() -> None:
    assert StepOutput().tokens == {} and StepOutput() == StepOutput()


# -- sampling parameters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (-0.1, 101, float("nan"), float("inf"), "1", None, True)],
        *[("top_p", bad) for bad in (0, 0.0, -1, 1.1, float("nan"), "1", None)],
        *[("top_k", bad) for bad in (-1, 2**31, 0.5, True, None)],
        *[("seed", bad) for bad in (2**63, -(2**63) - 1, 1e30, True, "5")],
        *[("max_tokens", bad) for bad in (0, -1, 2**31, 1.0, True, "5")],
        *[("stop", bad) for bad in ("x", ["x"], ("",), (1,), ("x",) * (MAX_STOP_STRINGS + 1))],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.param, caught.value.status) == (field, 400)


def test_the_ends_of_every_range_are_allowed() -> None:
    low = SamplingParams(temperature=0, top_p=1e-9, seed=-(2**63), max_tokens=1)
    high = SamplingParams(
        temperature=100,
        top_p=1,
        top_k=2**31 - 1,
        seed=2**63 - 1,
        max_tokens=2**31 - 1,
        stop=("x",) * MAX_STOP_STRINGS,
        ignore_eos=True,
    )
    assert low != high and SamplingParams() == SamplingParams(seed=None, max_tokens=None)

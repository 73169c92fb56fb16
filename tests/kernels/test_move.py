"""Carrying and turning rows on the CPU: against the reference, the forward pass and the door."""

from __future__ import annotations

import pytest
import torch

from leyline.errors import ConfigError
from leyline.kernels.move import MoveInputs, example, move, reference
from leyline.kernels.rope import rotate

# float32: one rounding of the angle's cosine and a fused multiply-add; narrower dtypes: one
# rounding of the result, whose last bit may fall either way.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def clone(inputs: MoveInputs) -> MoveInputs:
    ckv, kpe, *rest = inputs
    return (ckv.clone(), kpe.clone(), *rest)  # type: ignore[return-value]


def neighbours(start: int, dst: int, delta: int) -> MoveInputs:
    ckv, kpe, *_, inv_freq = example()
    rows = torch.arange(6)
    return ckv, kpe, start + rows, dst + rows, torch.full((6,), delta), inv_freq


def scattered(src: bool) -> MoveInputs:
    """Neighbouring slots on one side, scattered ones on the other."""
    inputs = list(neighbours(4, 20, 9))
    inputs[2 if src else 3] = torch.tensor([39, 30, 35, 31, 33, 37])
    return tuple(inputs)  # type: ignore[return-value]


CASES = {
    "scattered": example(),
    "in place": neighbours(4, 4, -7),
    "in place, untouched": neighbours(4, 4, 0),
    "copied": neighbours(4, 20, 0),
    "copied and turned": neighbours(20, 4, 123_456),
    "neighbours scattered": scattered(src=False),
    "scattered gathered": scattered(src=True),
    "half": example(dtype=torch.float16),
    "bf16": example(dtype=torch.bfloat16),
    "one row": example(rows=1),
}


@pytest.mark.parametrize("name", CASES)
def test_move_equals_the_reference(name):
    got, want = clone(CASES[name]), clone(CASES[name])
    move(*got)
    reference(*want)
    assert torch.equal(got[0], want[0])
    assert (got[1].float() - want[1].float()).abs().max() <= TOLERANCE[got[1].dtype]


@pytest.mark.parametrize("field", [4, 5])  # delta, inv_freq
def test_a_turn_that_is_one_percent_off_is_noticed(field):
    inputs = list(neighbours(4, 4, 700))
    got, want = clone(tuple(inputs)), clone(tuple(inputs))  # type: ignore[arg-type]
    perturbed = list(got)
    perturbed[field] = (perturbed[field] * 1.01).to(perturbed[field].dtype)
    move(*perturbed)
    reference(*want)
    assert (got[1] - want[1]).abs().max() > 1000 * TOLERANCE[torch.float32]


def test_delta_zero_copies_every_bit():
    ckv, kpe, *_, inv_freq = example()
    ckv[:, 3], kpe[:, 3, 0], kpe[:, 3, 1] = -0.0, -0.0, float("nan")
    src, dst, delta = torch.tensor([3]), torch.tensor([9]), torch.tensor([0])
    move(ckv, kpe, src, dst, delta, inv_freq)
    assert torch.equal(ckv[:, 9].view(torch.int32), ckv[:, 3].view(torch.int32))
    assert torch.equal(kpe[:, 9].view(torch.int32), kpe[:, 3].view(torch.int32))


def test_rows_that_are_not_named_keep_every_bit():
    ckv, kpe, src, dst, delta, inv_freq = example()
    before = ckv.clone(), kpe.clone()
    move(ckv, kpe, src, dst, delta, inv_freq)
    others = torch.ones(ckv.shape[1], dtype=torch.bool)
    others[dst] = False
    assert torch.equal(ckv[:, others], before[0][:, others])
    assert torch.equal(kpe[:, others], before[1][:, others])


@pytest.mark.parametrize("position", [5, 4097, 120_000])
@pytest.mark.parametrize("delta", [1, -3, 30_000])
def test_a_turned_band_is_the_one_a_forward_pass_would_store(position, delta):
    *_, inv_freq = example()
    raw = torch.randn(1, 1, 10, generator=torch.Generator().manual_seed(1))

    def stored(at: int) -> torch.Tensor:
        angle = at * inv_freq[None]
        return rotate(raw, torch.complex(angle.cos().float(), angle.sin().float()))

    kpe, ckv, slot = stored(position), torch.zeros(1, 1, 4), torch.tensor([0])
    move(ckv, kpe, slot, slot, torch.tensor([delta]), inv_freq)
    assert (kpe - stored(position + delta)).abs().max() < 1e-6


def test_turns_add_up_and_a_turn_back_is_a_way_home():
    ckv, kpe, src, _, _, inv_freq = example()
    start = kpe.clone()
    for delta in (5, 17, -300, 278):
        move(ckv, kpe, src, src, torch.full_like(src, delta), inv_freq)
    assert (kpe - start).abs().max() < 2e-6


def test_no_rows_is_no_work():
    ckv, kpe, *_, inv_freq = example()
    none = torch.empty(0, dtype=torch.int64)
    move(ckv, kpe, none, none, none, inv_freq)


def refusal(**changes: torch.Tensor) -> None:
    names = ("ckv", "kpe", "src_slots", "dst_slots", "delta", "inv_freq")
    inputs = dict(zip(names, example(rows=4), strict=True)) | changes
    before = inputs["ckv"].clone(), inputs["kpe"].clone()
    with pytest.raises(ValueError):
        move(*inputs.values())
    assert torch.equal(inputs["ckv"], before[0])
    assert torch.equal(inputs["kpe"], before[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"dst_slots": torch.tensor([1, 2, 2, 3])},
        {"src_slots": torch.tensor([5, 6, 7, 8]), "dst_slots": torch.tensor([6, 7, 8, 9])},
        {"src_slots": torch.tensor([5, 5, 7, 8]), "dst_slots": torch.tensor([5, 6, 1, 2])},
        {"dst_slots": torch.tensor([1, 2, 3, 40])},
        {"src_slots": torch.tensor([-1, 2, 3, 4])},
        {"delta": torch.tensor([1, 2, 3])},
        {"delta": torch.tensor([1.0, 2.0, 3.0, 4.0])},
        {"src_slots": torch.tensor([[1, 2, 3, 4]])},
        {"inv_freq": torch.ones(5)},
        {"inv_freq": torch.ones(4, dtype=torch.float64)},
        {"kpe": torch.zeros(3, 39, 10)},
        {"kpe": torch.zeros(3, 40, 10, dtype=torch.float16)},
        {"ckv": torch.zeros(3, 40, 24, dtype=torch.int64)},
        {"ckv": torch.zeros(3, 24, 40).transpose(1, 2)},
    ],
)
def test_the_door_refuses_and_changes_nothing(changes):
    refusal(**changes)


def test_triton_without_a_gpu_is_refused_not_replaced():
    with pytest.raises(ConfigError, match="needs a GPU"):
        move(*example(), backend="triton")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="allowed: torch, triton"):
        move(*example(), backend="numpy")

"""Carry rows of the cache to other slots and turn their rope band by the change of position.

For every layer l and moved row m, with src, dst its slots and delta[m] its change of position:

    ckv[l, dst] = ckv[l, src]                                    bit by bit
    band        = kpe[l, src] as pairs (2i, 2i+1)
    kpe[l, dst] = band turned by delta[m] * inv_freq[i]          bit by bit where delta is 0

A latent holds no position, so it is only carried. The turn is a *unit* rotation: the amplitude of
a YaRN model is already in the stored band, and the softmax scale is not in the cache. Turns compose
as positions do, R(a) R(b) = R(a + b), so a turned band is the one a forward pass would have stored
at the new position. Angles are formed in float64 from the exact integer delta and reduced modulo
2 pi before their cosines are rounded to float32; the arithmetic on the band is float32.

A row may stay where it is (src == dst: only its band turns) or go to a slot that nobody reads in
the same call. Under that rule rows are independent, and no order among them can matter.

Source: the rotary group law of Su et al., "RoFormer", arXiv 2104.09864, applied to the latent
cache of DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyline.errors import ConfigError

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # there are no wheels for every platform; the torch path needs none
        triton = tl = None

MoveInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    ckv: Tensor, kpe: Tensor, src_slots: Tensor, dst_slots: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    """Row by row, all reads before the first write."""
    old_ckv, old_kpe = ckv.clone(), kpe.clone()
    for src, dst, turn in zip(src_slots.tolist(), dst_slots.tolist(), delta.tolist(), strict=True):
        ckv[:, dst] = old_ckv[:, src]
        kpe[:, dst] = old_kpe[:, src]
        if turn:
            angle = torch.remainder(turn * inv_freq, 2 * math.pi)
            cos, sin = angle.cos().float(), angle.sin().float()
            even, odd = old_kpe[:, src, 0::2].float(), old_kpe[:, src, 1::2].float()
            kpe[:, dst, 0::2] = (even * cos - odd * sin).to(kpe.dtype)
            kpe[:, dst, 1::2] = (even * sin + odd * cos).to(kpe.dtype)


def example(
    layers: int = 3,
    slots: int = 40,
    rows: int = 9,
    latent: int = 24,
    rope_dim: int = 10,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> MoveInputs:
    """Seeded valid inputs: every third row stays in place, the others go to slots of their own."""
    generator = torch.Generator().manual_seed(seed)
    ckv = torch.randn(layers, slots, latent, generator=generator).to(dtype)
    kpe = torch.randn(layers, slots, rope_dim, generator=generator).to(dtype)
    order = torch.randperm(slots, generator=generator)
    src, dst = order[:rows], order[rows : 2 * rows].clone()
    dst[::3] = src[::3]
    delta = torch.randint(-5000, 5000, (rows,), generator=generator)
    delta[1::4] = 0
    inv_freq = 10000.0 ** -(torch.arange(rope_dim // 2, dtype=torch.float64) * 2 / rope_dim)
    return ckv, kpe, src, dst, delta, inv_freq


def move_kernel(
    ckv,
    kpe,
    src_slots,
    dst_slots,
    delta,
    cos,
    sin,
    ckv_layer_stride,
    ckv_slot_stride,
    kpe_layer_stride,
    kpe_slot_stride,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """One program a moved row and layer: cos, sin are [M, R/2]; strides count elements."""
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    src = tl.load(src_slots + row)
    dst = tl.load(dst_slots + row)
    if src != dst:
        column = tl.arange(0, BLOCK_LATENT)
        inside = column < LATENT
        base = ckv + layer * ckv_layer_stride + column
        latent = tl.load(base + src * ckv_slot_stride, mask=inside)
        tl.store(base + dst * ckv_slot_stride, latent, mask=inside)
    pair = tl.arange(0, BLOCK_PAIRS)
    inside = pair < PAIRS
    base = kpe + layer * kpe_layer_stride + 2 * pair
    even = tl.load(base + src * kpe_slot_stride, mask=inside)
    odd = tl.load(base + src * kpe_slot_stride + 1, mask=inside)
    out = base + dst * kpe_slot_stride
    if tl.load(delta + row) == 0:
        # Multiplying by 1 and 0 would lose the sign of a zero.
        tl.store(out, even, mask=inside)
        tl.store(out + 1, odd, mask=inside)
    else:
        c = tl.load(cos + row.to(tl.int64) * PAIRS + pair, mask=inside)
        s = tl.load(sin + row.to(tl.int64) * PAIRS + pair, mask=inside)
        x, y = even.to(tl.float32), odd.to(tl.float32)
        tl.store(out, (x * c - y * s).to(even.dtype), mask=inside)
        tl.store(out + 1, (x * s + y * c).to(odd.dtype), mask=inside)


def jit_kernel() -> Any:
    """The Triton kernel, ready to launch or compile.

    Raises:
        ConfigError: Triton is not installed.
    """
    if triton is None:
        raise ConfigError("Triton is not installed; use the torch backend.", param="backend")
    return triton.jit(move_kernel)


def move(
    ckv: Tensor,
    kpe: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Carry and turn rows, in place in `ckv` and `kpe`.

    Args:
        ckv: Latents [L, S, C]; rows contiguous.
        kpe: Rope bands [L, S, R], float32 or the dtype of `ckv`; rows contiguous.
        src_slots: Where each row is [M] int64.
        dst_slots: Where it goes [M] int64, all distinct; equal to `src_slots` row by row where it
            stays, else read by no row of the call.
        delta: New position minus old position of each row [M] int64.
        inv_freq: Radians a position of each pair [R/2] float64, as in the forward pass.
        backend: "torch", "triton", or None for Triton on a GPU and torch on a CPU.

    Raises:
        ValueError: A shape, dtype, device or slot breaks the contract; nothing was changed.
        ConfigError: Triton was asked for on a CPU, or is not installed.
    """
    _check(ckv, kpe, src_slots, dst_slots, delta, inv_freq)
    chosen = _choose_backend(backend, ckv.device)
    if not src_slots.numel():
        return
    launch = _launch if chosen == "triton" else _move_torch
    launch(ckv, kpe, src_slots, dst_slots, delta, inv_freq.to(ckv.device))


def _choose_backend(backend: str | None, device: torch.device) -> str:
    if backend is None:
        return "triton" if device.type == "cuda" else "torch"
    if backend not in ("torch", "triton"):
        raise ConfigError(f"backend is {backend!r}; allowed: torch, triton.", param="backend")
    if backend == "triton" and device.type != "cuda" and not _interpreted():
        raise ConfigError(
            f"The Triton backend needs a GPU, and the cache is on {device.type}.", param="backend"
        )
    return backend


def _interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, which needs no GPU."""
    if triton is None:
        return False
    from triton import knobs

    return knobs.runtime.interpret


def _check(
    ckv: Tensor, kpe: Tensor, src_slots: Tensor, dst_slots: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    if ckv.ndim != 3 or kpe.ndim != 3 or ckv.shape[:2] != kpe.shape[:2]:
        raise ValueError(f"ckv must be [L, S, C] and kpe [L, S, R], not {ckv.shape}, {kpe.shape}")
    if kpe.dtype not in (torch.float32, ckv.dtype) or not ckv.dtype.is_floating_point:
        raise ValueError(f"kpe must be float32 or {ckv.dtype} like ckv, not {kpe.dtype}")
    if ckv.stride(2) != 1 or kpe.stride(2) != 1:
        raise ValueError("the rows of ckv and kpe must be contiguous")
    if inv_freq.dtype != torch.float64 or 2 * inv_freq.numel() != kpe.shape[2]:
        raise ValueError(f"inv_freq must be [{kpe.shape[2] // 2}] float64 for an even rope width")
    lists = (src_slots, dst_slots, delta)
    if any(x.dtype != torch.int64 or x.shape != (src_slots.numel(),) for x in lists):
        raise ValueError("src_slots, dst_slots and delta must all be [M] int64")
    if any(x.device != ckv.device for x in (kpe, *lists)):
        raise ValueError("all tensors but inv_freq must be on one device")
    if src_slots.numel():
        _check_slots(src_slots, dst_slots, ckv.shape[1])


def _check_slots(src_slots: Tensor, dst_slots: Tensor, num_slots: int) -> None:
    both = torch.cat([src_slots, dst_slots])
    if int(both.min()) < 0 or int(both.max()) >= num_slots:
        raise ValueError(f"slots must be in [0, {num_slots})")
    written = torch.zeros(num_slots, dtype=torch.bool, device=both.device)
    written[dst_slots] = True
    if int(written.sum()) != dst_slots.numel():
        raise ValueError("dst_slots must be distinct")
    if bool((written[src_slots] & (src_slots != dst_slots)).any()):
        raise ValueError("a slot that is written may only be read by the row that stays in it")


def _cos_sin(delta: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """[M, R/2] float32 each; most calls have one or a few different deltas."""
    values, which = delta.unique(return_inverse=True)
    angle = torch.remainder(values.to(torch.float64)[:, None] * inv_freq, 2 * math.pi)
    return angle.cos().to(torch.float32)[which], angle.sin().to(torch.float32)[which]


def _launch(
    ckv: Tensor, kpe: Tensor, src_slots: Tensor, dst_slots: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    kernel = jit_kernel()
    cos, sin = _cos_sin(delta, inv_freq)
    latent, pairs = ckv.shape[2], inv_freq.numel()
    kernel[(src_slots.numel(), ckv.shape[0])](
        ckv,
        kpe,
        src_slots.contiguous(),
        dst_slots.contiguous(),
        delta.contiguous(),
        cos,
        sin,
        ckv.stride(0),
        ckv.stride(1),
        kpe.stride(0),
        kpe.stride(1),
        LATENT=latent,
        PAIRS=pairs,
        BLOCK_LATENT=triton.next_power_of_2(latent),
        BLOCK_PAIRS=triton.next_power_of_2(pairs),
    )


def _move_torch(
    ckv: Tensor, kpe: Tensor, src_slots: Tensor, dst_slots: Tensor, delta: Tensor, inv_freq: Tensor
) -> None:
    """Carry first, then turn at the destination; rows with delta 0 are never multiplied."""
    away = src_slots != dst_slots
    if bool(away.any()):
        src, dst = src_slots[away], _as_slice(dst_slots[away])
        if isinstance(dst, slice):  # writing by index refuses a view of the same tensor
            src = _as_slice(src)
        for layer in range(ckv.shape[0]):
            ckv[layer, dst] = ckv[layer, src]
            kpe[layer, dst] = kpe[layer, src]
    turned = delta != 0
    if bool(turned.any()):
        _turn(kpe, _as_slice(dst_slots[turned]), *_cos_sin(delta[turned], inv_freq))


def _turn(kpe: Tensor, slots: slice | Tensor, cos: Tensor, sin: Tensor) -> None:
    rotors = torch.complex(cos, sin)
    for band in kpe:
        rows = band[slots].to(torch.float32).contiguous()
        turned = torch.view_as_complex(rows.unflatten(-1, (-1, 2))) * rotors
        band[slots] = torch.view_as_real(turned).flatten(-2).to(kpe.dtype)


def _as_slice(slots: Tensor) -> slice | Tensor:
    """A slice where the slots are neighbours in order, so that no index is gathered."""
    first, last = int(slots[0]), int(slots[-1])
    neighbours = last - first == slots.numel() - 1 and bool((slots.diff() == 1).all())
    return slice(first, last + 1) if neighbours else slots

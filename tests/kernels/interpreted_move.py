"""Run as a script with TRITON_INTERPRET=1: the Triton kernel against the reference, on the CPU.

Prints one JSON object: for each case the largest difference in latents and in bands, and the
smallest largest-difference of bands when an input is 1 % off. The interpreter has to be chosen
before Triton is imported, so this needs a process of its own.
"""

from __future__ import annotations

import json

import torch

from leyline.kernels.move import MoveInputs, example, move, reference


def differences(got: MoveInputs, want: MoveInputs) -> tuple[float, float]:
    move(*got, backend="triton")
    reference(*want)
    pairs = zip(got[:2], want[:2], strict=True)
    latent, band = ((a.float() - b.float()).abs().max().item() for a, b in pairs)
    return latent, band


def perturbed(dtype: torch.dtype) -> tuple[float, float]:
    *inputs, inv_freq = example(dtype=dtype)
    return differences((*inputs, inv_freq * 1.01), example(dtype=dtype))  # type: ignore[arg-type]


def every_other_slot() -> MoveInputs:
    ckv, kpe, *rest = example(layers=2, rows=5, latent=70, rope_dim=14)
    ckv, kpe = (x.repeat_interleave(2, dim=1)[:, ::2] for x in (ckv.half(), kpe))
    return (ckv, kpe, *rest)  # type: ignore[return-value]


def main() -> None:
    out = {}
    for dtype in (torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        out[name] = differences(example(dtype=dtype), example(dtype=dtype))
        out[f"{name}, perturbed"] = perturbed(dtype)
    # A row wider than a power of two, views of a larger buffer, a float32 band beside float16.
    out["views"] = differences(every_other_slot(), every_other_slot())
    print(json.dumps(out))


if __name__ == "__main__":
    main()

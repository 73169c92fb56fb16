"""The Triton kernel without a GPU: run in the interpreter, compiled for a real target."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leyline.kernels.move import jit_kernel

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# As for the torch path: one rounding in float32; in float16 the last bit of the result.
TOLERANCE = {"float32": 1e-6, "views": 1e-6, "float16": 2e-3}
SIGNATURE = {
    "src_slots": "*i64",
    "dst_slots": "*i64",
    "delta": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    "ckv_layer_stride": "i64",
    "ckv_slot_stride": "i64",
    "kpe_layer_stride": "i64",
    "kpe_slot_stride": "i64",
    "LATENT": "constexpr",
    "PAIRS": "constexpr",
    "BLOCK_LATENT": "constexpr",
    "BLOCK_PAIRS": "constexpr",
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[float]]:
    script = ROOT / "tests" / "kernels" / "interpreted_move.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", TOLERANCE)
def test_the_interpreted_kernel_equals_the_reference(interpreted, name):
    latent, band = interpreted[name]
    assert latent == 0
    assert band <= TOLERANCE[name]


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_frequencies_one_percent_off_are_noticed(interpreted, name):
    assert interpreted[f"{name}, perturbed"][1] > 10 * TOLERANCE[name]


@pytest.mark.parametrize("band", ["*fp32", "*bf16"])
def test_the_kernel_compiles_for_sm_90_without_spills(band, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    source = ASTSource(
        jit_kernel(),
        {"ckv": "*bf16", "kpe": band, **SIGNATURE},
        constexprs={"LATENT": 512, "PAIRS": 32, "BLOCK_LATENT": 512, "BLOCK_PAIRS": 32},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    cubin = tmp_path / "move.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    assert ".target sm_90" in compiled.asm["ptx"]
    usage = resource_usage(cubin)
    # A spilled register lives in local memory, on the stack.
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert usage["REG"] <= 64


def resource_usage(cubin: Path) -> dict[str, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}

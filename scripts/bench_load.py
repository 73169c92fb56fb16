"""What loading costs: seconds and memory, against `transformers` in the same run.

A synthetic checkpoint of about 1 GB (a DeepSeek-V3 of 9 layers with 32 experts, bf16, in shards
with an index) is written, and then loaded by turns, each time in a fresh process that has imported
its libraries before the clock starts. Files are in the page cache for these. One more load begins
with the files thrown out of it; beside that stands what the disk gives a plain read.

Memory is what a process holds at its highest while loading, above what it held before: with torch
imported that is a fixed few hundred megabytes, which the last line has as `before_bytes`.

    python scripts/bench_load.py [--repeats 3] [--gigabytes 1] [--folder DIR]

The last line is JSON: `peak_rss_over_weights` (the worst run), `seconds_over_transformers` (the
ratio of the medians), and what they were made of.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from leyline.model.config import ModelConfig
from leyline.model.parameters import num_parameters, parameter_shapes
from leyline.model.shards import INDEX_NAME
from leyline.model.weights import load_model

DATA: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LAYER_GIGABYTES = 0.12  # of one layer with experts
SHARDS = 8
BLOCK = 8 << 20
Sample = dict[str, float]


def write_checkpoint(folder: Path, gigabytes: float) -> ModelConfig:
    """Write a sharded checkpoint of about that size; returns its config."""
    data = DATA | {"num_hidden_layers": max(2, 1 + round((gigabytes - 0.1) / LAYER_GIGABYTES))}
    config = ModelConfig.from_dict(data)
    (folder / "config.json").write_text(json.dumps(data))
    shapes = list(parameter_shapes(config))
    noise = torch.randn(1 << 20).bfloat16()  # repeated: what is in the weights costs nothing
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        start, end = (len(shapes) * i // SHARDS for i in (shard, shard + 1))
        tensors = {}
        for key, shape in shapes[start:end]:
            count = torch.Size(shape).numel()
            flat = noise.repeat(-(-count // len(noise)))[:count]
            tensors[key] = (flat * shape[-1] ** -0.5).view(shape)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return config


def load_with_leyline(folder: str) -> Any:
    """Load with the code under test."""
    return load_model(folder, progress=False)


def load_with_transformers(folder: str) -> Any:
    """Load with the peer, as its documentation does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


ARMS: dict[str, Callable[[str], Any]] = {
    "leyline": load_with_leyline,
    "transformers": load_with_transformers,
}


def status_bytes(key: str) -> int:
    """A line of this process's status, such as VmRSS, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(arm: str, folder: str) -> Sample:
    """Load once, in this process."""
    if arm == "transformers":
        import transformers
        from transformers import DeepseekV3ForCausalLM  # noqa: F401

        transformers.utils.logging.disable_progress_bar()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is held now
    start = time.perf_counter()
    model = ARMS[arm](folder)
    seconds = time.perf_counter() - start
    assert model is not None
    return {"seconds": seconds, "before": before, "peak": status_bytes("VmHWM")}


def in_a_process(arm: str, folder: Path) -> Sample:
    """Load once, in a fresh process."""
    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def shards(folder: Path) -> list[Path]:
    """The files with the weights."""
    return sorted(folder.glob("*.safetensors"))


def evict(folder: Path) -> None:
    """Throw the files out of the page cache."""
    for path in shards(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(folder: Path) -> float:
    """How long a plain read of all files takes."""
    block = bytearray(BLOCK)
    start = time.perf_counter()
    for path in shards(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


def run(folder: Path, repeats: int, gigabytes: float) -> dict[str, float]:
    """Write, load by turns, and say what came out."""
    config = write_checkpoint(folder, gigabytes)
    weights = 2 * num_parameters(config)
    samples: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    read_seconds(folder)
    for _ in range(repeats):
        for arm, taken in samples.items():
            taken.append(in_a_process(arm, folder))
            print(f"{arm:>12}: {taken[-1]['seconds']:.2f} s", flush=True)
    warm_read = read_seconds(folder)
    evict(folder)
    cold_read = read_seconds(folder)
    evict(folder)
    cold = in_a_process("leyline", folder)
    seconds = {
        arm: statistics.median(s["seconds"] for s in taken) for arm, taken in samples.items()
    }
    peaks = {
        arm: max(s["peak"] - s["before"] for s in taken) / weights for arm, taken in samples.items()
    }
    return {
        "peak_rss_over_weights": round(peaks["leyline"], 3),
        "seconds_over_transformers": round(seconds["leyline"] / seconds["transformers"], 3),
        "weights_bytes": weights,
        "before_bytes": max(s["before"] for s in samples["leyline"]),
        "seconds": round(seconds["leyline"], 3),
        "seconds_transformers": round(seconds["transformers"], 3),
        "peak_rss_over_weights_transformers": round(peaks["transformers"], 3),
        "gigabytes_per_second": round(weights / seconds["leyline"] / 1e9, 2),
        "gigabytes_per_second_cold": round(weights / cold["seconds"] / 1e9, 2),
        "disk_gigabytes_per_second": round(weights / cold_read / 1e9, 2),
        "page_cache_gigabytes_per_second": round(weights / warm_read / 1e9, 2),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Run the benchmark, or one load of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument(
        "--folder", help="where the checkpoint is written; a scratch folder if none"
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(measure(arguments.arm, arguments.folder)))
        return
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
        result = run(Path(arguments.folder), arguments.repeats, arguments.gigabytes)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            result = run(Path(scratch), arguments.repeats, arguments.gigabytes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

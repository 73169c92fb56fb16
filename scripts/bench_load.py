"""What loading costs: seconds and memory, against `transformers` in the same run.

Synthetic checkpoints of about 1 GB (bf16, in shards with an index) are written in two shapes:

* small: a DeepSeek-V3 of 9 layers with 32 experts, hundreds of tensors of 1 MB;
* joyai: tensors as wide as JoyAI-LLM-Flash's, and as few layers as have both kinds, one dense and
  one with experts; its vocabulary is scaled as the whole is, and experts fill the gigabyte.

Each is loaded by turns, each time in a fresh process that has imported its libraries before the
clock starts. Files are in the page cache for these. One more load begins with the files thrown out
of it; beside that stands what the disk gives a plain read.

The clock stops when all weights are in memory. `transformers` copies experts, and hands out the
rest as views of mapped files, of which not a page was touched; so whatever lies in the checkpoint's
files is read, a byte a page, before the clock stops. Leyline leaves nothing there: all is copied,
and what the CPU multiplies by is packed as well. `lazy` is the ratio with that reading left out.

Peak memory is counted twice, from Linux's own mark of the highest resident size. Growth is that
mark above what the process held before, libraries imported. From zero is the mark itself: torch
alone is 0.2 GB before any weight, so at 1 GB no loader that uses it could stay below 1.2 there,
which is why the bound of 1.15 is held against growth.

    python scripts/bench_load.py [--repeats 3] [--gigabytes 1] [--folder DIR]

The last line is JSON: `peak_rss_over_weights` (growth, the worst run), `seconds_over_transformers`
(the ratio of the medians) and what they were made of, for the small shape; the same for the other
one below `joyai`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from leyline.model.config import ModelConfig
from leyline.model.parameters import num_parameters, parameter_shapes
from leyline.model.shards import INDEX_NAME
from leyline.model.weights import load_model

SMALL: dict[str, Any] = {
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
JOYAI: dict[str, Any] = SMALL | {
    "vocab_size": 1320,  # of 129,280, as 1 GB is of 98
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "intermediate_size": 7168,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "rope_theta": 32000000,
}
SHARDS = 8
BLOCK = 8 << 20
PAGE = 4096
Sample = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """A config, and which count of it makes it larger.

    Attributes:
        data: The config without that count.
        count: The key of the count.
        fixed_gigabytes: The weights with a count of 0.
        gigabytes: What one more adds.
    """

    data: dict[str, Any]
    count: str
    fixed_gigabytes: float
    gigabytes: float

    def sized(self, gigabytes: float) -> dict[str, Any]:
        """The config whose weights are about that large."""
        count = max(2, round((gigabytes - self.fixed_gigabytes) / self.gigabytes))
        return self.data | {self.count: count}


SHAPES = {
    "small": Shape(SMALL, "num_hidden_layers", -0.03, 0.12),
    "joyai": Shape(JOYAI, "n_routed_experts", 0.22, 0.00944),
}


def write_checkpoint(folder: Path, data: dict[str, Any]) -> ModelConfig:
    """Write a sharded checkpoint of that config."""
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


def unread(model: Any, folder: str) -> list[Tensor]:
    """The parameters that lie in mapped files of the checkpoint."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(Path(folder).resolve()) in line]
    mapped = [range(int(start, 16), int(end, 16)) for start, end in spans]
    if not mapped:
        return []
    return [p for p in model.parameters() if any(p.data_ptr() in span for span in mapped)]


def touch(tensors: list[Tensor]) -> None:
    """Read a byte of every page."""
    for tensor in tensors:
        tensor.detach().view(-1).view(torch.uint8)[::PAGE].sum()


def measure(arm: str, folder: str) -> Sample:
    """Load once, in this process."""
    if arm == "transformers":
        import transformers
        from transformers import DeepseekV3ForCausalLM  # noqa: F401

        transformers.utils.logging.disable_progress_bar()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is held now
    start, cpu_start = time.perf_counter(), time.process_time()
    model = ARMS[arm](folder)
    lazy, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    left = unread(model, folder)
    start = time.perf_counter()
    touch(left)
    return {
        "seconds": lazy + time.perf_counter() - start,
        "lazy": lazy,
        "cpu": cpu,
        "before": before,
        "peak": status_bytes("VmHWM"),
    }


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


def run(folder: Path, repeats: int, data: dict[str, Any]) -> dict[str, float]:
    """Write, load by turns, and say what came out."""
    config = write_checkpoint(folder, data)
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
    ours, theirs = samples["leyline"], samples["transformers"]
    seconds = median(ours, "seconds")
    return {
        "peak_rss_over_weights": round(growth(ours) / weights, 3),
        "peak_rss_from_zero_over_weights": round(highest(ours, "peak") / weights, 3),
        "seconds_over_transformers": round(seconds / median(theirs, "seconds"), 3),
        "seconds_over_transformers_lazy": round(seconds / median(theirs, "lazy"), 3),
        "weights_bytes": weights,
        "before_bytes": highest(ours, "before"),
        "seconds": round(seconds, 3),
        "seconds_best": round(min(s["seconds"] for s in ours), 3),
        "cpu_seconds": round(median(ours, "cpu"), 3),
        "seconds_transformers": round(median(theirs, "seconds"), 3),
        "seconds_best_transformers": round(min(s["seconds"] for s in theirs), 3),
        "cpu_seconds_transformers": round(median(theirs, "cpu"), 3),
        "peak_rss_over_weights_transformers": round(growth(theirs) / weights, 3),
        "gigabytes_per_second": round(weights / seconds / 1e9, 2),
        "gigabytes_per_second_cold": round(weights / cold["seconds"] / 1e9, 2),
        "disk_gigabytes_per_second": round(weights / cold_read / 1e9, 2),
        "page_cache_gigabytes_per_second": round(weights / warm_read / 1e9, 2),
        "threads": torch.get_num_threads(),
    }


def median(samples: list[Sample], key: str) -> float:
    """The middle run."""
    return statistics.median(sample[key] for sample in samples)


def highest(samples: list[Sample], key: str) -> float:
    """The worst run."""
    return max(sample[key] for sample in samples)


def growth(samples: list[Sample]) -> float:
    """Bytes that the worst run held at its highest, above what it held before."""
    return max(sample["peak"] - sample["before"] for sample in samples)


def run_all(folder: Path, repeats: int, gigabytes: float) -> dict[str, Any]:
    """Every shape in a folder of its own; the small one's figures first."""
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        print(f"{name}:", flush=True)
        place = folder / name
        place.mkdir(exist_ok=True)
        found[name] = run(place, repeats, shape.sized(gigabytes))
    return found.pop("small") | found


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
        result = run_all(Path(arguments.folder), arguments.repeats, arguments.gigabytes)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            result = run_all(Path(scratch), arguments.repeats, arguments.gigabytes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

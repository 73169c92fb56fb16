"""Checkpoints in the form of the four target models' hub repositories, small enough for a test.

What is real: the config with all its keys in the hub's spelling (a preset, with smaller widths),
the head geometry, the router kind, the shards with an index, the MTP layer (in the shards for GLM,
in a file of its own for JoyAI), the dtype of the router bias, and what lies beside the weights and
must not be touched: Python code, pickles. What is not: hidden size, depth, number of experts,
vocabulary. `transformers` makes and saves the weights, so it is also the oracle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leyline.model.config import ModelConfig
from leyline.model.parameters import parameter_shapes
from leyline.model.presets import HUB_IDS, preset_data
from leyline.model.shards import INDEX_NAME
from tests.model.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE, write_tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 344,  # as ragged in blocks of 128 as the real 10,944
    "moe_intermediate_size": 176,
    "n_routed_experts": 16,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "torch_dtype": None,
    "auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"},
}
MTP_FILE = "mtp-1-of-1.safetensors"
SHARD_SIZE = "16MB"
NEVER_READ = ("modeling_evil.py", "pytorch_model.bin", "README.md")


@dataclass(frozen=True)
class Family:
    """How one family's small checkpoint differs from its preset.

    Attributes:
        config_class: The oracle's name for its config.
        small: Sizes of its own.
        bias_dtype: What the router bias is stored in, None where there is none.
        mtp_file: The file that holds the MTP layer; None puts it into the last shard.
        mtp_dense: Whether that layer is a plain MLP.
    """

    config_class: str
    small: dict[str, Any]
    bias_dtype: torch.dtype | None = torch.float32
    mtp_file: str | None = None
    mtp_dense: bool = False


FAMILIES = {
    "deepseek-v2-lite": Family("DeepseekV2Config", {}, bias_dtype=None),
    "moonlight-16b-a3b": Family("DeepseekV3Config", {}),
    "glm-4.7-flash": Family("Glm4MoeLiteConfig", {"q_lora_rank": 96}),
    "joyai-llm-flash": Family(
        "DeepseekV3Config",
        {"q_lora_rank": 192, "n_routed_experts": 32},
        torch.bfloat16,
        mtp_file=MTP_FILE,
        mtp_dense=True,
    ),
}


def config_data(preset: str) -> dict[str, Any]:
    """The `config.json` of a family's small checkpoint."""
    return preset_data(preset) | SMALL | FAMILIES[preset].small


def write_checkpoint(preset: str, folder: Path) -> Oracle:
    """Write a family's small checkpoint; returns the model that it was written from."""
    oracle = write_weights(preset, folder, {})
    write_tokenizer(folder)
    return oracle


def write_weights(preset: str, folder: Path, changes: dict[str, Any]) -> Oracle:
    """The same without what turns text into ids; `changes` are to the config."""
    import transformers

    family, data = FAMILIES[preset], config_data(preset) | changes
    config_class = getattr(transformers, family.config_class)
    theirs = config_class.from_dict({n: v for n, v in data.items() if n != "auto_map"})
    theirs.model_type = config_class.model_type  # joyai_llm_flash is unknown to transformers
    oracle = Oracle(theirs, folder, SHARD_SIZE)
    (folder / "config.json").write_text(json.dumps(data))
    shards = sorted(folder.glob("*.safetensors"))
    if family.bias_dtype is not None:
        for shard in shards:
            rewrite(shard, lambda name, value: _bias(name, value, family.bias_dtype))
    if data.get("num_nextn_predict_layers"):
        add_tensors(folder, family.mtp_file or shards[-1].name, mtp_layer(preset, data))
    for name in NEVER_READ:
        (folder / name).write_text("raise SystemExit('never to be run')")
    return oracle


def rewrite(path: Path, change: Any) -> None:
    """Pass every tensor of a file through `change(name, value)`, which returns {name: tensor}."""
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(path).items():
        tensors |= change(name, value)
    save_file(tensors, path, metadata={"format": "pt"})


def add_tensors(folder: Path, file: str, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a file, new or old, and to the index."""
    path = folder / file
    old = load_file(path) if path.is_file() else {}
    save_file(old | tensors, path, metadata={"format": "pt"})
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, file)
    index["metadata"]["total_size"] += sum(value.nbytes for value in tensors.values())
    (folder / INDEX_NAME).write_text(json.dumps(index))


def mtp_layer(preset: str, data: dict[str, Any]) -> dict[str, Tensor]:
    """The MTP layer that a real checkpoint carries behind the model's own layers."""
    family = FAMILIES[preset]
    layer, hidden = data["num_hidden_layers"], data["hidden_size"]
    longer = data | {"num_hidden_layers": layer + 1}
    if family.mtp_dense:
        longer["first_k_dense_replace"] = layer + 1
    prefix = f"model.layers.{layer}."
    shapes = dict(parameter_shapes(ModelConfig.from_dict(longer)))
    shapes = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    shapes |= {
        f"{prefix}enorm.weight": (hidden,),
        f"{prefix}hnorm.weight": (hidden,),
        f"{prefix}eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}embed_tokens.weight": (data["vocab_size"], hidden),
        f"{prefix}shared_head.norm.weight": (hidden,),
        f"{prefix}shared_head.head.weight": (data["vocab_size"], hidden),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _bias(name: str, value: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {name: value.to(dtype) if name.endswith("e_score_correction_bias") else value}


__all__ = ["FAMILIES", "HUB_IDS", "MTP_FILE", "NEVER_READ", "config_data", "write_checkpoint"]

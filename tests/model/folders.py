"""Model folders of a few hundred random weights, written without `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from leyline.model.config import ModelConfig
from leyline.model.parameters import RandomWeights, parameter_shapes
from leyline.model.shards import INDEX_NAME, SINGLE_NAME

DATA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 30,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "intermediate_size": 14,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 7,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "dtype": "float32",
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Tensors = dict[str, Tensor]


def tensors(data: dict[str, Any] = DATA) -> Tensors:
    """All parameters that a config calls for, float32."""
    config = ModelConfig.from_dict(data)
    source = RandomWeights(config)
    return {name: source.take(name, torch.float32) for name, _ in parameter_shapes(config)}


def write(
    folder: Path, weights: Tensors, data: dict[str, Any] = DATA, *, sharded: bool = False
) -> Path:
    """Write a folder; the tensors of a sharded one go to two files by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    if not sharded:
        save_file(weights, folder / SINGLE_NAME)
        return folder
    names = list(weights)
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for shard in SHARDS:
        save_file({n: weights[n] for n in names if weight_map[n] == shard}, folder / shard)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


class InMemory:
    """Parameters from a dictionary."""

    def __init__(self, weights: Tensors) -> None:
        self._weights = dict(weights)

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._weights.pop(name).to(dtype)

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return torch.cat([self.take(name, dtype) for name in names])

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        for name, out in places.items():
            assert out.shape == self._weights[name].shape
            out.copy_(self._weights.pop(name))

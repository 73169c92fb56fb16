"""Loading is strict: every parameter once, everything else an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leyline.errors import ModelError
from leyline.model.config import ModelConfig
from leyline.model.parameters import RandomWeights, parameter_shapes
from leyline.model.transformer import Transformer
from leyline.model.weights import INDEX_NAME, SINGLE_NAME, Checkpoint, load_model
from tests.model.steps import Resident, make_cache, run_pieces

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
IDS = torch.tensor([3, 7, 1])
Tensors = dict[str, Tensor]


def tensors(data: dict[str, Any] = DATA) -> Tensors:
    config = ModelConfig.from_dict(data)
    source = RandomWeights(config)
    return {name: source.take(name, torch.float32) for name, _ in parameter_shapes(config)}


def write(
    folder: Path, weights: Tensors, data: dict[str, Any] = DATA, *, sharded: bool = False
) -> Path:
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


def load(folder: Path, **options: Any) -> Transformer:
    return load_model(folder, progress=False, **options)


def answer(model: Transformer) -> Tensor:
    return run_pieces(model, make_cache(model, 3), Resident(torch.arange(3)), IDS, 3)


class InMemory:
    def __init__(self, weights: Tensors) -> None:
        self._weights = weights

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._weights.pop(name).to(dtype)


def expected(data: dict[str, Any] = DATA) -> Tensor:
    config = ModelConfig.from_dict(data)
    return answer(Transformer(config, InMemory(tensors(data)), dtype=torch.float32))


def refusal(folder: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert all(part in caught.value.message for part in parts), caught.value.message


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_loads(tmp_path, sharded):
    model = load(write(tmp_path, tensors(), sharded=sharded))
    assert torch.equal(answer(model), expected())
    assert model.dtype == torch.float32


def test_a_parameter_one_percent_off_is_noticed(tmp_path):
    weights = tensors()
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    assert (answer(load(write(tmp_path, weights))) - expected()).abs().max() > 1e-4


def test_the_dtype_is_the_configs_unless_asked_otherwise(tmp_path):
    folder = write(tmp_path, tensors())
    assert load(folder).dtype == torch.float32
    assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_norms_and_router_stay_float32_in_a_bf16_model(tmp_path):
    model = load(write(tmp_path, tensors()), dtype=torch.bfloat16)
    moe = model._layers[1]._mlp
    kept = (model._norm, model._layers[0]._input_norm, moe._gate, moe._bias)  # type: ignore[union-attr]
    assert all(tensor is not None and tensor.dtype == torch.float32 for tensor in kept)


def test_a_bias_stored_in_bf16_is_widened(tmp_path):
    weights = tensors()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights[name] = weights[name].bfloat16()
    config = ModelConfig.from_dict(DATA)
    with Checkpoint(write(tmp_path, weights), config, "cpu", progress=False) as checkpoint:
        assert torch.equal(checkpoint.take(name, torch.float32), weights[name].float())


def test_the_latent_eps_is_passed_on(tmp_path):
    model = load(write(tmp_path, tensors()), latent_norm_eps=0.5)
    assert model.config.latent_norm_eps == 0.5


# What may be in a checkpoint although the model does not use it.


def test_the_mtp_layer_is_skipped_by_its_number(tmp_path):
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2), "model.layers.2.enorm.weight": IDS}
    assert torch.equal(answer(load(write(tmp_path, tensors() | extra))), expected())


def test_a_layer_beyond_the_mtp_layer_is_unexpected(tmp_path):
    name = "model.layers.3.input_layernorm.weight"
    refusal(write(tmp_path, tensors() | {name: torch.ones(12)}), "unexpected", name)


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_is_the_embedding_whether_stored_or_not(tmp_path, stored):
    data = DATA | {"tie_word_embeddings": True}
    weights = tensors(data)
    copy = {"lm_head.weight": torch.full((30, 12), 9.0)} if stored else {}
    assert torch.equal(answer(load(write(tmp_path, weights | copy, data))), expected(data))


def test_stray_files_are_ignored_where_there_is_an_index(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    save_file({"model.norm.weight": torch.zeros(12)}, folder / SINGLE_NAME)
    (folder / "model-00003-of-00002.safetensors").write_bytes(b"garbage")
    assert torch.equal(answer(load(folder)), expected())


# What is missing, left over, or not what it says.


def dropped(*names: str) -> Tensors:
    return {name: value for name, value in tensors().items() if name not in names}


@pytest.mark.parametrize("sharded", [False, True])
def test_missing_parameters_are_all_named(tmp_path, sharded):
    names = ("model.layers.1.mlp.experts.2.up_proj.weight", "model.norm.weight")
    refusal(write(tmp_path, dropped(*names), sharded=sharded), "missing", *names)


def test_a_missing_head_is_not_taken_for_a_tied_one(tmp_path):
    refusal(write(tmp_path, dropped("lm_head.weight")), "missing lm_head.weight")


def test_unexpected_parameters_are_named(tmp_path):
    name = "model.layers.0.self_attn.q_proj.bias"
    refusal(write(tmp_path, tensors() | {name: torch.ones(14)}), "unexpected", name)


def test_missing_and_unexpected_come_in_one_message(tmp_path):
    weights = dropped("model.norm.weight") | {"model.norm.gamma": torch.ones(12)}
    refusal(write(tmp_path, weights), "missing model.norm.weight", "unexpected model.norm.gamma")


def test_a_long_list_is_cut(tmp_path):
    with pytest.raises(ModelError, match=r"and .* more") as caught:
        load(write(tmp_path, {"x": torch.ones(1)}))
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("shard", SHARDS)
def test_a_missing_shard_is_named(tmp_path, shard):
    folder = write(tmp_path, tensors(), sharded=True)
    (folder / shard).unlink()
    refusal(folder, shard, "not there")


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_that_names_a_tensor_no_file_holds_is_stale(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.update({"ghost": SHARDS[0]}))
    refusal(folder, "stale", "ghost")


def test_an_index_that_misses_a_tensor_is_stale(tmp_path):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.pop("model.norm.weight"))
    refusal(folder, "stale", "model.norm.weight")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_may_not_leave_the_folder(tmp_path, name):
    folder = write(tmp_path, tensors(), sharded=True)
    rewrite_index(folder, lambda names: names.update({"model.norm.weight": name}))
    refusal(folder, name)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    folder = write(tmp_path, tensors(), sharded=True)
    (folder / INDEX_NAME).write_text(content)
    refusal(folder, INDEX_NAME, "not a valid index")


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def huge_header(content: bytes) -> bytes:
    return (2**62).to_bytes(8, "little") + content[8:]


def bad_offsets(content: bytes) -> bytes:
    return content.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)


@pytest.mark.parametrize(
    "damage", [cut_short, huge_header, bad_offsets, lambda _: b"", lambda _: b"not a tensor file"]
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    folder = write(tmp_path, tensors())
    path = folder / SINGLE_NAME
    path.write_bytes(damage(path.read_bytes()))
    refusal(folder, SINGLE_NAME, "not a valid safetensors file")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DATA))
    refusal(tmp_path, "neither", SINGLE_NAME)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    refusal(tmp_path / "nowhere", "no model folder")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_wrong_shape_is_refused(tmp_path, name):
    weights = tensors()
    weights[name] = weights[name][:-1].contiguous()
    refusal(write(tmp_path, weights), name, "shape")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_quantised_storage_is_refused(tmp_path, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    weights = tensors()
    weights[name] = weights[name].to(dtype)
    refusal(write(tmp_path, weights), name, "not supported")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.gate.e_score_correction_bias", "lm_head.weight"]
)
def test_values_that_are_not_finite_are_refused(tmp_path, name, value):
    weights = tensors()
    weights[name].view(-1)[1] = value
    refusal(write(tmp_path, weights), name, "NaN or infinity")


def test_infinities_that_cancel_are_found(tmp_path):
    weights = tensors()
    weights["lm_head.weight"][0, :2] = torch.tensor([float("inf"), float("-inf")])
    refusal(write(tmp_path, weights), "lm_head.weight")


def test_a_parameter_is_handed_out_once(tmp_path):
    config = ModelConfig.from_dict(DATA)
    with Checkpoint(write(tmp_path, tensors()), config, "cpu", progress=False) as checkpoint:
        checkpoint.take("model.norm.weight", torch.float32)
        with pytest.raises(ModelError, match="taken twice"):
            checkpoint.take("model.norm.weight", torch.float32)
        with pytest.raises(ModelError, match="did not take"):
            checkpoint.require_all_taken()


def test_a_refused_folder_leaves_no_file_open(tmp_path):
    folder = write(tmp_path, dropped("model.norm.weight"))
    refusal(folder, "missing")
    assert names_of(load_file(folder / SINGLE_NAME)) == names_of(dropped("model.norm.weight"))
    (folder / SINGLE_NAME).unlink()


def names_of(weights: Iterable[str]) -> list[str]:
    return sorted(weights)


def test_a_progress_bar_ticks_once_a_tensor(tmp_path, capsys):
    load_model(write(tmp_path, tensors()))
    count = len(tensors())
    assert f"{count}/{count}" in capsys.readouterr().err

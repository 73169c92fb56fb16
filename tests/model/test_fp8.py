"""Weights in FP8 blocks: restored as the formula says, before anybody slices them into heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leyline.errors import ModelError
from leyline.kernels import attention as forms
from leyline.model.config import ModelConfig
from leyline.model.fp8 import dequantise_into, scale_shape
from leyline.model.transformer import Transformer
from leyline.model.weights import load_model
from tests.checkpoints import FAMILIES, config_data
from tests.model.folders import InMemory, Tensors, tensors, write
from tests.model.steps import answer, error

BLOCK = (128, 128)
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8 = {"quantization_config": QUANTISED | {"weight_block_size": [128, 128]}}
SUFFIX = "_scale_inv"
IDS = torch.arange(20)
# Ragged in both directions; GLM's kv_b_proj has 448 rows a head, which is 3.5 blocks.
SHAPES = [(128, 128), (576, 256), (2240, 512), (344, 200), (1, 1), (130, 127), (5, 300)]


def formula(stored: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """weight[i, j] = stored[i, j] * scale[i // rows, j // columns], element by element."""
    rows = torch.arange(stored.shape[0])[:, None] // block[0]
    columns = torch.arange(stored.shape[1])[None] // block[1]
    return stored.float() * scale.float()[rows, columns]


def quantised(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """A weight in FP8 with a factor a block, each block scaled to the range of E4M3."""
    scale = torch.empty(scale_shape(tuple(weight.shape), block))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows = slice(i * block[0], (i + 1) * block[0])
            columns = slice(j * block[1], (j + 1) * block[1])
            part = weight[rows, columns]
            scale[i, j] = part.abs().max() / 448
            stored[rows, columns] = (part / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def restored(stored: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(stored.shape, float("nan"), dtype=dtype)
    dequantise_into(out, stored, scale, BLOCK)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_restored_by_the_formula(shape, dtype):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    stored, scale = quantised(weight)
    assert torch.equal(restored(stored, scale, dtype), formula(stored, scale).to(dtype))
    assert error(restored(stored, scale), weight) < 0.04  # three bits of fraction


@pytest.mark.parametrize("shape", SHAPES)
def test_one_percent_on_a_factor_is_noticed(shape):
    stored, scale = quantised(torch.randn(shape))
    want = formula(stored, scale)
    scale[-1, -1] *= 1.01
    assert not torch.equal(restored(stored, scale), want)


def test_blocks_need_not_be_square():
    stored, scale = quantised(torch.randn(50, 70), (16, 32))
    out = torch.empty(50, 70)
    dequantise_into(out, stored, scale, (16, 32))
    assert torch.equal(out, formula(stored, scale, (16, 32)))
    assert not torch.equal(out, formula(stored, scale.flip(0), (16, 32)))


def test_the_factors_of_the_real_shapes():
    """models.md 2: 576 rows have five rows of factors, 10,944 have 86, 1,408 have 11."""
    assert scale_shape((576, 2048), BLOCK) == (5, 16)
    assert scale_shape((10944, 2048), BLOCK) == (86, 16)
    assert scale_shape((2048, 1408), BLOCK) == (16, 11)
    assert scale_shape((8960, 512), BLOCK) == (70, 4)


# Whole checkpoints, with the geometry of the real ones.


def is_quantised(name: str) -> bool:
    """DeepSeek's FP8 files keep embedding, head, norms and routers in full."""
    return name.endswith("proj.weight") or "kv_a_proj_with_mqa" in name


def split(weights: Tensors) -> tuple[Tensors, Tensors]:
    """What an FP8 checkpoint stores, and what it means."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, value in weights.items():
        meant[name] = stored[name] = value
        if is_quantised(name):
            stored[name], stored[name + SUFFIX] = quantised(value)
            meant[name] = formula(stored[name], stored[name + SUFFIX])
    return stored, meant


@pytest.fixture(scope="module", params=["glm-4.7-flash", "deepseek-v2-lite"])
def data(request) -> dict[str, Any]:
    assert request.param in FAMILIES
    return config_data(request.param) | {"num_hidden_layers": 2, "n_routed_experts": 8} | FP8


@pytest.fixture(scope="module")
def both(data) -> tuple[Tensors, Tensors]:
    return split(tensors(data))


def run(model: Transformer) -> Tensor:
    return answer(model, IDS, 20).logits


def expected(data: dict[str, Any], meant: Tensors) -> Tensor:
    config = ModelConfig.from_dict(data)
    return run(Transformer(config, InMemory(meant), dtype=torch.float32))


@pytest.mark.parametrize("sharded", [False, True])
def test_an_fp8_checkpoint_is_the_model_it_means(tmp_path, data, both, sharded):
    folder = write(tmp_path, both[0], data, sharded=sharded)
    got = run(load_model(folder, torch.float32, progress=False))
    assert torch.equal(got, expected(data, both[1]))


@pytest.mark.parametrize("kind", ["kv_b_proj", "kv_a_proj_with_mqa", "shared_experts.down_proj"])
def test_one_percent_on_one_factor_is_noticed_in_the_logits(tmp_path, data, both, kind):
    name = next(n for n in both[0] if kind in n and n.endswith(SUFFIX))
    stored = both[0] | {name: both[0][name].clone()}
    stored[name][-1, -1] *= 1.01
    folder = write(tmp_path, stored, data)
    got = run(load_model(folder, torch.float32, progress=False))
    assert not torch.equal(got, expected(data, both[1]))


def test_both_forms_of_attention_agree_on_restored_weights(tmp_path, data, both, monkeypatch):
    """`kv_b_proj` is restored once, and both forms read that: nothing is quantised again."""
    model = load_model(write(tmp_path, both[0], data), torch.float32, progress=False)
    logits = []
    for absorbed in (True, False):
        monkeypatch.setattr(forms, "prefer_absorbed", lambda *_, a=absorbed, **__: a)
        logits.append(run(model))
    assert not torch.equal(*logits) and error(*logits) < 1e-5


def test_an_fp8_checkpoint_runs_in_the_dtype_of_its_embedding(tmp_path, data, both):
    weights = {n: v.bfloat16() if v.dtype == torch.float32 else v for n, v in both[0].items()}
    model = load_model(write(tmp_path, weights, data), progress=False)
    assert model.dtype == torch.bfloat16
    assert torch.isfinite(run(model)).all()


def test_the_factors_of_an_mtp_layer_are_skipped(tmp_path, data, both):
    extra = {f"model.layers.2.mlp.up_proj.weight{SUFFIX}": torch.ones(2, 2)}
    assert load_model(write(tmp_path, both[0] | extra, data), torch.float32, progress=False)


# What is not such a checkpoint.

NAME = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def refusal(folder: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(folder, progress=False)
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_missing_factors_are_named(tmp_path, data, both):
    stored = {name: value for name, value in both[0].items() if name != NAME + SUFFIX}
    refusal(write(tmp_path, stored, data), NAME, "without the tensor", SUFFIX)


def test_factors_of_a_wrong_shape_are_refused(tmp_path, data, both):
    stored = both[0] | {NAME + SUFFIX: both[0][NAME + SUFFIX][:4].contiguous()}
    refusal(write(tmp_path, stored, data), NAME + SUFFIX, "shape [4, 2]", "[5, 2]")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_factors_of_a_wrong_dtype_are_refused(tmp_path, data, both, dtype):
    stored = both[0] | {NAME + SUFFIX: both[0][NAME + SUFFIX].to(dtype)}
    refusal(write(tmp_path, stored, data), NAME, "is stored as")


def test_factors_beside_a_weight_in_full_are_refused(tmp_path, data, both):
    stored = both[0] | {NAME: both[1][NAME]}
    refusal(write(tmp_path, stored, data), NAME, "beside")


def test_factors_of_a_parameter_that_does_not_exist_are_refused(tmp_path, data, both):
    extra = {f"model.layers.0.mlp.ghost.weight{SUFFIX}": torch.ones(1, 1)}
    refusal(write(tmp_path, both[0] | extra, data), "ghost")


def test_blocks_that_the_config_does_not_mention_are_refused(tmp_path, data, both):
    silent = {name: value for name, value in data.items() if name != "quantization_config"}
    refusal(write(tmp_path, both[0], silent), "FP8 in blocks", SUFFIX, "weight_block_size")

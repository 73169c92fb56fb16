"""Every way of storing weights that people use: read, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leyline.errors import ModelError
from leyline.model.config import ModelConfig
from leyline.model.schemes import fp8_block
from leyline.model.weights import load_model
from tests.model.folders import DATA, tensors, write

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_fp8_blocks_are_read():
    assert fp8_block({"quantization_config": BLOCKS}) == (128, 128)
    full = BLOCKS | {"fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": []}
    assert ModelConfig.from_dict(DATA | {"quantization_config": full}).fp8_block == (128, 128)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_plain_weights_have_no_block(key):
    assert fp8_block({key: None}) is None and fp8_block({}) is None


# By config, as the variants of models.md 2.3 write it.
REFUSED: list[tuple[str, Any, str]] = [
    ("quantization_config", {"quant_method": "fp8"}, "fp8 (one factor a tensor)"),
    ("quantization_config", BLOCKS | {"fmt": "e5m2"}, "fp8 (e5m2)"),
    ("quantization_config", BLOCKS | {"activation_scheme": "static"}, "fp8 (static activations)"),
    ("quantization_config", {"quant_method": "awq", "bits": 4}, "awq (4 bit)"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq (4 bit)"),
    ("quantization_config", {"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ("quantization_config", {"quant_method": "mxfp4"}, "mxfp4"),
    (
        "quantization_config",
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "compressed-tensors (pack-quantized)",
    ),
    ("quantization_config", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ("quantization_config", {"group_size": 64, "bits": 4}, "MLX affine"),
    ("quantization_config", {}, "a scheme without a name"),
    ("quantization", {"group_size": 64, "bits": 4}, "MLX affine"),
    ("compression_config", {"format": "int-quantized"}, "without a name"),
]


@pytest.mark.parametrize("key, block, name", REFUSED)
def test_other_schemes_are_refused_by_name(key, block, name):
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(DATA | {key: block})
    assert key in caught.value.message and name in caught.value.message
    assert "BF16 checkpoint" in caught.value.message and "\n" not in caught.value.message


def test_the_refusal_names_what_to_use_instead():
    data = DATA | {"model_type": "glm4_moe_lite", "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ModelError, match=r"such as zai-org/GLM-4\.7-Flash"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("size", [[128], 128, [128, 0], [128, "128"], [True, 128], "128x128"])
def test_a_block_size_that_is_none_is_refused(size):
    with pytest.raises(ModelError, match="weight_block_size"):
        fp8_block({"quantization_config": BLOCKS | {"weight_block_size": size}})


@pytest.mark.parametrize("block", ["fp8", 3, []])
def test_a_block_that_is_no_object_is_refused(block):
    with pytest.raises(ModelError, match="quantization_config must be an object"):
        fp8_block({"quantization_config": block})


# By the tensors, where the config keeps quiet.
PROJECTION = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "beside, name",
    [
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        (("qweight", "qzeros", "scales"), "AWQ or GPTQ"),
        (("weight_packed", "weight_scale", "weight_shape"), "compressed-tensors (packed"),
        (("weight", "weight_scale"), "compressed-tensors or per-tensor FP8"),
        (("weight", "scales", "biases"), "MLX affine"),
        (("weight", "weight.absmax"), "bitsandbytes"),
        (("weight", "weight.quant_state.bitsandbytes__nf4"), "bitsandbytes NF4"),
    ],
)
def test_a_scheme_is_known_by_its_tensors(tmp_path, beside, name):
    weights = {n: value for n, value in tensors().items() if not n.startswith(PROJECTION)}
    weights |= {f"{PROJECTION}.{part}": torch.ones(2, 2, dtype=torch.int32) for part in beside}
    with pytest.raises(ModelError) as caught:
        load_model(write(tmp_path, weights), progress=False)
    assert name in caught.value.message and PROJECTION in caught.value.message
    assert "BF16 checkpoint" in caught.value.message


def test_an_ordinary_surplus_is_no_scheme(tmp_path):
    weights = tensors() | {f"{PROJECTION}.bias": torch.ones(14)}
    with pytest.raises(ModelError, match="unexpected") as caught:
        load_model(write(tmp_path, weights), progress=False)
    assert "quantised" not in caught.value.message

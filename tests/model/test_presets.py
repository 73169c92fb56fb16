"""The four models in their real sizes, which no test machine holds: on the meta device."""

from __future__ import annotations

import re

import pytest
import torch

from leyline.cache.latent import row_bytes
from leyline.errors import ModelError
from leyline.model.config import ModelConfig
from leyline.model.parameters import (
    EmptyWeights,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
)
from leyline.model.presets import HUB_IDS, preset, preset_data
from leyline.model.rope import Rope
from leyline.model.transformer import Transformer

# models.md 1: parameters and those active a token, in billions, and the bytes of a cached token in
# all layers with a bfloat16 and with a float32 band.
FIGURES = {
    "deepseek-v2-lite": (15.706, 2.45, 31_104, 34_560),
    "moonlight-16b-a3b": (15.960, 2.58, 31_104, 34_560),
    "glm-4.7-flash": (29.943, 3.58, 54_144, 60_160),
    "joyai-llm-flash": (48.943, 3.04, 46_080, 51_200),
}
SCALES = {
    "deepseek-v2-lite": 0.1147214,
    "moonlight-16b-a3b": 0.0721688,
    "glm-4.7-flash": 0.0625,
    "joyai-llm-flash": 0.0721688,
}
# models.md 2.1: (layers, dense layers, experts, low-rank queries, router bias).
MAKE = {
    "deepseek-v2-lite": (27, 64, False, False),
    "moonlight-16b-a3b": (27, 64, False, True),
    "glm-4.7-flash": (47, 64, True, True),
    "joyai-llm-flash": (40, 256, True, True),
}


@pytest.fixture(params=HUB_IDS)
def name(request) -> str:
    return request.param


def test_a_preset_is_named_for_each_model(name):
    assert FIGURES.keys() == HUB_IDS.keys()
    assert re.fullmatch(r"[\w-]+/[\w.-]+", HUB_IDS[name])


def test_the_whole_model_builds_without_memory(name):
    config = preset(name)
    weights = EmptyWeights(config)
    model = Transformer(config, weights, device="meta")
    assert weights.left == {}
    experts = model._layers[1]._mlp
    shape = (config.n_routed_experts, 2 * config.moe_intermediate_size, config.hidden_size)
    assert tuple(experts._gate_up.shape) == shape  # type: ignore[union-attr]
    assert experts._gate_up.device.type == "meta"  # type: ignore[union-attr]


def test_the_number_of_parameters_is_the_real_ones(name):
    total, active, _, _ = FIGURES[name]
    assert round(num_parameters(preset(name)) / 1e9, 3) == total
    assert round(num_active_parameters(preset(name)) / 1e9, 2) == active


def test_one_more_row_is_noticed(name):
    data = preset_data(name)
    wider = ModelConfig.from_dict(data | {"vocab_size": data["vocab_size"] * 101 // 100})
    assert round(num_parameters(wider) / 1e9, 3) != FIGURES[name][0]


@pytest.mark.parametrize("band", [torch.bfloat16, torch.float32])
def test_a_cached_token_takes_the_real_bytes(name, band):
    config = preset(name)
    rows = row_bytes(
        config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim, torch.bfloat16, band
    )
    assert rows == FIGURES[name][2 if band == torch.bfloat16 else 3]


def test_the_softmax_scale_is_the_real_one(name):
    assert Rope(preset(name)).softmax_scale == pytest.approx(SCALES[name], abs=5e-8)


def hub_names(layers: int, experts: int, low_rank: bool, biased: bool) -> set[str]:
    """The keys of a hub checkpoint, written down from models.md 2.1."""
    queries = ["q_a_proj", "q_a_layernorm", "q_b_proj"] if low_rank else ["q_proj"]
    parts = [f"self_attn.{q}" for q in queries]
    parts += [f"self_attn.kv_{p}" for p in ("a_proj_with_mqa", "a_layernorm", "b_proj")]
    parts += ["self_attn.o_proj", "input_layernorm", "post_attention_layernorm"]
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(layers):
        mlps = ["mlp"] if layer == 0 else [f"mlp.experts.{e}" for e in range(experts)]
        mlps += [] if layer == 0 else ["mlp.shared_experts"]
        mine = parts + [f"{m}.{p}_proj" for m in mlps for p in ("gate", "up", "down")]
        mine += [] if layer == 0 else ["mlp.gate"]
        names |= {f"model.layers.{layer}.{part}.weight" for part in mine}
        if biased and layer:
            names.add(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
    return names


def test_the_tensor_names_are_the_hubs(name):
    ours = [n for n, _ in parameter_shapes(preset(name))]
    assert len(ours) == len(set(ours))
    assert set(ours) == hub_names(*MAKE[name])


@pytest.mark.parametrize(
    "name, tensor, shape",
    [
        ("deepseek-v2-lite", "self_attn.q_proj", (3072, 2048)),
        ("deepseek-v2-lite", "self_attn.kv_a_proj_with_mqa", (576, 2048)),
        ("moonlight-16b-a3b", "self_attn.kv_b_proj", (4096, 512)),
        ("moonlight-16b-a3b", "mlp.shared_experts.up_proj", (2816, 2048)),
        ("glm-4.7-flash", "self_attn.q_b_proj", (5120, 768)),
        ("glm-4.7-flash", "self_attn.kv_b_proj", (8960, 512)),
        ("glm-4.7-flash", "self_attn.o_proj", (2048, 5120)),
        ("joyai-llm-flash", "self_attn.q_a_proj", (1536, 2048)),
        ("joyai-llm-flash", "self_attn.q_b_proj", (6144, 1536)),
        ("joyai-llm-flash", "self_attn.kv_b_proj", (8192, 512)),
        ("joyai-llm-flash", "mlp.experts.255.down_proj", (2048, 768)),
    ],
)
def test_shapes_are_those_of_the_files(name, tensor, shape):
    shapes = dict(parameter_shapes(preset(name)))
    assert shapes[f"model.layers.1.{tensor}.weight"] == shape


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ModelError, match="deepseek-v2-lite, moonlight") as caught:
        preset("gpt-2")
    assert caught.value.param == "preset"


def test_empty_weights_are_handed_out_once():
    weights = EmptyWeights(preset("deepseek-v2-lite"))
    assert weights.take("model.norm.weight", torch.float32).shape == (2048,)
    with pytest.raises(ModelError, match="taken twice"):
        weights.take("model.norm.weight", torch.float32)
    with pytest.raises(ModelError, match="its place"):
        weights.take_all({"lm_head.weight": torch.empty(2, 2, device="meta")})

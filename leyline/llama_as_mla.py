"""A llama with grouped heads, rewritten as an MLA model, exactly.

No small pretrained MLA model exists, but a llama *is* one:

    latent    c_t  = the V heads of a token side by side          C = num_kv_heads * head_dim
    rope band k_t  = its K heads side by side, each with its own  R = num_kv_heads * head_dim
                     turn, so the frequencies repeat per head
    query     of head h is zero but in the block of its own K head; N = 0 (no nope rows)
    kv_b_proj of head h picks the block of its own V head

Four details make it exact.

*Scale.* The softmax scale becomes `R**-0.5`. What is missing stands in the config: DeepSeek's own
`mscale_all_dim`, which multiplies the scores by `(0.1 * mscale_all_dim * ln(factor) + 1)**2`. No
weight changes for it, so a bf16 checkpoint stays what it was to the bit. (The embedded model has
the missing factor in its queries instead; its weights are rounded anyway.)

*Norms.* The latent layernorm must be the identity: with an eps of 2**32 and a weight of 2**16 it
is, to the last bit of fp32, wherever the latent's mean square is below 256 (and both are exact in
bf16, which 1e8 and 1e4 are not). Above that the error is the mean square over 2**33, relative.

*Pairs.* Rope pairs must lie interleaved. llama.cpp's converter orders the rows of a llama's q and
k so; the hub's files, and llama.cpp's of Qwen2, hold a pair half a head apart and are reordered.

*Biases.* No bias-free MLA layer can stand for one with biases: everything a layer adds is linear
in a normalised vector, in which nothing is constant, and a constant that a wider hidden state
brought along would be divided by the norm of each token. But DeepSeek's architecture has biases,
switched on by `attention_bias`, at `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`. The last two
take those of v and k (in the latent, and before the turn, in the band) and that of the output as
they are. A q bias needs the compressed query: q_a_proj is then the llama's own q with its bias,
`q_a_layernorm` the identity as above, and q_b_proj the zeros and ones that spread the heads.

What it costs: a cached row is as wide as the llama's own keys and values, no wider; the spread
queries take num_kv_heads times the room, mostly zeros, which is little for 2 to 8 K heads (a third
to a half more weights) and much for a llama in which every head has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leyline.gguf_file import GgufModel, token_ids, tokenizer_config, tokenizer_spec
from leyline.llama import Llama, LlamaShape, llama_of_gguf

__all__ = [
    "LATENT_NORM_EPS",
    "LATENT_NORM_WEIGHT",
    "GgufModel",
    "LlamaShape",
    "gguf_tensor",
    "mla_config",
    "mla_config_of",
    "mla_layer",
    "mla_weights",
    "token_ids",
    "tokenizer_config",
    "tokenizer_spec",
]

LATENT_NORM_EPS = 2.0**32
LATENT_NORM_WEIGHT = 2.0**16  # sqrt(LATENT_NORM_EPS), so that the norm divides by what it adds

TensorOf = Callable[[str], Tensor]  # a source's tensor by its hub name

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_tensor(hub_name: str) -> str:
    """Return llama.cpp's name of a llama's tensor."""
    name, _, kind = hub_name.rpartition(".")
    if name.startswith("model.layers."):
        layer, name = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_GGUF_NAMES[name]}.{kind}"
    return f"{_GGUF_NAMES[name]}.{kind}"


# Tensors -------------------------------------------------------------------------------------


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Bring the halves of every rope pair together: row i of a head to 2i, i + half to 2i + 1.

    Args:
        rows: A weight [heads * head_dim, D] or a bias [heads * head_dim].
        head_dim: Rows of one head.
    """
    heads = rows.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).flatten(0, 2).contiguous()


def spread_heads(weight: Tensor, shape: LlamaShape) -> Tensor:
    """Put every query head into the block of its K head. [H * head_dim, D] -> [H * R, D]."""
    spread = weight.new_zeros(shape.num_heads, shape.kv_dim, weight.shape[-1])
    heads = weight.view(shape.num_heads, shape.head_dim, -1)
    for head in range(shape.num_heads):
        spread[head, shape.block(head)] = heads[head]
    return spread.flatten(0, 1)


def mla_value_choice(shape: LlamaShape) -> Tensor:
    """The kv_b_proj that picks every query head's own V head. [H * head_dim, C], zeros and ones."""
    choice = torch.zeros(shape.num_heads, shape.head_dim, shape.kv_dim)
    for head in range(shape.num_heads):
        choice[head, :, shape.block(head)] = torch.eye(shape.head_dim)
    return choice.flatten(0, 1)


def mla_layer(
    llama: Llama, tensor: TensorOf, layer: int, query_scale: float = 1.0
) -> dict[str, Tensor]:
    """Return one layer's tensors under the names of an MLA checkpoint.

    What is copied keeps its dtype; what the rewrite adds is fp32.

    Args:
        llama: What the source is.
        tensor: The source's tensors.
        layer: Which layer.
        query_scale: Factor on the queries; `mla_config_of` must be told the same.
    """
    shape, prefix = llama.shape, f"model.layers.{layer}."

    def take(name: str) -> Tensor:
        return tensor(prefix + name)

    def turned(name: str) -> Tensor:
        rows = take(name)
        return rows if llama.interleaved else interleaved(rows, shape.head_dim)

    key_value = torch.cat([take("self_attn.v_proj.weight"), turned("self_attn.k_proj.weight")])
    identity = torch.full((shape.kv_dim,), LATENT_NORM_WEIGHT)
    tensors = {
        "input_layernorm.weight": take("input_layernorm.weight"),
        "post_attention_layernorm.weight": take("post_attention_layernorm.weight"),
        **_query(turned, llama, query_scale),
        "self_attn.kv_a_proj_with_mqa.weight": key_value,
        "self_attn.kv_a_layernorm.weight": identity,
        "self_attn.kv_b_proj.weight": mla_value_choice(shape),
        "self_attn.o_proj.weight": take("self_attn.o_proj.weight"),
    }
    if llama.has_bias:
        tensors |= _biases(take, turned, llama)
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"mlp.{name}.weight"] = take(f"mlp.{name}.weight")
    return {prefix + name: value for name, value in tensors.items()}


def _query(turned: TensorOf, llama: Llama, query_scale: float) -> dict[str, Tensor]:
    """The spread queries: projected at once, or in two steps where there is a bias to add."""
    shape = llama.shape
    weight = turned("self_attn.q_proj.weight")
    if not llama.qkv_bias:
        return {"self_attn.q_proj.weight": spread_heads(weight, shape) * query_scale}
    width = shape.num_heads * shape.head_dim
    return {
        "self_attn.q_a_proj.weight": weight,
        "self_attn.q_a_layernorm.weight": torch.full((width,), LATENT_NORM_WEIGHT * query_scale),
        "self_attn.q_b_proj.weight": spread_heads(torch.eye(width), shape),
    }


def _biases(take: TensorOf, turned: TensorOf, llama: Llama) -> dict[str, Tensor]:
    """The three biases that `attention_bias` asks for; zeros where the llama has none."""
    shape, biases = llama.shape, {}
    key_value = torch.zeros(2 * shape.kv_dim)
    if llama.qkv_bias:
        biases["self_attn.q_a_proj.bias"] = turned("self_attn.q_proj.bias")
        key_value = torch.cat([take("self_attn.v_proj.bias"), turned("self_attn.k_proj.bias")])
    biases["self_attn.kv_a_proj_with_mqa.bias"] = key_value
    output = take("self_attn.o_proj.bias") if llama.output_bias else torch.zeros(shape.hidden_size)
    return {**biases, "self_attn.o_proj.bias": output}


# The config ----------------------------------------------------------------------------------


def mla_config_of(llama: Llama, dtype: str, query_scale: float = 1.0) -> dict[str, Any]:
    """Return `config.json` of the rewritten model; Leyline's own keys stand last."""
    shape = llama.shape
    return {
        "architectures": ["LeylineMlaForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": dtype,
        "vocab_size": llama.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "q_lora_rank": shape.num_heads * shape.head_dim if llama.qkv_bias else None,
        "kv_lora_rank": shape.kv_dim,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": shape.kv_dim,
        "v_head_dim": shape.head_dim,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "first_k_dense_replace": shape.num_layers,
        "max_position_embeddings": llama.window,
        "rms_norm_eps": llama.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _scale_block(llama, query_scale),
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": llama.has_bias,
        "tie_word_embeddings": llama.tied,
        **llama.ids,
        "rope_inv_freq": shape.inv_freq,
        "latent_norm_eps": LATENT_NORM_EPS,
    }


def _scale_block(llama: Llama, query_scale: float) -> dict[str, Any] | None:
    """A YaRN block that brings the softmax scale from R**-0.5 to the llama's, and nothing else.

    The frequencies are given outright, and with both mscales equal the amplitude is 1.
    """
    missing = llama.softmax_scale * math.sqrt(llama.shape.kv_dim) / query_scale
    if math.isclose(missing, 1.0, rel_tol=1e-12):
        return None
    mscale = 10 * (math.sqrt(missing) - 1)
    return {
        "type": "yarn",
        "factor": math.e,  # its logarithm is 1
        "original_max_position_embeddings": llama.window,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


# The embedded model --------------------------------------------------------------------------


def mla_weights(
    source: GgufModel, dtype: torch.dtype, tick: Callable[[int], Any] = lambda layer: None
) -> dict[str, Tensor]:
    """Return a GGUF's whole rewritten checkpoint; `tick` is told each finished layer's number."""
    llama = llama_of_gguf(source)

    def tensor(name: str) -> Tensor:
        return source.tensor(gguf_tensor(name))

    ends = [
        "model.embed_tokens.weight",
        "model.norm.weight",
        *([] if llama.tied else ["lm_head.weight"]),
    ]
    tensors = {name: tensor(name).to(dtype) for name in ends}
    for layer in range(llama.shape.num_layers):
        for name, value in mla_layer(llama, tensor, layer, _full_scale(llama)).items():
            tensors[name] = value.to(dtype).contiguous()
        tick(layer)
    return tensors


def mla_config(source: GgufModel, dtype: str) -> dict[str, Any]:
    """Return the `config.json` that goes with `mla_weights`."""
    llama = llama_of_gguf(source)
    return mla_config_of(llama, dtype, _full_scale(llama))


def _full_scale(llama: Llama) -> float:
    """The factor on queries that leaves nothing for the config to put right."""
    return llama.softmax_scale * math.sqrt(llama.shape.kv_dim)

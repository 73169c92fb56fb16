"""A llama with grouped heads, rewritten as an MLA model, exactly.

No small pretrained MLA model exists, but a llama *is* one:

    latent    c_t  = the V heads of a token side by side          C = num_kv_heads * head_dim
    rope band k_t  = its K heads side by side, each with its own  R = num_kv_heads * head_dim
                     turn, so the frequencies repeat per head
    query     of head h is zero but in the block of its own K head; N = 0 (no nope rows)
    kv_b_proj of head h picks the block of its own V head

Three details make it exact. The softmax scale becomes `R**-0.5`, so queries are multiplied by
`sqrt(R / head_dim)`. The latent layernorm must be the identity: with an eps of 2**32 and a weight
of 2**16 it is, to the last bit of fp32, wherever the latent's mean square is below 256 (and both
are exact in bf16, which 1e8 and 1e4 are not). And rope pairs must lie interleaved: llama.cpp's
converter has already ordered the rows of q and k so, so nothing is left to do.

The source is a GGUF file; what comes out are the contents of a model folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch

from leyline.errors import ModelError

LATENT_NORM_EPS = 2.0**32
LATENT_NORM_WEIGHT = 2.0**16  # sqrt(LATENT_NORM_EPS), so that the norm divides by what it adds
CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens


class GgufModel:
    """A llama in a GGUF file: its metadata, and its tensors in fp32 under llama.cpp's names."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, name: str) -> Any:
        """Return a metadata value.

        Raises:
            ModelError: If there is none of that name.
        """
        found = self._reader.get_field(name)
        if found is None:
            raise ModelError(f"The GGUF file has no metadata field {name!r}.")
        return found.contents()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, dequantised to fp32, [rows, columns] as in a linear layer.

        Raises:
            ModelError: If there is none of that name.
        """
        if name not in self._tensors:
            raise ModelError(f"The GGUF file has no tensor {name!r}.")
        found = self._tensors[name]
        return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy()).float()


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a llama with grouped heads, and what the rewrite makes of them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float

    @classmethod
    def of(cls, source: GgufModel) -> LlamaShape:
        """Read the sizes from GGUF metadata."""
        num_heads = int(source.field("llama.attention.head_count"))
        hidden_size = int(source.field("llama.embedding_length"))
        return cls(
            num_layers=int(source.field("llama.block_count")),
            hidden_size=hidden_size,
            intermediate_size=int(source.field("llama.feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(source.field("llama.attention.head_count_kv")),
            head_dim=hidden_size // num_heads,
            rope_theta=float(source.field("llama.rope.freq_base")),
        )

    @property
    def kv_dim(self) -> int:
        """Width of all K (or V) heads side by side: both C and R of the rewrite."""
        return self.num_kv_heads * self.head_dim

    @property
    def inv_freq(self) -> list[float]:
        """The llama's frequencies, once per K head. [R / 2], radians per position."""
        half = self.head_dim // 2
        once = [self.rope_theta ** (-index / half) for index in range(half)]
        return once * self.num_kv_heads

    def block(self, head: int) -> slice:
        """The rows of query head `head`'s own K (or V) head among all of them."""
        kv_head = head * self.num_kv_heads // self.num_heads
        return slice(kv_head * self.head_dim, (kv_head + 1) * self.head_dim)


def mla_query(weight: torch.Tensor, shape: LlamaShape) -> torch.Tensor:
    """Spread every query head over the rope band. [H * head_dim, D] -> [H * R, D]."""
    spread = weight.new_zeros(shape.num_heads, shape.kv_dim, weight.shape[-1])
    heads = weight.view(shape.num_heads, shape.head_dim, -1)
    for head in range(shape.num_heads):
        spread[head, shape.block(head)] = heads[head] * math.sqrt(shape.kv_dim / shape.head_dim)
    return spread.flatten(0, 1)


def mla_value_choice(shape: LlamaShape) -> torch.Tensor:
    """The kv_b_proj that picks every query head's own V head. [H * head_dim, C], zeros and ones."""
    choice = torch.zeros(shape.num_heads, shape.head_dim, shape.kv_dim)
    for head in range(shape.num_heads):
        choice[head, :, shape.block(head)] = torch.eye(shape.head_dim)
    return choice.flatten(0, 1)


def mla_layer(source: GgufModel, layer: int, shape: LlamaShape) -> dict[str, torch.Tensor]:
    """Return one layer's tensors under the names of an MLA checkpoint, in fp32."""

    def weight(name: str) -> torch.Tensor:
        return source.tensor(f"blk.{layer}.{name}.weight")

    tensors = {
        "input_layernorm": weight("attn_norm"),
        "post_attention_layernorm": weight("ffn_norm"),
        "self_attn.q_proj": mla_query(weight("attn_q"), shape),
        "self_attn.kv_a_proj_with_mqa": torch.cat([weight("attn_v"), weight("attn_k")]),
        "self_attn.kv_a_layernorm": torch.full((shape.kv_dim,), LATENT_NORM_WEIGHT),
        "self_attn.kv_b_proj": mla_value_choice(shape),
        "self_attn.o_proj": weight("attn_output"),
        "mlp.gate_proj": weight("ffn_gate"),
        "mlp.up_proj": weight("ffn_up"),
        "mlp.down_proj": weight("ffn_down"),
    }
    return {f"model.layers.{layer}.{name}.weight": value for name, value in tensors.items()}


def mla_weights(
    source: GgufModel, dtype: torch.dtype, tick: Callable[[int], Any] = lambda layer: None
) -> dict[str, torch.Tensor]:
    """Return the whole rewritten checkpoint; `tick` is told each finished layer's number."""
    shape = LlamaShape.of(source)
    tensors = {
        "model.embed_tokens.weight": source.tensor("token_embd.weight"),
        "model.norm.weight": source.tensor("output_norm.weight"),
    }
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    for layer in range(shape.num_layers):
        for name, value in mla_layer(source, layer, shape).items():
            tensors[name] = value.to(dtype).contiguous()
        tick(layer)
    return tensors


def mla_config(source: GgufModel, dtype: str) -> dict[str, Any]:
    """Return `config.json` of the rewritten model; Leyline's own keys stand last."""
    shape = LlamaShape.of(source)
    return {
        "architectures": ["LeylineMlaForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": dtype,
        "vocab_size": len(source.field("tokenizer.ggml.tokens")),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.kv_dim,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": shape.kv_dim,
        "v_head_dim": shape.head_dim,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "first_k_dense_replace": shape.num_layers,
        "max_position_embeddings": int(source.field("llama.context_length")),
        # The file holds it as fp32, so 1e-5 reads 9.99999975e-06.
        "rms_norm_eps": float(f"{source.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        **token_ids(source),
        "rope_inv_freq": shape.inv_freq,
        "latent_norm_eps": LATENT_NORM_EPS,
    }


def token_ids(source: GgufModel) -> dict[str, int]:
    """Return the ids of bos, eos and pad, as `generation_config.json` holds them."""
    return {
        "bos_token_id": int(source.field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(source.field("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(source.field("tokenizer.ggml.padding_token_id")),
    }


def tokenizer_spec(source: GgufModel) -> dict[str, Any]:
    """Return `tokenizer.json` for a GGUF's "smollm" vocabulary (byte-level BPE).

    Raises:
        ModelError: If the vocabulary is of another kind.
    """
    kind = source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"The GGUF's tokenizer is {kind}, expected ('gpt2', 'smollm').")
    tokens = source.field("tokenizer.ggml.tokens")
    types = source.field("tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True  # GPT-2's word pattern
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _special_token(index, token)
            for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in source.field("tokenizer.ggml.merges")],
        },
    }


def _special_token(index: int, token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **flags, "special": True}


def tokenizer_config(source: GgufModel) -> dict[str, Any]:
    """Return `tokenizer_config.json`: which tokens are special, and no BOS by itself."""
    tokens = source.field("tokenizer.ggml.tokens")
    ids = token_ids(source)
    return {
        "add_bos_token": bool(source.field("tokenizer.ggml.add_bos_token")),
        "add_prefix_space": False,
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[int(source.field("tokenizer.ggml.unknown_token_id"))],
        "model_max_length": int(source.field("llama.context_length")),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }

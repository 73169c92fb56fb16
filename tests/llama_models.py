"""Folders of random llamas, made by `transformers`, and the models they were made from.

Every size is distinct, biases are as large as what they are added to, and the softmax has a shape,
so that a row in a wrong place or a lost bias shows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.tiny_models import (
    MERGES,
    SPECIAL,
    VOCAB_SIZE,
    byte_tokenizer,
    quiet,
    write_tokenizer,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 42,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA_3}),
    "yarn": ("Qwen2", {"rope_parameters": YARN}),
    "linear": ("Llama", {"rope_parameters": LINEAR}),
}


def llama_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """Write a random model to a folder; returns it, its values those of `dtype`."""
    import transformers

    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, "tie_word_embeddings": False, "rope_parameters": dict(PLAIN), **options}
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    randomise(model, dtype)
    with quiet():  # a copy, because casting a whole model rounds its frequencies too
        copy.deepcopy(model).to(dtype).save_pretrained(folder, **save)
    write_tokenizer(folder)
    return model


def randomise(model: Any, dtype: torch.dtype) -> None:
    """Replace every parameter by a seeded random value that `dtype` holds."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.named_parameters():
        value = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.1 * value
        elif tensor.ndim == 2 and "embed" not in name:
            value *= (2.0 if "q_proj" in name else 1.0) * tensor.shape[-1] ** -0.5
        tensor.data.copy_(value.to(dtype))


def write_gguf(model: Any, path: Path, **options: Any) -> Path:
    """Write a model of `llama_model` as llama.cpp's converter does; returns the file.

    Args:
        model: The model.
        path: Where to.
        options: `architecture`, `kind` (a GGUF type), `pre`, `extra` tensors, and more metadata
            by full name, in which None leaves a field out.
    """
    architecture, extra = options.pop("architecture", "llama"), options.pop("extra", {})
    kind = getattr(gguf.GGMLQuantizationType, options.pop("kind", "F32"))
    fields = {
        **_gguf_fields(model.config, architecture),
        **_gguf_vocabulary(options.pop("pre", "gpt-2")),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**fields, **options}.items():
        if value is not None:
            _add_field(writer, name, value)
    for name, tensor in {**_gguf_tensors(model, architecture), **extra}.items():
        array = tensor.numpy()
        plain = array.ndim == 1
        stored = gguf.GGMLQuantizationType.F32 if plain else kind
        writer.add_tensor(name, gguf.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: Any, name: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    adders[type(value)](name, value)


def _gguf_fields(config: Any, architecture: str) -> dict[str, Any]:
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SIZES["head_dim"],
        "attention.value_length": SIZES["head_dim"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": SIZES["head_dim"],
    }
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def _gguf_vocabulary(pre: str) -> dict[str, Any]:
    vocab = byte_tokenizer().get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    unused = [f"[unused{index}]" for index in range(VOCAB_SIZE - len(tokens))]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)) + [5] * len(unused)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + unused,
        "token_type": types,
        "merges": [f"{left} {right}" for left, right in MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def _gguf_tensors(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """The weights under llama.cpp's names; of a llama, q and k rows in its order."""
    names = {
        "embed_tokens": "token_embd",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "norm": "output_norm",
        "lm_head": "output",
    }
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        *_, module, kind = parts = name.split(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if architecture == "llama" and module in heads:
            halves = tensor.reshape(heads[module], 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        tensors[f"{block}{names[module]}.{kind}"] = tensor.contiguous()
    return tensors

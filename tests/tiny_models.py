"""Model folders for tests: a few thousand random weights, a byte tokenizer, a chat template.

`transformers` makes and saves the weights, so a folder is also an oracle's checkpoint. Weights are
scaled so that the softmax has a shape, norms, routers and router biases are random, and every
dimension is distinct, so that a mix-up of two of them cannot pass.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 311  # a little more than the tokenizer has, as with the real models
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "the"), ("an", "d"))
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_EXPERTS: dict[str, Any] = {
    "intermediate_size": 44,
    "moe_intermediate_size": 28,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_COMMON: dict[str, Any] = {
    **_ATTENTION,
    **_EXPERTS,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
}
# An amplitude above 1 (mscale and mscale_all_dim differ), which a turn must not apply again.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def _v2_yarn() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_COMMON, q_lora_rank=None, topk_method="greedy", rope_parameters=dict(_YARN)
        )
    )


def _v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_COMMON,
            q_lora_rank=None,
            routed_scaling_factor=2.446,
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        )
    )


def _glm() -> Any:
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    return Glm4MoeLiteForCausalLM(
        Glm4MoeLiteConfig(
            **_COMMON,
            q_lora_rank=14,
            routed_scaling_factor=1.8,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    )


FAMILIES = {"v2_yarn": _v2_yarn, "v3": _v3, "glm": _glm}


def tiny_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a model of a family in float32 to a folder; returns the folder."""
    model = FAMILIES[family]().to(torch.float32).eval()
    _randomise(model, seed)
    with quiet():
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def load_oracle(folder: Path) -> Any:
    """`transformers`' own model of a folder, float32, eager attention."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of `transformers`."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, its config, the chat template and the stop id."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe = byte_tokenizer()
    bpe.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def byte_tokenizer() -> BpeTokenizer:
    """A byte-level BPE of three special tokens, all bytes and a few merges."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [left + right for left, right in MERGES]
    vocab = {name: index for index, name in enumerate(names)}
    bpe = BpeTokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore
    bpe.add_special_tokens(list(SPECIAL))
    return bpe


def _randomise(model: Any, seed: int) -> None:
    """Replace every parameter and the router biases by seeded random values."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        value = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.1 * value
        elif "bias" in name:
            value *= 0.1
        elif "embed" not in name:
            value *= (2.5 if "q_" in name else 1.0) * tensor.shape[-1] ** -0.5
        tensor.data.copy_(value)

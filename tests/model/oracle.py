"""`transformers` as the oracle: the four target shapes, scaled down, every dimension its own.

What a random initialisation leaves trivial is randomised (norms, routers, router biases), and
weights keep activations near 1, so that softmax has a shape. The norms inside attention get the
config's eps: `transformers` hard-codes 1e-6 there, serving engines take the config's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 97
LAYERS = 3
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 163840,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def _plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _heads(number: int) -> dict[str, Any]:
    return {"num_attention_heads": number, "num_key_value_heads": number}


def _v2_lite() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_COMMON,
        **_heads(5),
        q_lora_rank=None,
        qk_nope_head_dim=14,
        v_head_dim=18,
        n_routed_experts=9,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        norm_topk_prob=False,
        rope_parameters=dict(_YARN),
    )


def _moonlight() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_COMMON,
        **_heads(5),
        q_lora_rank=None,
        qk_nope_head_dim=14,
        v_head_dim=18,
        n_routed_experts=9,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
        rope_parameters=_plain(50_000.0),
    )


def _glm_flash() -> Any:
    from transformers import Glm4MoeLiteConfig

    return Glm4MoeLiteConfig(
        **_COMMON,
        **_heads(5),
        q_lora_rank=34,
        qk_nope_head_dim=21,  # 3 : 4 to v, and an odd head
        v_head_dim=28,
        n_routed_experts=9,
        num_experts_per_tok=4,
        n_shared_experts=1,
        routed_scaling_factor=1.8,
        rms_norm_eps=1e-5,
        rope_parameters=_plain(1_000_000.0),
    )


def _joyai() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_COMMON,
        **_heads(6),
        q_lora_rank=34,
        qk_nope_head_dim=14,
        v_head_dim=18,
        n_routed_experts=16,
        num_experts_per_tok=5,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        rope_parameters=_plain(32_000_000.0),
    )


def _grouped() -> Any:
    config = _joyai()
    config.n_group, config.topk_group, config.num_experts_per_tok = 4, 2, 3
    return config


CONFIGS = {
    "deepseek_v2_lite": _v2_lite,
    "moonlight": _moonlight,
    "glm_flash": _glm_flash,
    "joyai": _joyai,
    "grouped": _grouped,
}


@dataclass(frozen=True)
class Answer:
    """What the oracle says of one sequence: per layer where it has several.

    Attributes:
        ckv: [T, C] each.
        kpe: [T, R] each, in interleaved pairs.
        hidden: Output of every layer but the last [T, D] each.
        logits: [T, V].
    """

    ckv: list[Tensor]
    kpe: list[Tensor]
    hidden: list[Tensor]
    logits: Tensor

    def worst_error(self, want: Answer) -> float:
        """The largest relative error of any row, layer or logit."""
        pairs = [(self.logits, want.logits)]
        pairs += zip(self.ckv + self.kpe, want.ckv + want.kpe, strict=True)
        pairs += zip(self.hidden, want.hidden, strict=True)
        return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


class Oracle:
    """One random model in float32, and a folder with its checkpoint."""

    def __init__(self, config: Any, folder: Path, shard_size: str = "50GB") -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.folder = folder
        self.config = config
        with quiet():
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            _randomise(self.model)
            self.model.save_pretrained(folder, max_shard_size=shard_size)
        for module_name, module in self.model.named_modules():
            if module_name.endswith("a_layernorm"):
                module.variance_epsilon = self.config.rms_norm_eps

    def answer(self, ids: Tensor, positions: Tensor) -> Answer:
        """Run a whole sequence at the given positions."""
        with torch.no_grad():
            out = self.model(
                ids[None], position_ids=positions[None], output_hidden_states=True, use_cache=True
            )
        layers = out.cache.layers
        return Answer(
            ckv=[layer.keys[0, 0] for layer in layers],
            kpe=[self._interleaved(layer.values[0, 0]) for layer in layers],
            hidden=[hidden[0] for hidden in out.hidden_states[1:-1]],
            logits=out.logits[0],
        )

    def greedy(self, ids: Tensor, count: int) -> list[int]:
        """The next tokens, each time from a fresh pass over everything."""
        for _ in range(count):
            logits = self.answer(ids, torch.arange(len(ids))).logits
            ids = torch.cat([ids, logits[-1:].argmax(-1)])
        return ids[-count:].tolist()

    def _interleaved(self, kpe: Tensor) -> Tensor:
        """deepseek_v2 stores pairs side by side, the other classes all evens, then all odds."""
        if self.config.model_type == "deepseek_v2":
            return kpe
        return torch.stack(kpe.chunk(2, dim=-1), dim=-1).flatten(-2)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' remark on YaRN's explicit factor, and without its progress bars."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(before)


def _randomise(model: Any) -> None:
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            # bfloat16 values, so that a checkpoint may store them as such.
            value.data.copy_(value.data.normal_(std=0.2).bfloat16())
        elif name.endswith("norm.weight"):
            value.data.normal_(mean=1.0, std=0.2)
        elif name.endswith("embed_tokens.weight"):
            value.data.normal_()
        elif value.ndim >= 2:
            value.data.normal_(std=1.5 * value.shape[-1] ** -0.5)

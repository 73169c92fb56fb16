"""What a model folder's `config.json` says, checked.

Field names are those of the Hugging Face configs. Both spellings are read: the older one
(`rope_theta`, `rope_scaling`, `torch_dtype`) and the one that transformers 5 writes
(`rope_parameters`, `dtype`, `mlp_layer_types`). Whatever Leyline cannot run exactly is refused
here, with the name of the key, because a model that loads and answers nonsense is the worse error.

Two keys are Leyline's own: `rope_inv_freq` (one frequency a rope pair, in place of `rope_theta`)
and `latent_norm_eps` (eps of the norms inside attention, where it differs from `rms_norm_eps`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline.errors import ModelError
from leyline.model.schemes import Block, fp8_block

MODEL_TYPES = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "glm4_moe_lite": "glm4_moe_lite",
}
DTYPES = ("bfloat16", "float16", "float32")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORING_FUNCS = ("softmax", "sigmoid")
LARGEST_FLOAT = sys.float_info.max
LARGEST = {  # of an integer; whatever is named nowhere ends at 2**32
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), 10_000),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "n_shared_experts"), 65_536),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"), 2**20),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**20),
    "vocab_size": 2**24,
}


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """The YaRN block of a rope config (arXiv 2309.00071, with DeepSeek's two mscales).

    Attributes:
        factor: How many times the context was stretched.
        original_max_position_embeddings: Context before the stretch, in tokens.
        beta_fast: Pairs that turn more often than this over the old context keep their frequency.
        beta_slow: Pairs that turn less often than this are slowed by `factor`.
        mscale: Numerator of the cos/sin amplitude, together with `mscale_all_dim`.
        mscale_all_dim: Its denominator, and alone the factor on the softmax scale.
        attention_factor: The amplitude, if given outright.
        truncate: Whether the borders of the ramp are rounded to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one MLA transformer; see the module's docstring for the spellings read.

    Attributes:
        model_type: `deepseek_v2`, `deepseek_v3` (also JoyAI's) or `glm4_moe_lite`.
        q_lora_rank: Width of the compressed query, None where queries are projected directly.
        qk_nope_head_dim: Query width without position, N; may be 0.
        n_routed_experts: Experts a layer, E; 0 makes every layer dense.
        mlp_layer_types: "dense" or "sparse" for each layer; derived where the file has none.
        rope_inv_freq: Radians a position for each rope pair [R/2], or None for the theta formula.
        latent_norm_eps: eps of `q_a_layernorm` and `kv_a_layernorm`.
        attention_bias: Whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have biases.
        max_position_embeddings: The window, in tokens.
        num_nextn_predict_layers: MTP layers behind the model's own; they are not loaded.
        dtype: Name of the dtype the weights are meant to run in.
        fp8_block: Rows and columns of the blocks of FP8 weights, None where all are floats.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float
    rope_theta: float
    mlp_layer_types: tuple[str, ...]
    yarn: YarnScaling | None = None
    rope_inv_freq: tuple[float, ...] | None = None
    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    num_nextn_predict_layers: int = 0
    dtype: str = "bfloat16"
    fp8_block: Block | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head, N + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def has_router_bias(self) -> bool:
        """Whether the router carries `e_score_correction_bias`."""
        return self.topk_method == "noaux_tc"

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's MLP is a plain one, without experts."""
        return self.mlp_layer_types[layer] == "dense"

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a model folder.

        Raises:
            ModelError: No such folder or file, not JSON, or a model that cannot be run.
        """
        path = Path(folder) / "config.json"
        try:
            if not path.parent.is_dir():
                raise ModelError(
                    f"There is no model folder {str(folder)!r}: give a folder that holds "
                    "config.json and safetensors files.",
                    param="model",
                )
            if not path.is_file():
                raise ModelError(f"The folder {str(folder)!r} has no config.json.", param="model")
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            what = "cannot be read" if isinstance(error, OSError) else "is not valid JSON"
            raise ModelError(f"config.json {what}: {error}.", param="model") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> ModelConfig:
        """Check a decoded `config.json`.

        Raises:
            ModelError: A key is missing, has a wrong type or range, or asks for something that
                Leyline does not run; the message names the key and what is allowed.
        """
        if not isinstance(data, Mapping):
            raise ModelError("config.json must hold one JSON object.", param="model")
        reader = _Reader(data)
        model_type = _model_type(reader)
        _refuse_unsupported(reader)
        fields = _attention_fields(reader) | _rope_fields(reader, reader.even("qk_rope_head_dim"))
        fields |= _moe_fields(reader, model_type, fields["num_hidden_layers"])
        return cls(model_type=model_type, fp8_block=fp8_block(data), **fields)


class _Reader:
    """Typed access to a JSON object; null counts as absent."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix

    def raw(self, *names: str) -> Any:
        """The first of several spellings that is there and not null."""
        return next((self._data[n] for n in names if self._data.get(n) is not None), None)

    def integer(self, name: str, minimum: int = 1, default: int | None = None) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"must be an integer of at least {minimum}, not {value!r}")
        if value > LARGEST.get(name, 2**32):
            raise self.error(name, f"must be at most {LARGEST.get(name, 2**32)}")
        return value

    def even(self, name: str) -> int:
        if (value := self.integer(name, 2)) % 2:
            raise self.error(name, f"must be even, because rope turns pairs, not {value}")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {value!r}")
        if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT or (positive and value <= 0):
            raise self.error(name, f"must be a finite number above 0, not {value!r}")
        return float(value)

    def optional(self, name: str) -> float | None:
        return None if self.raw(name) is None else self.number(name, positive=False)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def choice(self, name: str, allowed: Collection[str], default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str) or value not in allowed:
            names = ", ".join(allowed)
            raise self.error(name, f"is {value!r}, which is not supported; supported: {names}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.raw(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {value!r}")
        return value or {}

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"config.json: {self._prefix}{name} {problem}.", param="model")

    def _required(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is None and default is None:
            raise self.error(name, "is missing")
        return default if value is None else value


def _model_type(reader: _Reader) -> str:
    """The family. `auto_map` names the author's Python code: it is ignored, and never run."""
    try:
        return MODEL_TYPES[reader.choice("model_type", MODEL_TYPES)]
    except ModelError as error:
        if not reader.raw("auto_map"):
            raise
        raise ModelError(
            f"{error.message} The code that its auto_map names is never run.", param="model"
        ) from None


def _refuse_unsupported(reader: _Reader) -> None:
    """Refuse what would load and then compute something else."""
    reader.choice("hidden_act", ("silu",), "silu")
    for name, allowed in (("mlp_bias", False), ("rope_interleave", True)):
        if reader.boolean(name, allowed) is not allowed:
            raise reader.error(name, f"must be {str(allowed).lower()}; the other is not supported")
    if reader.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", "must be 1.0")


def _attention_fields(reader: _Reader) -> dict[str, Any]:
    """Sizes, norms, ids: all that is neither rope nor experts."""
    eps = reader.number("rms_norm_eps", 1e-6)
    dtype_name = "dtype" if reader.raw("dtype") is not None else "torch_dtype"
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": reader.integer("num_attention_heads"),
        "q_lora_rank": None if reader.raw("q_lora_rank") is None else reader.integer("q_lora_rank"),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim", 0),
        "v_head_dim": reader.integer("v_head_dim"),
        "intermediate_size": reader.integer("intermediate_size"),
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "rms_norm_eps": eps,
        "latent_norm_eps": reader.number("latent_norm_eps", eps),
        "tie_word_embeddings": reader.boolean("tie_word_embeddings", False),
        "attention_bias": reader.boolean("attention_bias", False),
        "bos_token_id": _token_id(reader, "bos_token_id"),
        "eos_token_id": _token_ids(reader, "eos_token_id"),
        "num_nextn_predict_layers": reader.integer("num_nextn_predict_layers", 0, 0),
        "dtype": reader.choice(dtype_name, DTYPES, "bfloat16"),
    }


def _token_id(reader: _Reader, name: str) -> int | None:
    return None if reader.raw(name) is None else reader.integer(name, 0)


def _token_ids(reader: _Reader, name: str) -> tuple[int, ...]:
    value = reader.raw(name)
    listed = value if isinstance(value, list) else [value]
    ids = [i for i in listed if i is not None]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise reader.error(name, f"must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _rope_fields(reader: _Reader, rope_dim: int) -> dict[str, Any]:
    """Rope in either spelling: one `rope_parameters` object, or theta with `rope_scaling`."""
    modern = reader.mapping("rope_parameters")
    block = modern or reader.mapping("rope_scaling")
    rope = _Reader(block, "rope_parameters." if modern else "rope_scaling.")
    name = "type" if rope.raw("rope_type") is None else "rope_type"
    kind = rope.choice(name, ("default", "yarn"), "default")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "must be 1.0")
    holder = rope if rope.raw("rope_theta") is not None else reader
    theta = holder.number("rope_theta", 10000.0)
    if kind == "yarn" and theta <= 1:
        raise holder.error("rope_theta", f"must be above 1 with YaRN, not {theta}")
    return {
        "qk_rope_head_dim": rope_dim,
        "rope_theta": theta,
        "yarn": _yarn(rope) if kind == "yarn" else None,
        "rope_inv_freq": _inv_freq(reader, rope_dim),
    }


def _yarn(rope: _Reader) -> YarnScaling:
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional("mscale"),
        mscale_all_dim=rope.optional("mscale_all_dim"),
        attention_factor=rope.optional("attention_factor"),
        truncate=rope.boolean("truncate", True),
    )


def _inv_freq(reader: _Reader, rope_dim: int) -> tuple[float, ...] | None:
    values = reader.raw("rope_inv_freq")
    if values is None:
        return None
    numbers = isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= LARGEST_FLOAT
        for v in values
    )
    if not numbers or len(values) != rope_dim // 2:
        raise reader.error("rope_inv_freq", f"must be a list of {rope_dim // 2} finite numbers")
    return tuple(float(v) for v in values)


def _moe_fields(reader: _Reader, model_type: str, num_layers: int) -> dict[str, Any]:
    """Experts and router, or an all-dense model where the config has no routed experts."""
    if not reader.raw("n_routed_experts", "num_local_experts"):
        return {"mlp_layer_types": ("dense",) * num_layers}
    name = "num_local_experts" if reader.raw("n_routed_experts") is None else "n_routed_experts"
    softmax = model_type == "deepseek_v2"
    scoring, method = ("softmax", "greedy") if softmax else ("sigmoid", "noaux_tc")
    fields = {
        "mlp_layer_types": _layer_types(reader, model_type, num_layers),
        "n_routed_experts": reader.integer(name),
        "n_shared_experts": reader.integer("n_shared_experts", 0, 0),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        "n_group": reader.integer("n_group", 1, 1),
        "topk_group": reader.integer("topk_group", 1, 1),
        # GLM's first config had no scoring_func: softmax there is silently wrong.
        "scoring_func": reader.choice("scoring_func", SCORING_FUNCS, scoring),
        "topk_method": reader.choice("topk_method", TOPK_METHODS, method),
        "norm_topk_prob": reader.boolean("norm_topk_prob", not softmax),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }
    _check_groups(reader, fields)
    return fields


def _check_groups(reader: _Reader, fields: dict[str, Any]) -> None:
    experts, groups = fields["n_routed_experts"], fields["n_group"]
    if experts % groups:
        raise reader.error("n_group", f"is {groups}, which does not divide {experts} experts")
    if fields["topk_group"] > groups:
        raise reader.error("topk_group", f"must be at most n_group, {groups}")
    if fields["topk_method"] == "noaux_tc" and groups > 1 and experts // groups < 2:
        raise reader.error("n_group", "leaves fewer than two experts a group")
    reachable = experts // groups * fields["topk_group"]
    if fields["num_experts_per_tok"] > reachable:
        raise reader.error("num_experts_per_tok", f"must be at most {reachable}")


def _layer_types(reader: _Reader, model_type: str, num_layers: int) -> tuple[str, ...]:
    """Which layers have experts: as listed, else from `first_k_dense_replace`."""
    listed = reader.raw("mlp_layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise reader.error("mlp_layer_types", f"must be a list of {num_layers} names")
        if any(name not in ("dense", "sparse") for name in listed):
            raise reader.error("mlp_layer_types", 'may only hold "dense" and "sparse"')
        return tuple(listed)
    first = reader.integer("first_k_dense_replace", 0, 1 if model_type == "glm4_moe_lite" else None)
    freq = reader.integer("moe_layer_freq", 1, 1)
    sparse = (layer >= first and layer % freq == 0 for layer in range(num_layers))
    return tuple("sparse" if s else "dense" for s in sparse)

"""What a checkpoint of the Llama family says of itself, and whether MLA can carry all of it.

Llama, Mistral and Qwen2 differ in little: the bias of some projections, how the rope frequencies
were stretched, which rows of q and k a rope pair is made of. `Llama` holds those differences; it is
read from a `config.json` or from GGUF metadata. Whatever would make the rewrite something else
than the model it was is refused here with its reason: norms of queries and keys (they come after
the projection that the latent replaces), sliding windows (a latent row is seen by every later
token), rope frequencies that change with the length of the context (a cached row was turned by one
frequency), rope on a part of a head, biases in the MLP, experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leyline.errors import ModelError
from leyline.gguf_file import GgufModel, token_ids
from leyline.model.config import LARGEST_FLOAT, ModelConfig
from leyline.model.rope import Rope

MODEL_TYPES = ("llama", "mistral", "qwen2")
QK_NORM = "it normalises queries and keys after projecting them, which a latent cannot carry"
_SCALED = "it scales embeddings, norms or scores in ways that MLA has no place for"
_EXPERTS = "its experts have no equal in a dense MLA checkpoint"
REASONS = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next", "olmo2", "olmo3", "chameleon"), QK_NORM),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "granite", "cohere"), _SCALED),
    **dict.fromkeys(("mixtral", "qwen2_moe", "granitemoe", "gpt_oss"), _EXPERTS),
    "phi": "it turns only a part of each head",
    "stablelm": "it turns only a part of each head",
    "smollm3": "some of its layers have no rope, and in MLA all layers share the frequencies",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "joyai_llm_flash"),
        "it is an MLA model already; serve it as it is",
    ),
}


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
    head_inv_freq: tuple[float, ...] | None = None  # of one head, where theta does not tell

    @classmethod
    def of(cls, source: GgufModel) -> LlamaShape:
        """Read the sizes from GGUF metadata."""
        arch = source.architecture
        num_heads = source.whole(f"{arch}.attention.head_count")
        hidden_size = source.whole(f"{arch}.embedding_length")
        head_dim = source.whole(f"{arch}.attention.key_length", hidden_size // num_heads)
        return cls(
            num_layers=source.whole(f"{arch}.block_count"),
            hidden_size=hidden_size,
            intermediate_size=source.whole(f"{arch}.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=source.whole(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=source.number(f"{arch}.rope.freq_base", 10000.0),
            head_inv_freq=_gguf_frequencies(source, head_dim // 2),
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
        return list(self.head_inv_freq or once) * self.num_kv_heads

    def block(self, head: int) -> slice:
        """The rows of query head `head`'s own K (or V) head among all of them."""
        kv_head = head * self.num_kv_heads // self.num_heads
        return slice(kv_head * self.head_dim, (kv_head + 1) * self.head_dim)


@dataclass(frozen=True)
class Llama:
    """A model of the Llama family, but for its tensors.

    Attributes:
        family: What the source calls itself.
        shape: Its sizes and frequencies.
        window: Tokens it was trained for.
        rms_norm_eps: eps of every norm.
        tied: Whether the head is the embedding.
        ids: bos, eos and pad, as a `config.json` names them; absent ones are left out.
        softmax_scale: Factor on its attention scores, a YaRN amplitude squared included.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        output_bias: Whether that of attention's output has one.
        interleaved: Whether elements 2i and 2i+1 of a head turn together, as llama.cpp orders
            them; else i and i + head_dim / 2, as the hub does.
    """

    family: str
    shape: LlamaShape
    vocab_size: int
    window: int
    rms_norm_eps: float
    tied: bool
    softmax_scale: float
    ids: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    output_bias: bool = False
    interleaved: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether attention has any bias."""
        return self.qkv_bias or self.output_bias

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The hub names and shapes of all tensors that the source must hold."""
        shape, vocab = self.shape, (self.vocab_size, self.shape.hidden_size)
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab}
        for layer in range(shape.num_layers):
            for name, size in self._layer_shapes().items():
                tensors[f"model.layers.{layer}.{name}"] = size
        tensors["model.norm.weight"] = (shape.hidden_size,)
        return tensors if self.tied else {**tensors, "lm_head.weight": vocab}

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = self.shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        widths = {"q": shape.num_heads * shape.head_dim, "k": shape.kv_dim, "v": shape.kv_dim}
        sizes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, width in widths.items():
            sizes[f"self_attn.{name}_proj.weight"] = (width, hidden)
            if self.qkv_bias:
                sizes[f"self_attn.{name}_proj.bias"] = (width,)
        sizes["self_attn.o_proj.weight"] = (hidden, widths["q"])
        if self.output_bias:
            sizes["self_attn.o_proj.bias"] = (hidden,)
        sizes["post_attention_layernorm.weight"] = (hidden,)
        sizes["mlp.gate_proj.weight"] = sizes["mlp.up_proj.weight"] = (inner, hidden)
        sizes["mlp.down_proj.weight"] = (hidden, inner)
        return sizes


# A GGUF file ---------------------------------------------------------------------------------


def llama_of_gguf(source: GgufModel) -> Llama:
    """Read a GGUF file's metadata.

    Raises:
        ModelError: If a field is missing, or the model is one that MLA cannot carry.
    """
    arch = source.architecture
    if arch not in ("llama", "qwen2"):
        raise refusal(f"the GGUF's architecture is {arch!r}", REASONS.get(arch))
    shape = LlamaShape.of(source)
    _check_gguf(source, shape)
    _check_sizes(shape)
    names = set(source.names)
    return Llama(
        family=f"{arch} (GGUF)",
        shape=shape,
        vocab_size=len(source.texts("tokenizer.ggml.tokens")),
        window=source.whole(f"{arch}.context_length"),
        # The file holds it as fp32, so 1e-5 reads 9.99999975e-06.
        rms_norm_eps=float(f"{source.number(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}"),
        tied="output.weight" not in names,
        softmax_scale=shape.head_dim**-0.5,
        ids=token_ids(source),
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        interleaved=arch == "llama",
    )


def _check_gguf(source: GgufModel, shape: LlamaShape) -> None:
    """Refuse what the metadata says beyond a plain llama."""
    arch = source.architecture
    turned = source.find(f"{arch}.rope.dimension_count", shape.head_dim)
    if turned != shape.head_dim:
        raise refusal(f"rope turns {turned} of {shape.head_dim} elements of a head", None)
    if source.find(f"{arch}.attention.value_length", shape.head_dim) != shape.head_dim:
        raise refusal("its value heads are not as wide as its key heads", None)
    if source.find(f"{arch}.expert_count", 0):
        raise refusal("it has experts", _EXPERTS)
    if source.find(f"{arch}.attention.sliding_window", 0):
        raise _window_refusal("attention.sliding_window")
    if source.whole("split.count", 1, minimum=0) > 1:
        raise ModelError("The GGUF is one part of several; join them with llama-gguf-split first.")


def _gguf_frequencies(source: GgufModel, half: int) -> tuple[float, ...] | None:
    """Stretched frequencies of one head; llama 3's divisors are a tensor of their own."""
    arch = source.architecture
    kind = source.find(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise refusal(
            f"its rope scaling is {kind!r}, which GGUF metadata does not tell exactly",
            "name the safetensors folder of the model instead",
        )
    divisors = [source.number(f"{arch}.rope.scaling.factor", 1.0)] * half
    if "rope_freqs.weight" in source.names:
        factors = source.tensor("rope_freqs.weight").flatten().tolist()
        if len(factors) != half or not all(0 < f < math.inf for f in factors):
            raise ModelError(f"The GGUF's rope_freqs.weight must be {half} numbers above 0.")
        divisors = [d * f for d, f in zip(divisors, factors, strict=True)]
    if divisors == [1.0] * half:
        return None
    theta = source.number(f"{arch}.rope.freq_base", 10000.0)
    return tuple(theta ** (-index / half) / divisor for index, divisor in enumerate(divisors))


# A config.json -------------------------------------------------------------------------------


def llama_of_config(data: Mapping[str, Any]) -> Llama:
    """Read a decoded `config.json`.

    Raises:
        ModelError: If a key is missing or wrong, or the model is one that MLA cannot carry.
    """
    kind = data.get("model_type")
    if kind not in MODEL_TYPES:
        raise refusal(f"config.json: model_type is {kind!r}", REASONS.get(str(kind)))
    _check_config(data)
    heads, hidden = _whole(data, "num_attention_heads"), _whole(data, "hidden_size")
    head_dim = _whole(data, "head_dim", hidden // heads)
    frequencies, amplitude = _frequencies(data, head_dim)
    shape = LlamaShape(
        num_layers=_whole(data, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_whole(data, "intermediate_size"),
        num_heads=heads,
        # The classes differ in what an absent key means; only Llama's is the number of heads.
        num_kv_heads=_whole(data, "num_key_value_heads", heads if kind == "llama" else None),
        head_dim=head_dim,
        rope_theta=_rope_theta(data),
        head_inv_freq=frequencies,
    )
    _check_sizes(shape)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return Llama(
        family=kind,
        shape=shape,
        vocab_size=_whole(data, "vocab_size"),
        window=_whole(data, "max_position_embeddings"),
        rms_norm_eps=_number(data, "rms_norm_eps", 1e-6),
        tied=_flag(data, "tie_word_embeddings"),
        softmax_scale=head_dim**-0.5 * amplitude**2,
        ids={name: data[name] for name in names if data.get(name) is not None},
        qkv_bias=kind == "qwen2" or _flag(data, "attention_bias"),
        output_bias=kind != "qwen2" and _flag(data, "attention_bias"),
    )


def _check_config(data: Mapping[str, Any]) -> None:
    """Refuse what cannot be carried, each with its reason."""
    windowed = data.get("use_sliding_window", data["model_type"] == "mistral")
    layers = data.get("layer_types") or []
    if not isinstance(layers, list):
        raise ModelError(f"config.json: layer_types must be a list, not {layers!r}.")
    if windowed and data.get("sliding_window") is not None:
        raise _window_refusal("sliding_window")
    if any(layer != "full_attention" for layer in layers):
        raise _window_refusal("layer_types")
    if _flag(data, "mlp_bias"):
        raise refusal("config.json: mlp_bias is true", "MLA checkpoints have no such biases")
    if data.get("hidden_act", "silu") != "silu":
        raise refusal(f"config.json: hidden_act is {data['hidden_act']!r}", "only silu is run")
    if data.get("quantization_config") is not None:
        raise refusal("its weights are quantised", "name the unquantised model or a GGUF of it")


def _frequencies(data: Mapping[str, Any], head_dim: int) -> tuple[tuple[float, ...] | None, float]:
    """One head's frequencies (None where theta tells them), and the amplitude of cos and sin."""
    rope = _mapping(data, "rope_parameters") or _mapping(data, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    for holder in (data, rope):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise refusal("config.json: partial_rotary_factor is not 1.0", REASONS["phi"])
    if kind in ("dynamic", "longrope"):
        raise refusal(
            f"config.json: the rope type is {kind!r}",
            "its frequencies change with the length of the context, and a cached row has one",
        )
    half = head_dim // 2
    plain = [_rope_theta(data) ** (-index / half) for index in range(half)]
    if kind == "default":
        return None, 1.0
    if kind == "linear":
        return tuple(value / _number(rope, "factor") for value in plain), 1.0
    if kind == "llama3":
        return tuple(_llama3(value, rope) for value in plain), 1.0
    if kind == "yarn":
        return _yarn(data, rope, head_dim)
    raise refusal(f"config.json: the rope type is {kind!r}", "it is not known here")


def _llama3(inv_freq: float, rope: Mapping[str, Any]) -> float:
    """Llama 3's stretch: fast pairs keep their frequency, slow ones are slowed, between blended."""
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise ModelError("config.json: low_freq_factor must be below high_freq_factor.")
    turns = _whole(rope, "original_max_position_embeddings") * inv_freq / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - kept) * inv_freq / factor + kept * inv_freq


def _yarn(
    data: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int
) -> tuple[tuple[float, ...], float]:
    """YaRN's frequencies and amplitude, as the engine's own rope forms them for one head."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict.fromkeys((*names, "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 1)
    sizes |= dict.fromkeys(("intermediate_size", "max_position_embeddings"), 1)
    block = {**rope, "rope_type": "yarn", "rope_theta": _rope_theta(data)}
    # transformers takes the window for the old context where the block names none.
    block.setdefault("original_max_position_embeddings", data.get("max_position_embeddings"))
    config = {"model_type": "deepseek_v3", **sizes, "qk_rope_head_dim": head_dim}
    made = Rope(ModelConfig.from_dict({**config, "rope_parameters": block}))
    return tuple(made.inv_freq.tolist()), made.amplitude


def _rope_theta(data: Mapping[str, Any]) -> float:
    holder = _mapping(data, "rope_parameters")
    return _number(holder if "rope_theta" in holder else data, "rope_theta", 10000.0)


def _check_sizes(shape: LlamaShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise refusal(f"{shape.num_kv_heads} K heads do not divide {shape.num_heads} heads", None)
    if shape.head_dim % 2:
        raise refusal(f"a head is {shape.head_dim} wide, and rope turns pairs", None)


def _whole(data: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value: Any = default if data.get(name) is None else data[name]
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {name} must be an integer above 0, not {value!r}.")
    return value


def _number(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value: Any = default if data.get(name) is None else data[name]
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < value <= LARGEST_FLOAT:
        raise ModelError(f"config.json: {name} must be a number above 0, not {value!r}.")
    return float(value)


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: Any = data.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} must be an object, not {value!r}.")
    return value


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value: Any = data.get(name) or False
    if type(value) is not bool:
        raise ModelError(f"config.json: {name} must be true or false, not {value!r}.")
    return value


def refusal(what: str, why: str | None) -> ModelError:
    """The error that says what stands in the way of an exact rewrite, and why."""
    reason = f": {why}" if why else ""
    return ModelError(
        f"The model cannot be rewritten as MLA exactly: {what}{reason}. "
        f"What can: {', '.join(MODEL_TYPES)} without sliding windows."
    )


def _window_refusal(key: str) -> ModelError:
    return refusal(
        f"{key} limits how far back a token sees",
        "in a latent cache every later token sees every row",
    )

"""Ways of storing weights: which one a checkpoint uses, and which of them are read.

Plain floats are read, and FP8 in blocks (DeepSeek's form: `X.weight` in F8_E4M3 beside
`X.weight_scale_inv`, one factor a block). Every other scheme is refused by its name, because a
message about missing and unexpected tensors would not tell what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leyline.errors import ModelError

SCALE_SUFFIX = "_scale_inv"
ORIGINALS = {
    "deepseek_v2": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "joyai_llm_flash": "jdopensource/JoyAI-LLM-Flash",
    "glm4_moe_lite": "zai-org/GLM-4.7-Flash",
}
# What lies beside a quantised tensor, by the scheme that puts it there. The first hit counts.
TELLTALES = (
    (SCALE_SUFFIX, "FP8 in blocks of a size that config.json does not give"),
    (".g_idx", "GPTQ"),
    (".qzeros", "AWQ or GPTQ"),
    (".qweight", "AWQ or GPTQ"),
    (".weight_packed", "compressed-tensors (packed integers or FP4)"),
    (".weight_shape", "compressed-tensors (packed integers)"),
    (".weight_scale", "compressed-tensors or per-tensor FP8"),
    (".input_scale", "FP8 with static activations"),
    (".scales", "MLX affine"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes NF4"),
    (".absmax", "bitsandbytes"),
)

Block = tuple[int, int]


def fp8_block(config: Mapping[str, Any]) -> Block | None:
    """The size of the FP8 blocks that a `config.json` announces, None where it has plain floats.

    Raises:
        ModelError: It announces another scheme; the message names it and says what to use.
    """
    for key in ("quantization_config", "compression_config", "quantization"):
        block = config.get(key)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise ModelError(f"config.json: {key} must be an object, not {block!r}.", param="model")
        if key == "quantization_config" and _is_fp8_blocks(block):
            return _block_size(block)
        raise _refusal(f"config.json: {key} says", _name(block), str(config.get("model_type")))
    return None


def refuse_by_tensors(names: Iterable[str], model_type: str) -> None:
    """Refuse a checkpoint whose tensors belong to a scheme that its config kept quiet about.

    Raises:
        ModelError: One of the names is a telltale; the message names it and the scheme.
    """
    names = list(names)
    for suffix, scheme in TELLTALES:
        found = next((name for name in names if name.endswith(suffix)), None)
        if found is not None:
            raise _refusal(f"The tensor {found} shows", scheme, model_type)


def _is_fp8_blocks(block: Mapping[str, Any]) -> bool:
    return (
        block.get("quant_method") == "fp8"
        and block.get("weight_block_size") is not None
        and block.get("fmt") in (None, "e4m3")
        and block.get("activation_scheme") in (None, "dynamic")
    )


def _block_size(block: Mapping[str, Any]) -> Block:
    size = block["weight_block_size"]
    good = isinstance(size, list | tuple) and len(size) == 2
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise ModelError(
            "config.json: quantization_config.weight_block_size must be two positive integers, "
            f"not {size!r}.",
            param="model",
        )
    return size[0], size[1]


def _name(block: Mapping[str, Any]) -> str:
    """What people call the scheme of a quantisation block."""
    method = block.get("quant_method")
    if method is None:
        return "MLX affine" if "group_size" in block else "a scheme without a name"
    details = {
        "fp8": _fp8_details(block),
        "compressed-tensors": block.get("format"),
        "modelopt": block.get("quant_algo"),
    }.get(str(method)) or (f"{block['bits']} bit" if "bits" in block else None)
    return f"{method} ({details})" if details else str(method)


def _fp8_details(block: Mapping[str, Any]) -> str:
    if block.get("weight_block_size") is None:
        return "one factor a tensor"
    if block.get("fmt") not in (None, "e4m3"):
        return str(block["fmt"])
    return f"{block.get('activation_scheme')} activations"


def _refusal(found: str, scheme: str, model_type: str) -> ModelError:
    original = ORIGINALS.get(model_type)
    example = f", such as {original}" if original else ""
    return ModelError(
        f"{found} that the weights are quantised as {scheme}, which is not supported. Use the "
        f"model's BF16 checkpoint{example}, or one in FP8 blocks (quant_method fp8 with "
        "weight_block_size).",
        param="model",
    )

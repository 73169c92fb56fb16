"""`leyline doctor`: what the engine would do with a model here, told without loading its weights.

Everything follows from `config.json`, the headers of the weight files if they are there, and the
device. So it answers for a preset or a hub id before 31 GB are downloaded: of a hub repository it
takes the small files only.
"""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from leyline import hub, parts
from leyline.cache.latent import row_bytes
from leyline.config import EngineConfig
from leyline.diagnosis import Diagnosis, size
from leyline.embedded import embedded_folder, leyline_home
from leyline.errors import LeylineError, ModelError
from leyline.kernels.attention import prefer_absorbed
from leyline.llama import MODEL_TYPES, Llama, LlamaShape, llama_of_config
from leyline.llama_as_mla import mla_config_of
from leyline.model.config import ModelConfig
from leyline.model.parameters import num_active_parameters, num_parameters
from leyline.model.presets import HUB_IDS, preset_data
from leyline.model.safetensors_file import DTYPES, TensorFile
from leyline.model.shards import required_files, weight_map
from leyline.model.weights import RUN_DTYPES
from leyline.server.parsers.choosing import choose
from leyline.tokenizer import Tokenizer

UNTOLD = "told once the files are here"
FAMILIES = {
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "joyai_llm_flash": "JoyAI-LLM-Flash (DeepSeek-V3)",
    "glm4_moe_lite": "GLM-4.7-Flash",
}
REWRITTEN = "LeylineMlaForCausalLM"
TYPICAL_KEYS = 4096  # length of a context at which the forms of attention are compared
READ_BYTES_PER_S = 20e9  # what a CPU's memory delivers, in round numbers
SLOW_TOKENS_PER_S = 5.0
# The embedded model's sizes, for who asks before it was made.
SMOLLM2 = Llama(
    family="llama",
    shape=LlamaShape(30, 576, 1536, 9, 3, 64, 100000.0),
    vocab_size=49152,
    window=8192,
    rms_norm_eps=1e-5,
    tied=True,
    softmax_scale=64**-0.5,
)


@dataclass(frozen=True)
class Subject:
    """A model that is asked about.

    Attributes:
        name: What it is called.
        data: Its decoded `config.json`.
        folder: Where its small files are, None for a preset.
        stored_bytes: Size of its weight files, None if nobody can tell.
        is_complete: Whether the weights are on this machine.
        stored_dtype: torch's name of the dtype of the embedding, None if nobody can tell.
    """

    name: str
    data: dict[str, Any]
    folder: Path | None = None
    stored_bytes: int | None = None
    is_complete: bool = False
    stored_dtype: str | None = None


def diagnose(config: EngineConfig, preset: str = "") -> Diagnosis:
    """Look at a model without loading it.

    Args:
        config: The engine's options; `model` is a folder, a hub id, or empty for the embedded one.
        preset: A preset's name, in place of `config.model`.

    Raises:
        ConfigError: An option does not fit the model or the machine.
        ModelError: There is no such model, or it could not be served.
    """
    subject = _subject(config, preset)
    shape = ModelConfig.from_dict(subject.data)
    device = parts.device_of(config.device)
    dtype = _run_dtype(config, subject, shape)
    weight_bytes = num_parameters(shape) * dtype.itemsize
    free_bytes = parts.memory_bytes(device)
    text = _text(subject)
    cache = _cache(config, shape, dtype, free_bytes - weight_bytes)
    diagnosis = Diagnosis(
        model=subject.name,
        family=_family(subject.data),
        shape={
            "layers": shape.num_hidden_layers,
            "heads": shape.num_attention_heads,
            "kv_lora_rank": shape.kv_lora_rank,
            "qk_rope_head_dim": shape.qk_rope_head_dim,
            "routed_experts": shape.n_routed_experts,
            "window": shape.max_position_embeddings,
        },
        parameters={"total": num_parameters(shape), "active": num_active_parameters(shape)},
        weights={
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": weight_bytes,
            "stored_bytes": subject.stored_bytes,
            "is_complete": subject.is_complete,
        },
        cache=cache,
        device={"name": _device_name(device), "type": device.type, "free_bytes": free_bytes},
        kernels=_kernels(shape, device, dtype),
        text=text,
        parsers=text.pop("parsers", {"tool_calls": UNTOLD, "reasoning": UNTOLD}),
    )
    diagnosis.warnings.extend(_warnings(config, subject, shape, diagnosis))
    return diagnosis


# What is asked about -------------------------------------------------------------------------


def _subject(config: EngineConfig, preset: str) -> Subject:
    if preset:
        hub.refuse_revision(config.revision, f"{preset} is a preset")
        return Subject(f"{preset} ({HUB_IDS.get(preset)})", preset_data(preset))
    if not config.model:
        hub.refuse_revision(config.revision, "the embedded model is the one asked about")
        folder = embedded_folder(leyline_home(), "bfloat16")
        if not folder.is_dir():
            return Subject(parts.EMBEDDED_NAME, mla_config_of(SMOLLM2, "bfloat16"))
        return _folder_subject(parts.EMBEDDED_NAME, folder)
    folder = hub.find_model(
        config.model, config.revision, config.download_dir, config.progress, weights=None
    )
    subject = _folder_subject(hub.model_name(config.model), folder)
    if subject.is_complete or hub.local_folder(config.model) is not None:
        return subject
    names = hub.served_weights(folder)
    stored_bytes = hub.hub_bytes(config.model, folder, names, config.download_dir)
    return replace(subject, stored_bytes=stored_bytes)


def _folder_subject(name: str, folder: Path) -> Subject:
    try:
        shape = ModelConfig.load(folder)
    except ModelError as error:
        raise _llama_hint(name, folder) or error from None
    data = _read_config(folder)
    files = [folder / file for file in required_files(folder, shape)]
    complete = bool(files) and all(path.is_file() for path in files)
    stored_dtype, stored_bytes = None, None
    if complete:
        stored_bytes = sum(path.stat().st_size for path in files)
        mapped = weight_map(folder) or {}
        name_of_first = mapped.get("model.embed_tokens.weight", files[0].name)
        entry = TensorFile(folder / name_of_first).entries.get("model.embed_tokens.weight")
        if entry is not None and entry.dtype in DTYPES:
            stored_dtype = str(DTYPES[entry.dtype]).removeprefix("torch.")
    return Subject(name, data, folder, stored_bytes, complete, stored_dtype)


def _read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _llama_hint(name: str, folder: Path) -> ModelError | None:
    """What to do with a model that is no MLA model but can become one; None for any other."""
    try:
        data = _read_config(folder)
        kind = data["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if kind not in MODEL_TYPES:
        return None
    llama = llama_of_config(data)
    Tokenizer.load(folder)  # what cannot be read cannot be rewritten
    return ModelError(
        f"{name} is a {kind} model without latent attention. `leyline convert` rewrites it "
        f"exactly, with a latent and a rope band of {llama.shape.kv_dim} elements each.",
        param="model",
    )


def _family(data: dict[str, Any]) -> str:
    name = FAMILIES[data["model_type"]]
    if REWRITTEN in (data.get("architectures") or []):
        return f"Llama family, rewritten as MLA ({name})"
    return name


def _run_dtype(config: EngineConfig, subject: Subject, shape: ModelConfig) -> torch.dtype:
    """As the engine chooses it: what was asked for, else the embedding's, float16 never."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    stored: torch.dtype = getattr(torch, subject.stored_dtype or shape.dtype)
    return RUN_DTYPES.get(stored, stored)


# What would happen ---------------------------------------------------------------------------


def _cache(
    config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, free_bytes: int
) -> dict[str, Any]:
    """Bytes a token, and tokens; `free_bytes` is what the weights leave."""
    sizes = shape.num_hidden_layers, shape.kv_lora_rank, shape.qk_rope_head_dim, dtype
    rows = {name: row_bytes(*sizes, getattr(torch, name)) for name in ("bfloat16", "float32")}
    row = rows[config.kv_rope_dtype]
    usual = parts.DEFAULT_CONTEXTS * parts.max_len(config, shape)
    affordable = max(0, int(parts.MEMORY_SHARE * free_bytes)) // row
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "band_dtype": config.kv_rope_dtype,
        "bytes_per_token": rows,
        "tokens_that_fit": max(0, free_bytes) // row,
        "tokens": config.kv_cache_tokens or min(usual, affordable),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}: {platform.machine()}, {torch.get_num_threads()} threads"


def _kernels(shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    packed = not on_gpu and dtype == torch.bfloat16
    return {
        "attention": f"torch; absorbed for up to {_absorbed_queries(shape)} new tokens over "
        f"{TYPICAL_KEYS} cached, explicit beyond",
        "experts": "torch" if shape.n_routed_experts else "not needed",
        "linear": "torch, weights packed by oneDNN" if packed else "torch",
        "move": "triton" if on_gpu else "torch",
    }


def _absorbed_queries(shape: ModelConfig) -> int:
    """The longest step that attends in the latent, over a context of typical length."""

    def absorbed(queries: int) -> bool:
        return prefer_absorbed(
            queries,
            TYPICAL_KEYS + queries,
            heads=shape.num_attention_heads,
            latent=shape.kv_lora_rank,
            rope_dim=shape.qk_rope_head_dim,
            nope=shape.qk_nope_head_dim,
            value=shape.v_head_dim,
        )

    return next((n for n in range(TYPICAL_KEYS) if not absorbed(n + 1)), TYPICAL_KEYS)


def _text(subject: Subject) -> dict[str, Any]:
    """Which files turn text into ids, and whether they can be read."""
    if subject.folder is None:
        return {"known": False}
    names = ("tokenizer.json", "tiktoken.model", "chat_template.jinja", "tokenizer_config.json")
    files = [name for name in names if (subject.folder / name).is_file()]
    try:
        tokenizer = Tokenizer.load(subject.folder)
    except LeylineError as error:
        return {"known": True, "files": files, "error": error.message}
    chosen = choose(tokenizer.template.source if tokenizer.template else None)
    return {
        "known": True,
        "files": files,
        "error": None,
        "parsers": {"tool_calls": chosen.tool.name, "reasoning": chosen.reasoning.name},
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "stop_ids": sorted(tokenizer.stop_ids),
        "has_template": tokenizer.template is not None,
    }


# What to know beforehand ---------------------------------------------------------------------


def _warnings(
    config: EngineConfig, subject: Subject, shape: ModelConfig, diagnosis: Diagnosis
) -> list[str]:
    found = [
        *_memory_warnings(shape, diagnosis),
        *_speed_warnings(diagnosis),
        *_disk_warnings(config, subject, diagnosis),
        *_text_warnings(diagnosis.text),
    ]
    if config.kv_rope_dtype == "bfloat16":
        found.append("A bfloat16 rope band drifts when contexts are edited often.")
    if shape.fp8_block is not None:
        found.append("The weights are stored in FP8 and become twice as large in memory.")
    return found


def _memory_warnings(shape: ModelConfig, diagnosis: Diagnosis) -> list[str]:
    weights, free = diagnosis.weights["bytes"], diagnosis.device["free_bytes"]
    if weights >= free:
        return [f"The weights do not fit: {size(weights)} are needed, {size(free)} are free."]
    tokens, fitting = diagnosis.cache["tokens"], diagnosis.cache["tokens_that_fit"]
    if tokens > fitting:
        return [f"The cache does not fit: {tokens:,} tokens are asked for, {fitting:,} fit."]
    window = shape.max_position_embeddings
    if tokens < window:
        return [
            f"The cache holds {tokens:,} tokens, less than the window of {window:,}: longer "
            "contexts are refused. --kv-cache-tokens sets another size."
        ]
    return []


def _speed_warnings(diagnosis: Diagnosis) -> list[str]:
    """On a CPU, reading the weights once a token is the bound; bf16 may be slower still."""
    if diagnosis.device["type"] != "cpu":
        return []
    total = diagnosis.parameters["total"]
    read = diagnosis.weights["bytes"] * diagnosis.parameters["active"] / max(total, 1)
    found = []
    if READ_BYTES_PER_S / read < SLOW_TOKENS_PER_S:
        found.append(
            f"On a CPU this is slow: {size(read)} of weights are read for every token of a reply, "
            f"so expect at most {READ_BYTES_PER_S / read:.1f} tokens a second."
        )
    if diagnosis.weights["dtype"] == "bfloat16" and not _multiplies_bf16():
        found.append(
            "This CPU has no bfloat16 instructions; --dtype float32 is faster and takes twice the "
            "memory."
        )
    return found


def _multiplies_bf16() -> bool:
    """Whether the CPU says that it has bf16 products; True where it cannot be asked."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return any(flag in text for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def _disk_warnings(config: EngineConfig, subject: Subject, diagnosis: Diagnosis) -> list[str]:
    if subject.is_complete:
        return []
    if hub.local_folder(config.model) is not None and subject.folder is not None:
        return ["The folder does not hold all files of the weights."]
    needed = subject.stored_bytes or diagnosis.weights["bytes"]
    cache = _existing(Path(config.download_dir or constants.HF_HUB_CACHE).expanduser())
    free = shutil.disk_usage(cache).free
    if needed < free:
        return []
    return [f"The download needs {size(needed)} of disk, and {size(free)} are free."]


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest above it that there is."""
    return path if path.is_dir() or path == path.parent else _existing(path.parent)


def _text_warnings(text: dict[str, Any]) -> list[str]:
    if not text["known"]:
        return []
    if text["error"] is not None:
        return [f"The tokenizer cannot be used: {text['error']}"]
    found = []
    if not text["has_template"]:
        found.append("There is no chat template: only plain completions can be served.")
    if not text["stop_ids"]:
        found.append("No token ends a reply: each runs to its limit.")
    return found

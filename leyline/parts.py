"""What an engine is made of, put together from its options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from leyline import hub
from leyline.cache.latent import LatentCache, row_bytes
from leyline.cache.ledger import Ledger
from leyline.cache.prefix import PrefixCache
from leyline.config import EngineConfig
from leyline.context import Context
from leyline.embedded import ensure_embedded
from leyline.errors import ConfigError
from leyline.executor import Executor
from leyline.model.config import ModelConfig
from leyline.model.transformer import Transformer
from leyline.model.weights import load_model
from leyline.policy import DEFAULT
from leyline.scheduler import Scheduler
from leyline.sessions import Sessions
from leyline.tokenizer import Tokenizer

EMBEDDED_NAME = "smollm2-135m-instruct"
MEMORY_SHARE = 0.25
DEFAULT_CONTEXTS = 8
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Parts:
    """An engine's inside.

    Attributes:
        model_name: What clients call the model.
        tokenizer: Text to ids and back.
        cache: The tensors.
        executor: Runs batches.
        scheduler: Plans and commits them.
        num_tokens: Ids that have a text and a row in the embedding.
        max_model_len: Tokens a context holds at most.
    """

    model_name: str
    tokenizer: Tokenizer
    cache: LatentCache
    executor: Executor
    scheduler: Scheduler
    num_tokens: int
    max_model_len: int


def load(
    config: EngineConfig,
    keepers: Callable[[int], Iterable[Context]],
    pinned: Callable[[], Iterable[Context]],
) -> Parts:
    """Load the model and build everything around it.

    Args:
        config: The options.
        keepers: For a sequence, the contexts whose rows it must leave alone.
        pinned: The contexts whose rows eviction must leave alone.

    Raises:
        ConfigError: An option does not fit the model or the machine.
        ModelError: The model folder cannot be served.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = device_of(config.device)
    folder = model_folder(config)
    tokenizer = Tokenizer.load(folder, config.chat_template)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    model = load_model(folder, dtype, device, config.progress, check_weights=config.check_weights)
    cache = _cache(config, model, device)
    num_tokens = min(tokenizer.vocab_size, model.config.vocab_size)
    prefix = PrefixCache(Ledger(cache.ckv.shape[1]), DEFAULT.evict, pinned)
    scheduler = Scheduler(
        prefix,
        max_batch_tokens=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        keepers=keepers,
    )
    max_model_len = min(max_len(config, model.config), prefix.ledger.num_slots)
    executor = Executor(model, cache, num_tokens)
    name = hub.model_name(config.model) if config.model else EMBEDDED_NAME
    return Parts(name, tokenizer, cache, executor, scheduler, num_tokens, max_model_len)


def sessions_of(config: EngineConfig, parts: Parts) -> Sessions:
    """An empty registry of sessions, its quotas in slots of this engine's cache."""
    num_slots = parts.scheduler.prefix.ledger.num_slots
    return Sessions(
        config.max_sessions,
        config.session_ttl_s,
        keep_versions=config.keep_versions,
        session_slots=int(num_slots * config.session_share),
        pin_slots=int(num_slots * config.pin_share),
        max_tokens=config.max_session_tokens,
        num_slots=num_slots,
    )


def model_folder(config: EngineConfig) -> Path:
    """The folder that holds the model, downloaded or made if need be; see `hub.find_model`.

    Raises:
        ModelError: There is no such model, or it cannot be had.
        ConfigError: It has no revisions, and one is asked for.
    """
    if not config.model:
        hub.refuse_revision(config.revision, "the embedded model is the one served")
        return ensure_embedded(progress=config.progress)
    return hub.find_model(config.model, config.revision, config.download_dir, config.progress)


def device_of(name: str) -> torch.device:
    """The device of that name, checked."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"The device {name!r} cannot be used: {reason}", param="device") from None
    return device


def max_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens a context holds at most, whatever the cache's size."""
    trained = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but this model was trained for {trained} "
            "positions; choose at most that.",
            param="max_model_len",
        )
    return config.max_model_len or trained


def _cache(config: EngineConfig, model: Transformer, device: torch.device) -> LatentCache:
    """The cache's tensors, sized by the options or by the memory there is."""
    shape = model.config
    rope_dtype = getattr(torch, config.kv_rope_dtype)
    row = row_bytes(
        shape.num_hidden_layers, shape.kv_lora_rank, shape.qk_rope_head_dim, model.dtype, rope_dtype
    )
    affordable = max(1, int(MEMORY_SHARE * memory_bytes(device)) // row)
    usual = DEFAULT_CONTEXTS * max_len(config, shape)
    return LatentCache(
        shape.num_hidden_layers,
        config.kv_cache_tokens or min(usual, affordable),
        shape.kv_lora_rank,
        shape.qk_rope_head_dim,
        dtype=model.dtype,
        rope_dtype=rope_dtype,
        device=device,
    )


def memory_bytes(device: torch.device) -> int:
    """Memory that can be had on a device: on a CPU what the system and the cgroup leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(MEMINFO), re.MULTILINE)
    free = int(found[1]) * 1024 if found else _free_pages()
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _free_pages() -> int:
    """Free memory without what caches could give back, for systems without /proc."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(path: Path) -> str:
    """A small file of the system's, empty where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""

"""`leyline convert`: a checkpoint of the Llama family written anew as an MLA model folder.

The rewrite is `leyline.llama_as_mla`'s. Here it is streamed, a layer at a time, into shards, and
then proved: a probe text goes through the source (`leyline.llama_forward`, which shares nothing
with the engine) and through the engine's own layers with the weights as they now lie on disk. The
folder gets its name only if both give the same logits. Where a narrower dtype was asked for, the
source's matrices are rounded to it for this, so that the rewrite is held to the same bound and
what the rounding itself costs is a figure of the report. The folder is made under another name
beside its place, so that nothing half-written is ever found there.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from leyline.diagnosis import size
from leyline.errors import ConfigError, ModelError
from leyline.kernels.norm import rms_norm
from leyline.llama import Llama
from leyline.llama_as_mla import mla_config_of, mla_layer
from leyline.llama_forward import llama_logits
from leyline.llama_source import (
    FLOATS,
    LlamaSource,
    find_source,
    open_source,
    require_finite,
    write_json,
)
from leyline.model.attention import plan_step
from leyline.model.config import ModelConfig
from leyline.model.parameters import parameter_shapes
from leyline.model.rope import Rope
from leyline.model.shards import INDEX_NAME, SINGLE_NAME
from leyline.model.step import Span, Step
from leyline.model.transformer import Layer
from leyline.model.weights import Checkpoint
from leyline.tokenizer import Tokenizer

DTYPES = ("auto", *FLOATS)
SHARD_BYTES = 4 * 10**9
MARGIN_BYTES = 64 * 2**20  # beside the weights: tokenizer, headers, the file system's own
# Of the logits' standard deviation, or of 1 if that is below 1. Float32 sums in another order
# differ by 1e-5 to 1e-4 of it; a wrong row or a lost bias, by more than 0.1. It holds against the
# source rounded to the dtype written, whatever that is: no rounding hides a wrong row.
LARGEST_DIFFERENCE = 1e-3
PROBE = """\
The river Dart rises on the moor and reaches the sea after 75 km, at 50°21'N. Its name is thought
to be Brittonic: "river where oak trees grow". In 1240 it carried 3,141 barrels of tin.

def depth(stage: float, slope: float = 0.0125) -> float:
    return max(0.0, stage * slope) ** 0.6  # metres

– « Où est la rivière ? » – 河流在北方。Она течёт к морю. 🌊
"""


@dataclass(frozen=True)
class Conversion:
    """What came of a rewrite.

    Attributes:
        folder: The new model folder.
        family: What the source calls itself.
        dtype: The dtype its matrices were written in.
        exact: Whether that dtype holds every weight of the source as it was.
        num_tokens: Length of the probe text.
        difference: Largest difference of a logit from the source's own, in fp32 arithmetic;
            rounding is in it.
        error: The same from the source rounded to `dtype`: what the rewrite alone did.
        spread: Standard deviation of the logits.
        num_agreeing: Tokens of the probe text after which the most likely next one is the same.
        source_bytes: Size of the source's weights.
        num_bytes: Size of the new ones.
    """

    folder: Path
    family: str
    dtype: str
    exact: bool
    num_tokens: int
    difference: float
    error: float
    spread: float
    num_agreeing: int
    source_bytes: int
    num_bytes: int

    def __str__(self) -> str:
        rounded = "" if self.exact else ", rounded from a wider dtype"
        return (
            f"{self.family} is now MLA in {str(self.folder)!r}.\n"
            f"Weights: {size(self.source_bytes)} before, {size(self.num_bytes)} in "
            f"{self.dtype}{rounded}.\n"
            f"Largest logit difference on a probe text of {self.num_tokens} tokens: "
            f"{self.difference:.1e} (the logits' standard deviation is {self.spread:.1f}); the "
            f"most likely next token agrees after {self.num_agreeing} of {self.num_tokens}."
        )


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str = "auto",
    revision: str = "",
    download_dir: str = "",
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Rewrite a checkpoint of the Llama family as an MLA model folder.

    Args:
        source: A GGUF file, a folder with config.json and safetensors, or a hub id.
        target: The folder to make; it may exist if it is empty.
        dtype: Of the matrices written; "auto" takes the source's, float32 where that is quantised.
        revision: Branch, tag or commit of a source on the hub.
        download_dir: The hub's cache, in place of the library's.
        progress: Show a progress bar.
        shard_bytes: Size at which a new weights file is begun.

    Raises:
        ConfigError: The target is not empty, the dtype unknown, or a revision named for a source
            that has none.
        ModelError: The source is damaged or cannot be rewritten exactly, the disk is full, or the
            result gives other logits. Then nothing is left at the target.
    """
    target = Path(target).expanduser()
    _require_known(dtype)
    _require_empty(target)
    opened = open_source(find_source(source, revision, download_dir, progress))
    chosen = opened.dtype if dtype == "auto" else dtype
    exact = chosen in (opened.dtype, "float32")
    config = mla_config_of(opened.llama, chosen)
    shape = ModelConfig.from_dict(config)
    with _published(target) as draft, _bar(opened.llama, exact, progress) as bar:
        write_json(draft / "config.json", config)
        opened.write_text_files(draft)
        tokenizer = Tokenizer.load(draft)
        _require_room(draft, shape, getattr(torch, chosen))
        bar.set_postfix_str("rewriting")
        num_bytes = _write_weights(opened, draft, getattr(torch, chosen), shard_bytes, bar)
        bar.set_postfix_str("comparing")
        ids = probe_ids(tokenizer, shape)
        with torch.inference_mode():
            expected = _expected(opened, ids, None if exact else chosen, bar)
            figures = _figures(engine_logits(draft, shape, ids, bar), *expected)
        result = Conversion(
            folder=target,
            family=opened.llama.family,
            dtype=chosen,
            exact=exact,
            source_bytes=opened.num_bytes,
            num_bytes=num_bytes,
            **figures,
        )
        _require_equal(result)
    return result


def _require_known(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(
            f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.", param="dtype"
        )


def _bar(llama: Llama, exact: bool, progress: bool) -> tqdm:
    """Passes: rewriting, the source's forward, the same with rounded weights, the engine's."""
    total = (3 if exact else 4) * llama.shape.num_layers
    return tqdm(total=total, desc="Converting", unit="layer", disable=not progress)


def _require_equal(result: Conversion) -> None:
    """Refuse to publish a model that is not the one it was."""
    bound = LARGEST_DIFFERENCE * max(1.0, result.spread)
    if not (result.error <= bound < math.inf and math.isfinite(result.difference)):  # NaN is none
        raise ModelError(
            f"The rewritten model's logits differ by {result.error:.1e} on a probe text, more than "
            f"{bound:.1e}; it is not kept. Either the source is damaged or this is a bug in "
            "Leyline."
        )


# The probe -----------------------------------------------------------------------------------


def probe_ids(tokenizer: Tokenizer, config: ModelConfig) -> Tensor:
    """The ids of the probe text [T] int64 that this model has rows for, within its window."""
    ids = [i for i in tokenizer.encode(PROBE, bos=True) if i < config.vocab_size]
    return torch.tensor(ids[: config.max_position_embeddings])


def _expected(
    source: LlamaSource, ids: Tensor, rounded: str | None, bar: tqdm
) -> tuple[Tensor, Tensor]:
    """The source's logits [T, V] in fp32, as it is and with its matrices rounded to a dtype."""

    def tick(_: int) -> None:
        bar.update()

    own = llama_logits(source.llama, source.tensor, ids, tick)
    if rounded is None:
        return own, own
    dtype: torch.dtype = getattr(torch, rounded)

    def tensor(name: str) -> Tensor:
        return _stored(source.tensor(name), dtype)

    return own, llama_logits(source.llama, tensor, ids, tick)


def _figures(found: Tensor, own: Tensor, wanted: Tensor) -> dict[str, Any]:
    """What a conversion tells of the logits [T, V] found, the source's own and the wanted ones."""
    return {
        "num_tokens": len(found),
        "difference": float((found - own).abs().max()),
        "error": float((found - wanted).abs().max()),
        "spread": float(wanted.std()),
        "num_agreeing": int((found.argmax(-1) == own.argmax(-1)).sum()),
    }


def engine_logits(folder: Path, config: ModelConfig, ids: Tensor, bar: tqdm) -> Tensor:
    """Logits [T, V] of a model folder in fp32, by the engine's own layers, one in memory at a time.

    Raises:
        ModelError: The folder does not hold what its config calls for.
    """
    length = len(ids)
    span = Span(0, length, slice(0, length), 0)
    rope = Rope(config)
    plan = plan_step(Step(torch.arange(length), torch.arange(length), (span,)), config, rope)
    ckv = torch.zeros(length, config.kv_lora_rank)
    kpe = torch.zeros(length, config.qk_rope_head_dim)
    with Checkpoint(folder, config, "cpu", progress=False) as weights:
        embedding = weights.take("model.embed_tokens.weight", torch.float32)
        x = embedding[ids].clone()
        for index in range(config.num_hidden_layers):
            layer = Layer(config, index, weights, torch.float32, rope.softmax_scale)
            layer(x, plan, (ckv, kpe))
            bar.update()
        norm = weights.take("model.norm.weight", torch.float32)
        tied = config.tie_word_embeddings
        head = embedding if tied else weights.take("lm_head.weight", torch.float32)
        weights.require_all_taken()
    return rms_norm(x, norm, config.rms_norm_eps) @ head.T


# The folder ----------------------------------------------------------------------------------


def _require_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{str(target)!r} exists and is not an empty folder; name another.", param="target"
        )


def _require_room(draft: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse before the first byte what the disk cannot hold."""
    needed = sum(math.prod(shape) for _, shape in parameter_shapes(config)) * dtype.itemsize
    needed += MARGIN_BYTES
    free = shutil.disk_usage(draft).free
    if free < needed:
        raise ModelError(
            f"The rewritten model needs {size(needed)} of disk, and {size(free)} are free at "
            f"{str(draft.parent)!r}."
        )


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Yield a draft folder that becomes `target` if, and only if, the block succeeds.

    The draft's name is fixed and locked: two conversions cannot share it, and what a killed one
    left behind is swept by the next.
    """
    place = Path(os.path.abspath(target))  # "." has neither a name nor a parent
    draft = place.with_name(f".{place.name}.draft")
    lock = FileLock(draft.with_name(draft.name + ".lock"))
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        with lock.acquire(timeout=0):
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                yield draft
                _sync(draft)
                os.replace(draft, place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout as error:
        raise ModelError(f"Another conversion is writing {str(target)!r}.") from error
    except (OSError, SafetensorError) as error:  # the latter is what a full disk looks like
        raise ModelError(f"{str(target)!r} could not be written: {error}.") from error


def _sync(folder: Path) -> None:
    """Have the files on disk before their folder gets its name: a crash must not leave holes."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_weights(
    source: LlamaSource, draft: Path, dtype: torch.dtype, shard_bytes: int, bar: tqdm
) -> int:
    """Write the checkpoint, matrices in `dtype`, vectors as they are; returns its size in bytes."""
    shards = _Shards(draft, shard_bytes)
    for name, tensor in _rewritten(source, bar):
        shards.add(name, require_finite(name, _stored(tensor, dtype)))
    return shards.finish()


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is written: vectors stay as they are."""
    return tensor if tensor.ndim == 1 else tensor.to(dtype)


def _rewritten(source: LlamaSource, bar: tqdm) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the rewritten model, layer by layer."""
    llama = source.llama
    yield "model.embed_tokens.weight", source.tensor("model.embed_tokens.weight")
    for layer in range(llama.shape.num_layers):
        yield from mla_layer(llama, source.tensor, layer).items()
        bar.update()
    yield "model.norm.weight", source.tensor("model.norm.weight")
    if not llama.tied:
        yield "lm_head.weight", source.tensor("lm_head.weight")


class _Shards:
    """Safetensors files of a bounded size, with an index where there is more than one."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._waiting: dict[str, Tensor] = {}
        self._written: list[list[str]] = []  # tensor names, by file
        self._num_bytes = 0
        self._waiting_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write the ones before it if they fill a file."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._limit:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes

    def finish(self) -> int:
        """Write what is left, and the index; returns the bytes of all tensors."""
        self._write()
        files = [self._name(index) for index in range(len(self._written))]
        if len(files) == 1:
            os.replace(self._folder / files[0], self._folder / SINGLE_NAME)
            return self._num_bytes
        final = [f"{f[:11]}-of-{len(files):05d}.safetensors" for f in files]
        for old, new in zip(files, final, strict=True):
            os.replace(self._folder / old, self._folder / new)
        names = zip(self._written, final, strict=True)
        index = {name: file for held, file in names for name in held}
        total = {"total_size": self._num_bytes}
        write_json(self._folder / INDEX_NAME, {"metadata": total, "weight_map": index})
        return self._num_bytes

    def _name(self, index: int) -> str:
        return f"model-{index + 1:05d}.part"

    def _write(self) -> None:
        path = self._folder / self._name(len(self._written))
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library leaves it to its owner alone
        self._written.append(list(self._waiting))
        self._num_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

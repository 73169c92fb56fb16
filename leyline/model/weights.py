"""Strict loading of safetensors folders.

Every parameter is read exactly once and every tensor of the checkpoint is either a parameter or a
known exception (`leyline.model.shards.is_skipped`). Anything missing, left over, of a wrong shape
or dtype is an error that names file and tensor, found before a byte of weights is read, because a
model with one forgotten tensor starts, and then answers nonsense.

A tensor is read once, from its file to where it stays (an expert to its place among the others of
its layer), so what loading needs beyond the weights is about one tensor. Only what is converted, or
goes to another device, is copied from the mapped file, and its pages are given back.

What reading costs is mostly the system's handing out fresh memory, a page at a time, and that takes
a core each. So experts are read by threads of their own, a few tensors at a time, while the calling
one builds and packs the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor
from tqdm import tqdm

from leyline.errors import ModelError
from leyline.model import fp8
from leyline.model.config import ModelConfig
from leyline.model.copiers import computing_alone, copiers
from leyline.model.parameters import Shape, check_shape, parameter_shapes
from leyline.model.safetensors_file import DTYPES, Entry, TensorFile
from leyline.model.schemes import SCALE_SUFFIX, refuse_by_tensors
from leyline.model.shards import (
    INDEX_NAME,
    SINGLE_NAME,
    is_skipped,
    listed,
    no_weights,
    required_files,
    weight_map,
)
from leyline.model.transformer import Transformer

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
FP8 = "F8_E4M3"
BATCH = 8  # tensors that a copier fills before it is given more
KEPT_BYTES = 24 << 20  # holds every layer's projections, but not the head's
# float16 overflows in these models' residual streams (vllm PR 13232), so it is never run in.
RUN_DTYPES = {torch.float64: torch.float32, torch.float16: torch.bfloat16}


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    latent_norm_eps: float | None = None,
    check_weights: bool = False,
) -> Transformer:
    """Load a model folder: `config.json` and safetensors.

    Args:
        folder: Where it is.
        dtype: Dtype to run in; None takes the one that the embedding is stored in, bfloat16 for
            float16.
        device: Where to put it.
        progress: Show a progress bar in bytes.
        latent_norm_eps: In place of the config's; see `ModelConfig`.
        check_weights: Refuse NaN and infinity in every tensor, which reads them once more. Norms
            and router biases are always checked.

    Raises:
        ModelError: The folder is missing or incomplete, the config unsupported, a tensor missing,
            unexpected, of a wrong shape or dtype, or not finite.
    """
    config = ModelConfig.load(folder)
    opened = Checkpoint(Path(folder), config, device, progress, check_weights, behind=True)
    with opened as checkpoint, computing_alone():
        model = Transformer(
            config,
            checkpoint,
            dtype=checkpoint.run_dtype if dtype is None else dtype,
            device=device,
            latent_norm_eps=latent_norm_eps,
        )
        checkpoint.require_all_taken()
    return model


class Checkpoint:
    """The parameters in a folder, each handed out once; a context manager.

    Args:
        folder: Where the files are.
        config: What they must hold.
        device: Where parameters are handed out.
        progress: Show a progress bar.
        check_weights: See `load_model`.
        behind: Let `take_all` return before the places are filled. They are when
            `require_all_taken` returns.

    Raises:
        ModelError: On entry, if the files do not hold exactly the config's parameters.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        device: torch.device | str,
        progress: bool,
        check_weights: bool = False,
        behind: bool = False,
    ) -> None:
        self._device = torch.device(device)
        self._folder = folder
        self._shapes = dict(parameter_shapes(config))
        self._config = config
        self._progress = progress
        self._check_weights = check_weights
        self._behind = behind
        self._files: dict[str, TensorFile] = {}
        self._left: Counter[str] = Counter()  # tensors still to be read, by file
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._filling: list[Future[None]] = []
        self._counting = Lock()
        self._open = ExitStack()

    def __enter__(self) -> Checkpoint:
        with self._open:
            files = _open_files(self._folder, self._config)
            self._files = {n: f for n, f in files.items() if not is_skipped(n, self._config)}
            for file in set(files.values()):
                self._open.callback(file.close)
            _check_names(self._shapes, self._files, self._config)
            for name, shape in self._shapes.items():
                self._check_tensor(name, shape)
            self._left.update(file.name for file in self._files.values())
            bar = tqdm(
                total=sum(file.entries[name].num_bytes for name, file in self._files.items()),
                desc="Loading weights",
                unit="B",
                unit_scale=True,
                disable=not self._progress,
            )
            self._bar = self._open.enter_context(bar)
            self._copiers = copiers(self._device)
            self._open.callback(self._copiers.shutdown, cancel_futures=True)
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()
        self._files = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def run_dtype(self) -> torch.dtype:
        """The dtype to run in where none is asked for: the embedding's, as the file has it."""
        stored = DTYPES[self._entry("model.embed_tokens.weight").dtype]
        return RUN_DTYPES.get(stored, stored)

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter of its own memory; see `WeightSource.take`."""
        out = torch.empty(self._claim(name), dtype=dtype, device=self._device)
        self._fill(name, out)
        self._finish(name, out)
        return out

    def lend(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Read parameters below one another, into a buffer that is used again; see `WeightSource`.

        Fresh memory costs more than the copying into it, and whoever packs a weight needs it once.
        Only a head or a dense layer is too large for the buffer to be kept while the rest is read.
        """
        shapes = [self._claim(name) for name in names]
        rows = [shape[0] for shape in shapes]
        out = self._lent_place((sum(rows), *shapes[0][1:]), dtype)
        for name, part in zip(names, out.split(rows), strict=True):
            self._fill(name, part)
            self._finish(name, part)
        return out

    def take_all(self, places: Mapping[str, Tensor]) -> None:
        """Read parameters into places that are there; see `WeightSource.take_all`."""
        for name, out in places.items():
            check_shape(name, self._claim(name), out)
        items = list(places.items())
        batches = [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
        self._filling += [self._copiers.submit(self._fill_all, batch) for batch in batches]
        if not self._behind:
            self._settle()

    def _lent_place(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes > KEPT_BYTES:
            return torch.empty(shape, dtype=dtype, device=self._device)
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes].view(dtype).view(shape)

    def require_all_taken(self) -> None:
        """Raise unless the model took every parameter, and got it."""
        self._settle()
        if self._shapes:
            raise ModelError(f"The model did not take {listed(self._shapes)}: a bug in Leyline.")

    def _settle(self) -> None:
        """Wait until every place is filled."""
        for filled in self._filling:
            filled.result()
        self._filling = []

    def _claim(self, name: str) -> Shape:
        """Cross a parameter off the list; returns its shape."""
        if name not in self._shapes:
            raise ModelError(f"The parameter {name} does not exist or was taken twice.")
        return self._shapes.pop(name)

    def _fill_all(self, batch: Sequence[tuple[str, Tensor]]) -> None:
        for name, out in batch:
            self._fill(name, out)
            self._finish(name, out)

    def _fill(self, name: str, out: Tensor) -> None:
        """Copy, convert or restore a parameter; may run beside others of its kind."""
        factors = self._factors(name)
        if factors is not None and self._config.fp8_block is not None:
            stored, scale = self._view(name), self._view(factors)
            fp8.dequantise_into(out, stored, scale, self._config.fp8_block)
        else:
            self._files[name].read_into(name, out)

    def _finish(self, name: str, out: Tensor) -> None:
        """Count a parameter that was read, and look at it if that is wanted."""
        if self._check_weights or out.ndim == 1:
            _check_finite(f"The tensor {name} in {self._files[name].name}", out)
        for read in filter(None, (name, self._factors(name))):
            self._count(read)

    def _count(self, name: str) -> None:
        file = self._files[name]
        file.done(name)
        with self._counting:
            self._bar.update(file.entries[name].num_bytes)
            self._left[file.name] -= 1
            if not self._left[file.name]:
                file.close()

    def _factors(self, name: str) -> str | None:
        """The tensor that belongs to a parameter in FP8, if it is in FP8."""
        factors = name + SCALE_SUFFIX
        return factors if factors in self._files else None

    def _view(self, name: str) -> Tensor:
        return self._files[name].view(name)

    def _entry(self, name: str) -> Entry:
        return self._files[name].entries[name]

    def _check_tensor(self, name: str, shape: Shape) -> None:
        """Refuse a parameter of a wrong shape or dtype, or without its FP8 factors."""
        self._check_entry(name, shape)
        stored, factors = self._entry(name).dtype, name + SCALE_SUFFIX
        block = self._config.fp8_block
        if block is not None and factors in self._files:
            if stored != FP8:
                raise self._refusal(name, f"is stored as {stored} beside {factors}")
            self._check_entry(factors, fp8.scale_shape(shape, block))
            stored = self._entry(factors).dtype
        elif stored == FP8:
            raise self._refusal(name, f"is stored as {FP8} without the tensor {factors}")
        if stored not in FLOATS:
            raise self._refusal(name, f"is stored as {stored}, which is not supported")

    def _check_entry(self, name: str, shape: Shape) -> None:
        found = self._entry(name).shape
        if found != shape:
            raise self._refusal(
                name, f"has shape {list(found)}; config.json asks for {list(shape)}"
            )

    def _refusal(self, name: str, problem: str) -> ModelError:
        return ModelError(
            f"The tensor {name} in {self._files[name].name} {problem}.", param="model"
        )


def _open_files(folder: Path, config: ModelConfig) -> dict[str, TensorFile]:
    """For every tensor in the files that are needed, its file, headers checked."""
    mapped = weight_map(folder)
    if mapped is not None:
        return _open_indexed(folder, config, mapped)
    if not (folder / SINGLE_NAME).is_file():
        raise no_weights(folder)
    file = TensorFile(folder / SINGLE_NAME)
    return dict.fromkeys(file.entries, file)


def _open_indexed(
    folder: Path, config: ModelConfig, mapped: Mapping[str, str]
) -> dict[str, TensorFile]:
    shards = required_files(folder, config)
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ModelError(
            f"The model folder is incomplete: {INDEX_NAME} names {listed(absent)}, which "
            f"{'is' if len(absent) == 1 else 'are'} not there. If such names never existed, the "
            "index is stale; download the model again.",
            param="model",
        )
    files = {shard: TensorFile(folder / shard) for shard in shards}
    disputed = [n for n, s in mapped.items() if s in files and n not in files[s].entries]
    disputed += [n for s, file in files.items() for n in file.entries if mapped.get(n) != s]
    disputed = [name for name in disputed if not is_skipped(name, config)]
    if disputed:
        name = disputed[0]
        held = [s for s, file in files.items() if name in file.entries]
        raise ModelError(
            f"{INDEX_NAME} is stale: it and the files disagree on {listed(disputed)}. "
            f"The index puts {name} into {mapped.get(name, 'no file')}; it is in "
            f"{' and '.join(held) or 'none'}. Download the model again.",
            param="model",
        )
    return {name: files[shard] for name, shard in mapped.items() if shard in files}


def _check_names(shapes: Mapping[str, Shape], held: Iterable[str], config: ModelConfig) -> None:
    """Refuse a checkpoint that holds too little or too much."""
    held = set(held)
    if config.fp8_block is not None:
        held -= {name + SCALE_SUFFIX for name in shapes}
    missing = [name for name in shapes if name not in held]
    unexpected = sorted(held - shapes.keys())
    if unexpected:
        refuse_by_tensors(unexpected, config.model_type)
    problems = []
    if missing:
        problems.append(f"missing {listed(missing)}")
    if unexpected:
        problems.append(f"unexpected {listed(unexpected)}")
    if problems:
        raise ModelError(
            f"The weights do not fit config.json: {'; '.join(problems)}.", param="model"
        )


def _check_finite(what: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity; the extremes are NaN if any element is."""
    if tensor.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        raise ModelError(f"{what} holds NaN or infinity.", param="model")

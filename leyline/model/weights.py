"""Strict loading of safetensors folders.

Every parameter is read exactly once and every tensor of the checkpoint is either a parameter or a
known exception: the MTP layer (numbered `num_hidden_layers`, skipped by that number) and a copy of
a tied head. Anything missing or left over is an error that names it, found before a byte of
weights is read, because a model with one forgotten tensor starts, and then answers nonsense.

Where an index exists, only the files it names are opened; stray safetensors files are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from leyline.errors import ModelError
from leyline.model.config import ModelConfig
from leyline.model.parameters import Shape, parameter_shapes
from leyline.model.transformer import Transformer

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    latent_norm_eps: float | None = None,
) -> Transformer:
    """Load a model folder: `config.json` and safetensors.

    Args:
        folder: Where it is.
        dtype: Dtype to run in; None takes the config's.
        device: Where to put it.
        progress: Show a progress bar, one tick a tensor.
        latent_norm_eps: In place of the config's; see `ModelConfig`.

    Raises:
        ModelError: The folder is missing or incomplete, the config unsupported, a tensor missing,
            unexpected, of a wrong shape or dtype, or not finite.
    """
    config = ModelConfig.load(folder)
    run_dtype = getattr(torch, config.dtype) if dtype is None else dtype
    with Checkpoint(Path(folder), config, device, progress) as checkpoint:
        model = Transformer(
            config, checkpoint, dtype=run_dtype, device=device, latent_norm_eps=latent_norm_eps
        )
        checkpoint.require_all_taken()
    return model


class Checkpoint:
    """The tensors of a folder, each handed out once; a context manager.

    Raises:
        ModelError: On entry, if the files do not hold exactly the config's parameters.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, device: torch.device | str, progress: bool
    ) -> None:
        self._device = str(device)
        self._folder = folder
        self._shapes = dict(parameter_shapes(config))
        self._config = config
        self._progress = progress
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Checkpoint:
        with self._open:
            self._files = self._open_files()
            _check_names(self._shapes, self._files, self._config)
            bar = tqdm(
                total=len(self._shapes),
                desc="Loading weights",
                unit="tensor",
                disable=not self._progress,
            )
            self._bar = self._open.enter_context(bar)
            self._open = self._open.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files = {}
        self._open.close()

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one parameter; see `WeightSource.take`."""
        if name not in self._shapes:
            raise ModelError(f"The parameter {name} does not exist or was taken twice.")
        shape = self._shapes.pop(name)
        try:
            tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"The tensor {name} cannot be read: {error}.", param="model"
            ) from error
        _check_tensor(name, tensor, shape)
        self._bar.update()
        return tensor.to(dtype)

    def require_all_taken(self) -> None:
        """Raise unless the model took every parameter."""
        if self._shapes:
            raise ModelError(f"The model did not take {_listed(self._shapes)}: a bug in Leyline.")

    def _open_files(self) -> dict[str, Any]:
        """For every tensor name, the open file that holds it."""
        index = self._folder / INDEX_NAME
        if index.is_file():
            return self._open_indexed(_weight_map(index))
        single = self._folder / SINGLE_NAME
        if not single.is_file():
            raise ModelError(
                f"The folder {str(self._folder)!r} has neither {INDEX_NAME} nor {SINGLE_NAME}.",
                param="model",
            )
        opened = self._open_file(single)
        return dict.fromkeys(opened.keys(), opened)

    def _open_indexed(self, weight_map: Mapping[str, str]) -> dict[str, Any]:
        shards = sorted(set(weight_map.values()))
        absent = [shard for shard in shards if not (self._folder / shard).is_file()]
        if absent:
            raise ModelError(
                f"The model folder is incomplete: {INDEX_NAME} names {_listed(absent)}, which "
                f"{'is' if len(absent) == 1 else 'are'} not there. Download the model again.",
                param="model",
            )
        opened = {shard: self._open_file(self._folder / shard) for shard in shards}
        held = {shard: set(opened[shard].keys()) for shard in shards}
        stale = [name for name, shard in weight_map.items() if name not in held[shard]]
        unlisted = [n for s in shards for n in held[s] if weight_map.get(n) != s]
        if stale or unlisted:
            raise ModelError(
                f"{INDEX_NAME} is stale: it and the files disagree on "
                f"{_listed(stale or unlisted)}. Download the model again.",
                param="model",
            )
        return {name: opened[shard] for name, shard in weight_map.items()}

    def _open_file(self, path: Path) -> Any:
        try:
            opened = safe_open(path, framework="pt", device=self._device)
            return self._open.enter_context(opened)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path.name} is not a valid safetensors file: {error}. It may be cut short.",
                param="model",
            ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name, checked to stay inside the folder."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{INDEX_NAME} is not a valid index: {error!r}.", param="model") from error
    outside = [shard for shard in names.values() if Path(shard).name != shard]
    if outside:
        raise ModelError(f"{INDEX_NAME} names {_listed(outside)}, not a file name.", param="model")
    return names


def _check_names(shapes: Mapping[str, Shape], names: Iterable[str], config: ModelConfig) -> None:
    """Refuse a checkpoint that holds too little or too much."""
    held = {name for name in names if not _skipped(name, config)}
    missing = [name for name in shapes if name not in held]
    unexpected = sorted(held - shapes.keys())
    problems = []
    if missing:
        problems.append(f"missing {_listed(missing)}")
    if unexpected:
        problems.append(f"unexpected {_listed(unexpected)}")
    if problems:
        raise ModelError(
            f"The weights do not fit config.json: {'; '.join(problems)}.", param="model"
        )


def _skipped(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be in the file although the model has no use for it."""
    if config.tie_word_embeddings and name == "lm_head.weight":
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) == config.num_hidden_layers


def _check_tensor(name: str, tensor: Tensor, shape: Shape) -> None:
    if tensor.dtype not in FLOATS:
        raise ModelError(
            f"The tensor {name} is stored as {tensor.dtype}; quantised weights are not supported.",
            param="model",
        )
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"The tensor {name} has shape {list(tensor.shape)}; config.json asks for "
            f"{list(shape)}.",
            param="model",
        )
    # The sum is finite exactly if no element is NaN or infinite, short of an overflow that float64
    # rules out, and it needs no mask as large as the tensor.
    if not torch.isfinite(tensor.sum(dtype=torch.float64)):
        raise ModelError(f"The tensor {name} holds NaN or infinity.", param="model")


def _listed(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    names = list(dict.fromkeys(names))
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")

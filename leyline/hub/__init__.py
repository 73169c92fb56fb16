"""Where a model lies: a folder of yours, or a snapshot in the cache that Hugging Face tools share.

Only what is read is downloaded: configs, tokenizer and template first, so that a model that cannot
be run is refused before its weights are fetched, then the safetensors files that its index names.
Code and pickles are never asked for. Serving, `leyline doctor` and `leyline convert` come here for
all of it (`find_model`); they differ in which weights they want.

A revision is resolved once. Without one named, what the cache calls `main` is the model: once it
is complete, no start makes a single call, and an interrupted download goes on with the same
commit. A branch or tag that is named is looked up at every start, with one call, and a commit
never. Without a network what is cached is used; if something is missing, all of it is named.

`HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME` and the other settings of the
`huggingface_hub` library are read by that library, when it is imported.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from leyline.errors import ConfigError, ModelError
from leyline.hub.repository import SMALL_FILES, Repository, WeightFiles, snapshot
from leyline.model.config import ModelConfig
from leyline.model.shards import required_files


def served_weights(folder: Path) -> list[str]:
    """Names of the weight files that the engine reads, told by a folder's config and index.

    Raises:
        ModelError: The config is one that cannot be run, or the index is none.
    """
    return required_files(folder, ModelConfig.load(folder))


def find_model(
    model: str,
    revision: str = "",
    download_dir: str = "",
    progress: bool = True,
    *,
    weights: WeightFiles | None = served_weights,
    more: Sequence[str] = (),
) -> Path:
    """The folder of a model, downloaded if it is named by hub id and not in the cache.

    Args:
        model: A folder, which never makes the hub be asked, or a hub id such as `owner/name`.
        revision: Branch, tag or commit on the hub; see the module's docstring for none.
        download_dir: The hub's cache, in place of the library's.
        progress: Show the library's progress bars.
        weights: Says from the config which files of weights to fetch too, or refuses the model;
            with None, configs and tokenizer are enough.
        more: Patterns of small files to fetch beside `SMALL_FILES`.

    Raises:
        ConfigError: A revision is named for a folder.
        ModelError: There is no such folder or repository, access is denied, the download failed,
            the model cannot be run, or there is no network and the cache does not hold all of it.
    """
    folder = local_folder(model)
    if folder is not None:
        refuse_revision(revision, f"{model!r} is a folder")
        return folder
    if not is_hub_id(model):
        raise ModelError(
            f"There is no model folder {_clipped(model)!r}. Name a folder with config.json, "
            "safetensors and tokenizer.json, a hub id such as zai-org/GLM-4.7-Flash, or none for "
            "the embedded model.",
            param="model",
        )
    patterns = (*SMALL_FILES, *more)
    return snapshot(
        Repository(model, revision, _cache_dir(download_dir), patterns, progress), weights
    )


def refuse_revision(revision: str, reason: str) -> None:
    """Refuse a revision where the model has none.

    Raises:
        ConfigError: One is named.
    """
    if revision:
        raise ConfigError(
            f"revision is {revision!r}, but {reason}; only a model named by its hub id has "
            "revisions.",
            param="revision",
        )


def hub_bytes(model: str, folder: Path, names: Sequence[str], download_dir: str = "") -> int | None:
    """Size of files of a model on the hub, whether they are here or not, without a call.

    Args:
        model: Its hub id.
        folder: The snapshot that `find_model` returned.
        names: The files.
        download_dir: As for `find_model`.

    Returns:
        Their bytes in all, None if the cache does not know of each.
    """
    repo = Repository(model, "", _cache_dir(download_dir))
    sizes = repo.sizes(folder) or {}
    return sum(sizes[name] for name in names) if sizes.keys() >= set(names) else None


def _cache_dir(download_dir: str) -> Path:
    return Path(download_dir or constants.HF_HUB_CACHE).expanduser()


def local_folder(model: str) -> Path | None:
    """The folder that a text names, None if there is none.

    Raises:
        ModelError: It cannot be looked at.
    """
    try:
        folder = Path(model).expanduser()
        return folder if folder.is_dir() else None
    except (RuntimeError, ValueError):  # an unknown user's home, a NUL
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ModelError(
            f"The model folder {_clipped(model)!r} cannot be read: {error.strerror}.",
            param="model",
        ) from error


def _clipped(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_hub_id(model: str) -> bool:
    """Whether a text can be the id of a hub repository; a path like `./model` cannot."""
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model, re.ASCII):
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def model_name(model: str) -> str:
    """What clients call a model: its hub id, or the name of its folder."""
    folder = local_folder(model)
    return model if folder is None else folder.resolve().name

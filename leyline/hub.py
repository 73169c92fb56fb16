"""Where a model lies: a folder of yours, or a snapshot in the cache that Hugging Face tools share.

Only what an engine reads is downloaded: configs, tokenizer and template first, so that a model
that cannot be run is refused before its weights are fetched, then the safetensors files that its
index names. Code and pickles are never asked for.

A revision is resolved once. Without one named, what the cache calls `main` is the model: once it
is complete, no start makes a single call, and an interrupted download goes on with the same
commit. A branch or tag that is named is looked up at every start, with one call, and a commit
never. Without a network what is cached is used; if something is missing, all of it is named.

`HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME` and the other settings of the
`huggingface_hub` library are read by that library, when it is imported.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_cached_repo_tree,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from tqdm.auto import tqdm

from leyline.errors import ConfigError, ModelError
from leyline.model.config import ModelConfig
from leyline.model.shards import INDEX_NAME, SINGLE_NAME, listed, required_files

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
SMALL_FILES = ("*.json", "*.jinja", "tiktoken.model", "tokenizer.model", "merges.txt")
NESTED_FILES = ("*/*",)  # other formats lie in folders; what an engine reads lies at the top
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
ATTEMPTS = 3
PAUSE_S = 1.0


def find_model(
    model: str,
    revision: str = "",
    download_dir: str = "",
    progress: bool = True,
    *,
    weights: bool = True,
) -> Path:
    """The folder of a model, downloaded if it is named by hub id and not in the cache.

    Args:
        model: A folder, which never makes the hub be asked, or a hub id such as `owner/name`.
        revision: Branch, tag or commit on the hub; see the module's docstring for none.
        download_dir: The hub's cache, in place of the library's.
        progress: Show the library's progress bars.
        weights: Also fetch the weights; without, configs and tokenizer are enough.

    Raises:
        ConfigError: A revision is named for a folder.
        ModelError: There is no such folder or repository, access is denied, the download failed,
            or there is no network and the cache does not hold all of the model.
    """
    folder = local_folder(model)
    if folder is not None:
        if revision:
            raise ConfigError(
                f"revision is {revision!r}, but {model!r} is a folder; only a model named by its "
                "hub id has revisions.",
                param="revision",
            )
        return folder
    if not is_hub_id(model):
        raise ModelError(
            f"There is no model folder {_clipped(model)!r}. Name a folder with config.json, "
            "safetensors and tokenizer.json, a hub id such as zai-org/GLM-4.7-Flash, or none for "
            "the embedded model.",
            param="model",
        )
    cache = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    return _snapshot(_Repository(model, revision, cache, progress), weights)


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


@dataclass(frozen=True)
class _Repository:
    """A model on the hub, and where its files are kept."""

    repo_id: str
    revision: str
    cache_dir: Path
    progress: bool

    def cached_folder(self) -> Path | None:
        """The snapshot that the cache has of the revision, whole or not. Makes no call."""
        config = try_to_load_from_cache(
            self.repo_id, CONFIG_NAME, self.cache_dir, self.revision or None
        )
        return Path(config).parent if isinstance(config, str) else None

    def small_files(self, folder: Path) -> list[str] | None:
        """What the hub has besides weights in a cached snapshot, None if nobody noted that."""
        try:
            tree = get_cached_repo_tree(
                self.repo_id, revision=folder.name, cache_dir=self.cache_dir
            )
        except CachedRepoTreeNotFoundError:
            return None
        top = [file.path for file in tree if "/" not in file.path]
        return [name for name in top if any(fnmatch.fnmatch(name, p) for p in SMALL_FILES)]

    @property
    def needs_no_lookup(self) -> bool:
        """Whether the cache alone says which commit is meant."""
        return not self.revision or _is_commit(self.revision)


def _is_commit(revision: str) -> bool:
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def _snapshot(repo: _Repository, weights: bool) -> Path:
    """The folder of a snapshot in which everything is there."""
    cached = repo.cached_folder() if repo.needs_no_lookup else None
    if cached and repo.small_files(cached) and not _missing(repo, cached, weights):
        if not repo.revision:
            logger.info(
                "%s: the cache has commit %s; --revision main looks for a newer one.",
                repo.repo_id,
                cached.name[:12],
            )
        return cached
    try:
        folder = _download(repo, cached.name if cached else repo.revision, SMALL_FILES)
        if weights and (folder / CONFIG_NAME).is_file():
            # Read before the weights are fetched: what cannot be run is refused here.
            shards = required_files(folder, ModelConfig.load(folder))
            folder = _download(repo, folder.name, [glob.escape(shard) for shard in shards])
    except ModelError:
        raise
    except Exception as error:  # the library's, its HTTP client's and the disk's have no root
        raise _explained(error, repo, weights) from error
    missing = _missing(repo, folder, weights)
    if missing:
        raise ModelError(
            f"The hub's {repo.repo_id} cannot be served: it lacks {listed(missing)}.",
            param="model",
        )
    return folder


def _missing(repo: _Repository, folder: Path, weights: bool) -> list[str]:
    """The files that a snapshot lacks."""
    if not (folder / CONFIG_NAME).is_file():
        return [CONFIG_NAME]
    wanted = repo.small_files(folder) or []
    if weights:
        wanted = wanted + required_files(folder, ModelConfig.load(folder))
    missing = [name for name in wanted if not (folder / name).is_file()]
    if weights and not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append(" or ".join(TOKENIZERS))
    if SINGLE_NAME in missing:
        missing[missing.index(SINGLE_NAME)] = f"{SINGLE_NAME} or {INDEX_NAME}"
    return missing


def _download(repo: _Repository, revision: str, patterns: Sequence[str]) -> Path:
    """Fetch what is not there yet. The library tries files again, but not the look-up before."""
    attempts = 1 if _is_commit(revision) else ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            return Path(
                snapshot_download(
                    repo.repo_id,
                    revision=revision or None,
                    cache_dir=repo.cache_dir,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(NESTED_FILES),
                    tqdm_class=None if repo.progress else _NoBar,
                    library_name="leyline",
                )
            )
        except Exception as error:
            if attempt == attempts or not _is_passing(error):
                raise
            logger.warning("%s: %s; trying again.", repo.repo_id, _reason(error))
            time.sleep(PAUSE_S * attempt)
    raise AssertionError("unreachable")


def _is_passing(error: BaseException | None) -> bool:
    """Whether the hub said that it is busy or out of order, which may be over soon."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            return error.response.status_code == 429 or error.response.status_code >= 500
        error = error.__cause__
    return False


def _explained(error: Exception, repo: _Repository, weights: bool) -> ModelError:
    """One line on why a model could not be had."""
    name = repo.repo_id
    if isinstance(error, GatedRepoError):
        text = (
            f"The hub's {name} is gated: accept its terms on its page, and set HF_TOKEN to a token "
            "of that account."
        )
    elif isinstance(error, RepositoryNotFoundError):
        text = (
            f"There is neither a folder nor a hub repository {name!r}. If it is private, set "
            "HF_TOKEN to a token that may read it."
        )
    elif isinstance(error, RevisionNotFoundError):
        text = f"The hub's {name} has no revision {repo.revision!r}."
        return ModelError(text, param="revision")
    else:
        text = f"{name} could not be fetched from {constants.ENDPOINT}: {_reason(error)}. "
        text += _what_is_missing(repo, weights)
    return ModelError(text, param="model")


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")


def _what_is_missing(repo: _Repository, weights: bool) -> str:
    """What the cache has and lacks, for somebody without a network."""
    folder = repo.cached_folder()
    if folder is None:
        return f"Nothing of it is in the cache {str(repo.cache_dir)!r}."
    missing = _missing(repo, folder, weights)
    if not missing:
        return "The cache has all of it; start with HF_HUB_OFFLINE=1 to use that."
    return f"The cache lacks {listed(missing)}."


class _NoBar(tqdm):
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))

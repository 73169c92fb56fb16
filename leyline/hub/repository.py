"""A snapshot of a repository in the cache: what it has, what it lacks, and how that is fetched."""

from __future__ import annotations

import fnmatch
import glob
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    constants,
    get_cached_repo_tree,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from leyline.errors import ModelError
from leyline.hub.calls import ImpatientApi, NoBar, reason, tried, unsigned
from leyline.model.shards import INDEX_NAME, SINGLE_NAME, listed
from leyline.tokenizer import Tokenizer

logger = logging.getLogger("leyline.hub")

CONFIG_NAME = "config.json"
SMALL_FILES = ("*.json", "*.jinja", "tiktoken.model")
NESTED_FILES = ("*/*",)  # other formats lie in folders; what an engine reads lies at the top,
TEMPLATES = "additional_chat_templates/*.jinja"  # but for these
TOKENIZERS = ("tokenizer.json", "tiktoken.model")

WeightFiles = Callable[[Path], Sequence[str]]


@dataclass(frozen=True)
class Repository:
    """A model on the hub, and where its files are kept."""

    repo_id: str
    revision: str
    cache_dir: Path
    patterns: tuple[str, ...] = SMALL_FILES
    progress: bool = True

    def cached_folder(self) -> Path | None:
        """The snapshot that the cache has of the revision, whole or not. Makes no call."""
        config = try_to_load_from_cache(
            self.repo_id, CONFIG_NAME, self.cache_dir, self.revision or None
        )
        return Path(config).parent if isinstance(config, str) else None

    def sizes(self, folder: Path) -> dict[str, int] | None:
        """Files that a cached snapshot may have, and their bytes; None if nobody noted that."""
        try:
            tree = get_cached_repo_tree(
                self.repo_id, revision=folder.name, cache_dir=self.cache_dir
            )
        except CachedRepoTreeNotFoundError:
            return None
        return {file.path: file.size for file in tree}

    def small_files(self, folder: Path) -> list[str]:
        """What the hub has besides weights in a cached snapshot; [] if nobody noted that."""
        names = self.sizes(folder) or {}
        top = [name for name in names if "/" not in name]
        small = [name for name in top if any(fnmatch.fnmatch(name, p) for p in self.patterns)]
        return small + fnmatch.filter(names, TEMPLATES)

    @property
    def needs_no_lookup(self) -> bool:
        """Whether the cache alone says which commit is meant."""
        return not self.revision or _is_commit(self.revision)


def _is_commit(revision: str) -> bool:
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def snapshot(repo: Repository, weights: WeightFiles | None) -> Path:
    """The folder of a snapshot in which everything is there.

    Raises:
        ModelError: See `leyline.hub.find_model`.
    """
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
        folder = _small_files(repo, cached.name if cached else _commit(repo))
        if weights is not None:
            _download(repo, folder.name, _checked_weights(repo, folder, weights))
    except ModelError:
        raise
    except Exception as error:  # the library's, its HTTP client's and the disk's have no root
        raise _explained(error, repo, weights) from error
    _require(repo, _missing(repo, folder, weights))
    return folder


def _small_files(repo: Repository, commit: str) -> Path:
    """Fetch what is small; returns the snapshot's folder."""
    folder = _snapshot_download(repo, commit, repo.patterns, NESTED_FILES)
    nested = [name for name in repo.small_files(folder) if "/" in name]
    if nested:
        _download(repo, commit, nested)
    return folder


def _checked_weights(repo: Repository, folder: Path, weights: WeightFiles) -> Sequence[str]:
    """The weight files of a snapshot whose small files are there.

    They are read here, before gigabytes are fetched for a model that cannot be run.
    """
    _require(repo, _missing(repo, folder, None))
    shards = weights(folder)
    missing = _missing_tokenizer(folder)
    if repo.small_files(folder):  # else nobody knows what the hub has
        _require(repo, missing)
    if not missing:
        Tokenizer.load(folder)
    return shards


def _require(repo: Repository, missing: Sequence[str]) -> None:
    if missing:
        raise ModelError(
            f"The hub's {repo.repo_id} cannot be used: it lacks {listed(missing)}.", param="model"
        )


def _missing(repo: Repository, folder: Path, weights: WeightFiles | None) -> list[str]:
    """The files that a snapshot lacks."""
    if not (folder / CONFIG_NAME).is_file():
        return [CONFIG_NAME]
    wanted = repo.small_files(folder)
    if weights is not None:
        wanted = [*wanted, *weights(folder)]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if weights is not None:
        missing += _missing_tokenizer(folder)
    if SINGLE_NAME in missing:
        missing[missing.index(SINGLE_NAME)] = f"{SINGLE_NAME} or {INDEX_NAME}"
    return missing


def _missing_tokenizer(folder: Path) -> list[str]:
    found = any((folder / name).is_file() for name in TOKENIZERS)
    return [] if found else [" or ".join(TOKENIZERS)]


def _commit(repo: Repository) -> str:
    """The commit of the revision: one call, or what the cache has if the hub does not tell."""
    if _is_commit(repo.revision):
        return repo.revision
    try:
        return tried(repo.repo_id, lambda: _look_up(repo))
    except RevisionNotFoundError:
        raise
    except Exception as error:
        known = repo.cached_folder()
        if known is None:
            raise
        logger.warning("%s: %s; going on with what is cached.", repo.repo_id, reason(error))
        return known.name


def _look_up(repo: Repository) -> str:
    api = ImpatientApi(library_name="leyline")
    revision = repo.revision or None
    return api.resolve_revision(repo.repo_id, revision=revision, cache_dir=repo.cache_dir).resolved


def _download(repo: Repository, commit: str, names: Sequence[str]) -> None:
    """Fetch those of the files that are not there yet."""
    _snapshot_download(repo, commit, [glob.escape(name) for name in names])


def _snapshot_download(
    repo: Repository, commit: str, patterns: Sequence[str], ignored: Sequence[str] = ()
) -> Path:
    """Fetch what is not there yet. What was cut goes on where it was cut."""

    def download() -> Path:
        return Path(
            snapshot_download(
                repo.repo_id,
                revision=commit,
                cache_dir=repo.cache_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                tqdm_class=None if repo.progress else NoBar,
                library_name="leyline",
            )
        )

    return tried(repo.repo_id, download)


def _explained(error: Exception, repo: Repository, weights: WeightFiles | None) -> ModelError:
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
        text = f"{name} could not be fetched from {unsigned(constants.ENDPOINT)}: {reason(error)}. "
        text += _what_is_missing(repo, weights)
    return ModelError(text, param="model")


def _what_is_missing(repo: Repository, weights: WeightFiles | None) -> str:
    """What the cache has and lacks, for somebody without a network."""
    folder = repo.cached_folder()
    if folder is None:
        return f"Nothing of it is in the cache {str(repo.cache_dir)!r}."
    missing = _missing(repo, folder, weights)
    if not missing:
        return "The cache has all of it; start with HF_HUB_OFFLINE=1 to use that."
    return f"The cache lacks {listed(missing)}."

"""Which files of a model folder hold its weights, as the index says; nothing is opened here.

Where there is an index, only the files that it names are read, and of those only the ones that
hold something the model needs: a stray file cannot mix in, and JoyAI's MTP file may be absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leyline.errors import ModelError
from leyline.model.config import ModelConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name as the index has it, None where the folder has no index.

    Raises:
        ModelError: The index is no index, names a tensor twice, or leaves the folder.
    """
    path = folder / INDEX_NAME
    try:
        if not path.is_file():
            return None
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        names = {str(name): str(shard) for name, shard in index["weight_map"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{INDEX_NAME} is not a valid index: {error!r}.", param="model") from error
    shards = dict.fromkeys(names.values())
    strange = [s for s in shards if Path(s).name != s or not s.endswith(".safetensors")]
    if strange:
        raise ModelError(
            f"{INDEX_NAME} names {listed(strange)}, which is no safetensors file beside it.",
            param="model",
        )
    return names


def required_files(folder: Path, config: ModelConfig) -> list[str]:
    """The names of the files that hold this model's weights, whether they are there or not."""
    mapped = weight_map(folder)
    if mapped is None:
        return [SINGLE_NAME]
    return sorted({shard for name, shard in mapped.items() if not is_skipped(name, config)})


def is_skipped(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be stored although the model has no use for it.

    Those are the MTP layers, numbered from `num_hidden_layers` on, a copy of a tied head, and
    rope frequencies, which are computed more exactly than they are stored.
    """
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = int(match[1]) - config.num_hidden_layers if match else -1
    return 0 <= beyond < max(1, config.num_nextn_predict_layers)


def no_weights(folder: Path) -> ModelError:
    """Why a folder without an index and without a single file cannot be loaded."""
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    problem = f"The folder {str(folder)!r} has neither {INDEX_NAME} nor {SINGLE_NAME}"
    if shards:
        problem += f", only {listed(shards, 2)}: the index is missing. Download the model again"
    elif pickles:
        problem += (
            f", only {listed(pickles, 2)}, which may hold code and is never read. Use a "
            "safetensors version of the model"
        )
    return ModelError(f"{problem}.", param="model")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for JSON that must not say two things about one name."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is there twice")
        found[key] = value
    return found


def listed(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    names = list(dict.fromkeys(names))
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")

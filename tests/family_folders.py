"""Repositories in the form of the four families', weights and text both, small enough for a test.

The weights are those of `tests.checkpoints`. The tokenizers are the families' own, cut to their
first thousand ids: the same kind of file, split pattern, special tokens and chat template, and a
few rows of the embedding more than there are ids, where the real model has them too. JoyAI's own
template is not known here; it stands in with that of the model whose vocabulary it has.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
import tiktoken.load
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from leyline.model.presets import preset_data
from leyline.tiktoken_vocabulary import NUM_SPECIAL, PATTERN
from tests.checkpoints import FAMILIES, write_weights
from tests.model.oracle import Oracle
from tests.real_tokenizers import (
    DATA,
    EOS,
    MOONLIGHT_SPECIAL,
    NUM_RANKS,
    SOURCES,
    moonlight_config,
    moonlight_ranks,
    write,
)

NUM_BASE = 1000
SPARE_ROWS = {  # of the embedding, without an id
    "deepseek-v2-lite": 40,
    "moonlight-16b-a3b": 0,
    "glm-4.7-flash": 24,
    "joyai-llm-flash": 30,
}
PLACE_HOLDER = "\u2581holder\u2581"  # 800 of these are in JoyAI's vocabulary
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Numbers:
    """The ids of a cut vocabulary.

    Attributes:
        size: One more than the largest.
        of: Those of the special tokens, by the ids that they have in the real vocabulary.
    """

    size: int
    of: dict[int, int]

    def __call__(self, ids: Any) -> Any:
        """An id, or several, in the cut vocabulary."""
        return [self(one) for one in ids] if isinstance(ids, list) else self.of.get(ids, ids)


def write_repository(preset: str, folder: Path) -> Oracle:
    """Write what a family's repository has; returns the model that the weights are from."""
    folder.mkdir()
    numbers = _write_moonlight(folder) if preset not in SOURCES else _write_bpe(preset, folder)
    ids = {name: value for name, value in preset_data(preset).items() if name in ID_KEYS}
    changes = {name: numbers(value) for name, value in ids.items()}
    changes["vocab_size"] = numbers.size + SPARE_ROWS[preset]
    oracle = write_weights(preset, folder, changes)
    write(folder, "generation_config.json", {"eos_token_id": numbers(EOS[preset])})
    return oracle


# tokenizer.json -----------------------------------------------------------------------------------


def _write_bpe(preset: str, folder: Path) -> Numbers:
    source = DATA / SOURCES[preset]
    with zipfile.ZipFile(source / "tokenizer.json.zip") as archive:
        data = json.loads(archive.read("tokenizer.json"))
    numbers = _cut(data)
    write(folder, "tokenizer.json", data)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "added_tokens_decoder" in config:
        added = config["added_tokens_decoder"].items()
        config["added_tokens_decoder"] = {str(numbers(int(one))): token for one, token in added}
    if preset == "joyai-llm-flash":  # its template is a file, and writes the only BOS there is
        config["add_bos_token"] = False
        (folder / "chat_template.jinja").write_text(config.pop("chat_template"), encoding="utf-8")
    if (source / "chat_template.jinja").is_file():
        (folder / "chat_template.jinja").write_bytes((source / "chat_template.jinja").read_bytes())
    write(folder, "tokenizer_config.json", config)
    return numbers


def _cut(data: dict[str, Any]) -> Numbers:
    """Leave a `tokenizer.json` with its first ids, their merges, and its special tokens."""
    model = data["model"]
    vocab = {token: number for token, number in model["vocab"].items() if number < NUM_BASE}
    model["vocab"], model["merges"] = vocab, [one for one in model["merges"] if _makes(one, vocab)]
    kept = [token for token in data["added_tokens"] if PLACE_HOLDER not in token["content"]]
    behind = [token["id"] for token in kept if token["id"] >= NUM_BASE]
    numbers = Numbers(
        NUM_BASE + len(behind), {number: NUM_BASE + at for at, number in enumerate(behind)}
    )
    data["added_tokens"] = [token | {"id": numbers(token["id"])} for token in kept]
    return numbers


def _makes(merge: str | Sequence[str], vocab: Mapping[str, int]) -> bool:
    """Whether a merge is one of tokens that are there."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right} <= vocab.keys()


# tiktoken.model -----------------------------------------------------------------------------------


def _write_moonlight(folder: Path) -> Numbers:
    ranks = moonlight_ranks().splitlines(keepends=True)[:NUM_BASE]
    (folder / "tiktoken.model").write_bytes(b"".join(ranks))
    numbers = Numbers(
        NUM_BASE + NUM_SPECIAL,
        {number: number - NUM_RANKS + NUM_BASE for number in MOONLIGHT_SPECIAL},
    )
    config = moonlight_config()
    added = config["added_tokens_decoder"].items()
    config["added_tokens_decoder"] = {str(numbers(int(one))): token for one, token in added}
    write(folder, "tokenizer_config.json", config)
    return numbers


# The same text by others' tokenizers --------------------------------------------------------------


def prompt_ids(folder: Path, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The prompt of a conversation, as the families' own libraries write it."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config["chat_template"]
    tokens: dict[str, Any] = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}
    conversation: list[Any] = [dict(message) for message in messages]
    (text,), _ = render_jinja_template(
        [conversation], chat_template=template, add_generation_prompt=True, **tokens
    )
    return _encoder(folder, config)(text)


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else token or ""


def _encoder(folder: Path, config: Mapping[str, Any]) -> Callable[[str], list[int]]:
    if (folder / "tiktoken.model").is_file():
        added = config["added_tokens_decoder"].items()
        special = {token["content"]: int(number) for number, token in added}
        ranks = tiktoken.load.load_tiktoken_bpe(str(folder / "tiktoken.model"))
        encoding = tiktoken.Encoding(
            "", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        return lambda text: encoding.encode(text, allowed_special="all")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


__all__ = ["FAMILIES", "prompt_ids", "write_repository"]

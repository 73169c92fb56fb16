"""A llama in a GGUF file: its metadata, its tensors, and its vocabulary as a hub tokenizer.

GGUF is llama.cpp's format. Tensor names are llama.cpp's, and every metadata field of the model
begins with the architecture's name (`llama.block_count`, `qwen2.block_count`). Of the tokenizer
only the vocabulary is stored; how text is split beforehand is a name (`tokenizer.ggml.pre`) whose
meaning is code in llama.cpp, so only the names whose rules stand here can be rewritten.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import torch

from leyline.bpe_vocabulary import SENTENCEPIECE, SUPPORTED
from leyline.errors import ModelError

_FIELD = "The GGUF file's metadata field"
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # llama.cpp's types of special and of added tokens

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _WORDS.replace("{DIGITS}", "{1,3}"),
    "qwen2": _WORDS.replace("{DIGITS}", ""),
}
PRE_TOKENIZERS = ("smollm", "gpt-2", *_SPLITS)


class GgufModel:
    """A model in a GGUF file: its metadata, and its tensors under llama.cpp's names.

    Raises:
        ModelError: If the file is no GGUF file, or cut short.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise ModelError(f"{path.name} is not a whole GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's family, with which its fields begin."""
        return str(self.field("general.architecture"))

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        return list(self._tensors)

    def field(self, name: str) -> Any:
        """Return a metadata value.

        Raises:
            ModelError: If there is none of that name.
        """
        found = self._reader.get_field(name)
        if found is None:
            raise ModelError(f"The GGUF file has no metadata field {name!r}.")
        return found.contents()

    def find(self, name: str, default: Any = None) -> Any:
        """Return a metadata value, or `default` if there is none of that name."""
        return default if self._reader.get_field(name) is None else self.field(name)

    def whole(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a metadata value that must be an integer.

        Raises:
            ModelError: If it is none or too small, or there is none and no default.
        """
        value = self.field(name) if default is None else self.find(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"{_FIELD} {name} must be an integer of at least {minimum}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a metadata value that must be a finite number above 0.

        Raises:
            ModelError: If it is none, or there is none and no default.
        """
        value = self.field(name) if default is None else self.find(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value < math.inf:
            raise ModelError(f"{_FIELD} {name} must be a number above 0.")
        return float(value)

    def texts(self, name: str) -> list[str]:
        """Return a metadata value that must be a list of texts.

        Raises:
            ModelError: If it is none, or there is none.
        """
        value = self.field(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ModelError(f"{_FIELD} {name} must be a list of texts.")
        return value

    def token_id(self, name: str) -> int | None:
        """Return a token's id by its field's name, None if there is none.

        Raises:
            ModelError: If it is no integer from 0 on.
        """
        return None if self.find(name) is None else self.whole(name, minimum=0)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, dequantised to fp32, [rows, columns] as in a linear layer.

        Raises:
            ModelError: If there is none of that name.
        """
        if name not in self._tensors:
            raise ModelError(f"The GGUF file has no tensor {name!r}.")
        found = self._tensors[name]
        return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy()).float()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes, rows first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def kind(self, name: str) -> str:
        """Return how a tensor is stored, in llama.cpp's words: F32, BF16, Q4_1, ..."""
        return self._tensors[name].tensor_type.name


def token_ids(source: GgufModel) -> dict[str, Any]:
    """Return the ids of bos, eos and pad, as `generation_config.json` holds them.

    A turn may end with a token of its own, beside the one that ends a text; eos is then a list.
    """
    fields = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {n: source.token_id(f"tokenizer.ggml.{key}_token_id") for n, key in fields.items()}
    ids: dict[str, Any] = {f"{n}_token_id": i for n, i in found.items() if i is not None}
    turn_end = source.token_id("tokenizer.ggml.eot_token_id")
    if turn_end is not None and turn_end != found["eos"]:
        ids["eos_token_id"] = [i for i in (found["eos"], turn_end) if i is not None]
    return ids


def tokenizer_spec(source: GgufModel) -> dict[str, Any]:
    """Return `tokenizer.json` for a GGUF's vocabulary, if it is byte-level BPE.

    Raises:
        ModelError: If the vocabulary is of another kind.
    """
    pre = source.find("tokenizer.ggml.pre", "default")
    kind = source.field("tokenizer.ggml.model"), pre
    if kind[0] == "llama":
        raise ModelError(f"The GGUF's tokenizer is {SENTENCEPIECE}; {SUPPORTED}.")
    if kind[0] != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"The GGUF's tokenizer is {kind}; supported is 'gpt2' with one of "
            f"{', '.join(PRE_TOKENIZERS)}. Name the safetensors folder of the model instead."
        )
    tokens = source.texts("tokenizer.ggml.tokens")
    types = source.field("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{_FIELD} tokenizer.ggml.token_type must have one number a token.")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token, type_ == CONTROL_TOKEN)
            for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in source.texts("tokenizer.ggml.merges")],
        },
    }


def _pre_tokenizer(pre: str) -> dict[str, Any]:
    """How text is cut into words before its bytes are merged; `use_regex` is GPT-2's pattern."""
    if pre == "gpt-2":
        return _byte_level(use_regex=True)
    if pre == "smollm":
        first = {"type": "Digits", "individual_digits": True}
    else:
        pattern = {"Regex": _SPLITS[pre]}
        first = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {
        "type": "Sequence",
        "pretokenizers": [first, _byte_level(use_regex=pre == "smollm")],
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {**plain, "use_regex": use_regex}


def _added_token(index: int, token: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **flags, "special": special}


def tokenizer_config(source: GgufModel) -> dict[str, Any]:
    """Return `tokenizer_config.json`: which tokens are special, and whether BOS comes by itself."""
    tokens = source.texts("tokenizer.ggml.tokens")
    fields = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {n: source.token_id(f"tokenizer.ggml.{key}_token_id") for n, key in fields.items()}
    if any(i is not None and i >= len(tokens) for i in found.values()):
        raise ModelError("The GGUF file names a special token that its vocabulary does not have.")
    return {
        "add_bos_token": bool(source.find("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        **{f"{name}_token": tokens[i] for name, i in found.items() if i is not None},
        "model_max_length": source.whole(f"{source.architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }

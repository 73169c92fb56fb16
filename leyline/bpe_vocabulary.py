"""The vocabulary of a `tokenizer.json`: byte-level BPE, run by the tokenizers library."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BpeTokenizer

from leyline.errors import ModelError

FILE_NAME = "tokenizer.json"
LONG_TEXT = 4096  # characters from which on other threads are let run meanwhile
SENTENCEPIECE = "a SentencePiece vocabulary, as of Llama 2 and Mistral 7B"
SUPPORTED = "only byte-level BPE is supported, as of Llama 3, Qwen2, SmolLM2 and Mistral NeMo"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character of every byte, and the byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


BYTE_OF = _byte_alphabet()


class BpeVocabulary:
    """Ids of texts, and bytes of ids.

    Added tokens stand for their text in UTF-8. The library reads them as bytes if it can, and so
    decodes the `ö` that DeepSeek's first vocabulary lists as added to a byte that is no text.

    Attributes:
        kind: The file that it comes from.
        size: One more than the largest id.
        special_ids: Ids that are control, not text.
    """

    kind = FILE_NAME

    def __init__(self, bpe: BpeTokenizer) -> None:
        bpe.no_truncation()
        bpe.no_padding()
        added = bpe.get_added_tokens_decoder()
        self._bpe = bpe
        control = [token.content for token in added.values() if not _is_ordinary(token)]
        self._control = re.compile("|".join(map(re.escape, control)) if control else r"(?!)")
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.size: int = max(bpe.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, folder: Path, num_rows: int | None = None) -> BpeVocabulary:
        """Read the file.

        Args:
            folder: The model folder.
            num_rows: Ids that the model has a row for. Added tokens from there on are left out, so
                that no text can produce an id that the model has never seen.

        Raises:
            ModelError: If it is missing, unreadable, of another kind, or another model's.
        """
        path = folder / FILE_NAME
        try:
            bpe = BpeTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{FILE_NAME} in the model folder cannot be read: {error}") from error
        if type(bpe.decoder).__name__ != "ByteLevel":
            raise ModelError(f"{FILE_NAME} is {_kind(bpe)}; {SUPPORTED}.")
        vocabulary = cls(bpe)
        if num_rows is None or vocabulary.size <= num_rows:
            return vocabulary
        return cls(_without_added_from(bpe, num_rows))

    def ids(self, text: str) -> list[int]:
        """Ids of a text, in which the texts of added tokens are those tokens."""
        return _ids(self._bpe, text)

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text that is mere characters."""
        if not self._names_control(text):
            return self.ids(text)
        return _ids(self._plain_bpe, text)

    def _names_control(self, text: str) -> bool:
        normalizer = self._bpe.normalizer
        texts = [text] if normalizer is None else [text, normalizer.normalize_str(text)]
        return any(map(self._control.search, texts))

    def id_of(self, token: str) -> int | None:
        """The id of a token, by its text."""
        return self._bpe.token_to_id(token)

    def starts_with(self, bos_id: int | None) -> bool:
        """Whether the file itself puts this id in front of texts."""
        return self._bpe.encode("a", add_special_tokens=True).ids[:1] == [bos_id]

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that an id stands for, or None if it has no text.

        Raises:
            OverflowError, TypeError: If it is negative or no integer.
        """
        text = self._added.get(token_id)
        if text is not None:
            return text.encode("utf-8")
        token = self._bpe.id_to_token(token_id)
        if token is None:
            return None
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:  # no byte-level token, against all rules
            return token.encode("utf-8")

    @cached_property
    def _plain_bpe(self) -> BpeTokenizer:
        """The same without control tokens; takes seconds to make, and is seldom needed."""
        added = self._bpe.get_added_tokens_decoder()
        ordinary = {index for index, token in added.items() if _is_ordinary(token)}
        spec = json.loads(self._bpe.to_str())
        return _with_added(spec, [one for one in spec["added_tokens"] if one["id"] in ordinary])


def _ids(bpe: BpeTokenizer, text: str) -> list[int]:
    """Ids of a text. Of the library's functions, only the one for batches lets go of the GIL."""
    if len(text) <= LONG_TEXT:
        return bpe.encode(text, add_special_tokens=False).ids
    return bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _kind(bpe: BpeTokenizer) -> str:
    """What a vocabulary is called that is no byte-level one.

    In a SentencePiece one the first word of a text has a space before it that no text shows, and
    whether a byte is a character is known only when the run of bytes ends. So neither the text of
    two contexts is that of one behind the other, nor that of a token its own, on which edits by
    text and streams rely.
    """
    decoder = json.dumps(json.loads(bpe.to_str())["decoder"])
    if "Metaspace" in decoder or "\\u2581" in decoder or "ByteFallback" in decoder:
        return SENTENCEPIECE
    return f"a vocabulary with a decoder of type {type(bpe.decoder).__name__}"


def _is_ordinary(token: AddedToken) -> bool:
    """Whether an added token is ordinary text: a run of white space, or one character.

    Texts have to give these tokens whether special ones are looked for or not.
    """
    return not token.content.strip() or (len(token.content) == 1 and not token.special)


def _with_added(spec: dict[str, Any], added: list[dict[str, Any]]) -> BpeTokenizer:
    """A tokenizer with only some of its added tokens, which keep their ids."""
    # They are named in the model's vocabulary too, or else they would be numbered afresh.
    spec["model"]["vocab"].update({token["content"]: token["id"] for token in added})
    spec["added_tokens"] = added
    return BpeTokenizer.from_str(json.dumps(spec))


def _without_added_from(bpe: BpeTokenizer, num_rows: int) -> BpeTokenizer:
    spec = json.loads(bpe.to_str())
    largest = max(spec["model"]["vocab"].values(), default=-1)
    if largest >= num_rows:
        raise ModelError(
            f"{FILE_NAME} has ids up to {largest}, but config.json says that the model has "
            f"{num_rows} (vocab_size); they belong to different models."
        )
    return _with_added(spec, [token for token in spec["added_tokens"] if token["id"] < num_rows])

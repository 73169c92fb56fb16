"""The vocabulary of a `tiktoken.model`: byte-pair ranks, run by the tiktoken library.

That is how Moonlight and the Kimi models come: a file of ranks, and a Python file of their own with
the pattern that cuts texts into words, which Leyline does not run. What it does is done here: the
pattern (one for the whole family), 256 special ids behind the ranks, named by
`added_tokens_decoder` in `tokenizer_config.json` and "<|reserved_token_N|>" otherwise, and the same
cuts of very long texts. Moonlight's own file makes two more special ids, 163840 and 163841, for
which the model has no row in its embedding; texts cannot produce them here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken

from leyline.errors import ModelError

FILE_NAME = "tiktoken.model"
NUM_SPECIAL = 256
# Han characters are words of their own, and taken out of the letters by a class intersection (&&).
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MAX_CHARACTERS = 400_000  # of one text, and of one run of white space or of other characters:
MAX_RUN = 25_000  # the library gives up on longer ones


class TiktokenVocabulary:
    """Ids of texts, and bytes of ids.

    Args:
        ranks: Ids of byte strings, from 0 on without a gap; all single bytes are among them.
        special: Ids of the special tokens behind them.
        control: Those of the special ids that are control, not text.

    Attributes:
        kind: The file that it comes from.
        size: One more than the largest id.
        special_ids: Ids that are control, not text.
    """

    kind = FILE_NAME

    def __init__(
        self, ranks: Mapping[bytes, int], special: Mapping[str, int], control: frozenset[int]
    ) -> None:
        self._encoding = tiktoken.Encoding(
            FILE_NAME,
            pat_str=PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=dict(special),
        )
        self._special = dict(special)
        self._bytes = {number: token for token, number in ranks.items()}
        self._bytes |= {number: text.encode("utf-8") for text, number in special.items()}
        self.special_ids = control
        self.size = max(self._bytes) + 1

    @classmethod
    def load(
        cls, folder: Path, config: Mapping[str, Any], num_rows: int | None = None
    ) -> TiktokenVocabulary:
        """Read the file.

        Args:
            folder: The model folder.
            config: Its `tokenizer_config.json`.
            num_rows: Ids that the model has a row for; special ones from there on are left out.

        Raises:
            ModelError: If a file is unreadable, or another model's.
        """
        named = _named(config)
        try:
            ranks = _ranks((folder / FILE_NAME).read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"{FILE_NAME} in the model folder cannot be read: {error}") from error
        end = max([len(ranks) + NUM_SPECIAL, *(number + 1 for number in named)])
        if num_rows is not None:
            end = min(end, num_rows)
        if end < len(ranks):
            raise ModelError(
                f"{FILE_NAME} has {len(ranks)} ids, but config.json says that the model has {end} "
                "(vocab_size); they belong to different models."
            )
        numbers = range(len(ranks), end)
        texts = [named.get(number, (f"<|reserved_token_{number}|>", True)) for number in numbers]
        special = {text: number for (text, _), number in zip(texts, numbers, strict=True)}
        if len(special) < len(numbers):
            raise ModelError("added_tokens_decoder in tokenizer_config.json names a token twice.")
        control = {
            number for (_, is_control), number in zip(texts, numbers, strict=True) if is_control
        }
        return cls(ranks, special, frozenset(control))

    def ids(self, text: str) -> list[int]:
        """Ids of a text, in which the texts of special tokens are those tokens."""
        return [
            token_id
            for piece in _pieces(text)
            for token_id in self._encoding.encode(piece, allowed_special="all")
        ]

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text that is mere characters."""
        return [
            token_id
            for piece in _pieces(text)
            for token_id in self._encoding.encode_ordinary(piece)
        ]

    def id_of(self, token: str) -> int | None:
        """The id of a special token, by its text."""
        return self._special.get(token)

    def starts_with(self, bos_id: int | None) -> bool:
        """Whether the file itself puts this id in front of texts: such a file never does."""
        return False

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that an id stands for, or None if it has no text.

        Raises:
            OverflowError, TypeError: If it is negative or no integer.
        """
        if type(token_id) is not int:
            raise TypeError(token_id)
        if not 0 <= token_id < 1 << 32:
            raise OverflowError(token_id)
        return self._bytes.get(token_id)


def _ranks(data: bytes) -> dict[bytes, int]:
    """Parse lines of base64 and rank.

    Raises:
        ValueError: If a line is something else, or the ranks are not 0, 1, 2 and so on.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number + 1} is no token and its rank") from error
        if int(rank) != number or len(ranks) != number + 1:
            raise ValueError(f"line {number + 1} repeats a token, or its rank is not {number}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"the byte {missing[0]} is no token")
    return ranks


def _named(config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Text of each named special token, and whether it is control."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, Mapping) or not added:
        raise ModelError(
            f"A {FILE_NAME} needs the names of its special tokens: added_tokens_decoder in "
            "tokenizer_config.json."
        )
    named = {}
    for number, token in added.items():
        text = token.get("content") if isinstance(token, Mapping) else None
        if not str(number).isdecimal() or not isinstance(text, str) or not text:
            raise ModelError(
                "added_tokens_decoder in tokenizer_config.json must give each id an object with "
                f"a content, not {number!r}: {token!r}."
            )
        named[int(number)] = (text, token.get("special") is not False)
    return named


def _pieces(text: str) -> Iterator[str]:
    """Cut a text where the models' own Python files do; ids depend on it."""
    for start in range(0, len(text), MAX_CHARACTERS):
        yield from _runs(text[start : start + MAX_CHARACTERS])


def _runs(text: str) -> Iterator[str]:
    """Cut where a run of white space, or of other characters, gets too long."""
    if len(text) <= MAX_RUN:
        yield text
        return
    start, run, was_space = 0, 0, text[0].isspace()
    for at, character in enumerate(text):
        is_space = character.isspace()
        run = run + 1 if is_space == was_space else 1
        was_space = is_space
        if run > MAX_RUN:
            yield text[start:at]
            start, run = at, 1
    yield text[start:]

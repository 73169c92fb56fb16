"""Token ids and text: encode, decode, one token at a time, and the chat template.

Byte-level BPE tokens are byte strings, and a character may be cut between two of them. So
everything here is done on bytes: `decode` joins the tokens' bytes and reads them as UTF-8 once,
and a `TextStream` feeds the same bytes to an incremental UTF-8 decoder. The two agree for every
split because UTF-8 decoding with replacement depends on nothing but the bytes (Unicode 16,
section 3.9, "maximal subparts"); no window of earlier tokens is ever decoded again.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as BpeTokenizer

from leyline import bpe_vocabulary, tiktoken_vocabulary, tokenizer_files
from leyline.bpe_vocabulary import BYTE_OF, BpeVocabulary
from leyline.errors import InvalidRequestError, ModelError
from leyline.template import PART_SEPARATOR, ChatTemplate
from leyline.tiktoken_vocabulary import TiktokenVocabulary

__all__ = ["BYTE_OF", "TextStream", "Tokenizer", "Vocabulary", "check_text"]


class Vocabulary(Protocol):
    """What a tokenizer needs to know of its ids; see `leyline.bpe_vocabulary`."""

    kind: str
    size: int
    special_ids: frozenset[int]

    def ids(self, text: str) -> list[int]:
        """Ids of a text, in which the texts of special tokens are those tokens."""
        ...

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text that is mere characters."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a special token, by its text."""
        ...

    def starts_with(self, bos_id: int | None) -> bool:
        """Whether the vocabulary itself puts this id in front of texts."""
        ...

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that an id stands for, or None if it has no text."""
        ...


def check_text(text: Any, param: str | None = None) -> str:
    """Return `text` if it can be encoded.

    Raises:
        InvalidRequestError: If it is no string, or holds half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"The text must be a string, not {type(text).__name__}.", param=param
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at "
            f"character {error.start}, which is not valid Unicode; send the whole character.",
            param=param,
        ) from error
    return text


class TextStream:
    """Text of a growing list of token ids; obtained from `Tokenizer.stream`.

    The pieces that `push` and `flush` return, joined, equal `decode` of all ids. A character that
    is not complete yet is held back; U+FFFD appears only where the bytes really are bad.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether the text so far ends inside a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became certain, possibly none."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special=False))

    def flush(self) -> str:
        """End the text: return what was held back, an unfinished character as one U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """A model folder's tokenizer; see `load`.

    Args:
        vocabulary: Ids and their texts; the library's own tokenizer will do.
        bos_id: See below.
        stop_ids: See below.
        template: The chat template, if there is one.

    Attributes:
        kind: The file that the vocabulary comes from, `tokenizer.json` or `tiktoken.model`.
        vocab_size: One more than the largest id that has a text. A model may have more rows in its
            embedding; ids from here on are never sampled.
        bos_id: The id that plain prompts start with, or None if this model's start with none.
        stop_ids: Ids that end a reply.
        template: The chat template, or None.
    """

    def __init__(
        self,
        vocabulary: BpeTokenizer | Vocabulary,
        *,
        bos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        is_bare = isinstance(vocabulary, BpeTokenizer)
        self._bpe = vocabulary
        self._vocabulary: Vocabulary = BpeVocabulary(vocabulary) if is_bare else vocabulary
        self._special_ids = self._vocabulary.special_ids
        self._bytes: dict[int, bytes] = {}
        self.kind = self._vocabulary.kind
        self.vocab_size = self._vocabulary.size
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)
        self.template = template

    @classmethod
    def load(cls, folder: str | Path, template_file: str | Path | None = None) -> Tokenizer:
        """Read the vocabulary and what stands beside it in a model folder.

        A `tiktoken.model` goes before a `tokenizer.json`, which somebody converted from it. Where
        all the rest is looked for is told in `leyline.tokenizer_files`. No code of the folder runs.

        Args:
            folder: The model's.
            template_file: A chat template to use instead of the folder's.

        Raises:
            ModelError: If a file is missing, unreadable or of a kind that is not supported.
        """
        folder = Path(folder)
        config = tokenizer_files.read_json(folder / "tokenizer_config.json")
        vocabulary = _vocabulary(folder, config)
        tokenizer_files.check_added(config, vocabulary.id_of)
        tokens = tokenizer_files.special_tokens(folder, config)
        template = tokenizer_files.chat_template(folder, config, tokens, template_file)
        return cls(
            vocabulary,
            bos_id=_bos_id(vocabulary, config, tokens),
            stop_ids=tokenizer_files.stop_ids(folder, tokens, vocabulary.id_of, template),
            template=template,
        )

    @property
    def part_separator(self) -> str:
        """What `render` puts between the text parts of a message."""
        return PART_SEPARATOR if self.template is None else self.template.form.part_separator

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the ids of `text`, in which the texts of special tokens count as those tokens.

        Bytes that the vocabulary lacks (SmolLM2's has no U+0016, for one) leave no id behind.

        Args:
            text: What to encode.
            bos: Start with `bos_id`, if there is one and the text does not start with it itself.

        Raises:
            InvalidRequestError: If the text is not valid Unicode.
        """
        ids = self._vocabulary.ids(check_text(text))
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` as mere characters: it cannot produce a special token.

        Raises:
            InvalidRequestError: If the text is not valid Unicode.
        """
        return self._vocabulary.plain_ids(check_text(text))

    def decode(
        self, ids: Sequence[int], *, skip_special: bool = True, shown: Sequence[str] = ()
    ) -> str:
        """Return the text of `ids`; ids without a text count as empty.

        Args:
            ids: The tokens.
            skip_special: Leave the texts of special tokens out, except
            shown: these ones, by their texts.

        Raises:
            InvalidRequestError: If an id is negative or no integer.
        """
        hidden = self._hidden(skip_special, shown)
        shown_ids = (token_id for token_id in ids if token_id not in hidden)
        joined = b"".join(self.token_bytes(token_id, skip_special=False) for token_id in shown_ids)
        return joined.decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation; encode it with `bos=False`.

        Raises:
            InvalidRequestError: If the messages are malformed, the template refuses them, or the
                model has no template.
        """
        if self.template is None:
            raise InvalidRequestError(
                "This model has no chat template; use plain completions, or add a "
                "chat_template.jinja to the model folder.",
                param="messages",
            )
        return self.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def stream(self, *, skip_special: bool = True, shown: Sequence[str] = ()) -> TextStream:
        """Return a fresh `TextStream`; the arguments are those of `decode`."""
        return TextStream(self, self._hidden(skip_special, shown))

    def find(self, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
        """Return the token spans `[start, end)` that cover each occurrence of `text`.

        Special tokens count with their text. Occurrences do not overlap; spans may share a token.

        Raises:
            InvalidRequestError: If the text is empty or not valid Unicode.
        """
        wanted = check_text(text).encode("utf-8")
        if not wanted:
            raise InvalidRequestError("The text to find is empty.", param="text")
        pieces = [self.token_bytes(token_id, skip_special=False) for token_id in ids]
        ends = list(accumulate(map(len, pieces)))
        spans = []
        for first in _occurrences(b"".join(pieces), wanted):
            last = first + len(wanted)
            spans.append((bisect_right(ends, first), bisect_left(ends, last) + 1))
        return spans

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """Return the bytes that a token stands for, none for a skipped special token.

        Raises:
            InvalidRequestError: If the id is negative or no integer.
        """
        if skip_special and token_id in self._special_ids:
            return b""
        found = self._bytes.get(token_id)
        return self._look_up(token_id) if found is None else found

    def _hidden(self, skip_special: bool, shown: Sequence[str]) -> frozenset[int]:
        """The ids whose texts are left out; texts that are no special token's are never hidden."""
        if not skip_special:
            return frozenset()
        return self._special_ids.difference(map(self._vocabulary.id_of, shown))

    def _look_up(self, token_id: int) -> bytes:
        try:
            found = self._vocabulary.bytes_of(token_id)
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(
                f"{token_id!r} is not a token id; ids run from 0 to {self.vocab_size - 1}."
            ) from error
        return b"" if found is None else self._bytes.setdefault(token_id, found)


def _occurrences(data: bytes, wanted: bytes) -> Iterable[int]:
    at = data.find(wanted)
    while at >= 0:
        yield at
        at = data.find(wanted, at + len(wanted))


def _vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    num_rows = tokenizer_files.embedding_rows(folder)
    if (folder / tiktoken_vocabulary.FILE_NAME).is_file():
        return TiktokenVocabulary.load(folder, config, num_rows)
    if (folder / bpe_vocabulary.FILE_NAME).is_file():
        return BpeVocabulary.load(folder, num_rows)
    raise ModelError(
        f"The model folder {str(folder)!r} has no tokenizer.json and no tiktoken.model. Other "
        "tokenizer files are not supported; convert the tokenizer to a tokenizer.json first."
    )


def _bos_id(
    vocabulary: Vocabulary, config: Mapping[str, Any], tokens: Mapping[str, str]
) -> int | None:
    """The id that this tokenizer puts in front by itself; having a bos token is not enough."""
    bos_id = vocabulary.id_of(tokens.get("bos_token", ""))
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        adds_bos = vocabulary.starts_with(bos_id)
    return bos_id if adds_bos else None

"""Token ids and text: encode, decode, one token at a time, and the chat template.

Byte-level BPE tokens are byte strings, and a character may be cut between two of them. So
everything here is done on bytes: `decode` joins the tokens' bytes and reads them as UTF-8 once,
and a `TextStream` feeds the same bytes to an incremental UTF-8 decoder. The two agree for every
split because UTF-8 decoding with replacement depends on nothing but the bytes (Unicode 16,
section 3.9, "maximal subparts"); no window of earlier tokens is ever decoded again.
"""

from __future__ import annotations

import codecs
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer

from leyline.errors import InvalidRequestError, ModelError
from leyline.template import ChatTemplate

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character of every byte, and the byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


BYTE_OF = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an added token, written in plain characters
        return token.encode("utf-8")


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

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became certain, possibly none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, self._skip_special))

    def flush(self) -> str:
        """End the text: return what was held back, an unfinished character as one U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """A model folder's tokenizer; see `load`.

    Attributes:
        vocab_size: One more than the largest id that has a text.
        bos_id: The id that plain prompts start with, or None if this model's start with none.
        stop_ids: Ids that end a reply.
    """

    def __init__(
        self,
        bpe: BpeTokenizer,
        *,
        bos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        self._bpe = bpe
        self._bpe.no_truncation()
        self._bpe.no_padding()
        added = bpe.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._template = template
        self.vocab_size: int = max(bpe.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and what stands beside it in a model folder.

        The chat template is `chat_template.jinja`, else the one in `tokenizer_config.json`. Stop
        ids are collected from `generation_config.json`, `config.json` and the eos token.

        Raises:
            ModelError: If a file is missing, unreadable or of a kind that is not supported.
        """
        folder = Path(folder)
        bpe = _read_bpe(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        source = _template_source(folder, config)
        return cls(
            bpe,
            bos_id=_bos_id(bpe, config, special_tokens),
            stop_ids=_stop_ids(folder, bpe, special_tokens),
            template=ChatTemplate(source, special_tokens) if source is not None else None,
        )

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the ids of `text`, in which the texts of special tokens count as those tokens.

        Bytes that the vocabulary lacks (SmolLM2's has no U+0016, for one) leave no id behind.

        Args:
            text: What to encode.
            bos: Start with `bos_id`, if there is one and the text does not start with it itself.

        Raises:
            InvalidRequestError: If the text is not valid Unicode.
        """
        ids = self._bpe.encode(check_text(text), add_special_tokens=False).ids
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` as mere characters: it cannot produce a special token.

        Raises:
            InvalidRequestError: If the text is not valid Unicode.
        """
        return self._plain_bpe.encode(check_text(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; ids without a text count as empty.

        Raises:
            InvalidRequestError: If an id is negative or no integer.
        """
        joined = b"".join(self.token_bytes(token_id, skip_special) for token_id in ids)
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
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template; use plain completions, or add a "
                "chat_template.jinja to the model folder.",
                param="messages",
            )
        return self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Return a fresh `TextStream`."""
        return TextStream(self, skip_special)

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

    def _look_up(self, token_id: int) -> bytes:
        try:
            token = self._bpe.id_to_token(token_id)
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(
                f"{token_id!r} is not a token id; ids run from 0 to {self.vocab_size - 1}."
            ) from error
        if token is None:
            return b""
        return self._bytes.setdefault(token_id, _token_bytes(token))

    @cached_property
    def _plain_bpe(self) -> BpeTokenizer:
        spec = json.loads(self._bpe.to_str())
        # Runs of white space are ordinary text, even where a vocabulary lists them as added. They
        # are named in the model's vocabulary too, or else they would be numbered afresh.
        kept = [token for token in spec["added_tokens"] if not token["content"].strip()]
        spec["model"]["vocab"].update({token["content"]: token["id"] for token in kept})
        spec["added_tokens"] = kept
        return BpeTokenizer.from_str(json.dumps(spec))


def _occurrences(data: bytes, wanted: bytes) -> Iterable[int]:
    at = data.find(wanted)
    while at >= 0:
        yield at
        at = data.find(wanted, at + len(wanted))


def _read_json(path: Path) -> dict[str, Any]:
    """Read an optional JSON object; {} if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} in the model folder cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} in the model folder must hold a JSON object.")
    return value


def _read_bpe(path: Path) -> BpeTokenizer:
    if not path.is_file():
        raise ModelError(
            f"The model folder {str(path.parent)!r} has no tokenizer.json. Other tokenizer files "
            "are not supported; convert the tokenizer to a tokenizer.json first."
        )
    try:
        bpe = BpeTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json in the model folder cannot be read: {error}") from error
    if type(bpe.decoder).__name__ != "ByteLevel":
        kind = type(bpe.decoder).__name__
        raise ModelError(
            f"tokenizer.json has a decoder of type {kind}; only byte-level BPE is supported."
        )
    return bpe


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos, eos, ...: each stands as a string or as an object with its content."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _bos_id(
    bpe: BpeTokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> int | None:
    """The id that this tokenizer puts in front by itself; having a bos token is not enough."""
    bos_id = bpe.token_to_id(special_tokens.get("bos_token", ""))
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:
        adds_bos = bpe.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
    return bos_id if adds_bos else None


def _stop_ids(folder: Path, bpe: BpeTokenizer, special_tokens: Mapping[str, str]) -> set[int]:
    ids = set()
    for name in ("generation_config.json", "config.json"):
        ids.update(_eos_ids(_read_json(folder / name).get("eos_token_id"), name))
    eos_id = bpe.token_to_id(special_tokens.get("eos_token", ""))
    return ids if eos_id is None else ids | {eos_id}


def _eos_ids(value: Any, name: str) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise ModelError(f"eos_token_id in {name} must be an id or a list of ids, not {value!r}.")
    return ids


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ModelError(f"chat_template.jinja cannot be read: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name, of which the default is the chat one
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ModelError("chat_template in tokenizer_config.json must be a text.")
    return source

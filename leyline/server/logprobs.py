"""Log-probabilities as JSON: the shape of chats, the older one of completions, and prompts'.

No number here is ever infinite or NaN, which JSON has no words for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leyline.events import TokenLogprob
from leyline.tokenizer import TextStream, Tokenizer

Body = dict[str, Any]

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The number, or a very small one in place of what JSON cannot say."""
    return logprob if logprob > FLOOR else FLOOR


def chat_logprobs(tokenizer: Tokenizer, told: Iterable[TokenLogprob]) -> Body:
    """The `logprobs` of a chat's choice: an entry a token."""
    content = [
        _entry(tokenizer, one.token_id, one.logprob)
        | {"top_logprobs": [_entry(tokenizer, *top) for top in one.top]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> Body:
    spelled = tokenizer.token_bytes(token_id, skip_special=False)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(spelled),
    }


def prompt_logprobs(tokenizer: Tokenizer, told: Iterable[TokenLogprob | None]) -> list[Body | None]:
    """What vLLM calls `prompt_logprobs`: by token id, the token of the prompt and the likeliest.

    A rank is told where it is known: of the likeliest tokens, the first of which has rank 1.
    """
    return [None if one is None else _ranked(tokenizer, one) for one in told]


def _ranked(tokenizer: Tokenizer, one: TokenLogprob) -> Body:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(one.top, 1)}
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": token_name(tokenizer, token_id),
        }
        for token_id, logprob in ((one.token_id, one.logprob), *one.top)
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, or its bytes in words where they are no whole text.

    Two tokens of a list never have one name unless they have the same bytes.
    """
    spelled = tokenizer.token_bytes(token_id, skip_special=False)
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class LegacyLogprobs:
    """The `logprobs` of a completion's choice, some tokens at a time.

    Offsets are those of the tokens' first characters in the choice's text, the echoed prompt
    included. A character that several tokens spell is where all of them begin.

    Args:
        tokenizer: Knows the tokens' texts.
        skip_special: Whether special tokens are left out of the reply's text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(skip_special=skip_special)
        self._offset = 0

    def echoed(self, text: str, ids: Sequence[int], told: Sequence[TokenLogprob | None]) -> Body:
        """Those of the prompt, which stands in front as `text`; the first token has none."""
        starts, _ = _starts(self._tokenizer.stream(skip_special=False), ids)
        unseen = self._unseen(text, ids)
        self._offset = len(text)
        return self._body(ids, told, [max(0, start - unseen) for start in starts])

    def said(self, told: Sequence[TokenLogprob]) -> Body:
        """Those of the next tokens of the reply."""
        ids = [one.token_id for one in told]
        starts, length = _starts(self._stream, ids)
        offsets = [self._offset + start for start in starts]
        self._offset += length
        return self._body(ids, told, offsets)

    def _unseen(self, text: str, ids: Sequence[int]) -> int:
        """Characters of a first token that the server put in front of the client's text."""
        first = self._tokenizer.decode(ids[:1], skip_special=False)
        added = self._tokenizer.bos_id in ids[:1] and not text.startswith(first)
        return len(first) if added else 0

    def _body(
        self, ids: Sequence[int], told: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> Body:
        return {
            "tokens": [token_name(self._tokenizer, token_id) for token_id in ids],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in told],
            "top_logprobs": [None if one is None else self._top(one) for one in told],
            "text_offset": list(offsets),
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the one that stands there, by their names."""
        named: dict[str, float] = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            named.setdefault(token_name(self._tokenizer, token_id), finite(logprob))
        return named


def joined(first: Body, second: Body) -> Body:
    """Two runs of the older shape, one behind the other."""
    return {name: first[name] + second[name] for name in first}


def _starts(stream: TextStream, ids: Iterable[int]) -> tuple[list[int], int]:
    """Where in the text that comes out of a stream each token begins, and the text's length."""
    starts, length = [], 0
    for token_id in ids:
        starts.append(length)
        length += len(stream.push(token_id))
    return starts, length

"""A reply as it grows: tokens in, text out, stop strings kept back.

Only a suffix that could still become a stop string is held back, from the border of the token that
it begins in, so that text reaches the client as early as it can, in whole tokens, and never a part
of a stop string. A token is *settled* when all of its text is released.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from leyline.tokenizer import TextStream


class Reply:
    """The text of one request.

    Args:
        stream: A fresh text stream of the tokenizer.
        stop: Strings that end the reply. They are looked for behind the text of the first
        min_tokens: tokens only.
        include_stop: Whether the stop string is a part of the reply.
        enough: Told each piece of the text that is released; true ends the reply behind it, or
            behind the first `min_tokens`.

    Attributes:
        token_ids: Tokens pushed so far.
        text: Text released so far.
        stopped_by: The stop string that ended it.
    """

    def __init__(
        self,
        stream: TextStream,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        enough: Callable[[str], bool] | None = None,
    ) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._enough = enough
        self._is_enough = False
        self._held = ""
        self._ends: list[int] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether it has ended by what it says; nothing may be pushed after that."""
        is_early = len(self.token_ids) <= self._min_tokens
        return self.stopped_by is not None or (self._is_enough and not is_early)

    def push(self, token_id: int, *, hidden: bool = False) -> str:
        """Add a token; returns the text that is certain now.

        Args:
            token_id: The token.
            hidden: Whether it has no text, whatever the vocabulary says: a stop token.
        """
        piece = "" if hidden else self._stream.push(token_id)
        self.token_ids.append(token_id)
        length = len(self.text) + len(self._held) + len(piece)
        # A token that ends inside a character is settled with that character.
        self._ends.append(length + self._stream.pending)
        return self._release(piece, final=len(self.token_ids) <= self._min_tokens)

    def flush(self) -> str:
        """End the reply; returns what was held back."""
        return "" if self.stopped else self._release(self._stream.flush(), final=True)

    def num_kept(self) -> int:
        """How many of the tokens are settled: when the reply has ended, those it consists of.

        These are all, or those before the stop string. A token that reaches into the stop string
        is not among them, even if a part of its text was released.
        """
        return bisect_right(self._ends, len(self.text))

    def _release(self, piece: str, *, final: bool) -> str:
        """Add text, look for a stop string, hold back what may become one."""
        pending, self._held = self._held + piece, ""
        length = self._until_stop(pending) if len(self.token_ids) > self._min_tokens else None
        if length is None:
            length = len(pending) if final else self._certain(pending)
            self._held = pending[length:]
        released = pending[:length]
        self.text += released
        if released and self._enough is not None:
            self._is_enough = self._enough(released) or self._is_enough
        return released

    def _until_stop(self, pending: str) -> int | None:
        """Where the reply ends if it has a stop string: the first one, and the shortest there."""
        found = [(at, len(stop), stop) for stop in self._stop if (at := pending.find(stop)) >= 0]
        if not found:
            return None
        at, length, self.stopped_by = min(found)
        return at + length if self._include_stop else at

    def _certain(self, pending: str) -> int:
        """How much of the text cannot be the beginning of a stop string, in whole tokens."""
        held = max((_overlap(pending, stop) for stop in self._stop), default=0)
        if not held:
            return len(pending)
        before = len(self.text)
        border = bisect_right(self._ends, before + len(pending) - held)
        return max(0, self._ends[border - 1] - before) if border else 0


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

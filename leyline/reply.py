"""A reply as it grows: tokens in, text out, stop strings kept back.

Only a suffix that could still become a stop string is held back, so that text reaches the client
as early as it can, and never a part of a stop string.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from leyline.tokenizer import TextStream


class Reply:
    """The text of one request.

    Args:
        stream: A fresh text stream of the tokenizer.
        stop: Strings that end the reply.

    Attributes:
        token_ids: Tokens pushed so far.
        text: Text released so far.
        stopped: Whether a stop string was met; nothing may be pushed after that.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._held = ""
        self._ends: list[int] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now."""
        piece = self._stream.push(token_id)
        self.token_ids.append(token_id)
        self._ends.append(len(self.text) + len(self._held) + len(piece))
        return self._release(piece, final=False)

    def flush(self) -> str:
        """End the reply; returns what was held back."""
        return "" if self.stopped else self._release(self._stream.flush(), final=True)

    def num_kept(self) -> int:
        """How many of the tokens the text consists of: all, or those before the stop string.

        A token that reaches into the stop string is not among them, even if a part of it was
        released.
        """
        if not self.stopped:
            return len(self.token_ids)
        length = len(self.text)
        first = bisect_left(self._ends, length)
        return first + 1 if length and self._ends[first] == length else first

    def _release(self, piece: str, *, final: bool) -> str:
        """Add text, look for a stop string, hold back what may become one."""
        pending = self._held + piece
        found = [at for at in map(pending.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            pending, self._held = pending[: min(found)], ""
        else:
            held = (
                0
                if final
                else max(map(lambda stop: _overlap(pending, stop), self._stop), default=0)
            )
            pending, self._held = pending[: len(pending) - held], pending[len(pending) - held :]
        self.text += pending
        return pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

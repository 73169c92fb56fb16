"""What the engine remembers about a sequence: who asked for it and what is told to whom.

A job is a turn, or the edit of an idle session. Edits that reach a busy session ride along with
its job. When the job is over, its session learns what became of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from leyline.batch import Edited
from leyline.context import Context
from leyline.events import Completion, Delta, EditResult, FinishReason, Usage
from leyline.reply import Reply
from leyline.sequence import Sequence
from leyline.session import Session
from leyline.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Job:
    """One unfinished sequence, seen from outside.

    Attributes:
        work: The scheduler's sequence; its id is the id of the request that made it.
        session: Whose context it works on, if any.
        reply: The text of a turn; None for an edit.
        rendered: The text that the turn's client sent.
        waiting: When each edit that has not committed was asked for, by request, in seconds.
        results: Results of committed edits that are not reported yet, and when they were asked for.
        edited: Whether any edit committed.
    """

    work: Sequence
    session: Session | None = None
    reply: Reply | None = None
    rendered: str = ""
    waiting: dict[int, float] = field(default_factory=lambda: {})
    results: list[tuple[EditResult, float]] = field(default_factory=lambda: [])
    edited: bool = False

    @property
    def request_id(self) -> int:
        """The request that made it."""
        return self.work.sequence_id

    def push(self, token: int) -> Iterator[Delta]:
        """Add a sampled token to the reply; the text of a stop token is nobody's business."""
        if self.reply is not None and token not in self.work.stop_ids:
            yield from self._delta(self.reply.push(token), (token,))

    def flush(self) -> Iterator[Delta]:
        """End the reply."""
        if self.reply is not None:
            yield from self._delta(self.reply.flush(), ())

    def commit(self, event: Edited) -> None:
        """Note an edit that committed."""
        assert self.session is not None, "an edit without a session"
        self.edited = True
        self.session.version += 1
        result = EditResult(
            event.request_id,
            self.session.session_id,
            self.session.version,
            event.length_before,
            event.length_after,
            event.receipts,
            elapsed_ms=0.0,
        )
        self.results.append((result, self.waiting.pop(event.request_id)))

    def report(self) -> Iterator[EditResult]:
        """The results of committed edits, timed up to now, each of them once."""
        now = time.perf_counter()
        for result, since in self.results:
            yield replace(result, elapsed_ms=1e3 * (now - since))
        self.results = []

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The answer of a turn."""
        assert self.reply is not None, "only a turn is completed"
        work, session = self.work, self.session
        usage = Usage(
            prompt_tokens=work.prompt_len,
            completion_tokens=len(work.generated),
            cached_tokens=work.cached or 0,
            spliced_tokens=work.spliced,
            degraded=work.degraded,
        )
        return Completion(
            self.request_id,
            self.reply.text,
            self._kept(),
            finish_reason,
            usage,
            session.session_id if session else None,
            session.version if session else None,
        )

    def hand_over(self, tokenizer: Tokenizer, *, answered: bool = True) -> None:
        """Let the session go on from what the sequence has, without a reply nobody got."""
        if self.session is None:
            return
        kept = self._kept() if answered else ()
        self.session.context = self._context(len(self.work.generated) - len(kept))
        # A preempted sequence has no coverage; a stop string leaves rows behind the context's end.
        computed = max(self.work.view.coverage.reach, self.work.computed)
        self.session.computed = min(computed, len(self.session.context))
        if self.reply is not None:
            self.session.transcript = self.rendered + self._told(kept, tokenizer)

    def _kept(self) -> tuple[int, ...]:
        """The tokens that the reply consists of, its stop token included."""
        if self.reply is None:
            return ()
        if self.reply.stopped:
            return tuple(self.reply.token_ids[: self.reply.num_kept()])
        return tuple(self.work.generated)

    def _told(self, kept: tuple[int, ...], tokenizer: Tokenizer) -> str:
        """The reply as its client will send it back: the template adds the stop token's text, but
        nobody was ever shown a special token in the middle.
        """
        length = len(kept) - (bool(kept) and kept[-1] in self.work.stop_ids)
        end = tokenizer.decode(kept[length:], skip_special=False)
        return tokenizer.decode(kept[:length]) + end

    def _context(self, num_dropped: int) -> Context:
        """The sequence's context without the last tokens, if they are still the sampled ones."""
        context = self.work.view.whole()
        dropped = tuple(self.work.generated[len(self.work.generated) - num_dropped :])
        length = len(context) - num_dropped
        same = num_dropped and context.tokens[max(0, length) :] == dropped
        return context.prefix(length) if same and length > 0 else context

    def _delta(self, text: str, tokens: tuple[int, ...]) -> Iterator[Delta]:
        """The next piece of text, if there is one."""
        if text:
            yield Delta(self.request_id, text, tokens)

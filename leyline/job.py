"""What the engine remembers about a sequence: who asked for it and what is told to whom.

A job is a turn, the edit of an idle session, or its healing in the background. Edits that reach a
busy session ride along with its job. When the job is over, its session learns what became of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from leyline.batch import Edited, Sampled
from leyline.context import Context, Tokens
from leyline.directive import Directive, Mode, Receipt
from leyline.errors import LeylineError
from leyline.events import (
    Completion,
    Delta,
    EditResult,
    Failure,
    FinishReason,
    Purged,
    SessionState,
    TokenLogprob,
    Usage,
)
from leyline.marks import Mark, MessageSpan, follow
from leyline.reply import Reply
from leyline.rewriting import reasoning_span
from leyline.sampling import SamplingParams
from leyline.sequence import EditRequest, Sequence, View
from leyline.session import Checkpoint, Session, Transcript
from leyline.tokenizer import Tokenizer
from leyline.turn import Turn, tool_outputs


@dataclass(slots=True)
class Asked:
    """An edit that somebody waits for.

    Attributes:
        since: When it was asked for, in seconds.
        key: Its idempotency key, if any.
        reach: The texts that it wants forgotten in the whole cache.
    """

    since: float
    key: str | None = None
    reach: tuple[bytes, ...] = ()


def edit_work(request_id: int, session: Session) -> Sequence:
    """The sequence that edits an idle session: it samples nothing."""
    length, computed = len(session.context), session.computed
    return Sequence(request_id, View(session.context), computed=computed, owed=length - computed)


@dataclass(slots=True, eq=False)
class Job:
    """One unfinished sequence, seen from outside.

    Attributes:
        work: The scheduler's sequence; its id is the id of the request that made it.
        session: Whose context it works on, if any.
        reply: The text of a turn; None for an edit and for a healing.
        turn: What a turn started from.
        requests: The edits that have not committed, by request, and
        waiting: who waits for them; a mark that fires has nobody to tell.
        keep: Whether the context before the client's own edit stays a version with its rows.
        results: Results of committed edits that are not reported yet, and who asked.
        receipts: What the client's own edit of its history did.
        edited: Whether any edit committed.
        reply_start: Where the reply begins in the sequence's context.
        prompt: The tokens that the turn was asked with.
        logprobs: Of the tokens sampled so far, if they are wanted.
    """

    work: Sequence
    session: Session | None = None
    reply: Reply | None = None
    turn: Turn | None = None
    requests: dict[int, EditRequest] = field(default_factory=lambda: {})
    waiting: dict[int, Asked] = field(default_factory=lambda: {})
    results: list[tuple[EditResult, Asked]] = field(default_factory=lambda: [])
    receipts: tuple[Receipt, ...] = ()
    keep: bool = False
    edited: bool = False
    reply_start: int = 0
    prompt: Tokens = ()
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    _entered: bool = False
    _num_told: int = 0

    @property
    def request_id(self) -> int:
        """The request that made it."""
        return self.work.sequence_id

    @property
    def state(self) -> SessionState:
        """What the sequence's context is."""
        if not self.work.grafted:
            return "exact"
        return "healing" if self.session is not None and self.session.healing else "spliced"

    @property
    def messages(self) -> list[MessageSpan]:
        """Where the messages stand in the sequence's context."""
        if self.turn is not None and not self._entered:
            return self.turn.messages
        return self.session.messages if self.session is not None else []

    @property
    def owes_version(self) -> int:
        """1 if the session's version is still to count what the client edited itself."""
        turn = self.turn
        return int(bool(turn and turn.directives and not turn.carried and not self._entered))

    def push(self, sampled: Sampled) -> Iterator[Delta]:
        """Add a sampled token to the reply; a stop token's text belongs to it only if asked for."""
        if self.reply is not None:
            if sampled.logprob is not None:
                self.logprobs.append(sampled.logprob)
            hidden = sampled.token in self.work.stop_ids and not self._params.include_stop
            yield from self._delta(self.reply.push(sampled.token, hidden=hidden))

    def flush(self) -> Iterator[Delta]:
        """End the reply: all tokens that it keeps have been told then."""
        if self.reply is not None:
            yield from self._delta(self.reply.flush(), last=True)

    # -- edits ----------------------------------------------------------------------------------

    def double(self, request: EditRequest) -> tuple[Job, Session]:
        """A job to rehearse one more edit with, and its session: what commits there shows in no
        other one.
        """
        assert self.session is not None, "an edit without a session"
        session = self.session.copy()
        session.sequence_id = self.request_id
        requests = {**self.requests, request.request_id: request}
        return replace(self, session=session, requests=requests, waiting={}, results=[]), session

    def commit(self, event: Edited) -> None:
        """Note an edit that committed; if that fails, the session is as it was."""
        assert self.session is not None, "an edit without a session"
        before = self.session.copy()
        try:
            self._commit(self.session, event)
        except Exception:
            self.session.restore(before)
            raise
        self._note(event)

    def _commit(self, session: Session, event: Edited) -> None:
        """Have the session follow an edit."""
        request = self.requests[event.request_id]
        before, computed = event.edit.before, None
        if request.own:
            self.receipts = event.receipts
        else:
            self._enter()
            before = before.prefix(self._follow_reply(len(before), request.directives))
            computed = len(before) if self.reply is not None else None
        session.commit(
            before,
            event.edit.after,
            request.directives,
            kept=event.kept,
            heal=any(directive.mode is Mode.HEAL for directive in request.directives),
            computed=computed,
        )
        session.context = event.edit.after.append(request.append).prefix(self.reply_start)
        self._enter()
        del self.requests[event.request_id]
        self.edited = True

    def _note(self, event: Edited) -> None:
        """Keep the result for whoever asked; a mark that fired has nobody to tell."""
        asked = self.waiting.pop(event.request_id, None)
        if asked is None or self.session is None:
            return
        result = EditResult(
            event.request_id,
            self.session.session_id,
            self.session.version,
            event.length_before,
            event.length_after,
            event.receipts,
            elapsed_ms=0.0,
            state=self.state,
        )
        self.results.append((result, asked))

    def fail(self, request_id: int, error: LeylineError) -> Failure:
        """End an edit that will not be carried out; a repeat of it is a first one."""
        asked = self.waiting.pop(request_id)
        self.requests.pop(request_id, None)
        if asked.key is not None and self.session is not None:
            self.session.answers.drop(asked.key)
        return Failure(request_id, error)

    def purged(self, purged: Purged) -> None:
        """Add to the last result what it removed beyond its own context."""
        result, asked = self.results[-1]
        self.results[-1] = replace(result, purged=purged), asked

    def take_back(self, error: LeylineError) -> Failure:
        """Have the last result not told: its edit is done, but not all that was asked for."""
        result, asked = self.results.pop()
        if asked.key is not None and self.session is not None:
            self.session.answers.answer(asked.key, error)
        return Failure(result.request_id, error)

    def report(self) -> Iterator[EditResult]:
        """The results of committed edits, timed up to now, each of them once."""
        now = time.perf_counter()
        for result, asked in self.results:
            told = replace(result, elapsed_ms=1e3 * (now - asked.since))
            if asked.key is not None and self.session is not None:
                self.session.answers.answer(asked.key, told)
            yield told
        self.results = []

    def _follow_reply(self, length: int, directives: tuple[Directive, ...]) -> int:
        """Where the reply began before an edit; from now on it begins where that is after it."""
        start = self.reply_start if self.reply is not None else length
        after = follow(start, length, directives)
        moved = sum(directive.delta for directive in directives)
        self.reply_start = after[0] if after else length + moved
        return min(start, length)

    def _enter(self) -> None:
        """Let the session know the turn's prompt, once; a turn without an edit does so at its end.

        What the client changed in its own history is an edit like any other.
        """
        if self._entered or self.turn is None or self.session is None:
            return
        self._entered = True
        session, turn = self.session, self.turn
        if turn.directives and not turn.carried:
            session.commit(session.context, turn.after, turn.directives, kept=self.keep, heal=False)
        if turn.again_from is not None:  # the reply that was there, and what was said about it
            session.marks = [mark for mark in session.marks if mark.end <= turn.again_from]
        session.transcript = Transcript.of(turn.rendered)
        session.messages = list(turn.messages)

    # -- turns ----------------------------------------------------------------------------------

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The answer of a turn."""
        assert self.reply is not None, "only a turn is completed"
        work, session, kept = self.work, self.session, self._kept()
        usage = Usage(
            prompt_tokens=work.prompt_len,
            completion_tokens=len(kept),
            cached_tokens=work.cached or 0,
            spliced_tokens=work.spliced,
            degraded=work.degraded,
            state=self.state,
            first_difference=self.turn.first_difference if self.turn else None,
        )
        return Completion(
            self.request_id,
            self.reply.text,
            kept,
            finish_reason,
            usage,
            session.session_id if session else None,
            session.version if session else None,
            self.receipts,
            stopped_by=self._stopped_by(kept),
            logprobs=tuple(self.logprobs[: len(kept)]),
            prompt_token_ids=self.prompt,
            prompt_logprobs=() if self._params.prompt_logprobs is None else (None, *work.scores),
        )

    def _stopped_by(self, kept: tuple[int, ...]) -> str | int | None:
        """What of the client's own ended the reply."""
        assert self.reply is not None, "only a turn is stopped"
        asked = kept and kept[-1] in self.work.stop_ids.intersection(self._params.stop_token_ids)
        return kept[-1] if asked else self.reply.stopped_by

    def hand_over(self, tokenizer: Tokenizer, *, answered: bool = True) -> None:
        """Let the session go on from what the sequence has, without a reply nobody got."""
        session = self.session
        if session is None:
            return
        before = self._checkpoint()
        kept = self._kept() if answered else ()
        self._enter()
        session.context = self._context(len(self.work.generated) - len(kept))
        # A preempted sequence has no coverage; a stop string leaves rows behind the context's end.
        computed = max(self.work.view.coverage.reach, self.work.computed)
        session.computed = min(computed, len(session.context))
        session.marks = [mark for mark in session.marks if mark.end <= len(session.context)]
        if self.turn is not None:
            asked = self.turn.rendered
            session.transcript = Transcript.of(asked + self._told(kept, tokenizer), asked)
            session.checkpoint = before
            said = session.context.tokens[self.reply_start :] if kept else ()
            session.marks = list(self._settled(session, said, tokenizer, answered))
            self._note_reply(session, self.turn, kept)

    def _checkpoint(self) -> Checkpoint | None:
        """What the session goes on from if its client asks for this turn once more."""
        session, turn = self.session, self.turn
        if session is None or turn is None or turn.directives or self.edited:
            return None
        if turn.again_from is not None:
            return session.checkpoint
        return session.context, session.transcript, tuple(session.messages)

    def _settled(
        self, session: Session, said: Tokens, tokenizer: Tokenizer, answered: bool
    ) -> Iterator[Mark]:
        """The marks, now that it is known what there is of the turn that a scratch is about.

        Spans are where the edits during the turn have left them. A scratch that found nothing is
        done with, unless nobody got an answer: then it is about the next turn.
        """
        thought, at = reasoning_span(said, tokenizer), self.reply_start
        spans = {
            "reasoning": [(at + thought[0], at + thought[1])] if thought else [],
            "tool_output": [(one.start, one.end) for one in tool_outputs(session.messages)],
        }
        for mark in session.marks:
            found = spans.get(mark.of, [])
            if mark.of == "span" or not (found or answered):
                yield mark
            for start, end in found:
                yield replace(mark, of="span", start=start, end=end)

    def _note_reply(self, session: Session, turn: Turn, kept: tuple[int, ...]) -> None:
        """Have the session know where the reply stands, without the token that ends it.

        One that goes on with the last message is one message with it: its client sends back both
        as one.
        """
        if not kept:
            return
        end = len(session.context) - (kept[-1] in self.work.stop_ids)
        start = min(self.reply_start, end)
        if turn.continues:
            begun = session.messages.pop()
            start = begun.start if begun.start < begun.end else start
        session.messages.append(MessageSpan("assistant", None, start, end))

    def _kept(self) -> tuple[int, ...]:
        """The tokens that the reply consists of, its stop token included."""
        return () if self.reply is None else tuple(self.reply.token_ids[: self.reply.num_kept()])

    def _told(self, kept: tuple[int, ...], tokenizer: Tokenizer) -> str:
        """The reply as its client will send it back: what was shown of it, and behind that the text
        of the model's own stop token, which the template adds.
        """
        params = self._params
        length = len(kept) - (bool(kept) and kept[-1] in self.work.stop_ids)
        shown = partial(
            tokenizer.decode, skip_special=params.skip_special_tokens, shown=params.shown
        )
        end = shown(kept[length:]) if params.include_stop else ""
        if not end and tokenizer.stop_ids.issuperset(kept[length:]):
            end = tokenizer.decode(kept[length:], skip_special=False)
        return shown(kept[:length]) + end

    def _context(self, num_dropped: int) -> Context:
        """The sequence's context without the last tokens, if they are still the sampled ones."""
        context = self.work.view.whole()
        dropped = tuple(self.work.generated[len(self.work.generated) - num_dropped :])
        length = len(context) - num_dropped
        same = num_dropped and context.tokens[max(0, length) :] == dropped
        return context.prefix(length) if same and length > 0 else context

    def _delta(self, text: str, *, last: bool = False) -> Iterator[Delta]:
        """The next piece of the reply, with the tokens that are settled by it.

        Tokens without text wait for others, unless these are the last, or somebody wants to know
        of each how likely it was.
        """
        assert self.reply is not None, "only a turn has a text"
        start, end = self._num_told, self.reply.num_kept()
        if text or (start < end and (last or self.logprobs)):
            tokens, logprobs = self.reply.token_ids[start:end], self.logprobs[start:end]
            self._num_told = end
            yield Delta(self.request_id, text, tuple(tokens), tuple(logprobs))

    @property
    def _params(self) -> SamplingParams:
        """The turn's sampling parameters."""
        assert self.work.sampling is not None, "only a turn has sampling parameters"
        return self.work.sampling

"""Whose turn it is: queues, `plan` and `commit`.

A step is `plan()`, which picks at most one op for each running sequence under one token budget
and takes the slots it needs; `run()`, which is the executor's; and `commit()`, the only place
where a result lands. Every choice that is a matter of taste is in `policy`.

The order within a plan: sequences that decode, then longer extends in order of arrival, then new
sequences, then moves. Moves come last because nobody may acquire or file rows between the
decision that rows can turn in place and the turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from leyline.batch import (
    Batch,
    Edited,
    Ended,
    EndReason,
    Event,
    Extend,
    Move,
    Sampled,
    Slots,
    StepOutput,
)
from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.coverage import Coverage
from leyline.policy import DEFAULT, Policy
from leyline.sequence import EditRequest, Sequence, Splice, restarted
from leyline.splice import DEGRADED, begin, degrade, plan_move, settle, take

Keepers = Callable[[int], Iterable[Context]]


def nobody(_: int) -> Iterable[Context]:
    """Keepers of an engine without sessions."""
    return ()


class Scheduler:
    """Plans batches over the sequences it was given and commits what came of them.

    Args:
        prefix: The rows, and who owns them.
        policy: Four decisions; see `leyline.policy`.
        max_batch_tokens: Tokens computed in a step at most.
        max_sequences: Sequences that run at the same time at most.
        keepers: For a sequence, the contexts of others whose rows it must not give up.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        policy: Policy = DEFAULT,
        *,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        keepers: Keepers = nobody,
    ) -> None:
        self.prefix = prefix
        self.policy = policy
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.keepers = keepers
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.num_preempted = 0
        self.num_degraded = 0
        self._busy: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def find(self, sequence_id: int) -> Sequence | None:
        """The unfinished sequence of this id."""
        queued = (sequence for sequence in self.waiting if sequence.sequence_id == sequence_id)
        return self.running.get(sequence_id) or next(queued, None)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def edit(self, sequence_id: int, request: EditRequest) -> None:
        """Queue an edit of an unfinished sequence; it takes effect between two of its steps."""
        sequence = self.find(sequence_id)
        assert sequence is not None, "an edit was queued on a finished sequence"
        sequence.edits.append(request)

    def cancel_edit(self, sequence_id: int, request_id: int) -> list[int]:
        """Drop an edit that has not committed, and those behind it, whose positions count on it.

        Returns:
            The requests that were dropped; the sequence goes on as if nobody had asked for them.
        """
        sequence = self.find(sequence_id)
        waiting = [edit.request_id for edit in sequence.edits] if sequence else []
        if sequence is None or request_id not in waiting:
            return []
        first = waiting.index(request_id)
        if first == 0:
            self._drop_splice(sequence)
        sequence.edits = deque(list(sequence.edits)[:first])
        return waiting[first:]

    def finish(self, sequence_id: int, *, publish: bool = True) -> Sequence | None:
        """End a sequence now: its rows are filed, its slots let go. None if it is not there."""
        sequence = self.find(sequence_id)
        if sequence is not None:
            self._release(sequence, publish=publish)
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            self.running.pop(sequence_id, None)
        return sequence

    # -- plan ---------------------------------------------------------------------------------

    def plan(self) -> Batch:
        """The next batch; the slots its ops write are taken, nothing else has changed."""
        self._busy = set()
        extends = self._plan_extends()
        extends += self._plan_new(self.max_batch_tokens - sum(len(op.tokens) for op in extends))
        return Batch(tuple(self._plan_moves()), tuple(extends))

    def _plan_extends(self) -> list[Extend]:
        """Ops of the sequences that run already."""
        for sequence in self.running.values():
            if sequence.splice is None and sequence.edits:
                sequence.splice = begin(sequence, sequence.edits[0])
        order = sorted(self.running.values(), key=lambda s: (not s.decoding, s.sequence_id))
        extends: list[Extend] = []
        budget = self.max_batch_tokens
        for sequence in order:
            if sequence.running and budget > 0:
                extends += self._extend(sequence, budget)
                budget = self.max_batch_tokens - sum(len(op.tokens) for op in extends)
        return extends

    def _plan_new(self, budget: int) -> list[Extend]:
        """Admit waiting sequences in order of arrival as far as slots and budget allow."""
        extends: list[Extend] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            if not self._fits(sequence):
                break
            self.waiting.popleft()
            self._admit(sequence)
            if sequence.edits:
                sequence.splice = begin(sequence, sequence.edits[0])
            ops = self._extend(sequence, budget)
            if not sequence.running:
                break
            extends += ops
            budget -= sum(len(op.tokens) for op in ops)
        return extends

    def _plan_moves(self) -> list[Move]:
        """Moves of the splices whose inserts are all there."""
        moves: list[Move] = []
        for sequence in self.running.values():
            splice = sequence.splice
            if splice is None or sequence.sequence_id in self._busy or splice.next_insert():
                continue
            move = plan_move(splice, sequence, self.prefix, self._others(sequence))
            if move is None:
                self._wait(sequence, splice)
            else:
                self._busy.add(sequence.sequence_id)
                moves.append(move)
        return moves

    def _extend(self, sequence: Sequence, budget: int) -> list[Extend]:
        """The sequence's next extend, if it has one and slots can be had for it."""
        splice = sequence.splice
        op = self._insert(sequence, splice, budget) if splice else self._fill(sequence, budget)
        if op is None:
            return []
        self._busy.add(sequence.sequence_id)
        return [op]

    def _fill(self, sequence: Sequence, budget: int) -> Extend | None:
        """Compute the first gap of the sequence's view, or the beginning of it."""
        view = sequence.view
        gap = view.coverage.first_gap(len(view) - sequence.owed)
        if gap is None:
            return None
        start, end = gap[0], min(gap[1], gap[0] + budget)
        slots = self._take(sequence, end - start, _last(view.table[:start]))
        if slots is None:
            return None
        view.place(start, slots)
        return Extend(
            sequence.sequence_id,
            start,
            view.tokens(start, end),
            np.array(view.table[:end]),
            sample=sequence.samples and end == len(view),
            sampling=sequence.sampling,
            step=len(sequence.generated),
        )

    def _insert(self, sequence: Sequence, splice: Splice, budget: int) -> Extend | None:
        """Compute the next replacement tokens behind the old head, into private slots."""
        new = splice.next_insert()
        if new is None:
            return None
        done = splice.progress(new)
        tokens = new.tokens[done : done + budget]
        before = splice.view.table[new.dst : new.dst + done]
        slots = self._take(sequence, len(tokens), _last(before))
        if slots is None:
            self._wait(sequence, splice)
            return None
        splice.private = np.concatenate((splice.private, slots))
        splice.view.place(new.dst + done, slots)
        table = np.concatenate((sequence.view.table[: new.start], before, slots))
        return Extend(sequence.sequence_id, new.start + done, tokens, table)

    # -- commit -------------------------------------------------------------------------------

    def commit(self, batch: Batch, output: StepOutput) -> list[Event]:
        """Land the results of a batch: the counterpart of `plan`, called once for each."""
        events: list[Event] = [self._commit_move(move) for move in batch.moves]
        for op in batch.extends:
            events += self._commit_extend(op, output)
        for sequence in [s for s in self.running.values() if s.idle]:
            events.append(self._end(sequence, "edited"))
        return events

    def fail(self, batch: Batch) -> list[int]:
        """Give up the sequences of a batch that could not be run; nothing of it lands.

        Returns:
            Ids of the sequences that ended.
        """
        for move in batch.moves:
            self.prefix.ledger.release(move.dst_slots[move.dst_slots != move.src_slots])
            self._distrust(self.running[move.sequence_id])
        for op in batch.extends:
            sequence = self.running[op.sequence_id]
            if sequence.splice is None:
                self.prefix.ledger.release(op.written_slots)
        ids = [op.sequence_id for op in (*batch.moves, *batch.extends)]
        for sequence_id in ids:
            self.finish(sequence_id, publish=False)
        return ids

    def _commit_move(self, move: Move) -> Edited:
        """Swap the sequence to its edited view."""
        sequence = self.running[move.sequence_id]
        splice = sequence.splice
        assert splice is not None, "a move without a splice"
        event = settle(splice, move, sequence, self.prefix, self._others(sequence))
        if any(receipt.reason in DEGRADED for receipt in event.receipts):
            self._note_degraded(sequence)
        sequence.edits.popleft()
        if sequence.samples and not sequence.view.missing:
            self.prefix.ledger.release(sequence.uncover_last())
        return event

    def _commit_extend(self, op: Extend, output: StepOutput) -> list[Event]:
        """Cover what was computed; take the sampled token and see whether it is the last."""
        sequence = self.running[op.sequence_id]
        if sequence.splice is not None:
            sequence.splice.cover(op.start, len(op.tokens))
            return []
        sequence.view.coverage = sequence.view.coverage.add(op.start, op.end)
        if not op.sample:
            return []
        if not sequence.generated:
            self._publish(sequence)
        token = output.tokens[op.sequence_id]
        sequence.append(token)
        return [Sampled(op.sequence_id, token), *self._stop(sequence, token)]

    def _stop(self, sequence: Sequence, token: int) -> list[Event]:
        """End the sequence at a stop token or at its length limit."""
        if token in sequence.stop_ids:
            return [self._end(sequence, "stop")]
        over = len(sequence.generated) >= sequence.max_tokens
        return [self._end(sequence, "length")] if over else []

    def _end(self, sequence: Sequence, reason: EndReason) -> Ended:
        """Finish a sequence for good."""
        self.finish(sequence.sequence_id)
        return Ended(sequence.sequence_id, reason)

    # -- rows ---------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        """Start or resume a sequence from what the tree holds of its context."""
        limit = len(sequence.view.context) - sequence.samples
        # Whoever samples computes its last row itself, so that one is never a graft.
        context = sequence.view.context.exact_from(limit)
        slots = self.prefix.acquire(context, limit)
        if context.first_graft(len(slots)) < len(context):
            # A graft that is not there cannot be computed from the edited tokens.
            self.prefix.ledger.release(slots)
            context = context.exact_from(context.first_graft(len(slots)))
            slots = self.prefix.acquire(context, limit)
            self._note_degraded(sequence)
        sequence.view.context = context
        sequence.view.coverage = Coverage.of([(0, len(slots))])
        sequence.view.table = np.array(slots)
        sequence.running = True
        self.running[sequence.sequence_id] = sequence
        sequence.count_hit(len(slots))

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the policy lets a waiting sequence start now."""
        context = sequence.view.context
        needed = len(context) - self.prefix.resident(context)
        available = self.prefix.ledger.num_free + self.prefix.evictable()
        return self.policy.admit(needed, available, len(self.running))

    def _take(self, sequence: Sequence, num: int, after: int) -> Slots | None:
        """Slots for a running sequence, preempting later arrivals and at last itself."""
        slots = take(self.prefix, num, after)
        while slots is None and (candidates := self._younger(sequence)):
            self._preempt(self.policy.victim(candidates))
            slots = take(self.prefix, num, after)
        if slots is None and len(self.running) > 1 and sequence.sequence_id == max(self.running):
            self._preempt(sequence)
        return slots

    def _younger(self, sequence: Sequence) -> list[Sequence]:
        """Later arrivals that have no op in this batch."""
        later = (s for s in self.running.values() if s.sequence_id > sequence.sequence_id)
        return [other for other in later if other.sequence_id not in self._busy]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its rows stay in the tree as long as there is room."""
        sequence.computed = sequence.view.coverage.reach
        self._release(sequence)
        sequence.view = restarted(sequence.view, sequence.view.whole())
        sequence.running = False
        del self.running[sequence.sequence_id]
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _wait(self, sequence: Sequence, splice: Splice) -> None:
        """A splice found no slots: it waits, or becomes a re-prefill if the policy says so."""
        if not sequence.running:
            return
        splice.waited += 1
        if self.policy.degrade(len(self.running), splice.waited):
            self.prefix.ledger.release(splice.private)
            sequence.splice = degrade(sequence, splice)

    def _note_degraded(self, sequence: Sequence) -> None:
        """A graft was lost, or could not be made: say so in usage and in the counter."""
        sequence.degraded = True
        self.num_degraded += 1

    def _drop_splice(self, sequence: Sequence) -> None:
        """Undo an edit that has not committed."""
        if sequence.splice is not None:
            self.prefix.ledger.release(sequence.splice.private)
            sequence.splice = None

    def _publish(self, sequence: Sequence) -> None:
        """File the rows that a sequence has; it stays their owner."""
        reach = sequence.view.coverage.reach
        self.prefix.publish(sequence.view.whole().prefix(reach), sequence.view.table[:reach])

    def _release(self, sequence: Sequence, *, publish: bool = True) -> None:
        """File a sequence's rows in the tree and let go of its slots."""
        self._drop_splice(sequence)
        if sequence.running and publish:
            self._publish(sequence)
        if sequence.running:
            self.prefix.ledger.release(sequence.view.owned())

    def _distrust(self, sequence: Sequence) -> None:
        """Take rows that a failed move may have left half turned out of the tree."""
        context, splice = sequence.view.whole(), sequence.splice
        assert splice is not None, "a move without a splice"
        bound = self.prefix.exclusive(context, self._others(sequence), owners=1)
        self.prefix.give_up(context, max(bound, splice.edit.head))

    def _others(self, sequence: Sequence) -> list[Context]:
        """Contexts whose rows this sequence must not give up."""
        queued = (other.view.context for other in self.waiting)
        return [*self.keepers(sequence.sequence_id), *queued]


def _last(slots: Slots) -> int:
    """The last of these slots; -1 if there is none."""
    return int(slots[-1]) if len(slots) else -1

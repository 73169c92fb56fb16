"""Whose turn it is: `plan` and `commit`.

A step is `plan()`, which picks at most one op for each running sequence under one token budget
and takes the slots it needs; `run()`, which is the executor's; and `commit()`, the only place
where a result lands. Every choice that is a matter of taste is in `policy`.

The order within a plan: sequences that decode, then longer extends in order of arrival, then new
sequences, then moves. Moves come last because nobody may acquire or file rows between the
decision that rows can turn in place and the turn. Sequences in the background have ops only while
nobody else runs or waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from leyline.batch import (
    Batch,
    Broken,
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
from leyline.errors import not_finite
from leyline.policy import DEFAULT, Policy
from leyline.receipts import DEGRADED
from leyline.rehearsal import rehearse
from leyline.roster import Keepers, Roster, nobody
from leyline.rows import file_rows, take
from leyline.sequence import Sequence, Splice
from leyline.splice import begin, degrade, plan_move, settle


class Scheduler(Roster):
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
        super().__init__(prefix, keepers)
        self.policy = policy
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self._busy: set[int] = set()
        self._planning: Sequence | None = None

    # -- plan ---------------------------------------------------------------------------------

    def plan(self) -> Batch:
        """The next batch; the slots its ops write are taken, nothing else has changed.

        If it raises, `abandon` sets everything right again.
        """
        self._busy = set()
        self._make_way()
        extends = self._plan_extends()
        extends += self._plan_new(self.max_batch_tokens - sum(len(op.tokens) for op in extends))
        moves = self._plan_moves()
        self._planning = None
        return Batch(tuple(moves), tuple(extends))

    def abandon(self) -> list[int]:
        """Undo a plan that raised: the sequence it raised for ends, all others plan anew.

        Returns:
            Ids of the sequences that ended.
        """
        broken, self._planning = self._planning, None
        if broken is not None:
            self._remove(broken)
        for sequence in self.running.values():
            if sequence.splice is not None:
                sequence.splice.take_back()
        self.put_in_order()
        return [] if broken is None else [broken.sequence_id]

    def rehearse(
        self,
        sequence: Sequence,
        stopped: int | None = None,
        committed: Callable[[Edited], None] = lambda _: None,
    ) -> list[Edited]:
        """What the edits of a sequence would come to if the next plan were about it; see
        `leyline.rehearsal`. Nothing changes.

        Args:
            sequence: With the edits; one of this scheduler's, or a new one.
            stopped: A sequence in the background that would end first.
            committed: Told each edit before the next one is tried; what the keepers name and what
                is pinned may change with it.
        """
        leaving = [other for other in reversed(self.running.values()) if other.background]
        leaving.sort(key=lambda other: other.sequence_id != stopped)
        gone = (sequence.sequence_id, stopped)
        queued = [other for other in (*self.waiting, *leaving) if other.sequence_id not in gone]

        def others() -> list[Context]:
            return [*self._kept(sequence.sequence_id), *(other.view.whole() for other in queued)]

        def after(event: Edited) -> list[Context]:
            committed(event)
            return others()

        budget = self.max_batch_tokens
        return rehearse(sequence, self.prefix, others(), leaving, after, budget)

    def _make_way(self) -> None:
        """Stop everybody in the background if anybody else runs or waits."""
        if self.foreground:
            for sequence in reversed([s for s in self.running.values() if s.background]):
                self._planning = sequence
                self._yield(sequence)

    def _plan_extends(self) -> list[Extend]:
        """Ops of the sequences that run already."""
        for sequence in self.running.values():
            self._begin(sequence)
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
            self._planning = sequence = self.waiting[0]
            if (sequence.background and self.foreground) or not self._fits(sequence):
                break
            self._admit(sequence)
            self._begin(sequence)
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
            self._planning = sequence
            move = plan_move(splice, sequence, self.prefix, self.others(sequence))
            if move is None:
                self._wait(sequence, splice)
            else:
                self._busy.add(sequence.sequence_id)
                moves.append(move)
        return moves

    def _begin(self, sequence: Sequence) -> None:
        """Set out on the sequence's next edit, if one waits and none is under way."""
        self._planning = sequence
        if sequence.splice is None and sequence.edits:
            sequence.splice = begin(sequence, sequence.edits[0], self.prefix)

    def _extend(self, sequence: Sequence, budget: int) -> list[Extend]:
        """The sequence's next extend, if it has one and slots can be had for it."""
        self._planning, splice = sequence, sequence.splice
        if splice is not None:
            op = self._insert(sequence, splice, budget)
        else:
            op = self._fill(sequence, budget)
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
        params = sequence.sampling
        return Extend(
            sequence.sequence_id,
            start,
            view.tokens(start, end),
            np.array(view.table[:end]),
            sequence.draw() if sequence.samples and end == len(view) else None,
            sequence.targets(start, end),
            (params.prompt_logprobs or 0) if params is not None else 0,
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
        """Land the results of a batch: the counterpart of `plan`, called once for each.

        A result that cannot land ends its own sequence and no other, and is told as `Broken`.
        """
        events: list[Event] = []
        for move in batch.moves:
            events += self._land(move.sequence_id, partial(self._commit_move, move))
        for op in batch.extends:
            events += self._land(op.sequence_id, partial(self._commit_extend, op, output))
        for sequence in [s for s in self.running.values() if s.idle]:
            reason: EndReason = "edited" if sequence.sampling is None else "length"
            events += self._land(sequence.sequence_id, partial(self._end, sequence, reason))
        if any(isinstance(event, Broken) for event in events):
            self.put_in_order()
        return events

    def fail(self, batch: Batch) -> list[int]:
        """Give up the sequences of a batch that could not be run; nothing of it lands.

        Returns:
            Ids of the sequences that ended.
        """
        ids = [op.sequence_id for op in (*batch.moves, *batch.extends)]
        for sequence_id in ids:
            self._distrust(self.running[sequence_id].splice)
            self._remove(self.running[sequence_id])
        self.put_in_order()
        return ids

    def _land(self, sequence_id: int, result: Callable[[], list[Event]]) -> list[Event]:
        """What came of one op; its slots are put in order at the end of the commit."""
        sequence = self.running[sequence_id]
        view, splice = sequence.view, sequence.splice
        try:
            return result()
        except Exception as error:
            self._distrust(splice)
            if self.find(sequence_id) is not None:
                self._remove(sequence)
            sequence.view = view  # an edit that nobody will hear of has not happened
            return [Broken(sequence_id, error)]

    def _commit_move(self, move: Move) -> list[Event]:
        """Swap the sequence to its edited view."""
        sequence = self.running[move.sequence_id]
        splice = sequence.splice
        assert splice is not None, "a move without a splice"
        event = settle(splice, move, sequence, self.prefix)
        if any(receipt.reason in DEGRADED for receipt in event.receipts):
            self._note_degraded(sequence)
        return [event]

    def _commit_extend(self, op: Extend, output: StepOutput) -> list[Event]:
        """Cover what was computed; take scores, and the token, and see whether it is the last."""
        sequence = self.running[op.sequence_id]
        if sequence.splice is not None:
            sequence.splice.cover(op.start, len(op.tokens))
            return []
        sequence.view.coverage = sequence.view.coverage.add(op.start, op.end)
        if op.targets:
            self._score(sequence, op, output)
        if not op.sample:
            return []
        token = output.tokens.get(op.sequence_id)
        if token is None:  # before its rows are filed, where others would find them
            raise output.refused.get(op.sequence_id) or not_finite()
        if not sequence.generated:
            file_rows(sequence, self.prefix)
        sequence.append(token)
        told = Sampled(op.sequence_id, token, output.logprobs.get(op.sequence_id))
        return [told, *self._stop(sequence, token)]

    def _score(self, sequence: Sequence, op: Extend, output: StepOutput) -> None:
        """Take the scores of a piece of the prompt; some of them may be there already."""
        scores = output.scores.get(op.sequence_id)
        if scores is None:
            raise not_finite()
        sequence.scores[op.start :] = scores

    def _stop(self, sequence: Sequence, token: int) -> list[Event]:
        """End the sequence at a stop token or at its length limit."""
        if token in sequence.stop_ids:
            return self._end(sequence, "stop")
        over = len(sequence.generated) >= sequence.max_tokens
        return self._end(sequence, "length") if over else []

    def _end(self, sequence: Sequence, reason: EndReason) -> list[Event]:
        """Finish a sequence for good."""
        self.finish(sequence.sequence_id)
        return [Ended(sequence.sequence_id, reason)]

    # -- rows ---------------------------------------------------------------------------------

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the policy lets a waiting sequence start now."""
        context = sequence.view.context
        found = len(sequence.scores) if sequence.scoring else self.prefix.resident(context)
        needed = len(context) - found
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

    def _wait(self, sequence: Sequence, splice: Splice) -> None:
        """A splice found no slots: it waits, or becomes a re-prefill if the policy says so."""
        if not sequence.running:
            return
        splice.waited += 1
        if self.policy.degrade(len(self.running), splice.waited):
            sequence.splice = degrade(sequence, splice)
            self.prefix.ledger.release(splice.held)

    def _distrust(self, splice: Splice | None) -> None:
        """Take rows that a move may have left half turned out of the tree."""
        if splice is not None:
            self.prefix.give_up(splice.edit.before, splice.bound)


def _last(slots: Slots) -> int:
    """The last of these slots; -1 if there is none."""
    return int(slots[-1]) if len(slots) else -1

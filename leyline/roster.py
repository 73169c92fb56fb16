"""Who runs and who waits, in which order, and what becomes of the rows of those who come and go.

Sequences in the background stand behind all that are not, whenever they came. A sequence that
leaves, for good or for a while, files its rows in the tree and lets go of its slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from leyline.cache.prefix import PrefixCache
from leyline.context import Context
from leyline.rows import count_afresh, fetch_rows, file_rows
from leyline.sequence import EditRequest, Sequence, restarted

Keepers = Callable[[int], Iterable[Context]]


def nobody(_: int) -> Iterable[Context]:
    """Keepers of an engine without sessions."""
    return ()


class Roster:
    """The unfinished sequences of an engine.

    Args:
        prefix: The rows, and who owns them.
        keepers: For a sequence, the contexts of others whose rows it must not give up.

    Attributes:
        waiting: The queue; its head is the next to start.
        running: The sequences that own slots and are planned, by id.
        num_preempted: How often one had to make room for another.
        num_degraded: How often grafts were lost, or could not be made.
    """

    def __init__(self, prefix: PrefixCache, keepers: Keepers = nobody) -> None:
        self.prefix = prefix
        self.keepers = keepers
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.num_preempted = 0
        self.num_degraded = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    @property
    def foreground(self) -> bool:
        """Whether anybody runs or waits who is not in the background."""
        return any(not sequence.background for sequence in self.unfinished())

    def unfinished(self) -> list[Sequence]:
        """Every sequence, running ones first."""
        return [*self.running.values(), *self.waiting]

    def find(self, sequence_id: int) -> Sequence | None:
        """The unfinished sequence of this id."""
        return next((one for one in self.unfinished() if one.sequence_id == sequence_id), None)

    def others(self, sequence: Sequence) -> list[Context]:
        """Contexts whose rows this sequence must not give up."""
        queued = (other.view.context for other in self.waiting if other is not sequence)
        return [*self._kept(sequence.sequence_id), *queued]

    # -- what callers ask for -------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind those that wait as it does."""
        self.waiting.insert(len(self.waiting) if sequence.background else self._first(), sequence)

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
        sequence.edits = deque(list(sequence.edits)[:first])
        if first == 0:
            self._drop_splice(sequence)
            self.prefix.ledger.release(sequence.uncover_last())
        return waiting[first:]

    def finish(self, sequence_id: int, *, publish: bool = True) -> Sequence | None:
        """End a sequence now: its rows are filed, its slots let go. None if it is not there."""
        sequence = self.find(sequence_id)
        if sequence is not None:
            self._release(sequence, self._remove, publish=publish)
        return sequence

    def forsake(self, sequence_id: int) -> None:
        """End a sequence that could not be finished: none of its rows is filed any more."""
        sequence = self.find(sequence_id)
        if sequence is not None:
            self._remove(sequence)
        self.put_in_order()

    def put_in_order(self) -> None:
        """Have the ledger say again who owns what, after something was left half done."""
        count_afresh(self.prefix, self.running.values())

    def displace(self, doubt: Callable[[Context], Context | None]) -> list[int]:
        """Take away rows that must not be used any more; nothing of them is filed.

        Args:
            doubt: For a context, the one to go on from instead, with the same tokens; the context
                itself if only its rows are in doubt; None if nothing is wrong with it.

        Returns:
            Ids of the sequences that are to compute rows again, running or waiting. An edit whose
            rows are in doubt begins anew.
        """
        displaced: list[int] = []
        # The last goes first, so that they stand in the queue in order of arrival.
        for sequence in sorted(self.unfinished(), key=lambda s: -s.sequence_id):
            context, splice = doubt(sequence.view.whole()), sequence.splice
            if context is not None:
                self._displace(sequence, context)
            elif splice is not None and doubt(splice.edit.after) is not None:
                self._drop_splice(sequence)
            else:
                continue
            displaced.append(sequence.sequence_id)
        return displaced

    def forget_grafts(self, context: Context) -> None:
        """Take carried rows that nobody goes on from any more out of the tree.

        Eviction spares grafts, since nobody can compute them again; dead ones would fill the cache.

        Args:
            context: What somebody went on from until now.
        """
        start = context.first_graft()
        if start < len(context):
            others = [*self._kept(-1), *(other.view.context for other in self.waiting)]
            self.prefix.let_go(context, start, others)

    def _kept(self, sequence_id: int) -> list[Context]:
        """What this sequence must leave alone for others that may not even be queued."""
        editing = (s for s in self.running.values() if s.splice is not None and s.splice.keep)
        kept = (other.view.whole() for other in editing if other.sequence_id != sequence_id)
        return [*self.keepers(sequence_id), *kept]

    # -- coming and going -----------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        """Start or resume a waiting sequence from what the tree holds of its context."""
        if fetch_rows(sequence, self.prefix):
            self._note_degraded(sequence)
        self.waiting.remove(sequence)
        sequence.running = True
        self.running[sequence.sequence_id] = sequence
        sequence.count_hit(sequence.view.coverage.reach)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its rows stay in the tree as long as there is room."""
        self._release(sequence, self._suspend)
        self.num_preempted += 1

    def _yield(self, sequence: Sequence) -> None:
        """Back into the queue, behind everybody who is not in the background."""
        self._release(sequence, self._suspend)

    def _displace(self, sequence: Sequence, context: Context) -> None:
        """Have a sequence go on from a context of the same tokens, without any of its rows."""
        if context != sequence.view.whole():
            self._note_degraded(sequence)
        if sequence.running:
            self._release(sequence, self._suspend, publish=False)
            self.num_preempted += 1
        sequence.view = restarted(sequence.view, context)

    def _release(
        self, sequence: Sequence, leave: Callable[[Sequence], None], *, publish: bool = True
    ) -> None:
        """File a sequence's rows in the tree, have it leave, and let go of its slots."""
        if sequence.running and publish:
            file_rows(sequence, self.prefix)
        owned = sequence.owned()
        leave(sequence)
        self.prefix.ledger.release(owned)

    def _suspend(self, sequence: Sequence) -> None:
        """Have a running sequence wait again without any row, in front of those that wait as it."""
        self._remove(sequence)
        sequence.computed = sequence.view.coverage.reach
        sequence.view = restarted(sequence.view, sequence.view.whole())
        self.waiting.insert(self._first() if sequence.background else 0, sequence)

    def _first(self) -> int:
        """Where in the queue the background begins."""
        return sum(not sequence.background for sequence in self.waiting)

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence; whatever slots it owned are the caller's to release."""
        sequence.running, sequence.splice = False, None
        if self.running.pop(sequence.sequence_id, None) is None:
            self.waiting.remove(sequence)

    def _drop_splice(self, sequence: Sequence) -> None:
        """Undo an edit that has not committed."""
        splice, sequence.splice = sequence.splice, None
        if splice is not None:
            self.prefix.ledger.release(splice.held)

    def _note_degraded(self, sequence: Sequence) -> None:
        """A graft was lost, or could not be made: say so in usage and in the counter."""
        sequence.degraded = True
        self.num_degraded += 1

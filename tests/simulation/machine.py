"""The executor of the simulation, a page of code, and the memory that it works on."""

from __future__ import annotations

from random import Random

import numpy as np

from leyline.batch import Batch, Extend, Move, StepOutput
from leyline.events import TokenLogprob
from tests.simulation.symbols import VOCABULARY, Row, Violation, advance, root_state


class Machine:
    """Runs batches on symbolic rows.

    Attributes:
        rows: What each slot holds; None if it is free.
        held: The slots that hold something.
        remains: What is still in the memory of slots that were let go.
        lineage: For the digest of a context, that of the context without its last row, and that
            row's token and digest; whatever an entry refers to stands in front of it.
        num_tokens: The tokens that may be sampled.
    """

    def __init__(self, num_slots: int, random: Random) -> None:
        self.rows: list[Row | None] = [None] * num_slots
        self.held: set[int] = set()
        self.remains: dict[int, Row] = {}
        self.lineage: dict[int, tuple[int, int, int]] = {}
        self.random = random
        self.births = 0
        self.num_tokens = VOCABULARY

    def free(self, slots: np.ndarray) -> None:
        """Poison slots that were let go: nobody may read what remains in them."""
        for slot in slots.tolist():
            row = self.rows[slot]
            if row is not None:
                self.remains[slot] = row
            self.rows[slot] = None
            self.held.discard(slot)

    def scrub(self, slots: np.ndarray) -> None:
        """Overwrite slots."""
        for slot in slots.tolist():
            self.rows[slot] = None
            self.held.discard(slot)
            self.remains.pop(slot, None)

    def run(self, batch: Batch, roots: dict[int, bytes]) -> StepOutput:
        """All moves, then all extends."""
        for move in batch.moves:
            self.move(move)
        for extend in batch.extends:
            self.extend(extend, roots[extend.sequence_id])
        sampled = (op.sequence_id for op in batch.extends if op.sample)
        tokens = {number: self.random.randrange(self.num_tokens) for number in sampled}
        scores = {op.sequence_id: self.scores(op) for op in batch.extends if op.targets}
        return StepOutput(tokens, scores=scores)

    def scores(self, op: Extend) -> tuple[TokenLogprob, ...]:
        """A log-probability that says behind which row it was computed."""
        rows = [self.read(slot) for slot in op.written_slots.tolist()]
        pairs = zip(op.targets, rows, strict=False)  # the last row has no target
        return tuple(TokenLogprob(target, -float(row.seen % 2**32)) for target, row in pairs)

    def move(self, op: Move) -> None:
        """Carry and turn."""
        rows = [self.read(slot) for slot in op.src_slots.tolist()]
        for row, slot, delta in zip(rows, op.dst_slots.tolist(), op.delta.tolist(), strict=True):
            self.put(slot, row._replace(position=row.position + delta))

    def extend(self, op: Extend, root: bytes) -> None:
        """Compute rows one behind the other, each from all that stand in the table before it."""
        slots = op.table.tolist()
        state = root_state(root)
        for slot in slots[: op.start]:
            row = self.read(slot)
            state = self.note(state, row.token, row.seen)
        for index, token in enumerate(op.tokens):
            self.births += 1
            self.put(slots[op.start + index], Row(token, op.start + index, state, self.births))
            state = self.note(state, token, state)

    def note(self, state: int, token: int, seen: int) -> int:
        """The digest with one more row, entered in the lineage."""
        after = advance(state, token, seen)
        self.lineage[after] = state, token, seen
        return after

    def put(self, slot: int, row: Row) -> None:
        """Write a row."""
        self.rows[slot] = row
        self.held.add(slot)
        self.remains.pop(slot, None)

    def read(self, slot: int) -> Row:
        """A row that must be there."""
        row = self.rows[slot]
        if row is None:
            raise Violation(f"read: slot {slot} is read and holds nothing")
        return row

    def break_down(self, batch: Batch) -> None:
        """Fail half way: every slot that the batch may write holds rubbish."""
        rubbish = Row(-1, -1, -1, -1)
        for op in batch.moves:
            for slot, delta in zip(op.dst_slots.tolist(), op.delta.tolist(), strict=True):
                if delta or slot not in op.src_slots:
                    self.put(slot, rubbish)
        for op in batch.extends:
            for slot in op.written_slots.tolist():
                self.put(slot, rubbish)

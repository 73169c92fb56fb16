"""Bugs of the scheduler, the books and the edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

import leyline.directive
import leyline.reach
import leyline.receipts
import leyline.roster
import leyline.scheduler
import leyline.session
import leyline.sessions
import leyline.splice
from leyline.batch import Batch, Ended, Event, Extend, Move, Slots, StepOutput
from leyline.cache import radix
from leyline.cache.ledger import NO_SLOTS, Ledger
from leyline.cache.prefix import PrefixCache
from leyline.cache.radix import Node, RadixTree
from leyline.context import Context, Piece, canonical
from leyline.coverage import Coverage
from leyline.directive import Directive, Edit, Mode, Receipt, Run
from leyline.receipts import DEGRADED
from leyline.rows import file_rows
from leyline.scheduler import Scheduler
from leyline.sequence import Sequence, Splice
from tests.seeded_bugs import Patch, mutant


def change_moves(patch: Patch, change: Callable[[Move, PrefixCache], Move]) -> None:
    """Alter every planned move."""
    plan: Any = leyline.scheduler.plan_move

    def planned(
        splice: Splice, sequence: Sequence, prefix: PrefixCache, others: Iterable[Context]
    ) -> Move | None:
        move = plan(splice, sequence, prefix, others)
        return None if move is None else change(move, prefix)

    patch.setattr(leyline.scheduler, "plan_move", planned)


def change_edits(patch: Patch, change: Callable[[Edit], Edit]) -> None:
    """Alter every compiled edit."""
    apply: Any = leyline.splice.apply
    patch.setattr(leyline.splice, "apply", lambda *args: change(apply(*args)))


# -- moves ----------------------------------------------------------------------------------------


@mutant("provenance")
def delta_has_the_wrong_sign(patch: Patch) -> None:
    change_moves(patch, lambda move, _: replace(move, delta=-move.delta))


@mutant("provenance")
def delta_is_one_too_many(patch: Patch) -> None:
    change_moves(patch, lambda move, _: replace(move, delta=move.delta + 1))


@mutant("provenance")
def copies_are_not_turned(patch: Patch) -> None:
    def unturned(move: Move, _: PrefixCache) -> Move:
        return replace(move, delta=np.where(move.src_slots == move.dst_slots, move.delta, 0))

    change_moves(patch, unturned)


@mutant("write", "provenance", "kept")
def rows_turn_in_place_whoever_holds_them(patch: Patch) -> None:
    def in_place(move: Move, prefix: PrefixCache) -> Move:
        prefix.ledger.release(move.dst_slots[move.dst_slots != move.src_slots])
        return replace(move, dst_slots=move.src_slots)

    change_moves(patch, in_place)


@mutant("write", "degrade", "kept")
def other_sessions_are_not_asked(patch: Patch) -> None:
    exclusive: Any = PrefixCache.exclusive
    patch.setattr(
        PrefixCache,
        "exclusive",
        lambda self, context, others, owners: exclusive(self, context, (), owners),
    )


@mutant("provenance")
def turned_rows_stay_in_the_tree(patch: Patch) -> None:
    patch.setattr(PrefixCache, "give_up", lambda self, context, start: None)


# -- slots ----------------------------------------------------------------------------------------


@mutant("ledger")
def preemption_leaks(patch: Patch) -> None:
    def leaky(self: Scheduler, sequence: Sequence) -> None:
        file_rows(sequence, self.prefix)
        self._suspend(sequence)

    patch.setattr(Scheduler, "_preempt", leaky)


@mutant("ledger", "error")
def slots_are_released_twice(patch: Patch) -> None:
    release: Any = Scheduler._release

    def twice(self: Scheduler, sequence: Sequence, *args: Any, publish: bool = True) -> None:
        owned = sequence.owned()
        release(self, sequence, *args, publish=publish)
        self.prefix.ledger.release(owned)

    patch.setattr(Scheduler, "_release", twice)


@mutant("ledger", "atomic")
def private_slots_survive_a_cancel(patch: Patch) -> None:
    patch.setattr(Scheduler, "_drop_splice", lambda self, work: setattr(work, "splice", None))


@mutant("ledger", "read", "write", "pin")
def held_rows_are_evicted(patch: Patch) -> None:
    def shorten(self: PrefixCache, node: Node, wanted: int, *_: object) -> int:
        dropped = self.tree.truncate(node, max(0, len(node.tokens) - wanted))
        self.ledger.counts[dropped] = 1
        return len(self.ledger.release(dropped))

    patch.setattr(PrefixCache, "_shorten", shorten)


@mutant("write", "ledger")
def a_slot_is_given_out_twice(patch: Patch) -> None:
    def anywhere(self: Ledger, num: int) -> Slots | None:
        free = np.flatnonzero(self.counts <= 1)
        return free[:num].astype(np.int64) if len(free) >= num else None

    patch.setattr(Ledger, "_anywhere", anywhere)


@mutant("ledger")
def a_failed_batch_keeps_its_slots(patch: Patch) -> None:
    def fail(self: Scheduler, batch: Batch) -> list[int]:
        ids = [op.sequence_id for op in (*batch.moves, *batch.extends)]
        for sequence_id in ids:
            self.finish(sequence_id, publish=False)
        return ids

    patch.setattr(Scheduler, "fail", fail)


@mutant("provenance")
def half_turned_rows_are_trusted(patch: Patch) -> None:
    patch.setattr(Scheduler, "_distrust", lambda self, sequence: None)


# -- labels ---------------------------------------------------------------------------------------


@mutant("provenance")
def spliced_rows_are_filed_in_an_exact_path(patch: Patch) -> None:
    publish: Any = PrefixCache.publish

    def exact(self: PrefixCache, context: Context, slots: Slots) -> None:
        publish(self, Context.of(context.tokens, context.root), slots)

    patch.setattr(PrefixCache, "publish", exact)


@mutant("provenance")
def the_start_of_a_graft_is_ignored(patch: Patch) -> None:
    patch.setattr(radix, "_starts", lambda origin, position, start: False)


@mutant("provenance")
def a_split_starts_the_graft_again(patch: Patch) -> None:
    split: Any = RadixTree._split

    def relabelled(self: RadixTree, node: Node, length: int) -> Node:
        upper = split(self, node, length)
        del upper.children[node.edge]
        node.starts = node.origin is not None
        upper.children[node.edge] = node
        return upper

    patch.setattr(RadixTree, "_split", relabelled)


@mutant("provenance")
def an_origin_is_not_moved_along(patch: Patch) -> None:
    patch.setattr(Piece, "tail", lambda self, offset: Piece(self.tokens[offset:], self.origin))


@mutant("provenance", "degrade")
def an_origin_leaves_out_the_labels(patch: Patch) -> None:
    digest: Any = Context.digest
    patch.setattr(
        Context,
        "digest",
        lambda self, length=None: digest(Context.of(self.tokens, self.root), length),
    )


@mutant("provenance", "degrade", "read", "purge")
def exact_from_is_off_by_one(patch: Patch) -> None:
    exact_from: Any = Context.exact_from
    patch.setattr(Context, "exact_from", lambda self, start: exact_from(self, start + 1))


@mutant("provenance")
def a_reprefill_keeps_the_labels(patch: Patch) -> None:
    def exact(self: Edit) -> Edit:
        kept = (Run(0, 0, self.head),) if self.head else ()
        return Edit(self.before, self.after, kept, ())

    patch.setattr(Edit, "exact", exact)


@mutant("provenance", "write", "read")
def tenants_share_a_tree(patch: Patch) -> None:
    path: Any = RadixTree.path
    fork: Any = RadixTree._fork
    patch.setattr(
        RadixTree,
        "path",
        lambda self, context, now=None: path(self, Context(context.pieces), now),
    )
    patch.setattr(RadixTree, "_fork", lambda self, root, found, now: fork(self, b"", found, now))


# -- edits ----------------------------------------------------------------------------------------


@mutant("provenance", "read", "degrade", "error")
def rows_behind_an_edit_are_off_by_one(patch: Patch) -> None:
    change_edits(
        patch,
        lambda edit: replace(
            edit,
            kept=tuple(replace(run, dst=run.dst + 1) if run.delta else run for run in edit.kept),
        ),
    )


@mutant("provenance", "degrade")
def a_set_forgets_a_replacement(patch: Patch) -> None:
    change_edits(patch, lambda edit: replace(edit, inserts=edit.inserts[:-1]))


@mutant("degrade", "provenance", "error")
def a_set_is_applied_from_left_to_right(patch: Patch) -> None:
    apply: Any = leyline.splice.apply
    patch.setattr(leyline.splice, "apply", lambda context, ds: apply(context, tuple(reversed(ds))))


@mutant("degrade", "provenance")
def forget_keeps_the_tail(patch: Patch) -> None:
    apply: Any = leyline.splice.apply

    def amortized(context: Context, directives: Iterable[Directive]) -> Edit:
        return apply(context, [replace(one, mode=Mode.AMORTIZE) for one in directives])

    patch.setattr(leyline.splice, "apply", amortized)


@mutant("provenance", "ledger", "read", "degrade", "error")
def rows_that_are_missing_are_carried(patch: Patch) -> None:
    patch.setattr(Edit, "lose", lambda self, resident: self)


@mutant("degrade")
def a_loss_is_not_reported_by_the_sequence(patch: Patch) -> None:
    patch.setattr(Scheduler, "_note_degraded", lambda self, sequence: None)


@mutant("degrade")
def a_loss_is_not_reported_by_the_receipt(patch: Patch) -> None:
    receipt: Any = leyline.receipts._receipt

    def silent(*args: Any) -> Receipt:
        return replace(receipt(*args), reason=None)

    patch.setattr(leyline.receipts, "_receipt", silent)


@mutant("degrade")
def an_insertion_at_the_head_drops_the_tail(patch: Patch) -> None:
    lose: Any = Edit.lose

    def dropped(self: Edit, resident: int) -> Edit:
        edit = lose(self, resident)
        return edit if any(run.src for run in edit.kept) else edit.exact()

    patch.setattr(Edit, "lose", dropped)


@mutant("atomic", "ledger")
def a_cancelled_edit_has_already_cut_the_old_view(patch: Patch) -> None:
    begin: Any = leyline.scheduler.begin
    drop: Any = Scheduler._drop_splice

    def hasty(self: Scheduler, sequence: Sequence) -> None:
        if sequence.splice is not None:
            head = sequence.splice.edit.head
            self.prefix.ledger.release(sequence.view.table[head : sequence.view.coverage.reach])
            sequence.view.coverage = sequence.view.coverage.prefix(head)
        drop(self, sequence)

    patch.setattr(leyline.scheduler, "begin", begin)
    patch.setattr(Scheduler, "_drop_splice", hasty)


@mutant("atomic", "terminal")
def a_cancelled_edit_stays_in_the_queue(patch: Patch) -> None:
    patch.setattr(Scheduler, "cancel_edit", lambda self, sequence_id, request_id: None)


# -- steps ----------------------------------------------------------------------------------------


@mutant("last row")
def the_last_row_is_taken_from_the_tree(patch: Patch) -> None:
    acquire: Any = PrefixCache.acquire
    patch.setattr(
        PrefixCache, "acquire", lambda self, context, limit=None: acquire(self, context, None)
    )


@mutant("last row")
def an_edit_leaves_the_last_row_covered(patch: Patch) -> None:
    patch.setattr(Sequence, "uncover_last", lambda self: NO_SLOTS)


@mutant("last row", "ledger")
def a_sampled_token_counts_as_computed(patch: Patch) -> None:
    append: Any = Sequence.append

    def covered(self: Sequence, token: int) -> None:
        append(self, token)
        end = len(self.view)
        self.view.coverage = self.view.coverage.add(end - 1, end)

    patch.setattr(Sequence, "append", covered)


@mutant("one op")
def a_splice_moves_and_extends_at_once(patch: Patch) -> None:
    def moves(self: Scheduler) -> list[Move]:
        found = [
            leyline.scheduler.plan_move(s.splice, s, self.prefix, self.others(s))
            for s in self.running.values()
            if s.splice is not None
        ]
        return [move for move in found if move is not None]

    patch.setattr(Scheduler, "_plan_moves", moves)


@mutant("read", "provenance")
def a_chunk_begins_one_token_late(patch: Patch) -> None:
    fill: Any = Scheduler._fill

    def late(self: Scheduler, sequence: Sequence, budget: int) -> Any:
        op = fill(self, sequence, budget)
        return op and replace(op, tokens=op.tokens[1:] + op.tokens[:1])

    patch.setattr(Scheduler, "_fill", late)


@mutant("gap")
def a_splice_waits_for_ever(patch: Patch) -> None:
    patch.setattr(Scheduler, "_wait", lambda self, sequence, splice: None)


@mutant("terminal", "gap")
def an_end_is_told_twice(patch: Patch) -> None:
    commit: Any = Scheduler.commit

    def repeated(self: Scheduler, batch: Batch, output: StepOutput) -> list[Event]:
        events = commit(self, batch, output)
        return events + [event for event in events if isinstance(event, Ended)]

    patch.setattr(Scheduler, "commit", repeated)


@mutant("score")
def a_scored_prompt_reads_the_cache(patch: Patch) -> None:
    fetch: Any = leyline.roster.fetch_rows

    def fetched(sequence: Sequence, prefix: PrefixCache) -> bool:
        params = sequence.sampling
        sequence.sampling = params and replace(params, prompt_logprobs=None)
        try:
            return fetch(sequence, prefix)
        finally:
            sequence.sampling = params

    patch.setattr(leyline.roster, "fetch_rows", fetched)


@mutant("score")
def scores_of_a_chunk_stand_behind_all_others(patch: Patch) -> None:
    def appended(self: Scheduler, sequence: Sequence, op: Extend, output: StepOutput) -> None:
        sequence.scores += output.scores[op.sequence_id]

    patch.setattr(Scheduler, "_score", appended)


@mutant("score")
def scores_are_told_of_the_token_itself(patch: Patch) -> None:
    patch.setattr(Sequence, "targets", lambda self, start, end: self.view.tokens(start, end))


@mutant("terminal", "gap")
def edits_of_an_idle_session_never_end(patch: Patch) -> None:
    patch.setattr(Sequence, "idle", False)


# -- kept, shared, in the background, in doubt ----------------------------------------------------


@mutant("background")
def the_background_does_not_make_way(patch: Patch) -> None:
    patch.setattr(Scheduler, "_make_way", lambda self: None)


@mutant("background", "gap")
def the_background_waits_in_line(patch: Patch) -> None:
    patch.setattr(Scheduler, "add", lambda self, sequence: self.waiting.append(sequence))


@mutant("kept")
def a_kept_context_is_turned_in_place(patch: Patch) -> None:
    move: Any = leyline.splice._move
    patch.setattr(leyline.splice, "_move", lambda s, q, p, others: move(s, q, p, [*others][:-1]))


@mutant("kept", "rehearsal")
def keeping_is_given_up_too_soon(patch: Patch) -> None:
    plan: Any = leyline.scheduler.plan_move

    def hasty(splice: Splice, *args: Any) -> Move | None:
        splice.keep = False
        return plan(splice, *args)

    patch.setattr(leyline.scheduler, "plan_move", hasty)


@mutant("usage")
def a_turn_counts_what_its_own_edit_computed(patch: Patch) -> None:
    found: Any = Edit.found

    def counted(self: Edit) -> Coverage:
        return Coverage.of([*found(self), *((new.dst, new.end) for new in self.inserts)])

    patch.setattr(Edit, "available", counted)
    patch.setattr(Edit, "found", counted)


@mutant("purge")
def rows_in_doubt_stay_with_those_who_run_on_them(patch: Patch) -> None:
    patch.setattr(Scheduler, "displace", lambda self, doubt: [])


@mutant("ledger", "atomic")
def borrowed_slots_are_never_given_back(patch: Patch) -> None:
    patch.setattr(Splice, "held", property(lambda self: self.private))


@mutant("provenance")
def shared_rows_are_not_turned(patch: Patch) -> None:
    turned: Any = leyline.splice.turned
    patch.setattr(leyline.splice, "turned", lambda edit: turned(replace(edit, shares=())))


@mutant("provenance", "degrade")
def shared_rows_are_taken_for_exact(patch: Patch) -> None:
    def exact(edit: Edit) -> Edit:
        spans = [(share.dst, share.end) for share in edit.shares]
        pieces = [
            Piece(piece.tokens) if (start, end) in spans else piece
            for start, end, piece in edit.after.spans()
        ]
        return replace(edit, after=canonical(pieces, edit.after.root))

    change_edits(patch, exact)


@mutant("degrade", "provenance", "read", "error")
def shared_rows_are_those_of_another_position(patch: Patch) -> None:
    acquire: Any = PrefixCache.acquire

    def shifted(self: PrefixCache, context: Context, limit: int | None = None) -> Slots:
        slots = acquire(self, context, limit)
        return np.roll(slots, 1) if limit is not None else slots

    patch.setattr(leyline.splice.PrefixCache, "acquire", shifted)


@mutant("degrade", "error")
def what_follows_an_edit_is_lost(patch: Patch) -> None:
    view: Any = leyline.splice.target_view
    patch.setattr(leyline.splice, "target_view", lambda edit, old, append: view(edit, old))


@mutant("degrade")
def a_lost_share_is_no_loss(patch: Patch) -> None:
    patch.setattr(leyline.scheduler, "DEGRADED", DEGRADED[:-1])

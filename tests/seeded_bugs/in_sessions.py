"""Bugs of sessions, their marks and versions, of dry runs and purges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import leyline.directive
import leyline.reach
import leyline.receipts
import leyline.scheduler
import leyline.session
import leyline.sessions
import leyline.splice
from leyline.batch import Edited, Ended, EndReason, Event
from leyline.cache.prefix import PrefixCache
from leyline.cache.radix import RadixTree
from leyline.context import Context, Tokens
from leyline.directive import Directive
from leyline.job import Job
from leyline.marks import Mark
from leyline.origins import Origins, View
from leyline.purge import Purge
from leyline.reach import Reach
from leyline.scheduler import Scheduler
from leyline.sequence import Sequence
from leyline.session import Session, Version
from leyline.sessions import Sessions
from tests.seeded_bugs import Patch, mutant

# -- sessions: marks, pins, versions, healing, dry runs -------------------------------------------


@mutant("pin")
def pins_give_way_when_room_is_short(patch: Patch) -> None:
    reclaim: Any = PrefixCache.reclaim

    def careless(self: PrefixCache, num_free: int) -> int:
        patch.setattr(self, "pinned", lambda: ())
        return reclaim(self, num_free)

    patch.setattr(PrefixCache, "reclaim", careless)


@mutant("pin")
def pinned_rows_count_as_room(patch: Patch) -> None:
    def evictable(self: PrefixCache) -> int:
        owned = self._tree_counts()
        return int(np.count_nonzero((owned > 0) & (owned == self.ledger.counts)))

    patch.setattr(PrefixCache, "evictable", evictable)


@mutant("pin")
def a_pin_leaves_out_its_last_row(patch: Patch) -> None:
    end: Any = leyline.sessions._pinned_end
    patch.setattr(leyline.sessions, "_pinned_end", lambda session, now: end(session, now) - 1)


@mutant("pin")
def every_pin_has_a_quota_of_its_own(patch: Patch) -> None:
    check: Any = leyline.sessions._check_quota
    patch.setattr(leyline.sessions, "_check_quota", lambda who, _, *rest: check(who, 0, *rest))


@mutant("marks", "pin")
def a_mark_does_not_follow(patch: Patch) -> None:
    patch.setattr(leyline.session, "follow_marks", lambda marks, directives: list(marks))


@mutant("marks")
def what_a_turn_brought_is_sought_where_it_was(patch: Patch) -> None:
    patch.setattr(leyline.session, "follow_messages", lambda messages, directives: list(messages))


@mutant("marks")
def a_mark_fires_a_turn_too_soon(patch: Patch) -> None:
    after_turn: Any = Mark.after_turn
    patch.setattr(Mark, "after_turn", lambda self: after_turn(after_turn(self)))


@mutant("marks")
def marks_that_overlap_fire_on_too_much(patch: Patch) -> None:
    due: Any = leyline.session.due

    def whole(marks: Iterable[Mark]) -> tuple[Directive, ...]:
        return tuple(replace(d, end=d.end + 1) for d in due(marks))

    patch.setattr(leyline.session, "due", whole)


@mutant("marks")
def marks_that_have_fired_come_back(patch: Patch) -> None:
    revert: Any = Session.revert

    def reverted(self: Session, number: int) -> Version:
        version = revert(self, number)
        self.marks = list(version.marks)
        return version

    patch.setattr(Session, "revert", reverted)


@mutant("marks")
def a_version_keeps_half_a_reply(patch: Patch) -> None:
    follow: Any = Job._follow_reply

    def unfollowed(self: Job, length: int, directives: tuple[Directive, ...]) -> int:
        follow(self, length, directives)
        return length

    patch.setattr(Job, "_follow_reply", unfollowed)


@mutant("marks")
def a_turn_without_an_answer_uses_up_a_scratch(patch: Patch) -> None:
    settled: Any = Job._settled
    patch.setattr(Job, "_settled", lambda self, *args: settled(self, *args[:-1], True))


@mutant("marks")
def reasoning_is_sought_where_it_was_sampled(patch: Patch) -> None:
    settled: Any = Job._settled

    def sampled(self: Job, session: Session, said: Tokens, *args: Any) -> Iterable[Mark]:
        return settled(self, session, self._kept() if said else said, *args)

    patch.setattr(Job, "_settled", sampled)


@mutant("versions")
def versions_keep_more_rows_than_they_may(patch: Patch) -> None:
    patch.setattr(leyline.sessions, "_shrink", lambda session, room: None)


@mutant("versions")
def the_newest_version_goes_first(patch: Patch) -> None:
    shrink: Any = leyline.sessions._shrink

    def backwards(session: Session, room: int) -> None:
        session.versions.reverse()
        shrink(session, room)
        session.versions.reverse()

    patch.setattr(leyline.sessions, "_shrink", backwards)


@mutant("kept", "write")
def kept_versions_are_nobodys(patch: Patch) -> None:
    def others(self: Sessions, sequence_id: int) -> list[Context]:
        return [one.context for one in self if one.sequence_id != sequence_id]

    patch.setattr(Sessions, "others", others)


@mutant("heal")
def a_session_heals_before_its_rows_are_there(patch: Patch) -> None:
    end: Any = Scheduler._end

    def unfiled(self: Scheduler, sequence: Sequence, reason: EndReason) -> list[Event]:
        if sequence.background:
            self.finish(sequence.sequence_id, publish=False)
            return [Ended(sequence.sequence_id, reason)]
        return end(self, sequence, reason)

    patch.setattr(Scheduler, "_end", unfiled)


@mutant("terminal", "heal")
def a_healing_ends_too_early(patch: Patch) -> None:
    idle: Any = Sequence.idle.fget  # type: ignore[attr-defined]

    def early(self: Sequence) -> bool:
        return idle(self) or (self.background and self.view.missing <= self.owed + 1)

    patch.setattr(Sequence, "idle", property(early))


@mutant("heal")
def asking_again_brings_the_grafts_back(patch: Patch) -> None:
    def heal(self: Session, exact: Context) -> None:
        self.context, self.healing = exact, False

    patch.setattr(Session, "heal", heal)


@mutant("rehearsal")
def a_dry_run_asks_no_other_session(patch: Patch) -> None:
    rehearse: Any = leyline.scheduler.rehearse

    def alone(sequence: Sequence, prefix: PrefixCache, *args: Any) -> list[Edited]:
        leaving, budget = args[1], args[3]
        return rehearse(sequence, prefix, (), leaving, lambda _: (), budget)

    patch.setattr(leyline.scheduler, "rehearse", alone)


@mutant("rehearsal", "ledger", "write", "provenance", "degrade")
def a_dry_run_is_not_dry(patch: Patch) -> None:
    patch.setattr(RadixTree, "copy", lambda self: self)


# -- purges ---------------------------------------------------------------------------------------


@mutant("purge")
def a_purge_forgets_what_grafts_saw(patch: Patch) -> None:
    patch.setattr(Purge, "_seen", lambda self, origin: b"")


@mutant("purge")
def a_purge_reads_what_a_graft_saw_but_for_the_end(patch: Patch) -> None:
    view: Any = Origins.view

    def short(self: Origins, origin: bytes) -> View | None:
        known = view(self, origin)
        return known and known._replace(length=max(0, known.length - 1))

    patch.setattr(Origins, "view", short)


@mutant("purge")
def a_purge_misses_what_lies_across_two_nodes(patch: Patch) -> None:
    patch.setattr(Purge, "_end", lambda self, data: b"")


@mutant("purge")
def a_purge_forgets_the_tree(patch: Patch) -> None:
    patch.setattr(Reach, "_cut", lambda self, search, root: 0)


@mutant("purge")
def a_purge_takes_everybodys_rows(patch: Patch) -> None:
    cut: Any = Reach._cut

    def everywhere(self: Reach, search: Purge, root: bytes) -> int:
        return sum(cut(self, search, other) for other in list(self._tree.roots))

    patch.setattr(Reach, "_cut", everywhere)


@mutant("purge")
def a_purge_takes_the_whole_tree(patch: Patch) -> None:
    def whole(self: Reach, search: Purge, root: bytes) -> int:
        top = self._tree.roots.get(root)
        for child in list(top.children.values()) if top else ():
            self._scheduler.prefix.cut(child, 0)
        return 0

    patch.setattr(Reach, "_cut", whole)


@mutant("purge")
def a_purge_leaves_what_it_has_cut_short(patch: Patch) -> None:
    def once(self: Reach, search: Purge, root: bytes) -> int:
        for node, offset in search.dependents(self._tree, root):
            self._scheduler.prefix.cut(node, offset)
        return 0

    patch.setattr(Reach, "_cut", once)


@mutant("purge")
def a_purge_forgets_versions(patch: Patch) -> None:
    patch.setattr(Session, "drop_versions", lambda self, where: 0)


@mutant("purge")
def a_purge_forgets_what_marks_put_in(patch: Patch) -> None:
    patch.setattr(Session, "drop_marks", lambda self, where: None)


@mutant("purge")
def a_purge_overwrites_nothing(patch: Patch) -> None:
    nothing = SimpleNamespace(from_numpy=lambda slots: torch.from_numpy(slots[:0]))
    patch.setattr(leyline.reach, "torch", nothing)

"""Random traces of the mind keep every law, and they go where it hurts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from leyline.batch import Batch, Edited
from leyline.directive import Directive, Mode
from leyline.receipts import SHARE_LOST
from leyline.scheduler import Scheduler
from tests.simulation import Machine, Trace, computed, edited, fold, replay

CHUNK = 100
NUM_CHUNKS = 50


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_traces_keep_every_law(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            Trace(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed} breaks a law; {replay(seed)}") from error


def test_a_seed_is_one_trace() -> None:
    lines: list[list[str]] = []
    for _ in range(2):
        trace, said = Trace(7), []
        trace.log = lambda *words, said=said: said.append(" ".join(map(str, words)))
        trace.run()
        lines.append(said)
    assert lines[0] == lines[1] and len(lines[0]) > 30


def test_traces_go_where_it_hurts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    count_calls(monkeypatch, seen)
    for seed in range(500):
        trace = Trace(seed).run()
        seen.update(trace.ended.values())
        seen.update(f"edit {how}" for how in trace.answers.values())
        seen["preempted"] += trace.scheduler.num_preempted
        seen["degraded"] += trace.scheduler.num_degraded
        seen["origins"] += len(trace.origins)
        seen["versions"] += sum(len(session.versions) for session in trace.sessions)
        seen += trace.tally
    expected = {
        "stop": 30,
        "scored": 100,
        "refused by its form": 10,
        "length": 300,
        "edited": 100,
        "cancelled": 50,
        "failed": 30,
        "edit edited": 400,
        "edit cancelled": 30,
        "preempted": 50,
        "degraded": 25,
        "origins": 100,
        "turned in place": 50,
        "copied": 25,
        "lost for want of rows": 20,
        "lost for want of room": 5,
        "forgotten": 20,
        "batches that move and extend": 50,
        "shared": 50,
        "shared where they stood": 10,
        "lost shares": 15,
        "kept": 50,
        "not kept for want of room": 1,
        "turns that begin with an edit": 50,
        "versions": 50,
        "swaps": 50,
        "turns once more": 20,
        "turns told anew": 30,
        "edits during a turn": 60,
        "marks: pin span": 40,
        "marks: decay span": 40,
        "marks: scratch span": 10,
        "marks: scratch reasoning": 10,
        "marks: scratch tool_output": 10,
        "marks fired": 15,
        "pins refused": 30,
        "evictions beside pins": 20,
        "reverts": 10,
        "versions let go": 5,
        "dry runs come true": 50,
        "purges": 40,
        "sequences displaced": 20,
        "versions purged": 20,
        "sessions that lost grafts": 5,
    }
    rare = {what: seen[what] for what, least in expected.items() if seen[what] < least}
    assert not rare, f"seldom reached: {rare} of {seen}"


def count_calls(monkeypatch: pytest.MonkeyPatch, seen: Counter[str]) -> None:
    commit: Callable[..., list[Any]] = Scheduler.commit

    def counted(self: Scheduler, batch: Batch, output: Any) -> list[Any]:
        asked = {n: s.splice.request for n, s in self.running.items() if s.splice is not None}
        events = commit(self, batch, output)
        seen["batches that move and extend"] += bool(batch.moves and batch.extends)
        for event in events:
            if isinstance(event, Edited):
                edit, request = event.edit, asked[event.sequence_id]
                seen["kept"] += event.kept
                seen["not kept for want of room"] += request.keep and not event.kept
                seen["turns that begin with an edit"] += request.own
                seen["shared where they stood"] += any(not s.run.delta for s in edit.shares)
                for receipt in event.receipts:
                    seen["shared"] += receipt.shared > 0
                    seen["lost shares"] += receipt.reason == SHARE_LOST
                    seen["turned in place"] += receipt.moved_in_place > 0
                    seen["copied"] += receipt.copied > 0
                    seen["lost for want of rows"] += "evicted" in (receipt.reason or "")
                    seen["lost for want of room"] += "no room" in (receipt.reason or "")
                    seen["forgotten"] += "forget" in (receipt.reason or "")
        return events

    monkeypatch.setattr(Scheduler, "commit", counted)


# -- the simulator's own reference ----------------------------------------------------------------


def test_an_edit_keeps_what_the_tail_was_told() -> None:
    before = computed(b"", [], [1, 2, 3, 4])
    after = edited(b"", before, 4, [Directive(1, 2, (0,))])
    assert after == [before[0], (0, fold(b"", before[:1])), before[2], before[3]]


def test_forget_is_a_fresh_computation() -> None:
    before = computed(b"", [], [1, 2, 3, 4])
    after = edited(b"", before, 4, [Directive(1, 2, (), Mode.FORGET)])
    assert after == computed(b"", [], [1, 3, 4])


def test_a_replacement_sees_the_original_to_its_left() -> None:
    before = computed(b"", [], [1, 2, 3, 4])
    after = edited(b"", before, 4, [Directive(0, 1), Directive(3, 3, (0,))])
    assert after == [before[1], before[2], (0, fold(b"", before[:3])), before[3]]


def test_from_the_first_missing_row_on_all_is_computed() -> None:
    before = computed(b"", [], [1, 2, 3, 4])
    after = edited(b"", before, 3, [Directive(0, 1)])
    assert after[:2] == before[1:3] and after[2] == (4, fold(b"", before[1:3]))


def test_tenants_never_share_a_symbol() -> None:
    assert not set(computed(b"", [], [1, 2])) & set(computed(b"x", [], [1, 2]))


def test_a_free_slot_cannot_be_read() -> None:
    with pytest.raises(AssertionError, match="holds nothing"):
        Machine(4, Random(0)).read(2)

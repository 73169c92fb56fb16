"""What the simulation found in sessions, their turns and purges, in the smallest form."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from leyline.batch import Edited, Sampled
from leyline.context import Context
from leyline.directive import Directive, Mode
from leyline.job import Job
from leyline.marks import Mark, MessageSpan, Of
from leyline.reach import Reach
from leyline.session import Session
from leyline.sessions import Sessions
from leyline.turn import Turn
from tests.bench import Bench, edits
from tests.simulation.cast import Said
from tests.simulation.symbols import END_THINK, THINK, Letters

LETTERS: Any = Letters()
PROMPT = Context.of([0, 1, 0, 1, 2, 2])  # the last two are a tool's output


class Turning:
    """A turn of a session that has been told to scratch something of it."""

    def __init__(self, of: Of) -> None:
        self.bench = Bench()
        self.session = Session("s", PROMPT.prefix(4))
        self.session.mark(Mark("m", "scratch", 0, 0, None, 1, (), Mode.AMORTIZE, of))
        said: Any = Said()
        turn = Turn("", PROMPT, PROMPT, [MessageSpan("tool", None, 4, 6)])
        self.work = self.bench.turn(PROMPT, max_tokens=5)
        self.job = Job(self.work, self.session, said, turn, reply_start=len(PROMPT))

    def reply(self, *tokens: int) -> None:
        """Sample these."""
        for token in tokens:
            for event in self.bench.step(token):
                if isinstance(event, Sampled):
                    list(self.job.push(event))

    def edit(self, *directives: Directive) -> Edited:
        """An edit that commits at once."""
        self.bench.ask(self.work, *directives)
        request = self.work.edits[-1]
        self.job.requests[request.request_id] = request
        told = edits(self.bench.step())
        while not told:
            told = edits(self.bench.step())
        self.job.commit(told[0])
        return told[0]

    def marks(self, *, answered: bool = True) -> list[tuple[str, int, int]]:
        """What its session has to scratch when the turn is over."""
        self.job.hand_over(LETTERS, answered=answered)
        return [(mark.of, mark.start, mark.end) for mark in self.session.marks]


@pytest.mark.parametrize(
    ("directive", "place"),
    [
        (Directive(0, 2), (2, 4)),
        (Directive(4, 5), (4, 5)),
        (Directive(4, 6, (0, 1, 0)), (4, 7)),
        (Directive(6, 7), (4, 6)),
    ],
)
def test_a_tool_output_is_scratched_where_edits_have_left_it(
    directive: Directive, place: tuple[int, int]
) -> None:
    """Another span went: the one where it had stood when the turn began (marks, seed 155)."""
    turning = Turning("tool_output")
    turning.reply(0, 1)
    turning.edit(directive)
    assert turning.marks() == [("span", *place)]


def test_reasoning_is_scratched_where_edits_have_left_it() -> None:
    turning = Turning("reasoning")
    turning.reply(1, 1, THINK, 0, END_THINK)
    assert turning.marks() == [("span", 8, 11)]
    turning = Turning("reasoning")
    turning.reply(1, 1, THINK)
    turning.edit(Directive(6, 7))
    turning.reply(0, END_THINK)
    assert turning.marks() == [("span", 7, 10)]


def test_a_turn_that_nobody_got_an_answer_to_does_not_use_up_a_scratch() -> None:
    """The edit during it stays, so the session is told of the turn (marks, seed 153)."""
    turning = Turning("reasoning")
    turning.reply(THINK, 0)
    turning.edit(Directive(0, 1))
    assert turning.marks(answered=False) == [("reasoning", 0, 0)]
    turning = Turning("tool_output")
    turning.edit(Directive(0, 1))
    assert turning.marks(answered=False) == [("span", 3, 5)]


def test_going_back_makes_a_scratch_wait_for_its_turn_again() -> None:
    session = Session("s", PROMPT)
    session.mark(Mark("m", "scratch", 0, 0, None, 1, (), Mode.AMORTIZE, "tool_output"))
    session.commit(PROMPT, PROMPT.prefix(5), [Directive(5, 6)], kept=True, heal=False)
    session.context = PROMPT.prefix(5)
    session.marks = [Mark("m", "scratch", 2, 4, None, 1)]
    session.revert(0)
    assert [(mark.of, mark.start, mark.end) for mark in session.marks] == [("tool_output", 0, 0)]


def test_a_path_that_a_purge_cuts_short_may_end_with_half_of_the_text() -> None:
    """The row in front of a graft that saw the text was found after the purge (purge, seed 243)."""
    bench = Bench()
    parts: Any = SimpleNamespace(
        scheduler=bench.scheduler,
        cache=SimpleNamespace(ckv=SimpleNamespace(device="cpu"), fill=lambda slots, value: None),
        tokenizer=LETTERS,
    )
    reach = Reach(parts, Sessions(4, math.inf))
    told = bench.file(1, 0, 3)  # "ba" and "c"
    bench.edit(told, Directive(0, 2, (2,)), keep=True)  # "ab", and "c" which saw "ba"
    for event in edits(bench.drain()):
        reach.learn(event.edit)
    assert reach.find(b"", b"ba").rows == 4
    reach.purge(b"", b"ba")
    assert reach.find(b"", b"ba").rows == 0
    assert not bench.prefix.tree.roots

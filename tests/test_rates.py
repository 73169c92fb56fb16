"""How long work takes: fitted to batches that were timed, and asked for batches that were not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from leyline import Directive, Mode
from leyline.batch import Batch, Extend, Move
from leyline.directive import Receipt
from leyline.rates import Line, Rates, num_moved
from tests.engine_state import state_digest
from tests.lockstep import tiny_engine

Folder = Callable[[str], Path]


def extends(num_tokens: int) -> Batch:
    return Batch(extends=(Extend(1, 0, (5,) * num_tokens, np.arange(num_tokens)),))


def moves(num_rows: int) -> Batch:
    rows = np.arange(num_rows)
    return Batch(moves=(Move(1, rows, rows, rows),))


def both(num_tokens: int, num_rows: int) -> Batch:
    return Batch(moves(num_rows).moves, extends(num_tokens).extends)


def receipt(**counts: int) -> Receipt:
    names = ("removed", "inserted", "kept", "recomputed", "moved_in_place", "copied", "freed")
    numbers = [counts.pop(name, 0) for name in names]
    shared = counts.pop("shared", 0)
    assert not counts
    return Receipt(3, 5, Mode.AMORTIZE, Mode.AMORTIZE, *numbers, delta=0, shared=shared)


def taught(seed: int, noise: float = 0.0) -> Rates:
    """Rates of a machine on which a batch lasts 3 + 0.5 n, and a move 0.01 n milliseconds."""
    rates, random = Rates(100), Random(seed)
    for _ in range(60):
        num = random.randint(1, 100)
        rates.note(extends(num), (3 + 0.5 * num) * (1 + noise * random.gauss(0, 1)))
        rates.note(moves(num), 0.01 * num * (1 + noise * random.gauss(0, 1)))
    return rates


def test_nothing_is_known_before_anything_was_measured() -> None:
    rates = Rates(100)
    assert rates.extend_ms(5) is None and rates.move_ms(5) is None and not rates.knows_moves
    assert rates.move_ms(0) == 0.0
    assert rates.edit_ms([receipt(inserted=3)]) is None
    rates.note(extends(10), 20.0)
    assert rates.edit_ms([receipt(inserted=3)]) == pytest.approx(6.0)
    assert rates.edit_ms([receipt(inserted=3, copied=4)]) is None


def test_a_machine_is_learned() -> None:
    rates = taught(seed=0)
    assert rates.extend_ms(40) == pytest.approx(3 + 0.5 * 40)
    assert rates.extend_ms(250) == pytest.approx(3 * 3 + 0.5 * 250), "250 tokens are three batches"
    assert rates.move_ms(1000) == pytest.approx(10, rel=1e-3)
    assert rates.extend_ms(0) == 0.0


def test_a_noisy_machine_is_learned_roughly_and_another_one_is_told_apart() -> None:
    for seed in range(10):
        estimate = taught(seed, noise=0.05).extend_ms(50)
        assert estimate == pytest.approx(28, rel=0.15)
        assert estimate != pytest.approx(2 * 28, rel=0.15)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    rates = taught(seed=1)
    for num in range(1, 101):
        rates.note(extends(num), 10 * (3 + 0.5 * num))
        rates.note(extends(101 - num), 10 * (3 + 0.5 * (101 - num)))
    assert rates.extend_ms(50) == pytest.approx(280, rel=0.1)


def test_a_batch_of_both_kinds_and_one_of_neither_tell_nothing() -> None:
    rates = Rates(100)
    for batch in (Batch(), both(5, 5), moves(0)):
        rates.note(batch, 100.0)
    assert rates.extend_ms(5) is None and rates.move_ms(5) is None
    rates.note(both(5, 0), 10.0)
    assert rates.extend_ms(5) == pytest.approx(10.0), "a move of no rows takes no time"


def test_an_edit_costs_what_it_computes_and_what_it_carries() -> None:
    rates = taught(seed=2)
    told = [
        receipt(removed=9, inserted=10, shared=4, kept=500, moved_in_place=300, copied=200),
        receipt(inserted=1, recomputed=13),
    ]
    assert num_moved(told) == 504
    expected = 3 + 0.5 * (10 - 4 + 1 + 13) + 0.01 * 504
    assert rates.edit_ms(told) == pytest.approx(expected, rel=1e-3)
    assert rates.edit_ms([]) == 0.0


@pytest.mark.parametrize("points", [[(4, 2.0)], [(4, 2.0)] * 20, [(1, 9.0), (2, 5.0), (3, 1.0)]])
def test_points_that_make_no_rising_line_give_one_through_zero(
    points: list[tuple[float, float]],
) -> None:
    line = Line()
    for x, y in points:
        line.add(x, y)
    height, slope = line.fitted()
    assert height == 0.0 and slope > 0
    if len(points) != 3:
        assert slope == pytest.approx(0.5)


def test_no_estimate_is_negative_or_infinite() -> None:
    for seed in range(200):
        random, rates = Random(seed), Rates(64)
        for _ in range(random.randint(1, 10)):
            rates.note(extends(random.randint(1, 64)), random.random() * 10)
            rates.note(moves(random.randint(1, 64)), random.random() * 1e-3)
        for num in (0, 1, 7, 10**6):
            for estimate in (rates.extend_ms(num), rates.move_ms(num)):
                assert estimate is not None and 0 <= estimate < 1e9


def test_a_plan_says_what_it_would_cost_from_rates_of_this_engine(tiny_folder: Folder) -> None:
    with tiny_engine(tiny_folder("v3")) as engine:
        session = engine.session("s")
        session.chat("the rain in the land " * 20, temperature=0, max_tokens=4)
        digest = state_digest(engine)
        assert not engine.rates.knows_moves
        measured = session.plan([Directive(20, 21, (9, 9))])
        assert state_digest(engine) == digest and engine.rates.knows_moves
        assert measured.amortize_ms is not None and measured.forget_ms is not None
        engine.rates = taught(seed=3)
        tail = measured.length_after - 20
        plan = session.plan([Directive(20, 21, (9, 9))])
        # Two tokens are put in, and the last token of the reply has no row yet.
        assert plan.amortize_ms == pytest.approx(3 + 0.5 * 3 + 0.01 * (tail - 3), rel=1e-3)
        assert plan.forget_ms == pytest.approx(3 * -(-tail // 100) + 0.5 * tail, rel=1e-3)
        assert plan.cheaper is Mode.AMORTIZE
        end = len(session.tokens)
        assert session.plan([Directive(end, end, (9,) * 7)]).cheaper is Mode.AMORTIZE
        forgotten = session.plan([Directive(20, 21, (9,) * 3, Mode.FORGET)])
        assert forgotten.forget_ms == pytest.approx((plan.forget_ms or 0.0) + 0.5)


def test_a_machine_that_cannot_be_measured_still_plans(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError

    with tiny_engine(tiny_folder("v3")) as engine:
        session = engine.session("s")
        session.chat("the rain in the land", temperature=0, max_tokens=4)
        monkeypatch.setattr(engine.parts.cache, "move", broken)
        plan = session.plan([Directive(3, 5, (9,))])
        assert plan.receipts[0].moved_in_place + plan.receipts[0].copied > 0
        assert plan.amortize_ms is None and plan.cheaper is None and plan.forget_ms is not None


def test_a_scored_batch_is_counted_and_teaches_nothing() -> None:
    rates, (op,) = Rates(100), extends(10).extends
    rates.note(Batch(extends=(replace(op, targets=(5,) * 9),)), 10.0)
    assert (rates.num_batches, rates.num_tokens) == (1, 10)
    assert rates.extend_ms(10) is None
    rates.note(extends(10), 10.0)  # a twin that teaches
    assert rates.extend_ms(10) == pytest.approx(10.0)

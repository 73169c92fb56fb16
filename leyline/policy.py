"""Four decisions, as functions passed to the scheduler in one value.

Replace any of them with `dataclasses.replace(DEFAULT, victim=my_function)`; none can break a law,
only change whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

from leyline.cache.radix import Node
from leyline.sequence import Sequence

PATIENCE = 64


def admit(needed: int, available: int, num_running: int) -> bool:
    """Whether a waiting sequence may start.

    Args:
        needed: Slots its missing rows would take.
        available: Slots that are free or could be evicted.
        num_running: Sequences that are running; with none, somebody has to start.
    """
    return num_running == 0 or needed <= available


def victim(candidates: List[Sequence]) -> Sequence:
    """Who is preempted: one that loses nothing by it, then the latest arrival.

    A sequence with grafts may find them evicted when it resumes, which changes its meaning.
    """
    return max(candidates, key=lambda sequence: (not sequence.grafted, sequence.sequence_id))


def evict(node: Node) -> tuple[bool, int]:
    """Sort key of a leaf: exact rows before grafted ones, which nobody could compute again;
    among equals the least recently used first.
    """
    return node.origin is not None, node.last_used


def degrade(num_running: int, waited: int) -> bool:
    """Whether a splice that finds no slots becomes a re-prefill instead of waiting on.

    Args:
        num_running: Sequences that are running, this one included; alone, waiting is pointless.
        waited: Steps it has waited.
    """
    return num_running == 1 or waited >= PATIENCE


@dataclass(frozen=True)
class Policy:
    """The four functions; see theirs for the meaning of the arguments."""

    admit: Callable[[int, int, int], bool] = admit
    victim: Callable[[List[Sequence]], Sequence] = victim
    evict: Callable[[Node], Any] = evict
    degrade: Callable[[int, int], bool] = degrade


DEFAULT = Policy()

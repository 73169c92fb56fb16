"""The mind under random traces, with symbolic rows.

A slot holds a `Row`: a token, the position it is turned to, the digest of what it was computed
under, and the serial number of its computation. The executor is a page of code: an `Extend` folds
the rows that it is given and really sees, a `Move` adds `delta` to a position. Sessions, their
jobs and purges are the product's own. Beside every context that Leyline keeps, a trace keeps a
`Twin`: plain lists of symbols `(token, seen)`, and of tags that tell tokens apart, on which edits
are list slices. After every commit the laws of design.md section 5 are checked, and those of
sessions and purges where they can be broken, each by the function of its name.

    symbols, machine   what rows are, and the executor
    cast, world        who acts, and what a trace is made of
    desk, callers      what an engine does for its sessions, and what is asked of it
    trace              the steps
    laws, edit_laws    what holds for rows and slots, and for edits
    promises, purging  what holds for sessions, and after a purge

`python -m tests.simulation SEED` replays one trace and prints what happens in it.
"""

from tests.simulation.cast import Talk, Twin
from tests.simulation.edit_laws import degrade_at_admission
from tests.simulation.laws import last_row, ledger, provenance
from tests.simulation.machine import Machine
from tests.simulation.symbols import (
    VOCABULARY,
    Row,
    Symbol,
    Violation,
    computed,
    edited,
    fold,
    require,
)
from tests.simulation.trace import Trace
from tests.simulation.world import World

__all__ = [
    "VOCABULARY",
    "Machine",
    "Row",
    "Symbol",
    "Talk",
    "Trace",
    "Twin",
    "Violation",
    "World",
    "computed",
    "degrade_at_admission",
    "edited",
    "fold",
    "last_row",
    "ledger",
    "provenance",
    "replay",
    "require",
]


def replay(seed: int) -> str:
    """How to see a seed fail again."""
    return f"replay it with `python -m tests.simulation {seed}`"

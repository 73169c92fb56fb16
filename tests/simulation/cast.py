"""Who acts in a trace: sessions and sequences, and beside each of them what must be true of it.

Every token gets a *tag* when it enters a context, and keeps it wherever edits carry it. What a
mark is about is a set of tags, so that its positions can be told from the tags at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from leyline.batch import Edited
from leyline.context import Context
from leyline.directive import Directive
from leyline.job import Job
from leyline.marks import Mark
from leyline.sequence import EditRequest
from leyline.sequence import Sequence as Work
from leyline.session import Session
from tests.simulation.symbols import Symbol

Spans = list[frozenset[int]] | None  # tags; None until the turn has ended that they are about


@dataclass
class Promise:
    """What a session was promised about some tokens."""

    mark: Mark
    spans: Spans
    turns: int | None

    def ranges(self, tags: list[int]) -> list[tuple[int, int]]:
        """Where the tokens stand, from the first one that remains to the last."""
        found = [[at for at, tag in enumerate(tags) if tag in span] for span in self.spans or ()]
        return sorted((places[0], places[-1] + 1) for places in found if places)

    def absorb(self, tags: list[int]) -> None:
        """What was put between two tokens of a span belongs to it from now on."""
        if self.spans is not None:
            self.spans = [frozenset(tags[start:end]) for start, end in self.ranges(tags)]

    def end(self, tags: list[int]) -> int:
        """One past the last of the tokens."""
        return max((end for _, end in self.ranges(tags)), default=0)


class Past(NamedTuple):
    """What a version of a session must be."""

    tags: list[int]
    spans: dict[str, Spans]


@dataclass(eq=False)
class Talk:
    """A session, and what is promised to it.

    Attributes:
        session: The session.
        tags: Of the tokens of its context.
        promised: Leading rows of its context that must be there if nobody wanted for room.
        promises: By mark.
        past: What it can go back to, by version.
        base: Tags of what its last turn went on from.
    """

    session: Session
    tags: list[int] = field(default_factory=list)
    promised: int = 0
    promises: dict[str, Promise] = field(default_factory=dict)
    past: dict[int, Past] = field(default_factory=dict)
    base: list[int] = field(default_factory=list)

    @property
    def context(self) -> Context:
        """What its next turn goes on from."""
        return self.session.context

    @property
    def busy(self) -> bool:
        """Whether a turn or an edit is under way."""
        return self.session.busy

    def remember(self, number: int, tags: list[int]) -> None:
        """Note what a version is that is being made."""
        spans = {name: promise.spans for name, promise in self.promises.items()}
        self.past[number] = Past(tags, spans)


@dataclass
class Twin:
    """What a sequence's context must be, and what its requests may still expect.

    Attributes:
        work: The sequence.
        symbols: Of its context.
        tags: Of its context.
        job: What its session will learn from, if it serves one.
        talk: That session.
        heals: The session whose exact form it computes.
        requests: Edits without an answer.
        known: The context as it was last seen.
        promised: Leading rows that must be there if nobody wanted for room.
        reply: Tags of what it has sampled, and of what edits put in between.
        told: Tags of each tool output that its turn brought, and of what was put in its place.
        doomed: Tags of what the marks take out that it fires.
        forecast: What its edits came to in a dry run, if nothing has happened since.
    """

    work: Work
    symbols: list[Symbol]
    tags: list[int]
    job: Job | None = None
    talk: Talk | None = None
    heals: Talk | None = None
    requests: dict[int, EditRequest] = field(default_factory=dict)
    known: Context = field(default_factory=Context)
    promised: int = 0
    num_edits: int = 0
    num_sampled: int = 0
    reply: frozenset[int] = frozenset()
    told: list[frozenset[int]] = field(default_factory=list)
    doomed: frozenset[int] = frozenset()
    forecast: list[Edited] | None = None

    @property
    def root(self) -> bytes:
        """The tenant's root."""
        return self.work.view.context.root


class Said:
    """As much of a reply as a job needs."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False
        self.cut = 0

    def push(self, token: int, *, hidden: bool = False) -> str:
        """Add a token."""
        self.token_ids.append(token)
        return ""

    def stop(self, cut: int) -> None:
        """A stop string has ended it, which took so many tokens."""
        self.stopped, self.cut = True, cut

    def num_kept(self) -> int:
        """How many tokens are in front of the stop string."""
        return max(0, len(self.token_ids) - self.cut)


def coming(work: Work) -> int:
    """How long a sequence's context is once its waiting edits are done."""
    grown = sum(d.delta for edit in work.edits for d in edit.directives)
    return len(work.view) + grown + sum(len(edit.append) for edit in work.edits)


def reach(span: frozenset[int], tags: Sequence[int]) -> frozenset[int]:
    """The span from its first token that is there to its last, and all that stands between."""
    places = [at for at, tag in enumerate(tags) if tag in span]
    return frozenset(tags[places[0] : places[-1] + 1] if places else ())


def rewritten(
    span: frozenset[int], tags: list[int], directives: Sequence[Directive], new: Sequence[int]
) -> frozenset[int]:
    """A span with what a set of directives puts in the place of parts of it, and of it alone.

    Args:
        span: Tags, neighbours of each other.
        tags: Of the context before.
        directives: The set.
        new: Tags of the replacements.
    """
    left = iter(new)
    for directive in directives:
        put = list(islice(left, len(directive.replacement)))
        out = tags[directive.start : directive.end]
        if out and span.issuperset(out):
            span |= frozenset(put)
    return span

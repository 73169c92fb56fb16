"""A unit of work: what it is, what it has, what it misses.

A `View` is a context and where its rows are. A sequence works on one view; while an edit waits to
commit it carries a second one, the `Splice`, whose rows are the old ones that are kept and the
new ones that are computed into private slots. The old view stays whole until the `Move` commits.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from leyline.batch import Slots
from leyline.cache.ledger import NO_SLOTS
from leyline.context import Context, Tokens
from leyline.coverage import Coverage
from leyline.directive import Directive, Edit, Insert
from leyline.events import TokenLogprob
from leyline.sampling import Draw, SamplingParams


@dataclass(slots=True)
class View:
    """A context, the positions whose rows exist, and the slots they are in.

    Attributes:
        context: The pieces as of admission or the last edit.
        appended: Tokens sampled since; exact, behind the context.
        coverage: Positions with a row.
        table: Slot of every position [>= length]; meaningful where covered.
    """

    context: Context
    appended: list[int] = field(default_factory=lambda: [])
    coverage: Coverage = field(default_factory=Coverage)
    table: Slots = field(default_factory=lambda: NO_SLOTS)

    def __len__(self) -> int:
        return len(self.context) + len(self.appended)

    def whole(self) -> Context:
        """The context with everything sampled since."""
        return self.context.append(self.appended) if self.appended else self.context

    def tokens(self, start: int, end: int) -> Tokens:
        """Token ids of positions `[start, end)`."""
        base = len(self.context)
        fixed = self.context.tokens[start:end] if start < base else ()
        return (*fixed, *self.appended[max(0, start - base) : max(0, end - base)])

    @property
    def missing(self) -> int:
        """Positions without a row."""
        return self.coverage.missing(len(self))

    def owned(self) -> Slots:
        """Slots of the covered positions."""
        runs = [self.table[start:end] for start, end in self.coverage]
        return np.concatenate(runs) if runs else NO_SLOTS

    def owned_from(self, start: int) -> Slots:
        """Slots of the covered positions from `start` on."""
        return self.owned()[len(self.coverage.prefix(start)) :]

    def place(self, start: int, slots: Slots) -> None:
        """Note that positions from `start` on stand in these slots; covers nothing yet."""
        end = start + len(slots)
        if end > len(self.table):
            self.table = np.concatenate((self.table[:start], slots))
        else:
            self.table[start:end] = slots


@dataclass(frozen=True, slots=True)
class EditRequest:
    """A checked set of directives waiting for its sequence's next step.

    Attributes:
        request_id: Who asked.
        directives: What was asked, checked and sorted.
        append: Tokens that follow once the edit has committed: an ordinary gap behind it.
        own: Whether it is what a turn itself begins with: usage is counted from its commit.
        keep: Whether the context before is to stay with its rows, which costs copies of those
            that move. Without room for them it is given up before anything else is.
    """

    request_id: int
    directives: tuple[Directive, ...]
    append: Tokens = ()
    own: bool = False
    keep: bool = False


@dataclass(slots=True)
class Splice:
    """An edit on its way to its commit.

    Attributes:
        request: What was asked, and by whom.
        edit: What it means for the rows that exist.
        view: The context afterwards; kept rows in the slots of the old view, inserts in private
            ones, shared rows in those of others.
        private: The slots of the inserts in order, owned by the sequence beside its old view, and
        borrowed: those of the shared rows, of which it is one more owner.
        keep: Whether the old rows will be left alone.
        bound: From which position on the old branch is given up: nowhere until the move is planned.
        reason: Why less is kept than asked, or None.
        waited: Steps in which no slots could be had for it.
    """

    request: EditRequest
    edit: Edit
    view: View
    private: Slots = field(default_factory=lambda: NO_SLOTS)
    borrowed: Slots = field(default_factory=lambda: NO_SLOTS)
    keep: bool = False
    bound: int = sys.maxsize
    reason: str | None = None
    waited: int = 0

    @property
    def held(self) -> Slots:
        """Slots that the sequence owns for it, one beside the other as often as it owns them."""
        return np.concatenate((self.private, self.borrowed))

    def progress(self, new: Insert) -> int:
        """How many of an insert's rows are computed."""
        covered = self.view.coverage
        return len(covered.prefix(new.end)) - len(covered.prefix(new.dst))

    def cover(self, start: int, length: int) -> None:
        """Note that the next insert's rows from old position `start` on are computed."""
        new = self.next_insert()
        assert new is not None, "an insert was computed twice"
        first = start - new.start + new.dst
        self.view.coverage = self.view.coverage.add(first, first + length)

    def next_insert(self) -> Insert | None:
        """The first insert that still misses rows."""
        covered = self.view.coverage
        return next((i for i in self.edit.inserts if not covered.covers(i.dst, i.end)), None)

    def take_back(self) -> None:
        """Let go of private slots that were planned for and not computed; no count changes."""
        self.private = self.private[: sum(self.progress(new) for new in self.edit.inserts)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, or the edit of one idle session.

    Attributes:
        sequence_id: Unique and increasing: also the order of arrival.
        view: What it works on.
        sampling: How tokens are chosen; None for an edit and for healing.
        max_tokens: Tokens to sample at most; 0 for a prompt that is only scored.
        stop_ids: Tokens that end it.
        computed: Leading positions that had rows when the context was last used; rows missing
            below it were evicted, rows missing above it never existed.
        owed: Trailing positions that a sequence which samples nothing leaves to the next turn:
            nobody had computed them before.
        generated: Tokens sampled so far, edits or not.
        scores: Log-probabilities of the prompt's tokens from the second on, as far as they are
            computed, if they are wanted.
        edits: Edits that wait for the next step, first come first served.
        splice: The edit that is under way.
        cached: Rows found at first admission and never computed since, and
        spliced: how many of those are grafted; None before it.
        prompt_len: Context length at first admission; all three are counted afresh when the
            turn's own edit commits.
        background: Whether it may run only while nobody else wants to.
        degraded: Whether a graft was lost and had to be computed from the edited tokens.
        running: Whether it owns slots and is planned.
    """

    sequence_id: int
    view: View
    sampling: SamplingParams | None = None
    max_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    computed: int = 0
    owed: int = 0
    generated: list[int] = field(default_factory=lambda: [])
    scores: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    edits: deque[EditRequest] = field(default_factory=lambda: deque[EditRequest]())
    splice: Splice | None = None
    cached: int | None = None
    spliced: int = 0
    prompt_len: int = 0
    degraded: bool = False
    background: bool = False
    running: bool = False

    @property
    def samples(self) -> bool:
        """Whether it generates tokens."""
        return self.sampling is not None and self.max_tokens > 0

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to come: only rows in front of them
        may come from the cache.
        """
        if self.sampling is None or self.sampling.prompt_logprobs is None:
            return False
        return self.cached is None or len(self.scores) < self.prompt_len - 1

    @property
    def decoding(self) -> bool:
        """Whether its next op is the computation of a single token."""
        return self.view.missing == 1 and not self.edits and self.splice is None

    @property
    def grafted(self) -> bool:
        """Whether losing its rows would change what it attends to."""
        return self.view.context.first_graft() < len(self.view.context)

    @property
    def own_edit(self) -> bool:
        """Whether a turn's own edit is still to come."""
        return bool(self.edits) and self.edits[0].own

    def owned(self) -> Slots:
        """Every slot that it owns, as often as it owns it."""
        if not self.running:
            return NO_SLOTS
        held = self.splice.held if self.splice is not None else NO_SLOTS
        return np.concatenate((self.view.owned(), held))

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do for a sequence that samples nothing."""
        busy = self.samples or self.edits or self.splice is not None
        return not busy and self.view.missing <= self.owed

    def count_hit(self, num_rows: int) -> None:
        """Note how many rows an admission found; a later one can only find fewer of the first."""
        context = self.view.context
        if self.cached is None:
            self.cached, self.prompt_len = num_rows, len(context)
            self.spliced = context.num_grafted(num_rows)
        self.cached = min(self.cached, num_rows)
        self.spliced = min(self.spliced, context.num_grafted(self.cached))

    def count_own(self, edit: Edit) -> None:
        """Count afresh what the turn's own edit found: rows kept and brought, none computed."""
        found = edit.found().prefix(self.view.coverage.reach)
        self.prompt_len, self.cached = len(self.view), len(found)
        grafts = (span for span in self.view.context.spans() if not span[2].exact)
        self.spliced = sum(
            len(found.prefix(end)) - len(found.prefix(start)) for start, end, _ in grafts
        )

    def uncover_last(self) -> Slots:
        """Have whoever samples compute the last token once more if it is covered, for its logits.

        Returns:
            The slot let go, if any; the caller releases it.
        """
        view, last = self.view, len(self.view) - 1
        if not self.samples or not view.coverage.covers(last, last + 1):
            return NO_SLOTS
        view.context = view.context.exact_from(last)
        view.coverage = view.coverage.prefix(last)
        self.computed = view.coverage.reach
        return view.table[last : last + 1]

    def draw(self) -> Draw | None:
        """How its next token is chosen."""
        params = self.sampling
        if params is None:
            return None
        looks_back = params.penalises or params.constraint is not None
        early = len(self.generated) < params.min_tokens
        return Draw(
            params,
            len(self.generated),
            tuple(self.generated) if looks_back else (),
            self.view.context.distinct if params.repetition_penalty != 1 else (),
            tuple(sorted(self.stop_ids)) if early else (),
        )

    def targets(self, start: int, end: int) -> Tokens:
        """The tokens of the prompt whose scores come with the rows of positions `[start, end)`."""
        return self.view.tokens(start + 1, min(end + 1, self.prompt_len)) if self.scoring else ()

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.view.appended.append(token)
        self.generated.append(token)


def target_view(edit: Edit, old: View, append: Tokens = ()) -> View:
    """The view an edit leads to, before its inserts are computed and its rows are moved."""
    table = np.full(len(edit.after), -1, dtype=np.int64)
    for run in edit.kept:
        table[run.dst : run.dst + run.length] = old.table[run.src : run.src + run.length]
    kept = Coverage.of((run.dst, run.dst + run.length) for run in edit.kept)
    return View(edit.after.append(append), [], kept, table)


def restarted(view: View, context: Context) -> View:
    """A view of the same text without any row."""
    return replace(view, context=context, appended=[], coverage=Coverage(), table=NO_SLOTS)

"""Which tokens of an edited history are still the ones that were sent before.

`align` compares two token sequences and returns the directives that turn the first into the
second, so that a client which edits its messages and sends them again needs no other call. It
keeps the common head, the common tail, and in between runs of at least `min_run` tokens: a shorter
run between two edits is not worth a seam, and becomes part of the replacement.

A plain diff of 100,000 tokens against 100,000 takes 10^10 comparisons, so the text is anchored
first. A *gram* is `min_run` tokens in a row. Grams that occur once on either side can be paired
without a choice, as patience diff and genome aligners do with unique words; pairs that continue
each other form runs, and of the runs the heaviest chain that never goes backwards is kept. What
is between two links is a *gap*. A gap that shares few grams goes to rapidfuzz, whose longest
common subsequence over grams matches whole runs only. One that shares too many (text that repeats
itself) is anchored again by longer grams, three times at most; if that does not help, the first
occurrence of a gram is paired with the first, the second with the second, and so on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq

from leyline.directive import MAX_DIRECTIVES, Directive, Mode, Run

# Pairs of grams that the library compares in one piece: 2 MiB of bits, about 5 ms.
MAX_PAIRS = 1 << 24
# Anchors of min_run tokens first, then 4, 16 and 64 times as long where text repeats itself.
WIDENING = 4
WIDEST = 64

Ids = NDArray[np.int64]
Positions = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Points = tuple[Positions, Positions]  # of equal grams: the first in old, the first in new, ...


def align(
    old: Sequence[int],
    new: Sequence[int],
    min_run: int = 16,
    mode: Mode = Mode.FORGET,
    *,
    max_directives: int = MAX_DIRECTIVES,
) -> tuple[Directive, ...]:
    """The directives that turn `old` into `new`: sorted, not overlapping, none for equal inputs.

    Always: applying them gives exactly `new`; the longest common head is kept, then the longest
    common tail of the rest; every other run kept has at least `min_run` tokens; there are at most
    `max_directives` (the longest runs are kept).

    If, moreover, no two maximal common runs of at least `min_run` tokens overlap, in `old` or in
    `new`, as it is when nothing in the text repeats, then no alignment under these rules keeps
    more tokens. Where text repeats, it is a good alignment and not always the best one.

    With N the longer length, at most 4 sorts of 2N numbers, one pass over at most N runs for
    each, and N * 4096 / 64 word operations in the library; memory is O(N) plus 2 MiB. On one CPU
    core, 100,000 tokens took 30 ms with 50 edits and at most 0.25 s on inputs made to be hard
    (`scripts/bench_align.py`).

    Args:
        old: Token ids of the context as it stands.
        new: Token ids as they are wanted.
        min_run: Shortest run worth keeping between two edits, at least 1.
        mode: Given to every directive.
        max_directives: At least 1.

    Raises:
        ValueError: If `min_run` or `max_directives` is below 1.
    """
    if min_run < 1 or max_directives < 1:
        raise ValueError("min_run and max_directives must be at least 1")
    pair = _Pair(_ids(old), _ids(new), min_run)
    head = _common(pair.old, pair.new)
    tail = _common(pair.old[head:][::-1], pair.new[head:][::-1])
    middle = _Gap(head, len(old) - tail, head, len(new) - tail)
    runs = _longest(_anchored(pair, middle, min_run), max_directives - 1)
    edges = [Run(0, 0, head), *runs, Run(middle.old_end, middle.new_end, tail)]
    gaps = (_Gap.between(left, right) for left, right in pairwise(edges))
    return tuple(
        Directive(gap.old, gap.old_end, tuple(new[gap.new : gap.new_end]), mode)
        for gap in gaps
        if gap.longer
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """Tokens `[old, old_end)` of the one text that face `[new, new_end)` of the other."""

    old: int
    old_end: int
    new: int
    new_end: int

    @classmethod
    def between(cls, left: Run, right: Run) -> _Gap:
        """What lies between two runs."""
        return cls(left.src + left.length, right.src, left.dst + left.length, right.dst)

    @property
    def shorter(self) -> int:
        """Tokens on the side that has fewer."""
        return min(self.old_end - self.old, self.new_end - self.new)

    @property
    def longer(self) -> int:
        """Tokens on the side that has more."""
        return max(self.old_end - self.old, self.new_end - self.new)


@dataclass(frozen=True)
class _Pair:
    """The two texts."""

    old: Ids
    new: Ids
    min_run: int

    def inside(self, gap: _Gap) -> tuple[Ids, Ids]:
        """Both sides of a gap."""
        return self.old[gap.old : gap.old_end], self.new[gap.new : gap.new_end]

    def grams_inside(self, gap: _Gap, width: int) -> tuple[Hashes, Hashes]:
        """The grams of `width` tokens that lie in a gap whole."""
        if width > self.min_run:
            old, new = self.inside(gap)
            return _grams(old, width), _grams(new, width)
        old, new = self._grams
        old_end, new_end = gap.old_end - width + 1, gap.new_end - width + 1
        return old[gap.old : max(gap.old, old_end)], new[gap.new : max(gap.new, new_end)]

    @cached_property
    def _grams(self) -> tuple[Hashes, Hashes]:
        """Those of `min_run` tokens, of which every gap is a part."""
        return _grams(self.old, self.min_run), _grams(self.new, self.min_run)

    def agrees(self, run: Run) -> bool:
        """Whether a run's tokens are equal: it was found by hashes."""
        old = self.old[run.src : run.src + run.length]
        return np.array_equal(old, self.new[run.dst : run.dst + run.length])


def _anchored(pair: _Pair, gap: _Gap, width: int) -> list[Run]:
    """Runs kept inside a gap: the chain of its unique grams, and what its own gaps hold."""
    points = _unique_points(*pair.grams_inside(gap, width))
    chain = _runs(pair, gap, points, width)
    edges = [Run(gap.old, gap.new, 0), *chain, Run(gap.old_end, gap.new_end, 0)]
    kept: list[Run] = []
    for left, right in pairwise(edges):
        kept += [*_remaining(pair, _Gap.between(left, right), width), right]
    return kept[:-1]


def _remaining(pair: _Pair, gap: _Gap, width: int) -> list[Run]:
    """Runs kept between two links: by the library if it can be quick, else by longer anchors."""
    if gap.shorter < pair.min_run:
        return []
    old, new = pair.grams_inside(gap, pair.min_run)
    shared: Hashes = np.intersect1d(old, new)
    old_at = np.flatnonzero(np.isin(old, shared))
    new_at = np.flatnonzero(np.isin(new, shared))
    if len(old_at) * len(new_at) <= MAX_PAIRS:
        # Small numbers in place of hashes: the library takes numbers by their value.
        names = np.searchsorted(shared, old[old_at]), np.searchsorted(shared, new[new_at])
        src, dst = _library_points(*names)
        return _runs(pair, gap, (old_at[src], new_at[dst]), pair.min_run)
    if (wider := WIDENING * width) <= min(WIDEST * pair.min_run, gap.shorter):
        return _anchored(pair, gap, wider)
    points = _unique_points(_counted(old), _counted(new))
    return _runs(pair, gap, points, pair.min_run)


def _counted(hashes: Hashes) -> Hashes:
    """Each value's first, second, ... occurrence told apart, so that the same ones are paired."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    counted = np.empty_like(hashes)
    ranks = np.arange(len(hashes)) - np.searchsorted(ordered, ordered)
    counted[order] = _mixed(ordered + ranks.astype(np.uint64))
    return counted


def _library_points(old: Positions, new: Positions) -> Points:
    """The pairs of a longest common subsequence."""
    blocks = LCSseq.opcodes(old.tolist(), new.tolist()).as_matching_blocks()  # an empty one last
    src = [np.arange(block.a, block.a + block.size) for block in blocks]
    dst = [np.arange(block.b, block.b + block.size) for block in blocks]
    return np.concatenate(src), np.concatenate(dst)


def _unique_points(old: Hashes, new: Hashes) -> Points:
    """Positions of the values that occur once in `old` and once in `new`."""
    both = np.concatenate([old, new])
    order = np.argsort(both)
    differs = np.concatenate([[True], np.diff(both[order]) != 0, [True]])
    # A value that occurs twice: it begins, goes on, and is over.
    first = np.flatnonzero(differs[:-2] & ~differs[1:-1] & differs[2:])
    places = np.sort(np.stack([order[first], order[first + 1]]), axis=0)
    src, dst = places[:, (places[0] < len(old)) & (places[1] >= len(old))]
    return src, dst - len(old)


def _runs(pair: _Pair, gap: _Gap, points: Points, width: int) -> list[Run]:
    """The best chain of runs through paired grams, each grown as far as the texts agree.

    Args:
        pair: The texts.
        gap: Where the points lie.
        points: Positions of equal grams, counted from the start of the gap.
        width: Tokens in a gram.
    """
    if not len(points[0]):
        return []
    pieces = _joined(points[0] + gap.old, points[1] + gap.new, width)
    slack = [min(width - 1, piece.length - pair.min_run) for piece in pieces]
    chain = [pieces[index] for index in _heaviest_chain(pieces, slack)]
    return _grown(pair, [run for run in _apart(chain) if pair.agrees(run)])


def _joined(src: Positions, dst: Positions, width: int) -> list[Run]:
    """Paired grams as runs: one that overlaps or touches the one before it on its diagonal."""
    delta = dst - src
    order = np.argsort(delta * (int(src.max()) + 1) + src)  # by diagonal, then by position
    src, delta = src[order], delta[order]
    last = np.flatnonzero((np.diff(delta) != 0) | (np.diff(src) > width))
    first = np.concatenate([[0], last + 1])
    last = np.append(last, len(src) - 1)
    starts, lengths = src[first], src[last] + width - src[first]
    columns = (starts.tolist(), (starts + delta[first]).tolist(), lengths.tolist())
    return [Run(*run) for run in zip(*columns, strict=True)]


def _heaviest_chain(runs: Sequence[Run], slack: Sequence[int]) -> list[int]:
    """Indices of the runs, ascending on both sides, that have the most tokens together.

    A run may follow another if it begins behind its end on both sides, or would after losing its
    first `slack` tokens. Takes O(n log n) comparisons: runs are visited by where they begin in
    old, and those that have ended by then stand in a staircase, by where they end in new, on
    which longer ends have heavier chains.
    """
    begins = sorted(range(len(runs)), key=lambda index: runs[index].src + slack[index])
    ended = iter(sorted(range(len(runs)), key=lambda index: runs[index].src + runs[index].length))
    weight = [0] * len(runs)
    before = [-1] * len(runs)
    stairs = _Stairs()
    waiting = next(ended)
    for index in begins:
        run, loss = runs[index], slack[index]
        # The run itself ends later, so there is always one left to wait for.
        while (other := runs[waiting]).src + other.length <= run.src + loss:
            stairs.add(other.dst + other.length, weight[waiting], waiting)
            waiting = next(ended)
        total, before[index] = stairs.best(run.dst + loss)
        weight[index] = total + run.length
    best = max(begins, key=weight.__getitem__)
    chain: list[int] = []
    while best >= 0:
        chain.append(best)
        best = before[best]
    return chain[::-1]


class _Stairs:
    """Ends and weights of chains: neither falls from one step to the next."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._tops: list[tuple[int, int]] = []  # weight, and the index of the chain's last run

    def add(self, end: int, weight: int, index: int) -> None:
        """Add a chain, and drop those that end no earlier and weigh no more."""
        place = over = bisect_left(self._ends, end)
        if place and self._tops[place - 1][0] >= weight:
            return
        while over < len(self._tops) and self._tops[over][0] <= weight:
            over += 1
        self._ends[place:over] = [end]
        self._tops[place:over] = [(weight, index)]

    def best(self, limit: int) -> tuple[int, int]:
        """Weight and last run of the heaviest chain that ends by `limit`; (0, -1) for none."""
        place = bisect_right(self._ends, limit)
        return self._tops[place - 1] if place else (0, -1)


def _apart(chain: Sequence[Run]) -> Iterator[Run]:
    """The chain's runs, each without the first tokens that it shares with the one before."""
    src_end = dst_end = 0
    for run in chain:
        cut = max(src_end - run.src, dst_end - run.dst, 0)
        yield Run(run.src + cut, run.dst + cut, run.length - cut)
        src_end, dst_end = run.src + run.length, run.dst + run.length


def _grown(pair: _Pair, chain: list[Run]) -> list[Run]:
    """The chain with each run lengthened to the next unequal token, forwards, then backwards.

    Two that meet are one. The ends of the gap stay: tokens are unequal there already.
    """
    grown = chain[:1]
    for right in chain[1:]:
        left = _lengthened(grown[-1], _common(*pair.inside(_Gap.between(grown[-1], right))))
        gap = _Gap.between(left, right)
        if not gap.longer:
            grown[-1] = _lengthened(left, right.length)
            continue
        old, new = pair.inside(gap)
        more = _common(old[::-1], new[::-1])
        grown[-1:] = [left, Run(right.src - more, right.dst - more, right.length + more)]
    return grown


def _lengthened(run: Run, more: int) -> Run:
    return Run(run.src, run.dst, run.length + more)


def _longest(runs: list[Run], most: int) -> list[Run]:
    """At most so many runs, in order of position."""
    kept = sorted(runs, key=lambda run: -run.length)[:most]
    return sorted(kept, key=lambda run: run.src)


def _ids(tokens: Sequence[int]) -> Ids:
    return np.fromiter(tokens, np.int64, len(tokens))


def _common(left: Ids, right: Ids) -> int:
    """Length of the common head of two arrays."""
    length = min(len(left), len(right))
    unequal = np.flatnonzero(left[:length] != right[:length])
    return int(unequal[0]) if len(unequal) else length


def _grams(ids: Ids, width: int) -> Hashes:
    """A hash of the `width` tokens from each position on: one array element a gram.

    Doubled up from single tokens; an odd width overlaps its last two halves.
    """
    if len(ids) < width:
        return np.zeros(0, np.uint64)
    hashes = _mixed(ids.astype(np.uint64))
    covered = 1
    while covered < width:
        step = min(covered, width - covered)
        hashes = _mixed(hashes[:-step] * np.uint64(0x9E3779B97F4A7C15) + hashes[step:])
        covered += step
    return hashes


def _mixed(numbers: Hashes) -> Hashes:
    """Every bit spread over all 64 (splitmix64's finish, Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))

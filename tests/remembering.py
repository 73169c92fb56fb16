"""Rows that remember all that they saw: the reference for origins and purges.

A `Row` is a token and the rows that it attended to, each of which remembers in turn. Two rows that
were computed alike are the same object, so `is` tells whether labels are right. Contexts are lists
of rows, and edits are list slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from leyline.context import Context, Tokens
from leyline.directive import Directive, Edit, Mode, Source, apply
from leyline.origins import Origins

SPELLING = {0: b"a", 1: b"b", 2: b"ab", 3: b"ba", 4: b"", 5: b"abb"}


class Row:
    """What one computation knows; made by `row`.

    Attributes:
        token: Its own token.
        seen: What it attended to, itself aside.
    """

    known: ClassVar[dict[tuple[int, tuple[int, ...]], Row]] = {}

    def __init__(self, token: int, seen: tuple[Row, ...]) -> None:
        self.token = token
        self.seen = seen
        self.knows: dict[bytes, bool] = {}

    @property
    def view(self) -> tuple[Row, ...]:
        """All that it attended to, itself included."""
        return (*self.seen, self)

    def saw(self, text: bytes) -> bool:
        """Whether the text was in view of this row, or of one that it attended to."""
        if text not in self.knows:
            below = any(row.saw(text) for row in self.seen)
            self.knows[text] = below or text in spelled(self.view)
        return self.knows[text]


def row(token: int, seen: Iterable[Row]) -> Row:
    """The row of a token computed behind others."""
    rows = tuple(seen)
    key = token, tuple(map(id, rows))
    return Row.known.setdefault(key, Row(token, rows))


def computed(head: Sequence[Row], tokens: Iterable[int]) -> list[Row]:
    """The rows of tokens computed behind a head."""
    rows = list(head)
    for token in tokens:
        rows.append(row(token, rows))
    return rows[len(head) :]


def spelled(rows: Iterable[Row]) -> bytes:
    """What the tokens of rows spell."""
    return b"".join(SPELLING[row.token] for row in rows)


def labelled(context: Context, origins: Origins) -> list[Row]:
    """What a context's labels, and the book of origins, say about its rows."""
    rows: list[Row] = []
    for _, _, piece in context.spans():
        if piece.origin is None:
            rows += computed(rows, piece.tokens)
        else:
            source = origins.of(piece.origin)
            assert source is not None, "an origin that nobody learned"
            rows += computed(labelled(source, origins), piece.tokens)
    return rows


def relabelled(rows: list[Row], context: Context) -> list[Row]:
    """These rows where a context, to which some of them were lost, calls them grafts."""
    after: list[Row] = []
    for start, end, piece in context.spans():
        exact = piece.origin is None
        after += computed(after, piece.tokens) if exact else rows[start:end]
    return after


@dataclass
class Story:
    """A context, and what its rows really are."""

    context: Context
    rows: list[Row] = field(default_factory=list)


class World:
    """Some stories that are edited, appended to, and share rows with each other.

    Args:
        random: Decides everything.
        origins: Learns every edit.
    """

    def __init__(self, random: Random, origins: Origins) -> None:
        self.random = random
        self.origins = origins
        self.stories: list[Story] = []
        self.edits: list[Edit] = []
        for _ in range(random.randint(1, 3)):
            tokens = self.tokens(1, 8)
            self.stories.append(Story(Context.of(tokens), computed([], tokens)))

    def tokens(self, low: int, high: int) -> Tokens:
        """Random tokens of the spelling."""
        return tuple(self.random.choices(range(6), k=self.random.randint(low, high)))

    def step(self) -> Story:
        """Something happens to one of the stories."""
        story = self.random.choice(self.stories)
        kind = self.random.random()
        if kind < 0.25 or len(story.context) < 2:
            tokens = self.tokens(1, 4)
            story.rows += computed(story.rows, tokens)
            story.context = story.context.append(tokens)
        elif kind < 0.3:
            self.stories.append(Story(story.context, list(story.rows)))
        else:
            self.edit(story)
        return story

    def edit(self, story: Story) -> None:
        """A random set of directives, perhaps with some rows of the story evicted before it."""
        directives = self.directives(story)
        whole = apply(story.context, directives)
        edit = whole.lose(self.resident(story)) if self.random.random() < 0.2 else whole
        if not len(edit.after) or len(edit.after) > 14:
            return
        rows = self.edited(story.rows, directives)
        if edit != whole:
            rows = relabelled(rows, edit.after)
        story.context, story.rows = edit.after, rows
        self.origins.learn(edit)
        self.edits.append(edit)

    def resident(self, story: Story) -> int:
        """How many rows of a story there are."""
        return self.random.randint(0, len(story.context))

    def edited(self, rows: list[Row], directives: Sequence[Directive]) -> list[Row]:
        """What a set of directives means, from right to left."""
        for directive in reversed(directives):
            head, tail = rows[: directive.start], rows[directive.end :]
            new = computed(head, directive.replacement)
            if directive.source is not None:
                new = self.brought(directive.source, len(directive.replacement))
            if directive.mode is Mode.FORGET:
                tail = computed([*head, *new], [row.token for row in tail])
            rows = [*head, *new, *tail]
        return rows

    def brought(self, source: Source, length: int) -> list[Row]:
        """The rows of a source."""
        story = next(story for story in self.stories if story.context is source.context)
        return story.rows[source.start : source.start + length]

    def directives(self, story: Story) -> list[Directive]:
        """One to three spans in mixed modes, some of whose replacements are brought."""
        random, length = self.random, len(story.context)
        points = sorted(random.randint(0, length) for _ in range(2 * random.choice([1, 1, 2, 3])))
        return [
            self.directive(start, end) for start, end in zip(points[::2], points[1::2], strict=True)
        ]

    def directive(self, start: int, end: int) -> Directive:
        """A replacement of a span."""
        if self.random.random() < 0.25:
            other = self.random.choice(self.stories).context
            first = self.random.randint(0, len(other))
            tokens = other.tokens[first : first + self.random.randint(0, 4)]
            return Directive(start, end, tokens, source=Source(other, first))
        mode = self.random.choice([Mode.AMORTIZE, Mode.AMORTIZE, Mode.AMORTIZE, Mode.FORGET])
        return Directive(start, end, self.tokens(0, 3), mode)

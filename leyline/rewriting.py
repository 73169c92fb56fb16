"""What a client's rendered history means for a context that was made from an earlier one.

`rewrite` finds the directives between the two. Tokenising a text is not the inverse of spelling
tokens: what a model generated may come back as text and be tokenised otherwise. Where both
spell the same bytes the old ids stay, so that only what the client really changed is an edit.

`message_spans` finds where the content of each message stands, so that people can point at
messages. A content alone is a bad guide: "help" stands in many a system prompt. So the chat
template is asked what it writes around each content, with a stand-in in its place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

from leyline.align import align
from leyline.context import Tokens, common_length
from leyline.directive import Directive, Mode
from leyline.errors import InvalidRequestError
from leyline.marks import MessageSpan
from leyline.rendering import PLAIN, Rendering, rendered
from leyline.spelling import Spelling, occurrences
from leyline.template import content_text
from leyline.tokenizer import Tokenizer

THINK, END_THINK = b"<think>", b"</think>"
STAND_IN = "\ue000{}\ue001"  # private use characters: no text has them
STAND_INS = re.compile("\ue000([0-9]{1,9})\ue001")
MAX_SPACE = 64  # bytes of white space between a content and what follows it
MAX_TRIES = 64  # places at which a content is tried
TELLING_BYTES = 16  # a text of that length that is there once is no coincidence


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How a context becomes one that spells another text.

    Attributes:
        directives: Edits of the context, sorted and apart.
        append: Tokens behind it once they are carried out.
        first_difference: The first position of the old context that changes; its length if the
            text only goes on.
        new_tokens: All tokens afterwards.
    """

    directives: tuple[Directive, ...]
    append: Tokens
    first_difference: int
    new_tokens: Tokens


def rewrite(
    old: Sequence[int], rendered: str, tokenizer: Tokenizer, mode: Mode, min_run: int = 16
) -> Rewriting:
    """How `old` comes to spell `rendered`, with as many of its ids as possible.

    What spells the same bytes in both is taken off at either end, at borders that both have; the
    rest is aligned, and the same is done with every difference. So nothing is left of mere
    differences of tokenisation. A common tail shorter than `min_run` is not worth an edit: what
    stands there is appended, with its old ids.

    Takes what tokenising the text and `align` take, and time linear in the bytes of both texts.

    Args:
        old: The context's tokens.
        rendered: The text wanted; the texts of special tokens count as those tokens.
        tokenizer: Turns texts into ids.
        mode: Given to every directive.
        min_run: Shortest run of tokens worth keeping behind an edit, at least 1.

    Raises:
        InvalidRequestError: If the text is not valid Unicode.
    """
    whole = _real(Directive(0, len(old), tuple(tokenizer.encode(rendered)), mode), old, tokenizer)
    aligned = [] if whole is None else _aligned(whole, old, min_run)
    changes = [real for change in aligned if (real := _real(change, old, tokenizer))]
    append: Tokens = ()
    if changes and len(old) - changes[-1].end < min_run:
        last = changes.pop()
        append = (*last.replacement, *old[last.end :])
        if last.start < len(old):
            changes.append(Directive(last.start, len(old), (), mode))
    first = changes[0].start if changes else len(old)
    return Rewriting(tuple(changes), append, first, (*_applied(old, changes), *append))


def _aligned(whole: Directive, old: Sequence[int], min_run: int) -> list[Directive]:
    """A change in parts: what both sides have in common is kept."""
    parts = align(old[whole.start : whole.end], whole.replacement, min_run, whole.mode)
    return [
        replace(part, start=whole.start + part.start, end=whole.start + part.end) for part in parts
    ]


def _applied(old: Sequence[int], changes: Sequence[Directive]) -> Tokens:
    kept = [*old]
    for change in reversed(changes):
        kept[change.start : change.end] = change.replacement
    return tuple(kept)


def _real(change: Directive, old: Sequence[int], tokenizer: Tokenizer) -> Directive | None:
    """The change without what spells the same at its ends; None if all of it does."""
    out = Spelling(old[change.start : change.end], tokenizer)
    into = Spelling(change.replacement, tokenizer)
    head = _shared(out.edges, into.edges, common_length(out.data, into.data))
    rest, other = out.data[head:], into.data[head:]
    tail = _shared(_from_end(out), _from_end(into), common_length(rest[::-1], other[::-1]))
    start, end = out.covering(head, len(out.data) - tail)
    replacement = change.replacement[slice(*into.covering(head, len(into.data) - tail))]
    if start == end and not replacement:
        return None
    return replace(
        change, start=change.start + start, end=change.start + end, replacement=replacement
    )


def _shared(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """The largest number up to `limit` that is in both; 0 is."""
    return max(edge for edge in {*left} & {*right} if edge <= limit)


def _from_end(spelling: Spelling) -> list[int]:
    return [len(spelling.data) - edge for edge in spelling.edges]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the chat template writes around a content.

    Attributes:
        lead: The bytes in front of it, from the last special token on.
        follow: Those behind it, up to the first special token.
    """

    lead: bytes = b""
    follow: bytes = b""

    def ends(self, data: bytes, last: int) -> bool:
        """Whether what follows a content follows at `last`, as far as the text goes."""
        wanted = self.follow.lstrip()
        window = last + len(self.follow) + MAX_SPACE
        found = data[last:window].lstrip()
        return found.startswith(wanted) or (window >= len(data) and wanted.startswith(found))


def message_spans(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    start: int = 0,
    rendering: Rendering = PLAIN,
) -> list[MessageSpan]:
    """Where the content of each message stands, in tokens that cover it.

    White space around a content is the template's affair and not covered, nor is reasoning in
    think tags in front of it. A content that the template left out, or changed, has an empty span
    where the message before it ends; so has one that is too short to be told from other text where
    the template gives no hint.

    Args:
        messages: In order of their rendering; those behind the text's end are not found.
        text: Their rendering, or its end.
        tokens: The text's.
        tokenizer: Knows the chat template.
        start: Position of the first of the tokens.
        rendering: What else went into the text.

    Returns:
        A span for each message.
    """
    spelling = Spelling(tokens, tokenizer)
    exact = spelling.data == text.encode("utf-8")
    shown = [_shown(message, tokenizer) for message in messages]
    found: dict[int, tuple[int, int]] = {}
    cursor = 0
    for index, frame in _frames(messages, shown, tokenizer, rendering):
        content = shown[index]
        spelled = content.encode() if exact else _spelled(tokenizer.encode(content), tokenizer)
        place = _find(spelling.data, cursor, spelled, frame)
        if place is not None:
            found[index] = spelling.covering(*place)
            cursor = place[1]
    return list(_spans(messages, found, start))


def _spans(
    messages: Sequence[Mapping[str, Any]], found: Mapping[int, tuple[int, int]], start: int
) -> Iterator[MessageSpan]:
    here = 0
    for index, message in enumerate(messages):
        first, here = found.get(index, (here, here))
        call = message.get("tool_call_id")
        yield MessageSpan(
            str(message.get("role")),
            call if isinstance(call, str) else None,
            start + first,
            start + here,
        )


def _content(message: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """A message's content as one text, as the chat template gets it."""
    return content_text(message.get("content"), separator=tokenizer.part_separator) or ""


def _shown(message: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """A message's content without the reasoning in front of it."""
    content = _content(message, tokenizer)
    return (
        content.rpartition(END_THINK.decode())[2] if message.get("role") == "assistant" else content
    )


def _frames(
    messages: Sequence[Mapping[str, Any]],
    shown: Sequence[str],
    tokenizer: Tokenizer,
    rendering: Rendering,
) -> list[tuple[int, _Frame]]:
    """Index and frame of every message that has a content, in the order of their rendering."""
    marks = {i: STAND_IN.format(i) for i, content in enumerate(shown) if content.strip()}
    probe = [dict(message) for message in messages]
    for index, mark in marks.items():
        content = _content(messages[index], tokenizer)
        probe[index]["content"] = content.removesuffix(shown[index]) + mark
    try:
        whole = replace(rendering, opens_reply=False, continues_reply=False)
        text = rendered(tokenizer, probe, whole)
    except InvalidRequestError:  # some templates refuse a conversation that begins in the middle
        return [(index, _Frame()) for index in marks]
    pieces = STAND_INS.split(text)  # what is around them, and between those their numbers
    edges = [_edges(piece, tokenizer) for piece in pieces[::2]]
    frames = [_Frame(before[1], after[0]) for before, after in pairwise(edges)]
    written = [int(number) for number in pieces[1::2]]
    # A template may leave a content out; one that is there twice has no place of its own.
    once = {index for index, times in Counter(written).items() if times == 1} & marks.keys()
    return [(i, frame) for i, frame in zip(written, frames, strict=True) if i in once]


def _edges(piece: str, tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """A piece of a template's text up to its first special token, and from its last one on."""
    ids = tokenizer.encode(piece)
    special = [at for at, token in enumerate(ids) if not tokenizer.token_bytes(token)]
    first = special[0] + 1 if special else len(ids)
    return _spelled(ids[:first], tokenizer), _spelled(
        ids[special[-1] if special else 0 :], tokenizer
    )


def _spelled(ids: Sequence[int], tokenizer: Tokenizer) -> bytes:
    return Spelling(ids, tokenizer).data


def _find(data: bytes, cursor: int, content: bytes, frame: _Frame) -> tuple[int, int] | None:
    """The bytes `[first, last)` of a content behind `cursor`, white space around it left out."""
    bare = content.strip()
    unsure = None
    for body in dict.fromkeys([content, bare] if frame.lead else []):
        skipped = len(frame.lead) + len(body) - len(body.lstrip())
        for at in islice(occurrences(data, frame.lead + body, cursor, len(data)), MAX_TRIES):
            place = (at + skipped, at + skipped + len(bare))
            if frame.ends(data, place[1]):
                return place
            if unsure is None and not data[place[1] : place[1] + 1].isalnum():
                unsure = place
    if unsure is None and len(bare) >= TELLING_BYTES:
        places = list(islice(occurrences(data, bare, cursor, len(data)), 2))
        unsure = (places[0], places[0] + len(bare)) if len(places) == 1 else None
    return unsure


def reasoning_span(tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens `[start, end)` of a reply's first reasoning, or None if it has none.

    The think tags belong to it. If the prompt opened them, the reasoning starts with the reply and
    the closing tag is left to close what the prompt opened; if the reply ends inside, it goes to
    the reply's end.

    Args:
        tokens: The reply's.
        tokenizer: Spells them.
    """
    spelling = Spelling(tokens, tokenizer)
    opened, closed = spelling.data.find(THINK), spelling.data.find(END_THINK)
    if closed >= 0 and not 0 <= opened < closed:
        span = 0, bisect_right(spelling.edges, closed) - 1
    elif closed >= 0:
        behind = len(spelling.data) - len(spelling.data[closed + len(END_THINK) :].lstrip())
        start, end = spelling.covering(opened, closed + len(END_THINK))
        span = start, max(end, bisect_right(spelling.edges, behind) - 1)
    elif opened >= 0:
        length = len(tokens) - (tokens[-1] in tokenizer.stop_ids)
        span = spelling.covering(opened, len(spelling.data))[0], length
    else:
        return None
    return span if span[0] < span[1] else None

"""What a reply must look like, as constraints on its tokens: forms, demanded calls, reasoning.

A form is about what a model says, and a demanded call about what it does; neither is about what
it thinks before. Where tools may be called but need not be, a reply is in its form or a call.
Compiling takes a while and is bounded: it runs on threads of its own, and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from leyline.errors import InvalidRequestError, LeylineError
from leyline.grammar import Grammars, all_but
from leyline.sampling import Constraint
from leyline.server.ask import OutputForm
from leyline.server.parsers.choosing import Chosen
from leyline.server.parsers.pieces import ToolUse
from leyline.server.schema_check import without_notes
from leyline.tokenizer import Tokenizer

MAX_SECONDS = 10.0
_THREADS = 4
_WORD_BITS = 32

Mask = npt.NDArray[np.int32]
Start = Callable[[], Constraint]
"""Makes the constraint of one reply; each reply needs one of its own."""


class Constraints:
    """Compiles what requests demand, for one model.

    Args:
        tokenizer: Whose ids the replies consist of.
        chosen: What the model writes its calls and its reasoning in.
    """

    def __init__(self, tokenizer: Tokenizer, chosen: Chosen) -> None:
        self._tokenizer = tokenizer
        self._chosen = chosen
        self._grammars = Grammars(tokenizer)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="leyline-grammars")

    async def of_text(self, form: OutputForm | None) -> Start | None:
        """The constraint of a plain text; None if it may be anything.

        Raises:
            InvalidRequestError: If the form cannot be enforced.
        """
        return None if form is None else await self._beside(partial(self._form, form))

    async def of_reply(self, form: OutputForm | None, use: ToolUse, tail: str) -> Start | None:
        """The constraint of a chat's reply; None if it may be anything.

        Args:
            form: What it must say, if anything in particular.
            use: The tools.
            tail: The end of the prompt; it tells whether the reply begins inside its reasoning.

        Raises:
            InvalidRequestError: If the form or the tools' parameters cannot be enforced.
        """
        if form is None and use.choice != "required":
            return None
        return await self._beside(partial(self._reply, form, use, tail))

    async def without_calls(self, use: ToolUse) -> Start | None:
        """What keeps a reply from calling tools that it knows of; None if it need not be kept.

        The prompt tells of tools even where none may be called: a turn without calls is then one
        of the same conversation, which goes on from its context and its cache.
        """
        if use.choice != "none" or not use.tools:
            return None
        return await self._beside(self._start_callless)

    def _start_callless(self) -> Start:
        callless = self._callless
        return lambda: callless

    @cached_property
    def _callless(self) -> Constraint:
        return Without(self._chosen.tool.openings, self._tokenizer)

    async def _beside(self, compiled: Callable[[], Start]) -> Start:
        running = asyncio.get_running_loop().run_in_executor(self._threads, compiled)
        try:
            return await asyncio.wait_for(running, MAX_SECONDS)
        except asyncio.TimeoutError:
            raise InvalidRequestError(
                f"What the reply must look like takes more than {MAX_SECONDS:g} seconds to "
                "compile; send a simpler schema or grammar."
            ) from None

    def _form(self, form: OutputForm) -> Start:
        value = without_notes(form.value) if form.kind == "json_schema" else form.value
        try:
            return self._grammars.compile(form.kind, value).start
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param=form.param) from error

    def _calls(self, use: ToolUse) -> Start:
        """One call or several, and nothing else."""
        tool = self._chosen.tool
        special = {marker: self._special(marker) for marker in tool.markers}
        bare = replace(use, tools=tuple(map(_without_notes, use.tools)))
        lark = tool.grammar(bare, {text: id_ for text, id_ in special.items() if id_ is not None})
        try:
            return self._grammars.compile("grammar", lark).start
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"The parameters of the tools cannot be enforced: {error.message}", param="tools"
            ) from error

    def _reply(self, form: OutputForm | None, use: ToolUse, tail: str) -> Start:
        if use.choice == "required":
            said = self._calls(use)
        else:
            assert form is not None, "without a form nothing else is demanded"
            said = self._form(form)
            if use.tools and use.choice == "auto":
                said = _either(said, self._calls(use))
        return self._thought_before(said, tail)

    def _thought_before(self, said: Start, tail: str) -> Start:
        """What is said, behind reasoning if there is any."""
        reasoning = self._chosen.reasoning
        if reasoning.begins_inside(tail):
            return lambda: self._grammars.after(reasoning.end, said())
        if not reasoning.begin or tail.rstrip().endswith(reasoning.end):
            return said
        begin = self._tokenizer.encode(reasoning.begin)

        def thought() -> Constraint:
            behind = self._grammars.after(reasoning.end, said())
            return _Behind(begin, behind, self._tokenizer.vocab_size)

        return _either(said, thought)

    def _special(self, text: str) -> int | None:
        """The id of a special token of that text, if there is one."""
        ids = self._tokenizer.encode(text)
        is_special = len(ids) == 1 and not self._tokenizer.token_bytes(ids[0])
        return ids[0] if is_special else None


def _without_notes(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as far as a grammar is concerned: agents write pages about theirs."""
    function = {key: value for key, value in tool["function"].items() if key != "description"}
    if "parameters" in function:
        function["parameters"] = without_notes(function["parameters"])
    return {**tool, "function": function}


def _either(first: Start, second: Start) -> Start:
    return lambda: Either(first(), second())


class Without:
    """Allows whatever does not complete one of some texts; it serves any number of replies.

    Making it looks through the vocabulary once for each character of the texts.

    Args:
        texts: The texts.
        tokenizer: Whose tokens they would be written in.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self._spelled = [tokenizer.token_bytes(one, skip_special=False) for one in ids]
        self._masks: dict[bytes, Mask] = {}  # by what of a text a reply ends with
        for text in map(str.encode, texts):
            for size in range(len(text)):
                mask = self._all_but_ends(text[size:], is_begun=size > 0)
                self._masks[text[:size]] = mask & self._masks.get(text[:size], mask)
        self._longest = max(map(len, self._masks))

    def allowed(self, generated: Sequence[int]) -> Mask:
        """See `leyline.sampling.Constraint`."""
        behind = b"".join(self._spelled[one] for one in generated[-self._longest :])
        masks = [mask for begun, mask in self._masks.items() if behind.endswith(begun)]
        return np.bitwise_and.reduce(masks)

    def _all_but_ends(self, rest: bytes, *, is_begun: bool) -> Mask:
        """All tokens but those that begin with the rest of a text, or have all of it in them."""
        found = bytes.startswith if is_begun else bytes.__contains__
        ends = (one for one, text in enumerate(self._spelled) if found(text, rest))
        return all_but(ends, -(-len(self._spelled) // _WORD_BITS))


class Either:
    """Allows what one of two constraints allows, and goes on with those that still can."""

    def __init__(self, *constraints: Constraint) -> None:
        self._constraints = constraints
        self._lost: set[int] = set()
        self._length = 0

    def allowed(self, generated: Sequence[int]) -> Mask:
        """See `leyline.sampling.Constraint`."""
        if len(generated) < self._length:
            self._lost.clear()
        self._length = len(generated)
        masks: list[Mask] = []
        error: LeylineError | None = None
        for at, constraint in enumerate(self._constraints):
            try:
                masks += [] if at in self._lost else [constraint.allowed(generated)]
            except LeylineError as lost:
                self._lost.add(at)
                error = lost
        if not masks:
            raise error or LeylineError("The reply cannot follow its form any further.")
        return np.bitwise_or.reduce(masks)


class _Behind:
    """Allows some tokens in a row, and what another constraint allows from there on."""

    def __init__(self, tokens: Sequence[int], constraint: Constraint, num_tokens: int) -> None:
        self._tokens = list(tokens)
        self._constraint = constraint
        self._num_words = -(-num_tokens // _WORD_BITS)

    def allowed(self, generated: Sequence[int]) -> Mask:
        """See `leyline.sampling.Constraint`."""
        length = len(self._tokens)
        if list(generated[:length]) != self._tokens[: len(generated)]:
            raise LeylineError("The reply began otherwise.")
        if len(generated) >= length:
            return self._constraint.allowed(generated[length:])
        mask = np.zeros(self._num_words, dtype=np.uint32)
        word, bit = divmod(self._tokens[len(generated)], _WORD_BITS)
        mask[word] = np.uint32(1) << np.uint32(bit)
        return mask.view(np.int32)

"""A session as people hold it in a notebook: chat, look, edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from leyline.directive import Directive, Mode
from leyline.errors import InvalidRequestError
from leyline.events import Completion, Delta, EditPlan, EditResult, Reverted, SessionInfo
from leyline.marks import Mark, Of
from leyline.pointing import Change, MarkRequest, Scope, Target
from leyline.rendering import PLAIN, Rendering
from leyline.sampling import SamplingParams

if TYPE_CHECKING:
    from leyline.engine import Engine


class Conversation:
    """A client of one session; made by `Engine.session`.

    It keeps the messages it sent and got, as any client does, and sends them all every time. What
    the model attends to is the engine's affair: see `tokens` and `splice`.

    Attributes:
        session_id: The session's name.
        messages: The history as this client believes it. Whoever edits it has edited its history:
            the next turn says so, and the engine carries the edit out in
        edit_mode: `forget`, `amortize` or `heal`; None takes the engine's.
    """

    def __init__(self, engine: Engine, session_id: str) -> None:
        self._engine = engine
        self.session_id = session_id
        self.messages: list[dict[str, Any]] = []
        self.edit_mode: str | None = None

    def chat(
        self,
        content: str,
        params: SamplingParams | None = None,
        *,
        rendering: Rendering = PLAIN,
        **sampling: Any,
    ) -> Completion:
        """Say something and get the answer; sampling options may be given by name."""
        *_, last = self._turn(content, params, sampling, rendering)
        assert isinstance(last, Completion), "a turn ends in a completion"
        return last

    def stream(
        self,
        content: str,
        params: SamplingParams | None = None,
        *,
        rendering: Rendering = PLAIN,
        **sampling: Any,
    ) -> Iterator[str]:
        """Say something and get the answer piece by piece."""
        for event in self._turn(content, params, sampling, rendering):
            if isinstance(event, Delta) and event.text:
                yield event.text

    def _turn(
        self,
        content: str,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        rendering: Rendering,
    ) -> Iterator[Delta | Completion]:
        """One turn; the history grows only if it is answered."""
        asked = [*self.messages, {"role": "user", "content": content}]
        name, mode = self.session_id, self.edit_mode
        for event in self._engine.turn(asked, params, sampling, name, mode, rendering):
            if isinstance(event, Completion):
                self.messages = [*asked, {"role": "assistant", "content": event.text}]
            yield event

    @property
    def info(self) -> SessionInfo:
        """The session as it is now."""
        return self._engine.session_info(self.session_id)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the context."""
        return self.info.token_ids

    @property
    def text(self) -> str:
        """Text of the context, special tokens included."""
        return self.info.text

    @property
    def version(self) -> int:
        """Edits committed so far."""
        return self.info.version

    def find(self, text: str) -> tuple[int, int]:
        """The token span `[start, end)` that covers a text of the context.

        Raises:
            InvalidRequestError: If the text is not there, or is there more than once.
        """
        spans = self._engine.tokenizer.find(self.tokens, text)
        if len(spans) != 1:
            raise InvalidRequestError(
                f"The text {text[:60]!r} stands in the context {len(spans)} times; it must stand "
                "there once.",
                param="text",
            )
        return spans[0]

    def splice(
        self,
        start: int,
        end: int,
        replacement: str | Sequence[int] = (),
        mode: Mode | str = Mode.AMORTIZE,
    ) -> EditResult:
        """Replace tokens `[start, end)` of the context; see `edit` for several spans at once."""
        return self.edit([Change(Target(start, end), replacement, mode)])

    def replace(
        self,
        match: str,
        replacement: str | Sequence[int] = "",
        mode: Mode | str = Mode.AMORTIZE,
        *,
        occurrence: int | None = None,
        scope: Scope = "context",
    ) -> EditResult:
        """Replace a text of the context, wherever it stands; see `Change` for other ways to point.

        Raises:
            DirectiveError: If the text is not there, or several times and `occurrence` does not
                say which.
        """
        target = Target(match=match, occurrence=occurrence)
        return self.edit([Change(target, replacement, mode, scope)])

    def edit(
        self,
        changes: Sequence[Change | Directive],
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> EditResult:
        """Carry out a set of changes: all of them or none; see `Engine.edit`."""
        return self._engine.edit(
            self.session_id,
            changes,
            expected_version=expected_version,
            idempotency_key=idempotency_key,
        )

    def share(
        self, target: Target, session_id: str, source: Target, mode: Mode | str = Mode.AMORTIZE
    ) -> EditResult:
        """Put a span of another session in a span's place, with its rows: none is computed."""
        return self.edit([Change(target, mode=mode, source=(session_id, source))])

    def plan(self, changes: Sequence[Change | Directive]) -> EditPlan:
        """What a set of changes would do and cost; nothing is done."""
        return self._engine.plan_directives(self.session_id, changes)

    def revert(self, version: int | None = None) -> Reverted:
        """Go back to a kept version, the latest if none is named; the history stays as it is."""
        return self._engine.revert(self.session_id, version)

    def pin(self, target: Target, *, ttl_s: float | None = None, turns: int | None = None) -> Mark:
        """Keep the rows of a span in the cache for a while."""
        return self._mark(MarkRequest("pin", target, ttl_s=ttl_s, turns=turns))

    def decay(
        self,
        target: Target,
        turns: int,
        replacement: str | Sequence[int] = "",
        mode: Mode | str = Mode.AMORTIZE,
    ) -> Mark:
        """Have a span replaced after so many turns."""
        return self._mark(
            MarkRequest("decay", target, turns=turns, replacement=replacement, mode=mode)
        )

    def scratch(
        self, target: Target | None = None, of: Of = "span", replacement: str | Sequence[int] = ""
    ) -> Mark:
        """Have a span, or the next turn's reasoning or tool output, taken out when it ends."""
        return self._mark(MarkRequest("scratch", target, of=of, replacement=replacement))

    def unmark(self, mark: Mark) -> None:
        """Take a mark back."""
        self._engine.unmark(self.session_id, mark.mark_id)

    def _mark(self, request: MarkRequest) -> Mark:
        return self._engine.mark(self.session_id, request)

    def delete(self) -> None:
        """Forget the session and the history."""
        self._engine.delete_session(self.session_id)
        self.messages = []

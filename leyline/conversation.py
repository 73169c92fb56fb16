"""A session as people hold it in a notebook: chat, look, edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from leyline.batch import SamplingParams
from leyline.directive import Directive, Mode
from leyline.door import named_mode
from leyline.errors import InvalidRequestError
from leyline.events import Completion, Delta, EditResult, SessionInfo

if TYPE_CHECKING:
    from leyline.engine import Engine


class Conversation:
    """A client of one session; made by `Engine.session`.

    It keeps the messages it sent and got, as any client does, and sends them all every time. What
    the model attends to is the engine's affair: see `tokens` and `splice`.

    Attributes:
        session_id: The session's name.
        messages: The history as this client believes it.
    """

    def __init__(self, engine: Engine, session_id: str) -> None:
        self._engine = engine
        self.session_id = session_id
        self.messages: list[dict[str, Any]] = []

    def chat(
        self, content: str, params: SamplingParams | None = None, **sampling: Any
    ) -> Completion:
        """Say something and get the answer; sampling options may be given by name."""
        *_, last = self._turn(content, params, sampling)
        assert isinstance(last, Completion), "a turn ends in a completion"
        return last

    def stream(
        self, content: str, params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Say something and get the answer piece by piece."""
        for event in self._turn(content, params, sampling):
            if isinstance(event, Delta):
                yield event.text

    def _turn(
        self, content: str, params: SamplingParams | None, sampling: dict[str, Any]
    ) -> Iterator[Delta | Completion]:
        """One turn; the history grows only if it is answered."""
        asked = [*self.messages, {"role": "user", "content": content}]
        for event in self._engine.turn(asked, params, sampling, self.session_id):
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
        if isinstance(replacement, str):
            replacement = self._engine.tokenizer.encode_plain(replacement)
        return self.edit([Directive(start, end, tuple(replacement), named_mode(mode))])

    def edit(self, directives: Sequence[Directive]) -> EditResult:
        """Carry out a set of directives: all of them or none.

        Raises:
            DirectiveError: If the set does not fit the context; nothing has changed.
        """
        return self._engine.edit(self.session_id, directives)

    def delete(self) -> None:
        """Forget the session and the history."""
        self._engine.delete_session(self.session_id)
        self.messages = []

"""What answers from the first moment on: that the model is loading, then the application."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from leyline.server.failures import refusal
from leyline.server.health import LIVE
from leyline.server.wire import Json

_LOADING = "The model is loading; send the request again in a while."
_RETRY = {"retry-after": "5"}


class Front:
    """The application once it is there; before that a 503 for all but `/live`.

    Attributes:
        app: The application; None while the model loads.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or say that it came too early."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _loading(scope, receive, send)


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"].removeprefix(scope.get("root_path", "")) == LIVE:
        await Json({"status": "loading"})(scope, receive, send)
        return
    answer = refusal(503, _LOADING, code="loading", headers=_RETRY)
    await answer(scope, receive, send)

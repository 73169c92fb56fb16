"""Leyline: inference for models with multi-head latent attention, with an editable cache.

    from leyline import Engine

    with Engine() as engine:
        chat = engine.session()
        chat.chat("Here is a long tool output: ...")
        start, end = chat.find("a long tool output")
        chat.splice(start, end, "[evicted]")

The names below are the public ones; `leyline.errors` holds what can go wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyline.batch import SamplingParams
from leyline.config import EngineConfig
from leyline.directive import Directive, Mode, Receipt
from leyline.errors import LeylineError

if TYPE_CHECKING:
    from leyline.conversation import Conversation
    from leyline.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "Conversation",
    "Directive",
    "Engine",
    "EngineConfig",
    "LeylineError",
    "Mode",
    "Receipt",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load the tensor library only for those who compute: `leyline --help` answers at once."""
    if name == "Engine":
        from leyline.engine import Engine

        return Engine
    if name == "Conversation":
        from leyline.conversation import Conversation

        return Conversation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

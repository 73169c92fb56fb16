"""Leyline: inference for models with multi-head latent attention, with an editable cache.

    from leyline import Engine

    with Engine() as engine:
        chat = engine.session()
        chat.chat("Here is a long tool output: ...")
        chat.replace("a long tool output", "[evicted]")

The names below are the public ones; `leyline.errors` holds what can go wrong, and
`leyline.trimming` ready-made policies.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leyline.config import EngineConfig
from leyline.directive import Directive, Mode, Receipt
from leyline.errors import LeylineError
from leyline.events import TokenLogprob
from leyline.rendering import Rendering
from leyline.sampling import SamplingParams

if TYPE_CHECKING:
    from leyline.conversation import Conversation
    from leyline.engine import Engine
    from leyline.pointing import Change, MarkRequest
    from leyline.target import Target

__version__ = "0.1.0"

__all__ = [
    "Change",
    "Conversation",
    "Directive",
    "Engine",
    "EngineConfig",
    "LeylineError",
    "MarkRequest",
    "Mode",
    "Receipt",
    "Rendering",
    "SamplingParams",
    "Target",
    "TokenLogprob",
    "__version__",
]


# Names of modules that take longer to import than a quick `leyline --help` may.
_MODULES = {
    "Change": "leyline.pointing",
    "Conversation": "leyline.conversation",
    "Engine": "leyline.engine",
    "MarkRequest": "leyline.pointing",
    "Target": "leyline.target",
}


def __getattr__(name: str) -> Any:
    """Load the tensor library and the tokenizer only for those who need them."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

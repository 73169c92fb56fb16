"""What every route shares: the worker, the served name, and how requests are named and dated."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from leyline.errors import ModelNotFoundError
from leyline.server.failures import quoted
from leyline.server.settings import ServerConfig
from leyline.server.worker import Worker


@dataclass(frozen=True, slots=True)
class Serving:
    """The state behind the routes; it does not change while the server runs.

    Attributes:
        worker: The engine's thread.
        config: The server's options.
        started: When the server was built, in whole seconds since 1970.
    """

    worker: Worker
    config: ServerConfig
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The one name that clients may ask for."""
        return self.config.served_model_name or self.worker.engine.model_name

    def check_model(self, name: str | None) -> None:
        """Accept the served name or none at all.

        Raises:
            ModelNotFoundError: for any other name.
        """
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(
                f"The model {quoted(name)} is not served here; this server serves "
                f"{quoted(self.model_name)}.",
                param="model",
            )


def new_id(prefix: str) -> str:
    """A fresh id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"

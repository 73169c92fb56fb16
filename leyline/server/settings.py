"""What can be set about the server, apart from the engine behind it."""

from __future__ import annotations

from dataclasses import dataclass

from leyline.config import option
from leyline.errors import ConfigError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens.

    Raises:
        ConfigError: if a value is out of range.
    """

    host: str = option(
        "127.0.0.1", "Address to listen on; the default is reachable from this machine only."
    )
    port: int = option(8000, "Port to listen on; 0 takes a free one and prints it.")
    served_model_name: str | None = option(
        None, "Name that clients ask for; the default is the model's own name."
    )
    max_body_bytes: int = option(16 * _MEBIBYTE, "Largest request body accepted, in bytes.")

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host is empty; give an address such as 127.0.0.1.", param="host")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.", param="port")
        if self.max_body_bytes < 1:
            raise ConfigError(
                f"max_body_bytes is {self.max_body_bytes}; it must be at least 1.",
                param="max_body_bytes",
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK_HOSTS or self.host.startswith("127.")

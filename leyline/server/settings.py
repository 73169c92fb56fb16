"""What can be set about the server, apart from the engine behind it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields

from leyline.config import option
from leyline.errors import ConfigError
from leyline.server.parsers.choosing import REASONING_PARSERS, TOOL_PARSERS

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
CLOSING_FILES = ("api_key_file", "ssl_keyfile", "ssl_certfile")
LOG_LEVELS = ("debug", "info", "warning", "error")
_MEBIBYTE = 1024 * 1024
_KINDS = {
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "str": "a string",
    "str | None": "a string",
    "tuple[str, ...]": "a tuple of strings",
}
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def _several(help_text: str, *, secret: bool = False) -> tuple[str, ...]:
    """An option that may be given more than once; a secret one is in no `repr`."""
    return field(default=(), repr=not secret, metadata={"help": help_text, "choices": ()})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how the server listens, whom it lets in, and how much it takes on.

    Raises:
        ConfigError: if a value is out of range.
    """

    host: str = option(
        "127.0.0.1", "Address to listen on; the default is reachable from this machine only."
    )
    port: int = option(8000, "Port to listen on; 0 takes a free one and prints it.")
    uds: str = option("", "Unix socket to listen on, in place of an address and port.")
    root_path: str = option("", "Path that a proxy in front of the server takes off, such as /llm.")
    ssl_keyfile: str | None = option(
        None, "File of the TLS key; with a certificate, the server speaks TLS."
    )
    ssl_certfile: str | None = option(None, "File of the TLS certificate and its chain.")
    served_model_name: str | None = option(
        None, "Name that clients ask for; the default is the model's own name."
    )

    api_key: tuple[str, ...] = _several(
        "Key that lets a client in; give it again for more keys. Each is a tenant with a cache of "
        "its own. Better kept in a file or in LEYLINE_API_KEY: other users see command lines.",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "File of keys, one a line; a tenant's name may stand in front, with a space between."
    )
    metrics: bool = option(True, "Serve /metrics for Prometheus.")
    metrics_open: bool = option(False, "Let /metrics be read without a key.")
    allowed_origins: tuple[str, ...] = _several(
        "Origin whose web pages may call the server, such as https://chat.example; * for any. "
        "Give it again for more."
    )
    allowed_hosts: tuple[str, ...] = _several(
        "Name that clients may call the server by; give it again for more. The default is any, "
        "and on loopback only this machine's own."
    )

    max_body_bytes: int = option(16 * _MEBIBYTE, "Largest request body accepted, in bytes.")
    body_timeout_s: float = option(60.0, "Seconds that a request's body may take to arrive.")
    request_timeout_s: float = option(
        3600.0, "Seconds that a request may take, its time in the queue included; 0 for any."
    )
    idle_timeout_s: float = option(75.0, "Seconds that a connection may stay open unused.")
    max_connections: int = option(8192, "Connections open at the same time at most.")
    max_queued_requests: int = option(
        1024, "Requests that may wait for a place among those that run; more are told to retry."
    )
    shutdown_timeout_s: float = option(
        30.0, "Seconds that running requests have to end after a signal to stop."
    )
    sse_keep_alive_interval_s: float = option(
        15.0, "Seconds of silence in a stream after which a comment keeps it open; 0 for none."
    )
    force_usage: bool = option(False, "End every stream with its usage, asked for or not.")

    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls; auto takes what fits the model.",
        choices=("auto", *TOOL_PARSERS),
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its reasoning; auto takes what fits the model.",
        choices=("auto", *REASONING_PARSERS),
    )
    session_headers: bool = option(
        True, "Take the session of a request from the headers that agents send, as a guess."
    )

    access_log: bool = option(True, "Log a line for each request; never what is in it.")
    log_level: str = option("info", "How much is logged.", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for entry in fields(self):
            self._of_type(entry.name, str(entry.type))
        if not self.host:
            raise ConfigError("host is empty; give an address such as 127.0.0.1.", param="host")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.", param="port")
        for name in ("max_body_bytes", "max_connections"):
            self._at_least(name, 1)
        self._at_least("max_queued_requests", 0)
        for name in ("body_timeout_s", "idle_timeout_s"):
            self._seconds(name, positive=True)
        for name in ("request_timeout_s", "shutdown_timeout_s", "sse_keep_alive_interval_s"):
            self._seconds(name, positive=False)
        for entry in fields(self):
            self._one_of(entry.name, entry.metadata["choices"])
        self._check_files()
        self._check_addresses()

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        """Refuse a value that is not among the choices, where there are any."""
        value = getattr(self, name)
        if choices and value not in choices:
            raise ConfigError(
                f"{name} is {value!r}; it must be one of {', '.join(choices)}.", param=name
            )

    @property
    def is_loopback(self) -> bool:
        """Whether the address can be reached from this machine only."""
        return self.host in LOOPBACK_HOSTS or self.host.startswith("127.")

    @property
    def is_tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.ssl_certfile)

    def _check_files(self) -> None:
        """Refuse files without a name: who meant to close the server must not leave it open."""
        for name in CLOSING_FILES:
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; name a file, or leave it out.", param=name)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            missing = "ssl_certfile" if self.ssl_keyfile else "ssl_keyfile"
            raise ConfigError(f"TLS needs a key and a certificate: give {missing}.", param=missing)

    def _check_addresses(self) -> None:
        """Refuse what the socket and the URL cannot be made of."""
        if _ROOT_PATH.fullmatch(self.root_path) is None:
            raise ConfigError(
                f"root_path is {self.root_path!r}; it must be a path such as /llm, without a slash "
                "at its end.",
                param="root_path",
            )
        for name in ("allowed_origins", "allowed_hosts"):
            if not all(value.strip() for value in getattr(self, name)):
                raise ConfigError(f"{name} has an empty entry.", param=name)

    def _of_type(self, name: str, kind: str) -> None:
        """Refuse a value of another type, so that a config from code is as good as one of flags."""
        value = getattr(self, name)
        if not _fits(value, kind):
            shown = "of another type" if name == "api_key" else repr(value)
            raise ConfigError(f"{name} is {shown}; it must be {_KINDS[kind]}.", param=name)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}.", param=name)

    def _seconds(self, name: str, *, positive: bool) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and (value > 0 or (value == 0 and not positive))):
            least = "above 0" if positive else "0 or more"
            raise ConfigError(f"{name} is {value}; it must be {least} seconds.", param=name)


def _fits(value: object, kind: str) -> bool:
    """Whether a value is of a field's type; whole numbers are numbers, but truth is none."""
    if kind == "tuple[str, ...]":
        return type(value) is tuple and all(type(part) is str for part in value)
    if kind == "float":
        return type(value) in (int, float)
    return type(value).__name__ in kind.split(" | ") or (value is None and "None" in kind)

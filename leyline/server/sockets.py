"""The socket that a server listens on, and what it is called."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import Generator

from leyline.errors import ConfigError
from leyline.server.settings import ServerConfig

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 512


@contextlib.contextmanager
def listening(config: ServerConfig) -> Generator[socket.socket, None, None]:
    """A listening socket, so that a port that is taken is found out before anything starts.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    listener = _unix(config.uds) if config.uds else _internet(config)
    try:
        with listener:
            yield listener
    finally:
        if config.uds:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def allow_connections(count: int) -> None:
    """Raise the limit of open files as far as so many connections need, and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """The address to type into a client."""
    if config.uds:
        return f"unix:{config.uds}"
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if config.is_tls else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def check_certificate(config: ServerConfig) -> None:
    """See that the TLS key and certificate can be used, before a model is loaded.

    Raises:
        ConfigError: If they cannot.
    """
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=_no_password
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The TLS key {config.ssl_keyfile} and certificate {config.ssl_certfile} cannot be "
            f"used: {error.strerror or error if isinstance(error, OSError) else error}. They must "
            "be PEM files that belong together, the key without a password.",
            param="ssl_certfile",
        ) from error


def warn_of_strangers(config: ServerConfig, *, has_keys: bool) -> None:
    """Say so if whoever can reach the address can use the server."""
    if not (config.is_loopback or config.uds or has_keys):
        logger.warning(
            "Listening on %s without a key: whoever can reach this address can use the server. "
            "Give it keys with --api-key-file, or have it listen on 127.0.0.1.",
            config.host,
        )


def _internet(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = _strerror(error) if isinstance(error, OSError) else "not a host name"
        raise ConfigError(
            f"Cannot listen on {config.host}, port {config.port}: {reason}. "
            "Choose another address with --host or --port.",
            param="port",
        ) from error
    # Connections inherit it. asyncio sets it for sockets of its own alone, and without it the body
    # of a small answer waits until its head has been acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return listener


def _strerror(error: OSError) -> str:
    """What the system says; `create_server` says the address behind it once more."""
    return str(error.strerror).partition(" (while ")[0]


def _unix(path: str) -> socket.socket:
    """A Unix socket; one that a server left behind is taken over, one that is in use is not."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except (OSError, ValueError) as error:
        listener.close()
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(
            f"Cannot listen on the Unix socket {path}: {reason}.", param="uds"
        ) from error
    return listener


def _is_left_behind(path: str) -> bool:
    """Whether there is a socket that nobody listens on."""
    if not (os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) != 0


def _no_password() -> str:
    """What a key with a password gets instead of a question in the terminal."""
    return ""

"""API keys: who may use the server, and which tenant a key belongs to.

Keys are held as SHA-256 digests and compared in constant time, every one of them every time, so
that neither an answer's time nor a dump of a config tells anything about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers

from leyline.errors import ConfigError
from leyline.server.settings import ServerConfig

_KEY = re.compile(r"[!-~]{1,512}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_UNNAMED = "sha256:"  # no tenant's given name has a colon


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        tenant: Whose it is: a name, or for a key without one its digest.
        digest: SHA-256 of the key.
    """

    tenant: str
    digest: bytes = field(repr=False)


class Keyring:
    """The keys of a server; without any, everybody is let in.

    Args:
        keys: The keys; a tenant may have several, so that they can be changed without a gap.

    Raises:
        ConfigError: If one key is two tenants'.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)
        owners: dict[bytes, str] = {}
        for key in self._keys:
            if owners.setdefault(key.digest, key.tenant) != key.tenant:
                raise ConfigError(
                    f"The tenants {owners[key.digest]} and {key.tenant} have the same key; give "
                    "each a key of its own.",
                    param="api_key_file",
                )

    @staticmethod
    def of(config: ServerConfig) -> Keyring:
        """The keys that a config names.

        Raises:
            ConfigError: If the file cannot be read or has no key in it, or a key is malformed.
        """
        keys = [_key(text, "api_key") for text in config.api_key]
        if config.api_key_file:
            keys += _read(config.api_key_file)
        return Keyring(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def num_tenants(self) -> int:
        """How many tenants there are."""
        return len({key.tenant for key in self._keys})

    def tenant_of(self, headers: Headers) -> str | None:
        """The tenant that a request comes from; None for a stranger.

        The key stands in `Authorization: Bearer` or in `x-api-key`; one that is known will do.
        """
        found: str | None = None
        for text in _presented(headers):
            digest = _digest(text)
            for key in self._keys:
                found = key.tenant if hmac.compare_digest(digest, key.digest) else found
        return found


def _presented(headers: Headers) -> list[str]:
    """What a request shows as a key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [text for text in (bearer, headers.get("x-api-key", "").strip()) if text]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _key(text: str, param: str, tenant: str = "") -> Key:
    """A key as it was written down; never say it in an error."""
    if _KEY.fullmatch(text) is None:
        raise ConfigError(
            "An API key has 1 to 512 printable ASCII characters and no spaces; one that was given "
            "is none.",
            param=param,
        )
    return Key(tenant or _UNNAMED + hashlib.sha256(text.encode()).hexdigest(), _digest(text))


def _read(name: str) -> list[Key]:
    """The keys of a file: `KEY` or `TENANT KEY` a line; empty lines and `#` lines are skipped."""
    try:
        lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"Cannot read the keys in {name}: {reason}.", param="api_key_file") from (
            error
        )
    written = [(number, line.split()) for number, line in enumerate(lines, 1)]
    keys = [_line(number, words) for number, words in written if words and words[0][0] != "#"]
    if not keys:
        raise ConfigError(f"There is no key in {name}.", param="api_key_file")
    return keys


def _line(number: int, words: list[str]) -> Key:
    """The key that stands in a line."""
    tenant = words[0] if len(words) == 2 else ""
    if len(words) > 2 or (tenant and _TENANT.fullmatch(tenant) is None):
        raise ConfigError(
            f"Line {number} of the key file is no key: write the key, or a tenant's name (letters, "
            "digits, . _ -), a space and the key.",
            param="api_key_file",
        )
    return _key(words[-1], "api_key_file", tenant)

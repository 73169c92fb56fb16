"""Calls to the hub: made again where that helps, and what went wrong told in a line."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2  # what huggingface_hub talks through
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from tqdm.auto import tqdm

logger = logging.getLogger("leyline.hub")

ATTEMPTS = 3
PAUSE_S = 1.0
LOOKUP_TIMEOUT_S = 10.0
# A hub that is busy may not be so for long. Where nobody listens, and where a proxy or an address
# is wrong, another try would only keep the user waiting.
BUSY = (408, 429)
PASSING = (
    httpx2.TimeoutException,
    httpx2.ReadError,
    httpx2.WriteError,
    httpx2.CloseError,
    httpx2.RemoteProtocolError,
)
# The user and the query of an address: that of a download is signed.
SIGNATURE = re.compile(r"""(?<=://)[^\s/?#'"@]*@|(https?://[^\s?#'"]+)[?#][^\s'"]*""")

T = TypeVar("T")


def tried(name: str, call: Callable[[], T]) -> T:
    """Make a call about a model, and again if what went wrong may be over soon.

    Raises:
        Exception: What the last try raised, or one that no other try would mend.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if not is_passing(error):
                raise
            logger.warning("%s: %s; trying again.", name, reason(error))
            time.sleep(PAUSE_S * attempt)
    return call()


def is_passing(error: BaseException | None) -> bool:
    """Whether the hub was busy or out of order, or the connection to it was lost."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            return status in BUSY or status >= 500
        if isinstance(error, PASSING):
            return True
        error = error.__cause__
    return False


def reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return unsigned(lines[0]).rstrip(". ")


def unsigned(text: str) -> str:
    """A text whose addresses name no user and have no query: a signed one opens a private file."""
    return SIGNATURE.sub(r"\1", text)


class _Unsigned(logging.Filter):
    """The library tells of each cut download, with the address that it was cut at."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = unsigned(record.getMessage()), ()
        return True


logging.getLogger("huggingface_hub.utils._http").addFilter(_Unsigned())


class ImpatientApi(HfApi):
    """The library's client, which by itself waits for ever for a hub that does not answer."""

    def repo_info(self, *args: Any, **options: Any) -> Any:
        """The library's, with an end."""
        return super().repo_info(*args, **{"timeout": LOOKUP_TIMEOUT_S, **options})


class NoBar(tqdm):
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))

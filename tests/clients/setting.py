"""What every check of a client is told about the server, and how it says what it saw."""

from __future__ import annotations

import os

BASE_URL = os.environ["LEYLINE_URL"]
API_KEY = os.environ["LEYLINE_API_KEY"]
MODEL = os.environ["LEYLINE_MODEL"]
V1 = f"{BASE_URL}/v1"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def saw(what: str, holds: object = True) -> None:
    """Note something that was tried; a check stops at the first thing that does not hold."""
    if not holds:
        raise SystemExit(f"failed: {what}")
    print(f"saw: {what}", flush=True)

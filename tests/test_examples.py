"""The example, run as its reader would: an agent that knows nothing of directives saves work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SERVE = ("-m", "leyline", "serve", "--port", "0", "--no-progress", "--kv-cache-tokens", "16384")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with the embedded model."""
    with subprocess.Popen(
        [sys.executable, *SERVE], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            ready = re.search(r"ready at (\S+)", line)
            if ready:
                yield ready[1]
                break
        process.terminate()
    assert process.returncode == 0


def run_agent(url: str, mode: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "examples/agent.py", "--url", url, "--turns", "5", "--mode", mode],
        cwd=ROOT,
        env={**os.environ, "LEYLINE_API_KEY": "none"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_agent_saves_prefill_with_splices_and_less_without(url: str) -> None:
    amortize, forget = run_agent(url, "amortize"), run_agent(url, "forget")
    assert amortize["splices"] >= 2 and forget["splices"] == 0
    assert amortize["prefill_saved"] > forget["prefill_saved"] + 0.05

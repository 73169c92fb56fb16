"""schemathesis: random requests made of /openapi.json; no 5xx, no undocumented status."""

import os
import subprocess
import sys
import tempfile

from setting import API_KEY, BASE_URL, saw

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from schemathesis.cli import schemathesis; schemathesis()",
            "run",
            f"{BASE_URL}/openapi.json",
            f"--header=Authorization: Bearer {API_KEY}",
            f"--checks={CHECKS}",
            f"--max-examples={os.environ.get('LEYLINE_EXAMPLES', '6')}",
            "--phases=examples,coverage,fuzzing",
            "--request-timeout=600",  # a chat without a limit fills the window
            "--workers=4",
            "--seed=1",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
print(done.stdout[-6000:])
saw("all routes of /openapi.json", done.returncode == 0)

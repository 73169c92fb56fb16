"""`python -m leyline` is `leyline`."""

from __future__ import annotations

import sys

from leyline.cli import main

sys.exit(main())

"""Replay the seeds given on the command line."""

import sys

from tests.simulation.trace import Trace

for seed in sys.argv[1:]:
    Trace(int(seed), log=True).run()

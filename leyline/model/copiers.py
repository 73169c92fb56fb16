"""Threads that read weights, and a torch that computes on each of them alone.

Left to itself torch shares every operation out among its threads and waits for the last of them,
which on a busy machine costs more than the work (3 to 14 s a GB of 1 MB experts were measured,
against 0.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier, Thread

import torch

MAX_COPIERS = 4


@contextmanager
def computing_alone() -> Iterator[None]:
    """Have torch compute on the calling thread alone."""
    threads = torch.get_num_threads()
    _compute_alone(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compute_alone(threads: int) -> None:
    """Limit the calling thread to itself; all others go on with `threads`.

    `set_num_threads` sets the caller's limit and the one that new threads begin with. The second
    is set back by a thread that does nothing else.
    """
    torch.set_num_threads(1)
    helper = Thread(target=torch.set_num_threads, args=(threads,))
    helper.start()
    helper.join()


def copiers(device: torch.device) -> ThreadPoolExecutor:
    """Threads that fill places; one is enough for a device with memory of its own.

    All are started here: each holds back new threads of others for a moment.
    """
    threads = torch.get_num_threads()
    num = min(MAX_COPIERS, threads) if device.type == "cpu" else 1
    pool = ThreadPoolExecutor(num, "loading", _compute_alone, (threads,))
    all_started = Barrier(num)
    wait([pool.submit(all_started.wait) for _ in range(num)])
    return pool

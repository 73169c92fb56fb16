"""What serving costs: open-loop load over multi-turn sessions, and the price of the HTTP layer.

Two things are measured, with the embedded model:

*Load.* Conversations begin at random moments (a Poisson process, the same for both arms) at several
rates, whether the server keeps up or not. Each is a session of a few turns, one behind the other.
The arms are a client in a process of its own over HTTP, with streams, and the same conversations
handed to the engine's thread without HTTP. Given are tokens a second, time to the first token,
and time between tokens.

*Layer.* Eight streams decode together, by turns over HTTP and without. The engine's thread notes
when each step begins; `http_over_step` is the part by which the median distance of two steps grows
when the same tokens leave through HTTP. That is what Leyline's HTTP layer and the client take from
the engine; with fewer free cores than processes, part of it is the machine's, not the layer's.

The engine computes on one thread in all arms, so that the event loop and the client have a core
to run on where there are two.

    python scripts/bench_serve.py [--rates 0.5,1,2] [--seconds 20] [--repeats 5]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isnan, nan
from typing import Any

import httpx
import uvicorn
from tqdm import tqdm

from leyline import Engine, SamplingParams
from leyline.events import Completion, Delta, EngineEvent
from leyline.server import Worker, create_app

TURNS = 3
REPLY_TOKENS = 24
BATCH = 8
DECODED_TOKENS = 160
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": REPLY_TOKENS, "ignore_eos": True}

Message = dict[str, str]
Speak = Callable[[str, list[Message]], AsyncIterator[str]]


@dataclass
class Seen:
    """What the turns of a load came to, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """Throughput and percentiles."""
        return {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "ttft_p50_ms": percentile_ms(self.first, 50),
            "ttft_p99_ms": percentile_ms(self.first, 99),
            "itl_p50_ms": percentile_ms(self.between, 50),
            "itl_p99_ms": percentile_ms(self.between, 99),
        }


def percentile_ms(seconds: list[float], percent: int) -> float:
    """A percentile, in milliseconds; the largest value where there are few."""
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 1)


# -- the load, the same for both arms ---------------------------------------------------------


async def load(speak: Speak, rate: float, seconds: float, label: str) -> Seen:
    """Begin conversations at `rate` a second for so long, and wait for all of them."""
    chance, seen, begun = random.Random(7), Seen(), time.perf_counter()
    running: list[asyncio.Task[None]] = []
    at, number = 0.0, 0
    while (at := at + chance.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        number += 1
        running.append(asyncio.create_task(converse(speak, f"{label}-{number}", seen)))
    await asyncio.gather(*running)
    seen.seconds = time.perf_counter() - begun
    return seen


async def converse(speak: Speak, session: str, seen: Seen) -> None:
    """A few turns; the history is sent whole each time."""
    history: list[Message] = [{"role": "system", "content": f"You keep the log {session}. " * 8}]
    for turn in range(TURNS):
        history.append({"role": "user", "content": f"Entry {turn}: what comes next? " * 4})
        said, last = "", time.perf_counter()
        times: list[float] = []
        async for text in speak(session, history):
            now = time.perf_counter()
            times.append(now - last)
            said, last = said + text, now
        seen.first.append(times[0])
        seen.between += times[1:]
        seen.tokens += REPLY_TOKENS
        history.append({"role": "assistant", "content": said})


def over_http(client: httpx.AsyncClient, **more: Any) -> Speak:
    """Turns as streams of a server."""

    async def speak(session: str, history: list[Message]) -> AsyncIterator[str]:
        body = {"session_id": session, "messages": history, "stream": True, **GREEDY, **more}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"]
                    if choice and choice[0]["delta"].get("content"):
                        yield choice[0]["delta"]["content"]

    return speak


def without_http(worker: Worker, engine: Engine, **more: Any) -> Speak:
    """Turns handed to the engine's thread."""
    params = SamplingParams(**{**GREEDY, **more})

    async def speak(session: str, history: list[Message]) -> AsyncIterator[str]:
        def submit() -> int:
            return engine.submit_chat(history, params, session_id=session)

        async for event in worker.run(submit):
            if isinstance(event, Delta) and event.text:
                yield event.text
            assert isinstance(event, Delta | Completion), event

    return speak


# -- the arms -----------------------------------------------------------------------------------


class Watched(Engine):
    """An engine that notes when each full decode step begins; other steps are no numbers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.begun: list[float] = []

    def step(self) -> list[EngineEvent]:
        """Step, and note the time if eight requests decode."""
        now = time.perf_counter()
        events = super().step()
        full = sum(isinstance(event, Delta) for event in events) == BATCH
        self.begun.append(now if full else nan)
        return events


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The application on a socket of this process, on a thread; its address."""
    worker = Worker(engine)
    config = uvicorn.Config(create_app(worker), http="h11", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        worker.start()
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            worker.stop()


def client_process(url: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run this file as the client of a server; what it measured."""
    done = subprocess.run(
        [sys.executable, __file__, "--client", url, json.dumps(job)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


async def be_client(url: str, job: dict[str, Any]) -> dict[str, Any]:
    """The client's side of both measurements."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        if "rate" in job:
            speak = over_http(client)
            return asdict(await load(speak, job["rate"], job["seconds"], job["label"]))
        await decode_together(over_http(client, max_tokens=DECODED_TOKENS), job["label"])
        return {}


async def decode_together(speak: Speak, label: str) -> None:
    """Eight replies side by side."""

    async def one(number: int) -> None:
        ask = [{"role": "user", "content": f"{label} {number}: tell a long story."}]
        async for _ in speak(f"{label}-{number}", ask):
            pass

    await asyncio.gather(*(one(number) for number in range(BATCH)))


def run_without(engine: Engine, work: Callable[[Worker], Awaitable[Any]]) -> Any:
    """Do something with a worker of the engine's."""
    worker = Worker(engine)
    worker.start()
    try:
        return asyncio.run(work(worker))  # type: ignore[arg-type]
    finally:
        worker.stop()


def step_ms(engine: Watched) -> float:
    """Median distance of two full decode steps since the last call, in milliseconds."""
    begun, engine.begun = engine.begun, []
    distances = [1e3 * (b - a) for a, b in pairwise(begun) if not isnan(b - a)]
    return statistics.median(distances)


# -- what is measured -----------------------------------------------------------------------------


def measure_load(engine: Engine, rates: list[float], seconds: float) -> list[dict[str, Any]]:
    """Both arms at every rate."""
    rows = []
    for rate in tqdm(rates, desc="load", unit="rate"):
        label = f"load-{rate:g}"

        async def direct(worker: Worker, rate: float = rate, label: str = label) -> Seen:
            return await load(without_http(worker, engine), rate, seconds, f"{label}-direct")

        plain: Seen = run_without(engine, direct)
        with served(engine) as url:
            job = {"rate": rate, "seconds": seconds, "label": f"{label}-http"}
            http = Seen(**client_process(url, job))
        rows.append({"rate": rate, "http": http.summary(), "without": plain.summary()})
    return rows


def measure_layer(engine: Watched, repeats: int) -> dict[str, float]:
    """The decode step at batch 8, over HTTP and without, by turns."""
    without, http = [], []
    for number in tqdm(range(repeats), desc="layer", unit="round"):

        async def direct(worker: Worker, number: int = number) -> None:
            speak = without_http(worker, engine, max_tokens=DECODED_TOKENS)
            await decode_together(speak, f"direct-{number}")

        engine.begun = []
        run_without(engine, direct)
        without.append(step_ms(engine))
        with served(engine) as url:
            engine.begun = []
            client_process(url, {"label": f"http-{number}"})
            http.append(step_ms(engine))
    ratios = [after / before - 1 for before, after in zip(without, http, strict=True)]
    return {
        "step_ms": round(statistics.median(without), 2),
        "step_with_http_ms": round(statistics.median(http), 2),
        "http_over_step": round(statistics.median(ratios), 4),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line an arm and rate."""
    names = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    lines = [f"{'rate':>6} {'arm':8}" + "".join(f"{name:>15}" for name in names)]
    for row in rows:
        for arm in ("http", "without"):
            values = "".join(f"{row[arm][name]:15.1f}" for name in names)
            lines.append(f"{row['rate']:6g} {arm:8}{values}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="0.5,1,2", help="conversations begun a second")
    parser.add_argument("--seconds", type=float, default=20, help="how long they begin")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of the layer's arms")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        url, job = asked.client
        print(json.dumps(asyncio.run(be_client(url, json.loads(job)))))
        return
    engine = Watched(num_threads=1, max_sessions=4096)
    with engine:
        layer = measure_layer(engine, asked.repeats)
        rows = measure_load(engine, [float(rate) for rate in asked.rates.split(",")], asked.seconds)
    print(table(rows))
    print(json.dumps({"load": rows, **layer}))


if __name__ == "__main__":
    main()

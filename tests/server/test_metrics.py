"""The metrics: every documented name is there, moves when it should, and tells no texts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline.server import ServerConfig

from .client import Client, chat_body, over_engine
from .conftest import Connect
from .fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

Values = dict[str, float]


def words(text: str) -> list[str]:
    return text.split()


COUNTERS = words("""
    prompt_tokens prompt_tokens_cached prompt_tokens_spliced prompt_tokens_recomputed
    generation_tokens prefix_cache_queries prefix_cache_hits request_success request_failure
    requests_degraded num_preemptions degraded_splices sessions_expired sessions_displaced
    sessions_refused engine_steps http_requests directives directive_tokens_removed
    directive_tokens_inserted directive_tokens_kept directive_tokens_turned
    directive_tokens_reprefilled cache_purges cache_purged_rows
""")
GAUGES = words("""
    engine_up num_requests_running num_requests_waiting kv_cache_usage_perc kv_available_tokens
    kv_evictable_tokens kv_used_tokens sessions session_held_tokens
""")
HISTOGRAMS = words("""
    time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prefill_kv_computed_tokens iteration_tokens_total directive_seconds
""")


MOVED = words("""
    prompt_tokens_total prompt_tokens_cached_total prompt_tokens_recomputed_total
    generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
    request_success_total engine_steps_total http_requests_total directives_total
    directive_tokens_removed_total directive_tokens_inserted_total directive_tokens_kept_total
    directive_tokens_turned_total directive_tokens_reprefilled_total cache_purges_total
    sessions session_held_tokens time_to_first_token_seconds_count
    inter_token_latency_seconds_count e2e_request_latency_seconds_count
    request_queue_time_seconds_count iteration_tokens_total_count directive_seconds_count
    request_prefill_time_seconds_count request_decode_time_seconds_count
    request_prefill_kv_computed_tokens_count
""")
SAMPLE = re.compile(r"(leyline:[a-z0-9_]+(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})?) (\S+)")


def values_of(text: str) -> Values:
    """The samples by name and labels; the text must be what Prometheus reads."""
    values: Values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] not in values
            values[match[1]] = float(match[2])
    return values


async def scrape(client: Client) -> Values:
    answer = await client.get("/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    return values_of(answer.body.decode())


def total(values: Values, name: str) -> float:
    """A metric over all its labels."""
    return sum(v for k, v in values.items() if k.partition("{")[0] == f"leyline:{name}")


@pytest.fixture
def real(tiny_folder: Callable[[str], Path]) -> Iterator[Client]:
    """A client of a server over a small model."""
    with over_engine(tiny_folder("v3"), kv_cache_tokens=400) as client:
        yield client


async def lived(client: Client) -> None:
    """A day in the life of a server."""
    turn = chat_body("in the land of the", session_id="s1", max_tokens=4, temperature=0)
    assert (await client.post("/v1/chat/completions", turn)).status == 200
    assert (await client.post("/v1/chat/completions", turn | {"session_id": "s2"})).status == 200
    span = {"start": 4, "end": 6, "replacement": "a"}
    edit = {"session_id": "s1", "directives": [span | {"mode": "amortize"}]}
    assert (await client.post("/v1/directives", edit)).status == 200
    forget = {"session_id": "s2", "directives": [span | {"mode": "forget", "scope": "cache"}]}
    assert (await client.post("/v1/directives", forget)).status == 200
    refused = {"session_id": "s2", "directives": [{"start": 1, "end": 1 << 20}]}
    assert (await client.post("/v1/directives", refused)).status == 422
    info = (await client.get("/v1/sessions/s1?tokens=true")).json
    body = {"prompt": info["token_ids"], "max_tokens": 2, "stream": True}
    assert (await client.post("/v1/completions", body)).status == 200


async def test_every_name_is_there_before_anything_happens(real: Client) -> None:
    first = await scrape(real)
    await real.get("/health")
    text = (await real.get("/metrics")).body.decode()
    kinds = dict(re.findall(r"(?m)^# TYPE leyline:(\S+) (\S+)$", text))
    assert kinds == (
        {f"{name}_total": "counter" for name in COUNTERS}
        | dict.fromkeys(GAUGES, "gauge")
        | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert len(re.findall(r"(?m)^# HELP leyline:\S+ \S+", text)) == len(kinds)
    assert "_created" not in text and first["leyline:engine_up"] == 1


async def test_what_happens_is_counted_and_counters_never_go_back(real: Client) -> None:
    before = await scrape(real)
    await lived(real)
    after = await scrape(real)
    for name in MOVED:
        assert total(after, name) > total(before, name), name
    assert after['leyline:directives_total{mode="amortize",result="done"}'] == 1
    assert after['leyline:directives_total{mode="forget",result="done"}'] == 1
    assert after['leyline:directives_total{mode="amortize",result="refused"}'] == 1
    assert after['leyline:directive_tokens_removed_total{mode="amortize"}'] == 2
    assert after['leyline:request_success_total{finished_reason="length"}'] == 3
    assert total(after, "e2e_request_latency_seconds_count") == 3
    assert total(after, "request_queue_time_seconds_count") == 5
    assert total(after, "time_to_first_token_seconds_count") == 3
    latency = total(after, "e2e_request_latency_seconds_sum")
    parts = total(after, "request_decode_time_seconds_sum") + total(
        after, "request_prefill_time_seconds_sum"
    )
    assert parts <= latency + 1e-9
    assert after["leyline:generation_tokens_total"] == 4 + 4 + 2
    parts = (after[f"leyline:prompt_tokens_{one}_total"] for one in ("cached", "recomputed"))
    assert after["leyline:prompt_tokens_total"] == sum(parts)
    share = total(after, "kv_used_tokens") / 400
    assert after["leyline:kv_cache_usage_perc"] == pytest.approx(share) and share < 1
    slots = sum(total(after, f"kv_{one}_tokens") for one in ("available", "evictable", "used"))
    assert slots == 400 and total(after, "sessions") == 2
    await lived(real)
    again = await scrape(real)
    for key, value in after.items():
        if re.search(r"_(total|count|sum|bucket)(\{|$)", key):
            assert again[key] >= value, key


async def test_labels_are_ours_alone(real: Client) -> None:
    secret = "zebra-secret"
    headers = {"x-request-id": secret, "x-session-id": secret}
    await real.open("POST", f"/v1/sessions/{secret}/revert", {}, headers=headers).finish()
    await real.open(secret.upper(), f"/{secret}").finish()
    directive = {"start": 1, "end": 2, "mode": secret}
    body = {"session_id": secret, "directives": [directive]}
    assert (await real.post("/v1/directives", body)).status >= 400
    await real.post("/v1/chat/completions", chat_body(secret, user=secret, max_tokens=1))
    text = (await real.get("/metrics")).body.decode()
    assert secret not in text.lower()
    assert 'directives_total{mode="unknown",result="refused"} 1.0' in text
    assert 'method="OTHER",route="unmatched",status="404"' in text
    assert 'route="/v1/sessions/{session_id}/revert",status="404"' in text


async def test_two_servers_in_a_process_count_apart(connect: Connect) -> None:
    one, two = connect(), connect()
    await one.chat()
    assert total(await scrape(one), "request_success_total") == 1
    assert total(await scrape(two), "request_success_total") == 0


async def test_failures_are_counted_by_their_code_and_hang_ups_once(connect: Connect) -> None:
    client = connect(FakeEngine(gated=True))
    exchange = client.open("POST", "/v1/chat/completions", chat_body(stream=True))
    client.engine.allow(1)
    await exchange.first_bytes()
    await exchange.hang_up()
    assert await client.open_requests() == 0
    client.engine.allow(100)
    values = await scrape(client)
    assert values['leyline:request_failure_total{code="cancelled"}'] == 1
    assert (
        total(values, "request_failure_total") == 1 and total(values, "request_success_total") == 0
    )


async def test_a_dead_engine_still_gives_its_last_numbers(real: Client) -> None:
    await lived(real)
    before = await scrape(real)
    await asyncio.to_thread(real.worker.stop)
    after = await scrape(real)
    assert after["leyline:engine_up"] == 0
    for name in ("sessions", "generation_tokens_total", "kv_available_tokens"):
        assert after[f"leyline:{name}"] == before[f"leyline:{name}"]


async def test_a_scrape_does_not_wait_for_a_long_step(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyline.server.metrics._PATIENCE_SECONDS", 0.01)
    client, stuck = connect(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def long_step() -> None:
        asyncio.run_coroutine_threadsafe(stuck.wait(), loop).result()

    waiting = asyncio.ensure_future(client.worker.call(long_step))
    await asyncio.wait({waiting}, timeout=0)
    values = await scrape(client)
    stuck.set()
    await waiting
    assert values["leyline:engine_up"] == 1


async def test_an_observer_that_fails_stops_nothing(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()

    def fail(*_: Any) -> None:
        raise RuntimeError("broken observer")

    for name in ("opened", "stepped"):
        monkeypatch.setattr(client.worker.observer, name, fail)
    assert (await client.chat()).status == 200
    assert "broken observer" in caplog.text


async def test_metrics_can_be_left_out(connect: Connect) -> None:
    client = connect(config=ServerConfig(metrics=False))
    assert (await client.get("/metrics")).status == 404
    assert (await client.chat()).status == 200

"""What went wrong for others, by the row of our list of it: kinds that go across the routes.

The rows of the OpenAI surface alone are in test_known_bugs.py, what comes back from a client in
test_sent_back.py. docs/known-bugs.md has the place of every row.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest

from leyline import EngineConfig
from leyline.rendering import Rendering
from leyline.sampling import SamplingParams
from leyline.server import ServerConfig
from leyline.server.bodies import MAX_CONTAINERS
from leyline.server.schema import ChatRequest
from leyline.stats import EngineStats, stats_of
from tests.server.parsers.corpus import kimi, kimi_section

from .client import Answer, Client, chat_body, over_engine
from .conftest import Connect
from .fake_engine import FakeEngine, FakeTemplate, FakeTokenizer
from .test_known_bugs import THINKS, TOOLS, call, says
from .test_stream_equals_whole import calls_of, choices_of

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def asking(path: str, text: str = "hi", limit: int = 500) -> dict[str, Any]:
    """A body of one of the APIs that ask for an answer."""
    body: dict[str, Any] = {
        CHAT: chat_body(text),
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
        MESSAGES: chat_body(text),
    }[path]
    return body | {limit_of(path): limit}


def limit_of(path: str) -> str:
    """What an API calls the most tokens to generate."""
    return "max_output_tokens" if path == RESPONSES else "max_tokens"


def events(answer: Answer) -> list[dict[str, Any]]:
    """The data of a stream of any of the APIs."""
    assert answer.status == 200, answer.body
    data = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


# -- rows 1 to 4: stop strings -------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
async def test_row_1_a_stop_string_ends_responses_and_messages_too(
    connect: Connect, chunk: int
) -> None:
    client = connect(says("The quick brown fox", chunk=chunk))
    for path, stop, key in ((RESPONSES, "stop", "delta"), (MESSAGES, "stop_sequences", "text")):
        body = asking(path) | {stop: ["own fox"]}
        whole = (await client.post(path, body)).json
        (block,) = whole["content"] if path == MESSAGES else whole["output"][0]["content"]
        assert block["text"] == "The quick br"
        told = events(await client.post(path, body | {"stream": True}))
        deltas = [one["delta"] if path == MESSAGES else one for one in told if "delta" in one]
        assert "".join(one.get(key, "") for one in deltas) == "The quick br"


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("stop", ["x" * 900, "</thin!", "<tool_cal!", '"}}\n</tool_call>!', "b!"])
async def test_rows_2_and_4_nothing_of_a_marker_is_lost_or_shown_beside_any_stop(
    connect: Connect, chunk: int, stop: str
) -> None:
    client = connect(says("<think>a</think>b" + call("f", '{"a": "b"}'), chunk=chunk))
    for body in (await client.chat(tools=TOOLS, stop=stop), await client.chat(tools=TOOLS)):
        message = body.json["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("a", "b")
    (choices,) = choices_of((await client.chat(tools=TOOLS, stop=stop, **USAGE)).chunks, 1)
    deltas = [choice["delta"] for choice in choices]
    assert "".join(one.get("reasoning") or "" for one in deltas) == "a"
    assert "".join(one.get("content") or "" for one in deltas) == "b"
    (made,) = calls_of(deltas[1:])
    assert made["function"] == {"name": "f", "arguments": '{"a": "b"}'}


# -- row 27: parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_row_27_a_part_that_cannot_be_read_is_refused_on_every_role(
    connect: Connect, role: str
) -> None:
    client = connect()
    for kind in ("image_url", "input_audio", "file", "thinking", "text2", ""):
        parts = [{"type": "text", "text": "seen"}, {"type": kind, kind or "x": {"url": "x"}}]
        answer = await client.post(CHAT, {"messages": [{"role": role, "content": parts}]})
        assert answer.status == 400 and answer.error["param"].startswith("messages[0].content")
    assert client.engine.seen == []


# -- rows 47 and 51: calls -----------------------------------------------------------------------

KIMI_TEMPLATE = "<|tool_calls_section_begin|> <|tool_call_begin|> tools tool_calls"


def writes_kimi(text: str, **options: Any) -> FakeEngine:
    tokenizer = FakeTokenizer(FakeTemplate(KIMI_TEMPLATE))
    return FakeEngine(reply=lambda _: text, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
async def test_row_47_the_id_that_a_model_wrote_goes_out_and_comes_back(
    connect: Connect, chunk: int
) -> None:
    ids = ["functions.f:3", "functions.g:4"]
    text = kimi_section(kimi(ids[0], '{"a": 1}'), kimi(ids[1], "{}"))
    client = connect(writes_kimi(text, chunk=chunk))
    message = (await client.chat(tools=TOOLS)).json["choices"][0]["message"]
    assert [one["id"] for one in message["tool_calls"]] == ids
    (choices,) = choices_of((await client.chat(tools=TOOLS, **USAGE)).chunks, 1)
    deltas = [one for choice in choices for one in choice["delta"].get("tool_calls", ())]
    assert [one["id"] for one in deltas if "id" in one] == ids
    history = [
        {"role": "user", "content": "hi"},
        message,
        *({"role": "tool", "tool_call_id": one, "content": "x"} for one in ids),
    ]
    assert (await client.post(CHAT, {"messages": history, "tools": TOOLS})).status == 200
    seen = client.engine.seen[-1][1]
    assert [one["id"] for one in seen[1]["tool_calls"]] == ids
    assert [one["tool_call_id"] for one in seen[2:]] == ids


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_row_51_arguments_are_told_while_they_are_written(
    connect: Connect, path: str
) -> None:
    text = "The quick brown fox. " * 20
    client = connect(says(call("f", json.dumps({"text": text}))))
    tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": {}}
    tool = {CHAT: TOOLS[0], RESPONSES: tool, MESSAGES: {"name": "f", "input_schema": {}}}[path]
    if path == MESSAGES:
        tool["input_schema"] = {"type": "object"}
    told = events(await client.post(path, asking(path, limit=900) | {"tools": [tool]} | USAGE))
    lines = [json.dumps(one) for one in told]
    growing = [at for at, line in enumerate(lines) if arguments_in(line)]
    assert len(growing) > len(text) / 2 and growing[0] < 20


def arguments_in(line: str) -> bool:
    return any(
        mark in line
        for mark in ('"arguments": "', "function_call_arguments.delta", "input_json_delta")
    )


# -- row 88: what is inside stays inside ---------------------------------------------------------


async def test_row_88_no_name_of_the_inside_is_a_field(connect: Connect) -> None:
    client = connect()
    await client.chat()
    names = {one.name for kind in (SamplingParams, Rendering, EngineConfig, ServerConfig)
             for one in fields_of(kind)} - set(ChatRequest.model_fields) - {"prompt"}  # fmt: skip
    assert {"constraint", "shown", "told", "kv_cache_tokens", "policy", "api_key"} <= names
    for value in (True, 7, "x", ["x"], {"x": 1}):
        await client.chat(**dict.fromkeys(names, value))
    first, *others = client.engine.seen
    assert len(others) == 5 and all(one == first for one in others)
    assert set(map(repr, client.engine.renderings)) == {repr(client.engine.renderings[0])}


# -- row 132: one request that keeps everybody waiting -------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema, schema]}
    return schema


CROWDS: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200_000}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": nested(10)}}],
    "guided_json": nested(10),
    "stop": [["x"]] * 200_000,
    "metadata": [[]] * 200_000,
    "unheard_of": {"a": [{}] * 200_000},
}


@pytest.mark.parametrize(
    "path, name",
    [
        *((CHAT, name) for name in CROWDS),
        *((path, "unheard_of") for path in (COMPLETIONS, RESPONSES, MESSAGES, "/tokenize")),
    ],
)
async def test_row_132_millions_of_lists_are_counted_before_they_are_read(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    client = connect()
    raw = json.dumps(chat_body() | {name: CROWDS[name]}).encode()
    monkeypatch.setattr("leyline.server.bodies._without_repeats", None)  # nothing is read
    answer = await client.post(path, raw=raw)
    assert answer.status == 413 and str(MAX_CONTAINERS) in answer.json["error"]["message"]
    assert client.engine.seen == []


async def test_row_132_brackets_in_texts_are_text(connect: Connect) -> None:
    text = '[{"\\' * (MAX_CONTAINERS // 2 + 1)
    client = connect(FakeEngine(reply=lambda _: "so", max_model_len=10**6))
    assert (await client.chat(text)).status == 200
    assert client.engine.seen[0][1][0]["content"] == text
    answer = await client.chat(text, more=[[]] * MAX_CONTAINERS)
    assert answer.status == 413 and answer.error["code"] == "body_too_large"


# -- rows 127 to 131: forms, over a real engine --------------------------------------------------


@pytest.fixture(scope="module")
def real(tiny_folder: Callable[[str], Path]) -> Iterator[Client]:
    """A real engine whose window is small."""
    with over_engine(tiny_folder("v3"), kv_cache_tokens=400, max_model_len=300) as client:
        yield client


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"guided_choice": ["Rome", "Lima"]}, lambda text: text in ("Rome", "Lima")),
    ({"guided_regex": "[ab]{3}c"}, lambda text: len(text) == 4 and text[-1] == "c"),
    ({"guided_json": {"enum": [1, 22]}}, lambda text: json.loads(text) in (1, 22)),
    ({"guided_grammar": 'start: "x"+ "y"'}, lambda text: set(text) <= {"x", "y"}),
    (
        {"response_format": {"type": "json_object"}, "logit_bias": {"96": 50}},
        lambda text: text.startswith("{"),
    ),
    ({}, lambda text: True),
]


async def test_row_129_forms_of_every_kind_at_the_same_time(real: Client) -> None:
    both = [FORMS, FORMS[::-1]]
    for seed in range(4):
        forms = both[seed % 2]
        common = {"max_tokens": 30, "seed": seed, "temperature": 1.5}
        answers = await asyncio.gather(*(real.chat(**form, **common) for form, _ in forms))
        for answer, (_, fits) in zip(answers, forms, strict=True):
            assert answer.status == 200, answer.body
            assert fits(answer.json["choices"][0]["message"]["content"])


HEAVY: list[dict[str, Any]] = [
    {"guided_regex": "(a{1000}){1000}"},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    {"guided_json": {"allOf": [{"multipleOf": n} for n in (97, 89, 83, 79, 73)]}},
    {"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
    {"guided_json": {"type": "object", "properties": {f"k{n}": {} for n in range(1000)}}},
]


@pytest.mark.parametrize("form", HEAVY, ids=range(len(HEAVY)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_rows_127_and_130_what_is_too_much_to_follow_is_its_senders_fault(
    real: Client, path: str, form: dict[str, Any]
) -> None:
    """And never an error of the server's own, which clients would send again."""
    answer, beside = await asyncio.gather(
        real.post(path, asking(path, limit=9) | form), real.complete("the", max_tokens=2)
    )
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error", answer.body
    assert beside.status == 200


async def test_row_130_nobody_waits_while_a_form_is_compiled(
    real: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leyline.grammar import Grammars

    compiling, served = asyncio.Event(), asyncio.Event()
    loop, compile_ = asyncio.get_running_loop(), Grammars.compile

    def slowly(self: Grammars, kind: Any, value: Any = None) -> Any:
        loop.call_soon_threadsafe(compiling.set)
        asyncio.run_coroutine_threadsafe(served.wait(), loop).result(30)
        return compile_(self, kind, value)

    monkeypatch.setattr(Grammars, "compile", slowly)
    slow = real.open("POST", CHAT, chat_body(guided_choice=["a"], max_tokens=2))
    await compiling.wait()
    assert (await real.complete("the", max_tokens=2)).status == 200
    served.set()
    assert (await slow.finish()).json["choices"][0]["message"]["content"] == "a"


async def test_row_130_compiling_has_an_end(real: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline.grammar import Grammars

    released = asyncio.Event()
    loop, compile_ = asyncio.get_running_loop(), Grammars.compile

    def endless(self: Grammars, kind: Any, value: Any = None) -> Any:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(30)
        return compile_(self, kind, value)

    monkeypatch.setattr(Grammars, "compile", endless)
    monkeypatch.setattr("leyline.server.constraints.MAX_SECONDS", 0.01)
    answer = await real.chat(guided_choice=["b"], max_tokens=2)
    assert answer.status == 400 and "simpler" in answer.error["message"]
    released.set()


async def test_row_136_forms_leave_nothing_on_the_disk(
    real: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for number in range(5):
        assert (await real.chat(guided_choice=[f"only{number}"], max_tokens=2)).status == 200
    assert list(tmp_path.iterdir()) == []


# -- rows 20, 88, 92 and 150: prompts and windows ------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_row_20_agents_that_always_ask_for_64k_are_served(real: Client, path: str) -> None:
    for stream in (False, True):
        body = asking(path, limit=64_000) | {"stream": stream, "temperature": 0}
        assert (await real.post(path, body)).status == 200
    too_long = await real.post(path, asking(path, "x" * 400))
    assert too_long.status == 400 and "maximum context length" in too_long.body.decode()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_row_19_limits_that_are_none_are_refused_on_every_api(
    connect: Connect, path: str
) -> None:
    client = connect()
    for limit in (0, -1, 2**31, 2**64, 1.5, "5", True):
        assert (await client.post(path, asking(path) | {limit_of(path): limit})).status == 400
    assert client.engine.seen == []


@pytest.mark.parametrize("prompt", [[2], [0], [1, 2], "<|im_end|>", "<|endoftext|>", " ", "\x00"])
async def test_row_150_prompts_of_hardly_anything_are_answered(real: Client, prompt: Any) -> None:
    answer = await real.complete(prompt, max_tokens=2, echo=True, logprobs=1)
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["prompt_tokens"] >= 1


async def numbers(client: Client) -> EngineStats:
    return await client.worker.call(lambda: stats_of(client.engine))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_rows_92_and_94_who_hangs_up_is_given_up_in_the_engine_too(
    real: Client, path: str, stream: bool
) -> None:
    """Else this would go on for 250 steps; nothing is left running, waiting or owned."""
    body = asking(path, limit=250) | {"stream": stream}
    if path in (CHAT, COMPLETIONS):
        body |= {"ignore_eos": True}
    for wait in (False, True):
        exchange = real.open("POST", path, body)
        if wait:
            before = (await numbers(real)).num_batches
            while (await numbers(real)).num_batches < before + 3:
                await asyncio.sleep(0)
        await exchange.hang_up()
        left = await numbers(real)
        assert (left.num_running, left.num_waiting, left.num_used) == (0, 0, 0)


async def test_row_88_who_cannot_fit_fails_alone(real: Client) -> None:
    requests = [
        real.complete([5 + n] * 90, max_tokens=200, ignore_eos=True, seed=n) for n in range(4)
    ]
    *answers, refused = await asyncio.gather(*requests, real.complete([5] * 301, max_tokens=2))
    assert [answer.status for answer in answers] == [200] * 4
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
    assert (await numbers(real)).num_preempted > 0


# -- rows 139, 152 and 153: strangers, addresses and logs ----------------------------------------


PROBES = ("/health", "/live")  # which an orchestrator asks for by address, and which tell nothing


async def test_row_139_no_route_answers_to_another_machines_name(connect: Connect) -> None:
    client = connect()
    schema = (await client.get("/openapi.json")).json
    paths = {path: one for path, one in schema["paths"].items() if path not in PROBES}
    assert len(paths) > 20
    paths |= {path: ["get"] for path in ("/metrics", "/openapi.json", "/docs", "/nowhere")}
    for path, operations in paths.items():
        for method in operations:
            sent = {"host": "evil.example"}
            answer = await client.open(method.upper(), path, {}, headers=sent).finish()
            assert answer.status == 403, (method, path)
    assert client.engine.seen == []


def test_rows_139_and_149_a_server_is_this_machines_own_unless_told_otherwise() -> None:
    config = ServerConfig()
    assert config.host == "127.0.0.1"
    assert config.allowed_origins == () and config.allowed_hosts == () and not config.uds


async def test_row_152_no_address_in_a_request_is_ever_called(real: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        image = {"type": "image_url", "image_url": {"url": url}}
        remote = {"type": "object", "properties": {"a": {"$ref": url}}, "$schema": url, "$id": url}
        tool = {"name": "f", "description": url, "parameters": remote, "strict": True}
        tools = [{"type": "function", "function": tool}]
        for body in (
            chat_body([image]),
            chat_body(url, max_tokens=2),
            chat_body(tools=tools, tool_choice="required", max_tokens=2),
            chat_body(tools=[{"type": "mcp", "server_url": url}], max_tokens=2),
            chat_body(guided_json=remote, max_tokens=2),
            chat_body(guided_grammar=f"%import {url}\nstart: x", max_tokens=2),
            chat_body(web_search_options={"url": url}),
        ):
            assert (await real.post(CHAT, body)).status in (200, 400)
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_row_153_a_megabyte_of_a_name_is_no_line_of_the_log(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    client = connect()
    secret = "secret" * 200_000
    for fields in ({"user": secret}, {"model": secret}, {"safety_identifier": secret}):
        answer = await client.chat(secret[:6], **fields)
        assert len(answer.body) < 2000
    assert len(caplog.text) < 5000 and "secretsecret" not in caplog.text


# -- rows 156 and 159: what load tools and agents send -------------------------------------------


async def test_row_156_what_a_load_tool_asks_first(connect: Connect) -> None:
    client = connect(FakeEngine(tokenizer=FakeTokenizer(FakeTemplate(THINKS))))
    assert (await client.get("/health")).status == 200
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"ignore_eos": True, "stream": True, "stream_options": options, "max_tokens": 4}
    for answer in (await client.chat(**fields), await client.complete(**fields)):
        assert answer.status == 200 and answer.chunks[-1]["usage"]["completion_tokens"] == 4


AGENTS = [
    {"x-claude-code-session-id": "3fa8-1"},
    {"x-session-id": "ses_1", "x-session-affinity": "ses_1"},
    {"session-id": "s", "thread-id": "t"},
    {"x-session-id": "é\x00 /" * 100},
    {"x-session-id": ""},
    {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27,x"},
    {"x-stainless-retry-count": "-1", "openai-organization": "o", "openai-beta": "responses=v9"},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_row_159_no_header_of_an_agent_is_a_failure(connect: Connect, path: str) -> None:
    client = connect()
    marked = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    for headers in AGENTS:
        bodies = [asking(path)] * 2
        if path in (CHAT, MESSAGES):
            bodies.append(asking(path) | {"messages": [{"role": "user", "content": marked}]})
        for body in bodies:
            answer = await client.post(path, body, headers=headers)
            assert answer.status == 200, answer.body

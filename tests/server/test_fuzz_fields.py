"""Row 21: anything at all in any field of chat and completions, over a real engine.

An answer or a typed refusal, never a crash; and a request beside it is answered as ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyline.server.schema import ChatRequest, CompletionRequest

from .client import Answer, Client, over_engine
from .test_fuzz import json_values

EDGES = [-(2**63) - 1, -(2**63), -(2**31), -1, 0, 1, 2, 20, 21, 310, 311, 2**31 - 1, 2**31,
         2**63 - 1, 2**63, 2**64, 10**400]  # fmt: skip
numbers = st.sampled_from(EDGES) | st.sampled_from([float(x) for x in (-1, 0, 1, 1e-320, 1e308)])
texts = st.sampled_from(["", "a", "\ud83d", "auto", "required", "none", "{", "(", "\x00", "x" * 99])
anything = st.recursive(
    numbers | texts | st.booleans() | st.none() | st.sampled_from([float("nan"), float("inf")]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["type", "function", "name", "parameters", "properties", "json_schema", "schema", "5",
             "role", "content", "text", "id", "arguments", "regex", "choice", "json", "anyOf"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function") | anything},
        optional={
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g"]) | anything},
                optional={"parameters": anything, "description": anything, "strict": anything},
            )
        },
    ),
    max_size=2,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | anything},
        optional={"content": anything, "tool_calls": anything, "name": anything},
    ),
    max_size=3,
)
floats = st.floats(0, 2, allow_nan=False)
PLAUSIBLE: dict[str, Any] = {
    "temperature": floats,
    "top_p": st.floats(1e-9, 1),
    "top_k": st.sampled_from([-1, 0, 1, 300, 1_000_000]),
    "min_p": st.floats(0, 1),
    "seed": st.sampled_from([-(2**63), 0, 2**63 - 1]),
    "min_tokens": st.integers(0, 3),
    "stop": st.sampled_from(["a", ["a", "the"], []]),
    "stop_token_ids": st.lists(st.integers(0, 265), max_size=3),
    "presence_penalty": floats,
    "frequency_penalty": floats,
    "repetition_penalty": st.floats(0.1, 100),
    "logit_bias": st.dictionaries(st.integers(0, 265).map(str), st.integers(-100, 100), max_size=3),
    "n": st.integers(1, 3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "guided_regex": st.sampled_from(["[ab]+", ".*", "(x|y)z"]),
    "cache_salt": st.sampled_from(["s", "t"]),
}
some = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@pytest.fixture(scope="module")
def real(tiny_folder: Callable[[str], Path]) -> Iterator[Client]:
    with over_engine(tiny_folder("v3"), kv_cache_tokens=4000) as client:
        yield client


def send(real: Client, path: str, *sent: dict[str, Any]) -> list[int]:
    """The statuses of some requests, which run together with one that is fine."""

    async def exchange() -> list[Answer]:
        fine = {"prompt": "the", "max_tokens": 1}
        beside = real.open("POST", "/v1/completions", fine)
        others = [real.open("POST", path, raw=json.dumps(body).encode()) for body in sent]
        return [await one.finish() for one in (beside, *others)]

    beside, *answers = asyncio.run(exchange())
    assert beside.status == 200
    for body, answer in zip(sent, answers, strict=True):
        assert answer.status in (200, 400, 404), (body, answer.body)
        if answer.status >= 400:
            assert answer.error["type"] in ("invalid_request_error", "not_found_error"), body
            assert answer.error["message"]
    return [answer.status for answer in answers]


def bodies(model: type[Any], plausible: dict[str, Any], required: dict[str, Any]) -> Any:
    """A body that is fine, with up to two of its fields replaced by anything."""
    names = sorted(set(model.model_fields) - {"stream", "max_tokens", "max_completion_tokens"})
    odd = st.dictionaries(st.sampled_from(names), anything | json_values, max_size=2)
    fine = st.fixed_dictionaries(
        {"max_tokens": st.just(3), **required}, optional=PLAUSIBLE | plausible
    )
    return st.builds(lambda fine, odd: fine | odd, fine, odd)


@given(bodies(ChatRequest, {"tools": tools, "logprobs": st.just(True)},
              {"messages": messages | st.just([{"role": "user", "content": "x"}])}))  # fmt: skip
@settings(parent=some)
def test_chat_fields(real: Client, body: dict[str, Any]) -> None:
    send(real, "/v1/chat/completions", body)


@given(bodies(CompletionRequest, {"echo": st.booleans()}, {"prompt": st.just("in the land")}))
@settings(parent=some)
def test_completion_fields(real: Client, body: dict[str, Any]) -> None:
    send(real, "/v1/completions", body)


@given(tools, anything)
@settings(parent=some)
def test_tools(real: Client, tools: list[Any], choice: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "tools": tools}
    for tool_choice in ("required", choice):
        send(real, "/v1/chat/completions", body | {"tool_choice": tool_choice})


NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


@pytest.mark.parametrize("start", range(0, len(NAMES), 8))
def test_every_number_in_every_field(real: Client, start: int) -> None:
    fine: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    for name in NAMES[start : start + 8]:
        limit = {} if name in ("max_tokens", "max_completion_tokens") else {"max_tokens": 1}
        values = EDGES if limit else [-1, 0, 1, 2**31, 2**64]
        plain = [fine | limit | {name: value} for value in values]
        listed = [fine | limit | {name: [value]} for value in values]
        for path in ("/v1/chat/completions", "/v1/completions"):
            send(real, path, *plain, *listed)


def test_the_fuzz_reaches_more_than_the_door(real: Client) -> None:
    """What it sends would prove little if all of it were refused."""
    seen: list[int] = []

    @given(bodies(ChatRequest, {}, {"messages": st.just([{"role": "user", "content": "x"}])}))
    @settings(parent=some, max_examples=60)
    def collect(body: dict[str, Any]) -> None:
        seen.extend(send(real, "/v1/chat/completions", body))

    collect()
    assert seen.count(200) > 5 and seen.count(400) > 5


HELLO = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, '
DEEP = [
    HELLO + '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": @}}}]}',
    HELLO + '"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", '
    '"parameters": {"properties": {"a": @}}}}]}',
    HELLO + '"chat_template_kwargs": {"x": @}}',
    HELLO + '"context_management": @}',
    HELLO + '"guided_json": @}',
    HELLO + '"logit_bias": @}',
    HELLO + '"metadata": @}',
    '{"max_tokens": 1, "messages": [{"role": "user", "content": @}]}',
    '{"max_tokens": 1, "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",'
    ' "arguments": {"a": @}}}]}]}',
]


@pytest.mark.parametrize("frame", DEEP)
def test_deep_json_is_refused_or_served(real: Client, frame: str) -> None:
    for depth in (190, 900, 5000):
        properties = '{"properties": {"a": ' * (depth // 2) + "{}" + "}}" * (depth // 2)
        for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, properties):
            raw = frame.replace("@", deep).encode()
            answer = asyncio.run(real.post("/v1/chat/completions", raw=raw))
            assert answer.status in (200, 400), (depth, answer.body)

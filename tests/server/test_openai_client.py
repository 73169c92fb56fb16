"""The openai package over a real socket: tools, reasoning, forms, log-probabilities, choices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

HERE = Path(__file__).parent
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine, FakeTemplate, FakeTokenizer
from leyline.server import ServerConfig, serve

def reply(prompt):
    asked = prompt.strip().split("\\n")[-1]
    call = '<tool_call>\\n{"name": "weather", "arguments": {"city": "%s"}}\\n</tool_call>'
    if "tool" in asked:
        return "It is warm there."
    if "weather" in asked:
        return "<think>Two of them.</think>" + "\\n".join(call % city for city in ("Rome", "Lima"))
    return '{"city": "Rome"}' if "city" in asked else "<think>Why not?</think>Hello!"

template = FakeTemplate('tools tool_calls <tool_call> {"arguments": <think>')
serve(FakeEngine(reply, tokenizer=FakeTokenizer(template)), ServerConfig(port=0, access_log=False))
"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-c", SCRIPT, str(HERE)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                yield client
        finally:
            server.kill()


def asking(text: str) -> Any:
    return {"model": "fake-model", "messages": [{"role": "user", "content": text}]}


def test_a_loop_with_tools(client: openai.OpenAI) -> None:
    body = asking("the weather?")
    first = client.chat.completions.create(**body, tools=[WEATHER])
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.model_extra == {
        "reasoning_content": "Two of them.",
        "reasoning": "Two of them.",
    }
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls if call.type == "function"] == [  # type: ignore[union-attr]
        '{"city": "Rome"}',
        '{"city": "Lima"}',
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in calls]
    messages = [*body["messages"], choice.message, *results]
    second = client.chat.completions.create(model="fake-model", messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "It is warm there."
    assert second.choices[0].finish_reason == "stop"


def test_the_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asking("the weather?"), tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "tool_calls.function.arguments.done"} <= kinds
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == [
        {"city": "Rome"},
        {"city": "Lima"},
    ]


def test_a_form_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**asking("a city"), response_format=City)
    assert answer.choices[0].message.parsed == City(city="Rome")
    with client.chat.completions.stream(**asking("a city"), response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(city="Rome")


def test_row_31_answers_are_what_the_packages_models_say(client: openai.OpenAI) -> None:
    fields: Any = {"n": 2, "logprobs": True, "top_logprobs": 2, "tools": [WEATHER], "seed": 1}
    for text in ("the weather?", "hello"):
        whole = client.chat.completions.with_raw_response.create(**asking(text), **fields)
        answer = ChatCompletion.model_validate_json(whole.http_response.content)
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert choice.logprobs is not None and choice.logprobs.content
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        stream = client.chat.completions.create(
            **asking(text), **fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = [ChatCompletionChunk.model_validate(chunk.to_dict()) for chunk in stream]
        assert chunks[-1].usage == answer.usage and chunks[-1].choices == []
    raw = client.completions.with_raw_response.create(
        model="fake-model", prompt="hello", logprobs=2, max_tokens=5, n=2
    )
    text = Completion.model_validate_json(raw.http_response.content)
    assert text.choices[1].logprobs is not None
    assert len(text.choices[1].logprobs.tokens or []) == 5


def test_row_41_streamed_fragments_belong_to_their_calls(client: openai.OpenAI) -> None:
    fragments: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        **asking("the weather?"), tools=[WEATHER], stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None and call.function.arguments is not None
            fragments[call.index] = fragments.get(call.index, "") + call.function.arguments
    assert fragments == {0: '{"city": "Rome"}', 1: '{"city": "Lima"}'}


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asking("x"), n=99)
    assert refused.value.param == "n" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        client.chat.completions.create(**asking("x" * 5000))
    assert long.value.code == "context_length_exceeded"

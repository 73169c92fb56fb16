"""What the server says it takes back, whatever a model wrote: as it is, and to the same tokens.

Clients send their whole history with every turn. A reply that is refused when it comes back ends
its conversation for good, and one that is told otherwise costs all of its cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline.server.parsers.choosing import choose
from leyline.template import INVALID, ChatTemplate
from tests.server.parsers.corpus import CASES, CUT, TOOLS, USE, Case
from tests.server.parsers.readings import read
from tests.test_real_templates import ASK, PUBLISHED, TOKENS
from tests.tiny_models import TEMPLATE

from .client import Answer, Client, over_engine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GLM = "glm-4.7-flash"
WRITERS = {
    "glm47": ("glm-4.5v", GLM, "glm-5.2"),
    "qwen3_coder": ("qwen-3.5", "qwen-3.6"),
    "deepseek_v3": ("deepseek-v3", "deepseek-v3.1"),
    "prompted": ("qwen-2.5", "qwen-3", ""),  # "" is of a model without a format of its own
}
TEMPLATES = {name: ChatTemplate(PUBLISHED[name], TOKENS) for names in WRITERS.values()
             for name in names if name} | {"": ChatTemplate(TEMPLATE, TOKENS)}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Lima"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
VISIT = {"name": "visit", "description": "x", "parameters": CITY}
DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
BROKEN = [
    '{"city": "Ro',  # cut by a limit
    '{"city": [1,, }',
    '{"city": Rome}',
    '"Rome"',
    "[1]",
    "5",
    "null",
    " ",
    "",
    '{"city": NaN, "city": 1e999}',
    '{"city": ' + "9" * 400 + "}",
    r'{"city": "\ud83d"}',  # half of a character, as an escape
    r'{"\udc00": ["\ud83d\ude42"]}',
    '{"a":' * 70 + "1" + "}" * 70,
]


def reply_of(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a client keeps of a reply, and the results of its calls."""
    said = read(case, [case.text])
    calls = [
        {"id": f"call_{at}", "type": "function",
         "function": {"name": name, "arguments": arguments.removesuffix(CUT)}}
        for at, (name, arguments) in enumerate(said.calls)
    ]  # fmt: skip
    message: dict[str, Any] = {"role": "assistant", "content": said.content or None}
    message |= {"reasoning_content": said.reasoning} if said.reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "12"} for one in calls]
    return message, results


@pytest.mark.parametrize("form", WRITERS)
def test_rows_34_and_44_whatever_a_model_wrote_its_template_takes_back(form: str) -> None:
    num_calls = 0
    for case in (case for case in CASES if case.form == form):
        message, results = reply_of(case)
        for name in WRITERS[form]:
            told = choose(PUBLISHED[name] if name else TEMPLATE).tool.prompted(
                [ASK, message, *results, ASK], USE
            )
            text = TEMPLATES[name].render(told, tools=list(TOOLS) if name else None)
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in text
                num_calls += 1
    assert num_calls > 10


def test_row_44_a_broken_call_is_told_as_what_it_is() -> None:
    """Not as a call without arguments, and not as none."""
    case = next(case for case in CASES if case.form == "glm47" and case.name == "cut in a string")
    message, results = reply_of(case)
    text = TEMPLATES[GLM].render([ASK, message, *results])
    assert f"<arg_key>{INVALID}</arg_key>" in text and "rm -rf" in text
    whole = {"name": "write", "arguments": '{"text": "rm -rf"}'}
    message["tool_calls"][0]["function"] = whole
    assert INVALID not in TEMPLATES[GLM].render([ASK, message, *results])


# -- over the three chat APIs and a real engine --------------------------------------------------


def served(folder: Path, **options: Any) -> Iterator[Client]:
    with over_engine(folder, kv_cache_tokens=8000, **options) as client:
        yield client


@pytest.fixture(scope="module")
def glm(
    tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A tiny model with the template of GLM-4.7, which walks over arguments."""
    template = tmp_path_factory.mktemp("template") / "glm.jinja"
    template.write_text(PUBLISHED[GLM], encoding="utf-8")
    yield from served(tiny_folder("v3"), chat_template=str(template))


@pytest.fixture(scope="module")
def plain(tiny_folder: Callable[[str], Path]) -> Iterator[Client]:
    """A tiny model whose template knows of no tools."""
    yield from served(tiny_folder("v3"))


def with_call(path: str, arguments: str) -> dict[str, Any]:
    """A conversation in which a call with such arguments was made and answered."""
    function = {"name": "visit", "arguments": arguments}
    if path == CHAT:
        call = {"id": "c1", "type": "function", "function": function}
        history = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        return {"messages": history, "max_tokens": 2}
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c1"} | function,
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    return {"input": items, "max_output_tokens": 2}


@pytest.mark.anyio
@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("kind, path", [("glm", CHAT), ("glm", RESPONSES), ("plain", CHAT)])
async def test_rows_22_and_34_broken_arguments_end_no_conversation(
    request: pytest.FixtureRequest, kind: str, path: str, arguments: str
) -> None:
    client: Client = request.getfixturevalue(kind)
    for stream in (False, True):
        answer = await client.post(path, with_call(path, arguments) | {"stream": stream})
        assert answer.status == 200, answer.body
        assert b"error" not in answer.body.replace(b'"error":null', b"")


@pytest.mark.anyio
@pytest.mark.parametrize("kind, path", [("glm", CHAT), ("glm", RESPONSES), ("plain", CHAT)])
async def test_arguments_deeper_than_any_stack_are_refused_for_their_length_alone(
    request: pytest.FixtureRequest, kind: str, path: str
) -> None:
    client: Client = request.getfixturevalue(kind)
    answer = await client.post(path, with_call(path, DEEP))
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"


@pytest.mark.anyio
async def test_what_messages_could_not_read_it_takes_back(glm: Client) -> None:
    """Its calls have objects; a broken one has the text that there was as its only value."""
    use = {"type": "tool_use", "id": "c1", "name": "visit", "input": {INVALID: '{"city": "Ro'}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "42"}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = await glm.post(MESSAGES, {"messages": messages, "max_tokens": 2})
    assert answer.status == 200, answer.body
    rendered = await glm.post(f"{CHAT}/render", with_call(CHAT, '{"city": "Ro'))
    assert f"<arg_key>{INVALID}</arg_key>" in rendered.json["prompt"]
    assert counted(answer)[0] == rendered.json["count"]  # the same prompt as of a chat


# -- to the same tokens --------------------------------------------------------------------------


def counted(answer: Answer) -> tuple[int, int, int]:
    """Tokens of the prompt, of them cached, and of the reply, in the words of any of the APIs."""
    usage = answer.json["usage"]
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], cached, usage["output_tokens"]


ODD = {"max_tokens": 30, "temperature": 2, "logit_bias": {"2": -100}}  # bytes that are no text


@pytest.mark.anyio
@pytest.mark.parametrize("fields", [
    ODD | {"seed": 1},
    ODD | {"seed": 2},
    {"tools": [{"type": "function", "function": VISIT}], "tool_choice": "required",
     "parallel_tool_calls": False, "max_tokens": 90, "seed": 3},
])  # fmt: skip
async def test_rows_34_and_55_a_chat_goes_on_from_its_own_tokens(
    plain: Client, fields: dict[str, Any]
) -> None:
    session = {"session_id": f"chat-{fields['seed']}"}
    history: list[dict[str, Any]] = [{"role": "user", "content": "in the land"}]
    told = 0
    for _ in range(3):
        answer = await plain.post(CHAT, fields | session | {"messages": history})
        assert answer.status == 200, answer.body
        prompt, cached, replied = counted(answer)
        assert cached >= told - 1  # the last token of a reply was not run through the model
        assert answer.json["usage"].get("first_difference") is None
        told = prompt + replied
        message = answer.json["choices"][0]["message"]
        history = [
            *history,
            message,
            *(
                {"role": "tool", "tool_call_id": one["id"], "content": "so"}
                for one in message.get("tool_calls", ())
            ),
            {"role": "user", "content": "and?"},
        ]


@pytest.mark.anyio
async def test_rows_34_and_55_a_response_goes_on_from_its_own_tokens(plain: Client) -> None:
    tool = {"type": "function"} | VISIT
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    first = await plain.post(RESPONSES, fields | {"input": "in the land"})
    call = first.json["output"][-1]
    assert json.loads(call["arguments"])["city"] in ("Rome", "Lima")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "so"}
    more = {"input": [result], "previous_response_id": first.json["id"]}
    second = await plain.post(RESPONSES, fields | more)
    assert second.status == 200, second.body
    prompt, _, replied = counted(first)
    assert counted(second)[1] >= prompt + replied - 1


@pytest.mark.anyio
async def test_rows_34_and_55_a_message_goes_on_from_its_own_tokens(plain: Client) -> None:
    tool = {"name": "visit", "input_schema": CITY}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"tools": [tool], "tool_choice": choice, "max_tokens": 90}
    asked = {"role": "user", "content": "in the land"}
    headers = {"x-claude-code-session-id": "messages"}
    first = await plain.post(MESSAGES, fields | {"messages": [asked]}, headers=headers)
    assert first.status == 200, first.body
    use = first.json["content"][-1]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "so"}
    history = [
        asked,
        {"role": "assistant", "content": first.json["content"]},
        {"role": "user", "content": [result]},
    ]
    second = await plain.post(MESSAGES, fields | {"messages": history}, headers=headers)
    assert second.status == 200, second.body
    prompt, _, replied = counted(first)
    assert counted(second)[1] >= prompt + replied - 1


@pytest.mark.anyio
async def test_a_reply_that_was_changed_is_not_taken_for_ones_own(plain: Client) -> None:
    """The twin: another word, and the cache ends in front of it."""
    session = {"session_id": "twin", "max_tokens": 30, "seed": 9, "logit_bias": {"2": -100}}
    asked = {"role": "user", "content": "in the land"}
    first = await plain.post(CHAT, session | {"messages": [asked]})
    prompt, _, _ = counted(first)
    other = {"role": "assistant", "content": "zzz"}
    history = [asked, other, {"role": "user", "content": "and?"}]
    second = await plain.post(CHAT, session | {"messages": history})
    assert counted(second)[1] <= prompt + 3

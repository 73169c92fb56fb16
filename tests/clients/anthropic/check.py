"""Anthropic's client for Python: messages, streams, tools, counting, context management."""

import anthropic
from setting import API_KEY, BASE_URL, MODEL, saw

client = anthropic.Anthropic(base_url=BASE_URL, api_key=API_KEY)
GREEDY = {"temperature": 0}  # no field of the client's own any more
ONE = {"type": "any", "disable_parallel_tool_use": True}
ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Lima"]}},
        "required": ["city"],
    },
}

message = client.messages.create(model=MODEL, max_tokens=20, messages=ASK, extra_body=GREEDY)
saw("messages.create", "Paris" in message.content[0].text)
with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK, extra_body=GREEDY) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
saw("messages.stream says the same", text == message.content[0].text)
saw("with usage", final.usage.output_tokens == message.usage.output_tokens)
called = client.messages.create(
    model=MODEL, max_tokens=100, messages=ASK, tools=[WEATHER], tool_choice=ONE
)
use = next(block for block in called.content if block.type == "tool_use")
saw("a tool use", use.input["city"] in ("Paris", "Lima") and called.stop_reason == "tool_use")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
history = [
    *ASK,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
answered = client.messages.create(model=MODEL, max_tokens=20, messages=history, tools=[WEATHER])
saw("a tool result is answered", answered.stop_reason in ("end_turn", "max_tokens", "tool_use"))
count = client.messages.count_tokens(model=MODEL, messages=ASK)
saw(
    "count_tokens",
    count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
)
long = []
for number in range(4):
    block = {"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather"}
    long.append({"role": "user", "content": f"Round {number}."})
    long.append({"role": "assistant", "content": [block | {"input": {"city": "Lima"}}]})
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "rain " * 60}
    long.append({"role": "user", "content": [result]})
edited = client.beta.messages.create(
    model=MODEL,
    max_tokens=8,
    messages=long,
    tools=[WEATHER],
    betas=["context-management-2025-06-27"],
    context_management={
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 100},
                "keep": {"type": "tool_uses", "value": 1},
            }
        ]
    },
)
applied = edited.context_management.applied_edits[0]
saw("context_management", applied.cleared_tool_uses == 3)
try:
    client.messages.create(model="another", max_tokens=1, messages=ASK)
except anthropic.NotFoundError as error:
    saw("an unknown model is a NotFoundError", error.body["error"]["type"] == "not_found_error")

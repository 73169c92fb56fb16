"""litellm, as an OpenAI server and as a hosted vLLM."""

import json

import litellm
from setting import API_KEY, MODEL, V1, WEATHER, saw

ASK = [{"role": "user", "content": "What is the capital of France?"}]

for provider in ("openai", "hosted_vllm"):
    where = {"model": f"{provider}/{MODEL}", "api_base": V1, "api_key": API_KEY}
    answer = litellm.completion(messages=ASK, temperature=0, max_tokens=20, **where)
    saw(f"{provider}: completion", "Paris" in answer.choices[0].message.content)
    stream = litellm.completion(messages=ASK, temperature=0, max_tokens=20, stream=True, **where)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    saw(f"{provider}: a stream says the same", text == answer.choices[0].message.content)
    called = litellm.completion(messages=ASK, tools=[WEATHER], tool_choice="required", **where)
    call = called.choices[0].message.tool_calls[0]
    saw(f"{provider}: a tool call", json.loads(call.function.arguments)["city"])

"""The OpenAI client for Python: chat, streams, tools, parsed output, responses, directives."""

import json

import openai
from pydantic import BaseModel
from setting import API_KEY, MODEL, V1, WEATHER, saw

client = openai.OpenAI(base_url=V1, api_key=API_KEY)
ASK = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """What parsed output must be."""

    name: str
    inhabitants: int


saw("models.list", [model.id for model in client.models.list()] == [MODEL])
chat = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=20)
saw("chat", "Paris" in chat.choices[0].message.content)
stream = client.chat.completions.create(
    model=MODEL,
    messages=ASK,
    temperature=0,
    max_tokens=20,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
saw("a stream says the same", text == chat.choices[0].message.content)
details = chunks[-1].usage.prompt_tokens_details
saw("usage with cached tokens at the end of a stream", details.cached_tokens > 0)
called = client.chat.completions.create(
    model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", temperature=0
)
call = called.choices[0].message.tool_calls[0]
saw("a required tool call", json.loads(call.function.arguments)["city"] in ("Paris", "Lima"))
saw("finish_reason tool_calls", called.choices[0].finish_reason == "tool_calls")
after = [
    *ASK,
    called.choices[0].message,
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
answered = client.chat.completions.create(
    model=MODEL, messages=after, tools=[WEATHER], max_tokens=20
)
saw("a tool's result is answered", answered.choices[0].message.content is not None)
with client.chat.completions.stream(
    model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", temperature=0
) as events:
    kinds = {event.type for event in events}
    final = events.get_final_completion()
saw("the stream helper", "tool_calls.function.arguments.done" in kinds)
saw("and what it put together", final.choices[0].message.tool_calls[0].function.name)
parsed = client.chat.completions.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "Describe Paris in JSON."}],
    response_format=City,
    temperature=0,
    max_tokens=200,
)
saw("parse with a schema", isinstance(parsed.choices[0].message.parsed, City))
likely = client.chat.completions.create(
    model=MODEL, messages=ASK, logprobs=True, top_logprobs=3, max_tokens=4, n=2, seed=1
)
saw("n = 2 with logprobs", all(len(c.logprobs.content) == 4 for c in likely.choices))
done = client.completions.create(
    model=MODEL, prompt="One, two,", max_tokens=1, echo=True, logprobs=1
)
saw("completions with echo", done.choices[0].logprobs.token_logprobs[0] is None)
response = client.responses.create(
    model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0
)
saw("responses.create", response.output_text)
following = client.responses.create(
    model=MODEL, input="Again.", previous_response_id=response.id, max_output_tokens=16
)
saw("previous_response_id", following.usage.input_tokens_details.cached_tokens > 0)
with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=16) as events:
    kinds = [event.type for event in events]
saw("responses.stream", kinds[0] == "response.created" and "response.output_text.delta" in kinds)
try:
    client.chat.completions.create(model="another", messages=ASK)
except openai.NotFoundError as error:
    saw("an unknown model is a NotFoundError", error.body["code"] == "model_not_found")
try:
    openai.OpenAI(base_url=V1, api_key="wrong", max_retries=0).models.list()
except openai.AuthenticationError as error:
    saw("a wrong key is an AuthenticationError", error.body["code"] == "invalid_api_key")
LONG = [
    {"role": "user", "content": "Remember the word owl, and that the sky is blue."},
]
first = client.chat.completions.create(
    model=MODEL, messages=LONG, max_tokens=16, temperature=0, extra_body={"session_id": "check"}
)
receipt = client.post(
    "/directives",
    body={
        "session_id": "check",
        "directives": [{"match": ", and that the sky is blue", "mode": "amortize"}],
    },
    cast_to=object,
)
saw("a directive through client.post", receipt["receipts"][0]["removed"] > 0)

"""LangChain's agent with its own context editing, on top of sessions."""

from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from setting import API_KEY, MODEL, V1, saw


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: " + "rain and more rain, " * 40


model = ChatOpenAI(
    model=MODEL,
    base_url=V1,
    api_key=API_KEY,
    temperature=0,
    max_tokens=160,
    extra_body={"session_id": "langchain", "edit_mode": "amortize"},
)
saw("invoke", model.invoke("What is the capital of France?").content)
forced = model.bind_tools([get_weather], tool_choice="get_weather")
call = forced.invoke("What is the weather in Lima?").tool_calls[0]
saw("a named tool call", call["name"] == "get_weather" and "city" in call["args"])
streaming = ChatOpenAI(model=MODEL, base_url=V1, api_key=API_KEY, max_tokens=8, stream_usage=True)
chunks = list(streaming.stream("Say hello."))
saw("stream with usage", chunks[-1].usage_metadata or chunks[-2].usage_metadata)
editing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=100, keep=1)])
agent = create_agent(model, [get_weather], middleware=[editing])
history = []
for city in ("Lima", "Oslo", "Rome"):
    asked = {"id": f"call_{city}", "name": "get_weather", "args": {"city": city}}
    history += [
        ("user", f"What is the weather in {city}?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": asked["id"],
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": asked["id"],
            "content": get_weather.invoke({"city": city}),
        },
    ]
result = agent.invoke(
    {"messages": [*history, ("user", "Where does it rain?")]}, {"recursion_limit": 6}
)
saw("an agent with ContextEditingMiddleware", result["messages"][-1].content is not None)

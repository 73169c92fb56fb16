"""The OpenAI Agents SDK, over responses and over chat."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from setting import API_KEY, MODEL, V1, saw

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=V1, api_key=API_KEY)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    agent = Agent(
        name="Guide",
        instructions="Answer briefly.",
        tools=[get_weather],
        model=kind(MODEL, client),
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200
        ),
    )
    before = len(asked)
    result = Runner.run_sync(agent, "What is the weather in Lima?", max_turns=4)
    saw(f"{kind.__name__}: a tool was run and answered", len(asked) > before)
    saw(f"{kind.__name__}: a final output", isinstance(result.final_output, str))

"""Pydantic AI: text, a tool, and an output that is a model."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from setting import API_KEY, MODEL, V1, saw


class City(BaseModel):
    """The output."""

    name: str
    large: bool


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key=API_KEY))
settings = {"temperature": 0, "max_tokens": 120}
text = Agent(model).run_sync("What is the capital of France?", model_settings=settings)
saw("text", "Paris" in text.output)
again = Agent(model).run_sync("What is the capital of France?", model_settings=settings)
saw("cached tokens", again.usage().cache_read_tokens > 0)
made = Agent(model, output_type=City).run_sync("Describe Paris.", model_settings=settings)
saw("an output that is a model", isinstance(made.output, City))

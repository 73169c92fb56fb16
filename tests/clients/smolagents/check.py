"""smolagents: a model, and an agent that calls a tool."""

from setting import API_KEY, MODEL, V1, saw
from smolagents import OpenAIModel, ToolCallingAgent

model = OpenAIModel(model_id=MODEL, api_base=V1, api_key=API_KEY, temperature=0, max_tokens=60)
ask = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
saw("generate, with parts and stops", model.generate(ask, stop_sequences=["Observation:"]).content)
agent = ToolCallingAgent(tools=[], model=model, max_steps=2, instructions="Answer at once.")
answer = agent.run("What is the capital of France?")
saw("an agent that ends with final_answer", answer is not None)

// The OpenAI client for Node: chat, streams with usage, tools.
import OpenAI from "openai";

const { LEYLINE_URL, LEYLINE_API_KEY, LEYLINE_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${LEYLINE_URL}/v1`, apiKey: LEYLINE_API_KEY });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const saw = (what, holds = true) => {
  if (!holds) throw new Error(`failed: ${what}`);
  console.log(`saw: ${what}`);
};
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      parameters: {
        type: "object",
        properties: { city: { enum: ["Paris", "Lima"] } },
        required: ["city"],
      },
    },
  },
];

const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 20 });
saw("chat", chat.choices[0].message.content.includes("Paris"));
const stream = await client.chat.completions.create({
  model, messages, temperature: 0, max_tokens: 20, stream: true, stream_options: { include_usage: true },
});
let text = "", usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
saw("a stream says the same", text === chat.choices[0].message.content);
saw("usage", usage.prompt_tokens_details.cached_tokens > 0);
const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", temperature: 0 });
const final = await runner.finalChatCompletion();
saw("a tool call", JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).city);
const response = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 16 });
saw("responses.create", response.output_text.length > 0);

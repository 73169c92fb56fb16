// The AI SDK with its OpenAI-compatible provider: text, streams, a tool, an object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const { LEYLINE_URL, LEYLINE_API_KEY, LEYLINE_MODEL } = process.env;
const provider = createOpenAICompatible({
  name: "leyline", baseURL: `${LEYLINE_URL}/v1`, apiKey: LEYLINE_API_KEY, includeUsage: true,
});
const model = provider(LEYLINE_MODEL);
const prompt = "What is the capital of France?";
const saw = (what, holds = true) => {
  if (!holds) throw new Error(`failed: ${what}`);
  console.log(`saw: ${what}`);
};

const whole = await generateText({ model, prompt, temperature: 0, maxOutputTokens: 20 });
saw("generateText", whole.text.includes("Paris"));
const stream = streamText({ model, prompt, temperature: 0, maxOutputTokens: 20 });
let text = "";
for await (const piece of stream.textStream) text += piece;
saw("streamText says the same", text === whole.text);
const usage = await stream.usage;
saw("cached tokens", (usage.cachedInputTokens ?? usage.inputTokenDetails?.cacheReadTokens) > 0);
const called = streamText({
  model, prompt, temperature: 0, toolChoice: "required",
  tools: {
    get_weather: tool({
      description: "The weather of a city.",
      inputSchema: jsonSchema({
        type: "object", properties: { city: { enum: ["Paris", "Lima"] } }, required: ["city"],
      }),
    }),
  },
});
const calls = await called.toolCalls;
saw("a streamed tool call", calls[0].toolName === "get_weather" && calls[0].input.city);

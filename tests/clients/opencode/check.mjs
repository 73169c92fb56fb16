// opencode: one question through its own agent, with tools in the request.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { LEYLINE_URL, LEYLINE_API_KEY, LEYLINE_MODEL: model, LEYLINE_NODE_BIN } = process.env;
const folder = mkdtempSync(join(tmpdir(), "opencode-"));
writeFileSync(
  join(folder, "opencode.json"),
  JSON.stringify({
    $schema: "https://opencode.ai/config.json",
    autoupdate: false,
    share: "disabled",
    provider: {
      leyline: {
        npm: "@ai-sdk/openai-compatible",
        name: "Leyline",
        options: { baseURL: `${LEYLINE_URL}/v1`, apiKey: LEYLINE_API_KEY },
        models: { [model]: { name: model, limit: { context: 8192, output: 64 } } },
      },
    },
    agent: {
      build: {
        prompt: "Answer in one sentence.",
        tools: {
          bash: false, edit: false, write: false, task: false, todowrite: false, todoread: false,
          webfetch: false, skill: false, grep: false, glob: false, patch: false,
        },
      },
    },
  }),
);
const done = spawnSync(
  join(LEYLINE_NODE_BIN, "opencode"),
  ["run", "--print-logs", "--model", `leyline/${model}`, "What is the capital of France?"],
  { cwd: folder, encoding: "utf8", timeout: 240_000, env: { ...process.env, HOME: folder, PWD: folder, XDG_CONFIG_HOME: folder, OPENCODE_CONFIG: join(folder, "opencode.json"), OPENCODE_DISABLE_MODELS_FETCH: "1" } },
);
console.log(done.stdout.slice(-1500), done.stderr.slice(-3000));
if (done.status !== 0 || !done.stdout.trim()) throw new Error(`failed: exit ${done.status}`);
console.log("saw: a question through its agent");

// codex: `codex exec` over /v1/responses.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { LEYLINE_URL, LEYLINE_MODEL: model, LEYLINE_NODE_BIN } = process.env;
const folder = mkdtempSync(join(tmpdir(), "codex-"));
writeFileSync(join(folder, "instructions.md"), "You are a helpful assistant. Answer in one sentence.\n");
writeFileSync(
  join(folder, "config.toml"),
  `model = "${model}"
model_provider = "leyline"
model_context_window = 8192
model_instructions_file = "${join(folder, "instructions.md")}"
check_for_update_on_startup = false

[model_providers.leyline]
name = "Leyline"
base_url = "${LEYLINE_URL}/v1"
env_key = "LEYLINE_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
`,
);
const done = spawnSync(
  join(LEYLINE_NODE_BIN, "codex"),
  ["exec", "--skip-git-repo-check", "--sandbox", "read-only", "What is the capital of France?"],
  { cwd: folder, encoding: "utf8", timeout: 240_000, env: { ...process.env, HOME: folder, CODEX_HOME: folder }, input: "" },
);
console.log(done.stdout.slice(-1500), done.stderr.slice(-2500));
if (done.status !== 0 || !done.stdout.trim()) throw new Error(`failed: exit ${done.status}`);
console.log("saw: codex exec answered over /v1/responses");

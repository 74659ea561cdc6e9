// The command line `promptfoo`: an evaluation by each provider that speaks to an OpenAI- or Anthropic-like server.
import { execFile } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { promisify } from "node:util";
import { SCHEMA, assert, run } from "./checks.mjs";

const QUIET = { PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_DISABLE_SHARING: "1" };

// Each test passes by promptfoo's own count.
async function evaluated(name, provider, config, assertion = { type: "javascript", value: "output.length > 0" }) {
  const written = {
    prompts: ["The weather in {{city}}?"],
    providers: [{ id: provider, config: { apiKey: "none", max_tokens: 60, ...config } }],
    tests: ["Paris", "Oslo"].map((city) => ({ vars: { city }, assert: [assertion] })),
  };
  writeFileSync(`${name}.json`, JSON.stringify(written));
  const words = ["eval", "--config", `${name}.json`, "--output", `${name}-out.json`, "--no-cache", "--no-table"];
  const options = { env: { ...process.env, ...QUIET }, timeout: 200_000 };
  const ended = promisify(execFile)("promptfoo", words, options);
  ended.child.stdin.end();
  const said = await ended.catch((error) => error);
  const { stats, results } = JSON.parse(readFileSync(`${name}-out.json`)).results;
  assert(stats.successes === 2, `${results[0].error} ${said.stderr}`);
}

await run("promptfoo", {
  async chat(at) {
    await evaluated("chat", `openai:chat:${at.model}`, { apiBaseUrl: at.v1 });
  },
  async completion(at) {
    await evaluated("completion", `openai:completion:${at.model}`, { apiBaseUrl: at.v1 });
  },
  async responses(at) {
    await evaluated("responses", `openai:responses:${at.model}`, { apiBaseUrl: at.v1 });
  },
  async structured(at) {
    const response_format = { type: "json_schema", json_schema: { name: "place", schema: SCHEMA, strict: true } };
    const valid = { type: "is-json", value: SCHEMA };
    await evaluated("structured", `openai:chat:${at.model}`, { apiBaseUrl: at.v1, response_format }, valid);
  },
  async anthropic(at) {
    await evaluated("anthropic", `anthropic:messages:${at.model}`, { apiBaseUrl: at.url });
  },
});

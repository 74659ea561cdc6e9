// What the clients' programs share. A check is a function of `at` that throws; `run` prints one JSON line.
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
export const QUESTION = "What is the weather in Paris?";

export function assert(holds, words = "did not hold") {
  if (!holds) throw new Error(words);
}

export function isCity(value) {
  const found = typeof value === "string" ? JSON.parse(value) : value;
  assert(SCHEMA.properties.city.enum.includes(found?.city), JSON.stringify(value));
}

export async function run(name, checks) {
  const { positionals, values } = parseArgs({ options: { sense: { type: "boolean" } }, allowPositionals: true });
  const [url, model] = positionals;
  const at = { url, model, v1: `${url}/v1`, sense: Boolean(values.sense) };
  const passed = [];
  const failed = {};
  for (const [check, work] of Object.entries(checks)) {
    try {
      await work(at);
      passed.push(check);
    } catch (error) {
      console.error(error);
      failed[check] = `${error.name}: ${error.message}`.slice(0, 400);
    }
  }
  const place = new URL(`./node_modules/${name}/package.json`, import.meta.url);
  console.log(JSON.stringify({ version: JSON.parse(readFileSync(place)).version, passed, failed }));
}

// Vercel's AI SDK with its providers for OpenAI (Responses by default), OpenAI-compatible servers and Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import { QUESTION, SCHEMA, assert, isCity, run } from "./checks.mjs";

const openai = (at) => createOpenAI({ baseURL: at.v1, apiKey: "none" })(at.model);
const compatible = (at) =>
  createOpenAICompatible({ name: "attar", baseURL: at.v1, supportsStructuredOutputs: true })(at.model);
const anthropic = (at) => createAnthropic({ baseURL: at.v1, apiKey: "none" })(at.model);
const short = { prompt: QUESTION, maxOutputTokens: 100, maxRetries: 0 };
const tools = { weather: tool({ description: "Tell the weather.", inputSchema: jsonSchema(SCHEMA) }) };
const forced = { tools, toolChoice: { type: "tool", toolName: "weather" } };

const checks = {};
for (const [name, model] of Object.entries({ openai, compatible, anthropic })) {
  checks[`${name}_chat`] = async (at) => assert((await generateText({ model: model(at), ...short })).text);
  checks[`${name}_stream`] = async (at) => {
    let text = "";
    for await (const part of streamText({ model: model(at), ...short }).textStream) text += part;
    assert(text);
  };
  checks[`${name}_tools`] = async (at) =>
    isCity((await generateText({ model: model(at), ...short, ...forced })).toolCalls[0].input);
  if (name === "anthropic") continue; // its provider asks for structured output by a tool of its own
  checks[`${name}_structured`] = async (at) => {
    const output = Output.object({ schema: jsonSchema(SCHEMA) });
    isCity((await generateText({ model: model(at), ...short, output })).output);
  };
}
await run("ai", checks);

// Anthropic's JavaScript library.
import Anthropic from "@anthropic-ai/sdk";
import { QUESTION, SCHEMA, assert, isCity, run } from "./checks.mjs";

const made = (at) => new Anthropic({ baseURL: at.url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const tools = [{ name: "weather", description: "Tell the weather.", input_schema: SCHEMA }];
const tool_choice = { type: "tool", name: "weather" };

await run("@anthropic-ai/sdk", {
  async chat(at) {
    assert((await made(at).messages.create({ model: at.model, messages, max_tokens: 8 })).content[0].text);
  },
  async stream(at) {
    const final = await made(at).messages.stream({ model: at.model, messages, max_tokens: 8 }).finalMessage();
    assert(final.content[0].text);
  },
  async counting(at) {
    assert((await made(at).messages.countTokens({ model: at.model, messages })).input_tokens > 0);
  },
  async tools(at) {
    const answer = await made(at).messages.create({ model: at.model, messages, tools, tool_choice, max_tokens: 100 });
    isCity(answer.content.find((each) => each.type === "tool_use").input);
  },
  async tools_streamed(at) {
    const options = { model: at.model, messages, tools, tool_choice, max_tokens: 100 };
    const answer = await made(at).messages.stream(options).finalMessage();
    isCity(answer.content.find((each) => each.type === "tool_use").input);
  },
});

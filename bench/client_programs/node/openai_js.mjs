// OpenAI's JavaScript library.
import OpenAI from "openai";
import { QUESTION, SCHEMA, assert, isCity, run } from "./checks.mjs";

const made = (at) => new OpenAI({ baseURL: at.v1, apiKey: "none", maxRetries: 0 });
const said = [{ role: "user", content: QUESTION }];
const weather = { type: "function", function: { name: "weather", parameters: SCHEMA, strict: true } };
const form = { type: "json_schema", json_schema: { name: "place", schema: SCHEMA, strict: true } };

await run("openai", {
  async chat(at) {
    const answer = await made(at).chat.completions.create({ model: at.model, messages: said, max_tokens: 8 });
    assert(answer.choices[0].message.content);
  },
  async stream(at) {
    const stream = await made(at).chat.completions.create({ model: at.model, messages: said, max_tokens: 8, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert(text);
  },
  async embeddings(at) {
    assert((await made(at).embeddings.create({ model: at.model, input: ["a", "b"] })).data.length === 2);
  },
  async structured(at) {
    const options = { model: at.model, messages: said, max_tokens: 100, response_format: form };
    isCity((await made(at).chat.completions.parse(options)).choices[0].message.parsed);
  },
  async tools(at) {
    const called = [];
    const described = { ...weather.function, function: (args) => called.push(args) && "rain", parse: JSON.parse };
    const runner = made(at).chat.completions.runTools({
      model: at.model, messages: said, max_tokens: 100, parallel_tool_calls: false,
      tool_choice: { type: "function", function: { name: "weather" } }, tools: [{ type: "function", function: described }],
    });
    await runner.done();
    isCity(called[0]);
  },
  async responses(at) {
    const answer = await made(at).responses.create({ model: at.model, input: QUESTION, max_output_tokens: 50 });
    assert(answer.output_text);
    const events = [];
    const options = { model: at.model, input: QUESTION, max_output_tokens: 50, stream: true };
    for await (const event of await made(at).responses.create(options)) events.push(event.type);
    assert(["response.completed", "response.incomplete"].includes(events.at(-1)), events.at(-1));
  },
});

// Ollama's JavaScript library.
import { Ollama } from "ollama";
import { QUESTION, SCHEMA, assert, isCity, run } from "./checks.mjs";

const made = (at) => new Ollama({ host: at.url });
const messages = [{ role: "user", content: QUESTION }];
const options = { num_predict: 8 };

await run("ollama", {
  async chat(at) {
    assert((await made(at).chat({ model: at.model, messages, options })).message.content);
  },
  async stream(at) {
    let last;
    for await (const part of await made(at).chat({ model: at.model, messages, options, stream: true })) last = part;
    assert(last.done);
  },
  async generate(at) {
    assert((await made(at).generate({ model: at.model, prompt: "Once", options })).response);
  },
  async embed(at) {
    assert((await made(at).embed({ model: at.model, input: ["a", "b"] })).embeddings.length === 2);
  },
  async models(at) {
    assert((await made(at).list()).models.some((each) => each.model === at.model));
    assert((await made(at).show({ model: at.model })).details);
  },
  async structured(at) {
    const answer = await made(at).chat({ model: at.model, messages, format: SCHEMA, options: { num_predict: 100 } });
    isCity(answer.message.content);
  },
});

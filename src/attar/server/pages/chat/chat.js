// The conversation. `chat.items` are its messages as the server takes them, each with what the page alone knows: `note`
// (figures), `thought` (reasoning), and `plain` (text that is no Markdown).
const $ = id => document.getElementById(id), talk = $("talk");
const knobs = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const kept = [...knobs, "system", "schema", "tools"]; // options that outlive the page; the API key does not
const EXAMPLES = [
  "Explain what a KV cache is, in three sentences.", "Write a Python function that merges two sorted lists, with a test.",
  "Compare int8 and int4 weights in a table.", "Tell a short story about a lighthouse keeper.",
];
let chat = fresh(), running = null, model = "", chats = true; // chats: as far as is known, the model has a chat template
let images = []; // data URLs of the next message
let edited = null; // the message that the next one replaces
let listed = false, wanted = ""; // wanted: the model of the last visit to this tab

function fresh() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), at: Date.now(), title: "", items: [] };
}

const headers = () => ({ "Content-Type": "application/json", ...($("key").value && { Authorization: "Bearer " + $("key").value }) });

// Why there is no answer. A page without a key asks for one: what the server says is for programs.
async function failure(response) {
  if (response.status === 401) {
    $("login").hidden = false;
    return new Error("This server asks for an API key: fill it in on this page.");
  }
  const { message, code } = (await response.json()).error;
  return Object.assign(new Error(message), { code });
}

async function copy(text, button) {
  const label = button.textContent;
  let done = true;
  try { await navigator.clipboard.writeText(text); } catch { // only secure pages have a clipboard
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

// The view follows an answer only from the end of the conversation: a reader who has scrolled back stays there.
function follow(change, always) {
  const near = talk.scrollHeight - talk.clientHeight - talk.scrollTop < 4; // heights are rounded, scrollTop is not
  change();
  if (near || always) talk.scrollTop = talk.scrollHeight;
}

function turn(kind, ...children) {
  const made = make("div", { className: "turn " + kind }, ...children);
  follow(() => talk.append(made), kind === "user" || kind === "assistant");
  return made;
}

const textOf = ({ content }) =>
  typeof content === "string" ? content : (content || []).filter(each => each.type === "text").map(each => each.text).join("\n");
const imagesOf = ({ content }) => (Array.isArray(content) ? content.filter(each => each.type === "image_url").map(each => each.image_url.url) : []);

function content(text, shown) {
  if (!shown.length) return text;
  return [...shown.map(url => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])];
}

function call({ function: { name, arguments: given } }) {
  return make("div", { className: "call" }, make("p", { textContent: visible(`Calls ${name}`) }), json(structured(given) ?? given));
}

function result({ content, tool_call_id }) {
  const made = chat.items.flatMap(each => each.tool_calls || []).find(each => each.id === tool_call_id), found = structured(content);
  const title = make("p", { textContent: visible(`Result of ${made ? made.function.name : "a tool"}`) });
  return [title, found ? json(found) : make("div", { textContent: visible(content) })];
}

function thought(text) {
  const words = make("div", { textContent: visible(text) });
  return [make("details", { className: "thought" }, make("summary", { textContent: "Reasoning" }), words), words];
}

// An answer as a whole.
function body(item) {
  const text = textOf(item), found = structured(text), shown = make("div", { className: "md" });
  if (item.plain) return [visible(text)];
  if (found) shown.append(json(found));
  else new Markdown(shown).write(text);
  return [...(item.thought ? [thought(item.thought)[0]] : []), ...(text ? [shown] : []), ...(item.tool_calls || []).map(call)];
}

function act(name, work, className = "") {
  const button = make("button", { type: "button", textContent: name, className });
  button.addEventListener("click", () => work(button));
  return button;
}

// The line below a message: what can be done with it, and its figures.
function acts(item) {
  const own = item.role === "user", made = make("div", { className: own ? "acts own" : "acts" });
  if (textOf(item)) made.append(act("Copy", button => copy(textOf(item), button)));
  if (own) made.append(act("Edit", () => edit(item)));
  else made.append(act("Regenerate", again, "again"));
  if (item.note) made.append(make("span", { className: "note", textContent: item.note }));
  follow(() => talk.append(made));
}

const onlyLastAgain = () => [...talk.querySelectorAll(".again")].forEach(each => each.remove());

function add(item) {
  onlyLastAgain();
  if (item.role === "tool") return turn("tool", ...result(item));
  const pictures = imagesOf(item).map(src => Object.assign(new Image(), { src, alt: "an image of this message" }));
  const made = turn(item.role + (item.plain ? " plain" : ""), ...(item.role === "user" ? [...pictures, visible(textOf(item))] : body(item)));
  acts(item);
  return made;
}

function redraw() {
  talk.replaceChildren();
  chat.items.forEach(add);
  welcome();
  talk.scrollTop = talk.scrollHeight;
  compose();
}

function welcome() {
  const there = talk.querySelector(".empty");
  if (there || talk.children.length) { if (there && talk.children.length > 1) there.remove(); return; }
  const examples = EXAMPLES.map(text => act(text, () => { if (!running) { $("text").value = text; $("ask").requestSubmit(); } }));
  const hint = "Enter sends, Shift+Enter begins a line, Escape stops. The panel shows the engine while it works.";
  talk.append(make("div", { className: "empty" }, make("h2", { textContent: "Ask the model" }), make("p", { textContent: hint }), make("div", {}, ...examples)));
}

// Calls of the last answer that have no result yet.
function openCalls() {
  const last = chat.items.findLastIndex(each => each.role === "assistant");
  const calls = last < 0 ? [] : chat.items[last].tool_calls || [], given = chat.items.slice(last + 1);
  return given.some(each => each.role === "user") ? [] : calls.filter(each => !given.some(({ tool_call_id }) => tool_call_id === each.id));
}

function compose() {
  const [next] = edited ? [] : openCalls();
  $("text").placeholder = next ? `Result of ${visible(next.function.name)}` : chats ? "Message" : "Text to continue";
  $("editing").hidden = !edited;
}

function edit(item) {
  if (running) return;
  edited = item;
  $("text").value = textOf(item);
  images = imagesOf(item);
  show();
  compose();
  $("text").focus();
}

function unedit() {
  if (!edited) return;
  edited = null; images = [];
  $("text").value = "";
  show();
  compose();
}

// Images come by the button, pasted or dropped. The server decides what it takes; a press on one takes it back.
function show() {
  $("images").replaceChildren(...images.map((src, at) => {
    const button = act("", () => { images.splice(at, 1); show(); $("text").focus(); });
    button.setAttribute("aria-label", `Remove image ${at + 1}`);
    button.append(Object.assign(new Image(), { src, alt: "" }));
    return button;
  }));
}

function attach(files) {
  if ($("attach").hidden) return false;
  const found = [...files].filter(file => file.type.startsWith("image/"));
  for (const file of found) {
    const reader = new FileReader();
    reader.onload = () => { images.push(reader.result); show(); };
    reader.readAsDataURL(file);
  }
  return found.length > 0;
}

function parsed(name, label) {
  const text = $(name).value.trim();
  if (!text) return null;
  try { return JSON.parse(text); } catch (error) { throw new Error(`${label} is not JSON: ${error.message}`); }
}

// A model without a chat template continues the text so far.
function request(items) {
  const name = $("models").value || model, found = {};
  for (const knob of knobs) if ($(knob).value !== "") found[knob] = Number($(knob).value);
  const common = { ...(name && { model: name }), stream: true, stream_options: { include_usage: true }, ...found };
  if (!chats) {
    const prompt = items.reduce((sum, each) => sum + (sum && each.role === "user" ? "\n" : "") + textOf(each), "");
    return { max_tokens: 256, ...common, prompt };
  }
  const schema = parsed("schema", "The schema"), tools = parsed("tools", "The list of tools");
  const messages = items.map(({ role, content, tool_calls, tool_call_id }) =>
    ({ role, content, ...(tool_calls && { tool_calls }), ...(tool_call_id && { tool_call_id }) }));
  if ($("system").value) messages.unshift({ role: "system", content: $("system").value });
  return {
    ...common, messages, ...(tools && { tools }),
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
  };
}

async function begun(items, signal) {
  for (;;) {
    const path = chats ? "v1/chat/completions" : "v1/completions";
    const response = await fetch(path, { method: "POST", headers: headers(), signal, body: JSON.stringify(request(items)) });
    if (response.ok) return response;
    const error = await failure(response);
    if (error.code !== "no_chat_template" || !chats) throw error;
    chats = false;
    compose();
  }
}

// Events of a stream, whose bytes come in pieces that end anywhere.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

// An answer while it comes. What came since the last frame is drawn at once.
class Live {
  constructor() {
    this.node = turn("assistant");
    this.item = { role: "assistant", content: "", ...(!chats && { plain: true }) };
    this.fresh = this.reasoned = ""; // what is not drawn yet
    this.waits = false;
  }

  take({ delta, text }) {
    const more = delta ? delta.content : text, { item } = this;
    if (!delta) item.plain = true;
    for (const { index, id, function: part } of (delta && delta.tool_calls) || []) {
      const calls = item.tool_calls ??= [], each = calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
      each.function.name += part.name || "";
      each.function.arguments += part.arguments || "";
    }
    const reasoned = delta && delta.reasoning_content;
    if (reasoned) { item.thought = (item.thought || "") + reasoned; this.reasoned += reasoned; }
    if (more) { item.content += more; this.fresh += more; }
    if ((reasoned || more) && !this.waits) {
      this.waits = true;
      requestAnimationFrame(() => { this.waits = false; this.draw(); });
    }
    return Boolean(more || reasoned || (delta && delta.tool_calls));
  }

  draw() {
    follow(() => {
      const { item, node } = this;
      if (this.reasoned && !this.words) {
        const [box, words] = thought("");
        node.append(box);
        this.words = words;
      }
      if (this.reasoned) this.words.append(visible(this.reasoned));
      this.reasoned = "";
      if (!this.fresh) return;
      if (item.plain) { node.classList.add("plain"); node.append(visible(this.fresh)); }
      else {
        if (!this.text) { node.append(make("div", { className: "md" })); this.text = new Markdown(node.lastChild); }
        this.text.write(this.fresh);
      }
      this.fresh = "";
    });
  }

  // What it is in the end: the item, or null where nothing came.
  end() {
    const { item, node } = this;
    if (item.tool_calls) item.tool_calls = item.tool_calls.filter(Boolean);
    this.draw();
    if (item.content || item.tool_calls || item.thought) {
      if (item.tool_calls || (!item.plain && structured(item.content))) follow(() => node.replaceChildren(...body(item)));
      return item;
    }
    node.remove();
    return null;
  }
}

// Ask for the answer to chat.items. Where nothing comes, the items are again those of `back`, and so is what was typed.
async function ask(back) {
  const asked = chat, here = () => chat === asked;
  const last = talk.lastElementChild;
  if (last) last.scrollIntoView({ block: "nearest" }); // on a phone the options may have been in view
  const live = new Live(), began = performance.now(), controller = running = new AbortController();
  let first = 0, tokens = 0, reason = "", failed = null;
  talk.setAttribute("aria-busy", "true");
  if (document.activeElement === $("send")) $("text").focus(); // a button that goes dead takes the focus with it
  $("send").disabled = true; $("stop").disabled = false;
  try {
    for await (const event of events(await begun(asked.items, controller.signal))) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices && event.choices[0];
      if (!choice) continue;
      if (choice.finish_reason) reason = choice.finish_reason;
      if (live.take(choice) && !first) $("ttft").textContent = Math.round((first = performance.now()) - began) + " ms";
    }
  } catch (error) { failed = error; }
  const seconds = (performance.now() - first) / 1000, item = live.end(), stopped = failed && failed.name === "AbortError";
  const rate = first && tokens > 1 && seconds >= 0.1 ? `, ${((tokens - 1) / seconds).toFixed(1)} per second` : ""; // else it means little
  const note = stopped ? "stopped" : failed ? "" : `${tokens} token${tokens === 1 ? "" : "s"}${rate}` + (reason === "length" ? ", cut at the limit" : "");
  if (item) asked.items.push(Object.assign(item, { note }));
  else asked.items = back.items;
  running = null;
  save(asked);
  talk.removeAttribute("aria-busy");
  if (here()) {
    if (item) acts(item); else {
      redraw();
      if (!$("text").value && !images.length) { $("text").value = back.text; images = back.images; show(); }
    }
    if (stopped && !item) turn("note", "stopped");
    else if (failed && !stopped) turn("note error", visible(failed.message));
    else if (!item) turn("note", "The answer is empty.");
    welcome();
    compose();
  }
  const nowhere = [$("stop"), document.body].includes(document.activeElement); // else the focus is on an option
  $("send").disabled = false; $("stop").disabled = true;
  if (nowhere) $("text").focus();
}

function submit() {
  const text = $("text").value.trim(), shown = images, back = { items: chat.items.slice(), text, images: shown };
  if (!(text || images.length) || running) return;
  const [next] = edited ? [] : openCalls();
  if (edited) { chat.items = chat.items.slice(0, chat.items.indexOf(edited)); edited = null; redraw(); }
  const item = next ? { role: "tool", tool_call_id: next.id, content: text } : { role: "user", content: content(text, shown) };
  $("text").value = ""; images = []; show();
  talk.querySelectorAll(".turn.error").forEach(each => each.remove());
  chat.items.push(item);
  chat.title ||= text.slice(0, 60) || "Image";
  add(item);
  welcome();
  compose();
  if (openCalls().length) save(chat); else ask(back);
}

// Another answer to the last message.
function again() {
  if (running) return;
  const items = chat.items.slice(), last = items.findLastIndex(each => each.role !== "assistant");
  unedit();
  chat.items = items.slice(0, last + 1);
  redraw();
  ask({ items, text: "", images: [] });
}

// Probes of the chat page, for test_chat_browser.py. They run in the page.
window.drawn = (text, cuts) => {
  const root = document.createElement("div"), live = new Markdown(root);
  for (let at = 0, number = 0; at < text.length; number++) {
    const end = at + cuts[number % cuts.length];
    live.write(text.slice(at, end));
    at = end;
  }
  return root;
};

// What an answer may not be made of.
window.wrong = root => {
  const known = "a blockquote button code del div em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul".split(" ");
  const attributes = "aria-label class dir href rel start target title type".split(" "), found = [];
  for (const each of root.querySelectorAll("*")) {
    const tag = each.localName;
    if (!known.includes(tag)) found.push(tag);
    for (const { name } of each.attributes) if (!attributes.includes(name)) found.push(`${tag} ${name}`);
    if (tag === "a" && !(/^https?:\/\//.test(each.getAttribute("href")) && each.rel === "noopener noreferrer")) found.push(each.outerHTML);
    if (tag === "a" && each.parentElement.closest("a")) found.push("a link in a link");
  }
  let depth = 0;
  for (const each of root.querySelectorAll("*:not(:has(*))")) {
    let up = 0;
    for (let node = each; node !== root; node = node.parentElement) up++;
    depth = Math.max(depth, up);
  }
  if (depth > 60) found.push(`${depth} deep`);
  if (/[\u202a-\u202e\u2066-\u2069]/.test(root.textContent)) found.push("characters that reorder text");
  return found;
};

// Characters that are read as inline text, for an answer that comes in pieces of `size`.
window.work = (text, size) => {
  const real = inline;
  let read = 0;
  window.inline = piece => { read += piece.length; return real(piece); };
  drawn(text, [size]);
  window.inline = real;
  return read;
};

// Answers of chats are `text` from here on, in pieces of bytes that end anywhere. Everything else is asked as before.
window.asked = [];
window.answering = (deltas, size) => {
  window.before ??= window.fetch;
  window.fetch = async (where, options) => {
    if (where !== "v1/chat/completions") return window.before.call(window, where, options);
    asked.push(JSON.parse(options.body));
    const events = deltas.map(delta => ({ choices: [{ index: 0, delta }] }));
    events.push({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] }, { choices: [], usage: { completion_tokens: deltas.length } });
    const bytes = new TextEncoder().encode(events.map(each => `data: ${JSON.stringify(each)}\n\n`).join("") + "data: [DONE]\n\n");
    let at = 0;
    const stream = new ReadableStream({
      pull(controller) {
        if (at >= bytes.length) { controller.close(); return; }
        controller.enqueue(bytes.slice(at, at + size));
        at += size;
      }
    });
    return new Response(stream);
  };
};

window.told = async (text, said, size = 7) => {
  answering(said, size);
  $("text").value = text;
  $("ask").requestSubmit();
  while (running) await new Promise(done => setTimeout(done));
  return talk.querySelectorAll(".assistant").length;
};

// Chats are refused from here on.
window.refusing = () => {
  window.fetch = async (where, options) => {
    if (where !== "v1/chat/completions") return window.before.call(window, where, options);
    return new Response(JSON.stringify({ error: { message: "no" } }), { status: 500 });
  };
};

// Chats get no answer from here on, until they are stopped.
window.silent = () => {
  window.fetch = (where, options) => {
    if (where !== "v1/chat/completions") return window.before.call(window, where, options);
    const stopped = () => new DOMException("", "AbortError");
    return new Promise((_, fail) => options.signal.addEventListener("abort", () => fail(stopped())));
  };
};

// The least contrast of paper, cached and active blocks with each other, of outlines, and of lines of charts.
window.contrastOfBlocks = () => {
  const style = getComputedStyle(document.documentElement), probe = document.createElement("i");
  document.body.append(probe);
  const light = name => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color.match(/[\d.]+/g)
      .map(value => value / 255)
      .map(value => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
      .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  };
  const contrast = pair => {
    const [dark, bright] = pair.map(light).sort((one, other) => one - other);
    return (bright + 0.05) / (dark + 0.05);
  };
  const blocks = [["--paper", "--cached"], ["--cached", "--active"], ["--paper", "--active"], ["--paper", "--soft"]];
  const found = Math.min(...[...blocks, ["--code", "--accent"], ["--code", "--ink"]].map(contrast));
  probe.remove();
  return found;
};

// What reaches beyond the window, and does not scroll.
window.outside = () =>
  [...document.querySelectorAll("body *")]
    .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !each.closest("pre, .scroll"))
    .map(each => `${each.tagName} ${each.className} ${each.id} ${each.getBoundingClientRect().right}`);

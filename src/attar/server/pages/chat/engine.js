// The engine: its values now and over the last two minutes, and a map of its cache blocks.
const SPAN = 120; // seconds that are shown
let looks = []; // {at, values}, where values are null if none came

// Lines of values over time. They share one scale, from 0 to the highest value.
function plot(name, title, now, ...lines) {
  const svg = $(name), seen = looks.flatMap(each => lines.map(line => (each.values ? each.values[line] : null)));
  const highest = Math.max(0, ...seen.filter(each => each !== null));
  while (svg.children.length < lines.length) svg.append(document.createElementNS(svg.namespaceURI, "path"));
  lines.forEach((line, number) => {
    let path = "", begun = false;
    for (const { at, values } of looks) {
      const value = values ? values[line] : null;
      if (value === null) { begun = false; continue; }
      path += `${begun ? "L" : "M"}${(240 * (1 - (now - at) / 1000 / SPAN)).toFixed(1)} ${(34 - 31 * value / (highest || 1)).toFixed(1)}`;
      begun = true;
    }
    svg.children[number].setAttribute("d", path);
  });
  const last = looks.at(-1).values, round = value => (value === null ? "unknown" : String(Math.round(10 * value) / 10));
  const ends = last ? lines.map(line => `${line} ${round(last[line])}`).join(", ") : "unknown";
  svg.setAttribute("aria-label", `${title}, last 2 minutes: now ${ends}; highest ${round(highest)}`);
}

function remember(now, values) {
  looks.push({ at: now, values });
  looks = looks.filter(({ at }) => now - at <= 1000 * SPAN);
  plot("rates", "Tokens per second", now, "rate");
  plot("queue", "Requests", now, "running", "waiting");
  plot("usage", "Cache blocks in use", now, "used");
}

// States differ in shape as well: free ones are outlines, cached ones are smaller.
function draw(states) {
  const canvas = $("blocks"), width = canvas.clientWidth, scale = devicePixelRatio || 1;
  const cell = states.length > 4096 ? 3 : states.length > 1024 ? 5 : 9, across = Math.max(1, Math.floor(width / cell));
  const height = Math.ceil(states.length / across) * cell, style = getComputedStyle(document.documentElement);
  const [paper, edge, active, cached] = ["--paper", "--soft", "--active", "--cached"].map(name => style.getPropertyValue(name));
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = height + "px";
  const pen = canvas.getContext("2d"), side = cell - 1, inset = cell === 9 ? 2 : cell === 5 ? 1 : 0;
  pen.scale(scale, scale);
  const fill = (colour, ...box) => { pen.fillStyle = colour; pen.fillRect(...box); };
  for (let i = 0; i < states.length; i++) {
    const left = i % across * cell, top = Math.floor(i / across) * cell, state = states.charCodeAt(i);
    if (state === 1) fill(active, left, top, side, side);
    else if (state === 2) fill(cached, left + inset, top + inset, side - 2 * inset, inset ? side - 2 * inset : 1);
    else if (!inset) { fill(paper, left, top, side, side); fill(edge, left + 1, top + 1, 1, 1); }
    else { fill(edge, left, top, side, side); fill(paper, left + 1, top + 1, side - 2, side - 2); }
  }
}

// Where several models are served, one is chosen. Until then each answer would need a name that nobody knows.
async function list() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  const names = (await response.json()).data.map(each => each.id);
  if (names.length > 1) {
    $("models").replaceChildren(...names.map(name => new Option(name)));
    $("models").value = names.includes(wanted) ? wanted : names[0];
    $("models").hidden = false;
  }
  listed = true;
}

let before = null;
function tell(stats, now) {
  const passed = before ? (now - before.now) / 1000 : 0, made = before ? stats.generated_tokens - before.tokens : 0;
  const rate = passed && made >= 0 ? made / passed : null;
  before = { now, tokens: stats.generated_tokens };
  $("rate").textContent = rate === null ? "–" : rate.toFixed(1);
  for (const name of ["running", "waiting", "preemptions"]) $(name).textContent = stats[name];
  $("reused").textContent = stats.prompt_tokens ? Math.round(100 * stats.reused_tokens / stats.prompt_tokens) + " %" : "–";
  const counts = ["free", "active", "cached"].map(name => stats["blocks_" + name]), all = counts.reduce((sum, each) => sum + each);
  ["free", "active", "cached"].forEach((name, at) => { $(name).textContent = counts[at]; });
  $("used").textContent = `${counts[1]} of ${all}`;
  $("blocks").setAttribute("aria-label", `${all} cache blocks: ${counts[0]} free, ${counts[1]} active, ${counts[2]} cached`);
  remember(now, { rate, running: stats.running, waiting: stats.waiting, used: counts[1] });
  draw(atob(stats.blocks));
}

async function look() {
  try {
    if (!listed) await list();
    const chosen = $("models").value;
    model = chosen || model;
    const response = await fetch("v1/engine" + (chosen && "?model=" + encodeURIComponent(chosen)), { headers: headers() });
    if (!response.ok) throw await failure(response);
    const { ready, stats } = await response.json();
    model = chosen || ready.model;
    $("attach").hidden = !ready.images;
    $("model").textContent = visible((chosen ? "" : model + ", ") + `${ready.context.toLocaleString()} tokens`);
    $("state").textContent = "";
    $("login").hidden = true;
    if (stats) tell(stats, performance.now());
  } catch (error) {
    $("state").textContent = error.message;
    if (before) remember(performance.now(), null);
    before = null;
  }
  setTimeout(look, document.hidden ? 5000 : 500);
}

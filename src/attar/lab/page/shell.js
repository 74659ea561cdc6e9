// The shell: tabs, controls, the address, live data. A simulator is { id, title, lead, controls(data), draw(values, data) };
// `draw` returns { summary, figures, formulas: [[name, text]], sources: [[badge, text]], omits: [text] }.
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
let current = labs[0],
  values = {},
  controls = [],
  told = 0,
  later = 0,
  written = null,
  heard = ""; // the server's last answer

const clean = (control, value) => {
  if (control.options) return control.options.some(each => each[0] === value) ? value : control.start;
  const number = Number(value);
  if (value === "" || !Number.isFinite(number)) return control.start;
  const inside = Math.min(control.max, Math.max(control.min, number));
  return control.whole ? Math.round(inside) : inside;
};

// A range of many sizes moves over its values' logarithms, 100 places from end to end.
const toPlace = (control, value) =>
  control.log ? (100 * Math.log(value / control.min)) / Math.log(control.max / control.min) : value;
const fromPlace = (control, place) => {
  if (!control.log) return clean(control, place);
  const value = control.min * (control.max / control.min) ** (place / 100);
  return clean(control, control.power ? 2 ** Math.round(Math.log2(value)) : Number(value.toPrecision(2)));
};

function made(control) {
  const id = "c-" + control.id,
    name = control.unit ? `${control.label} (${control.unit})` : control.label;
  const reset = h("button", { type: "button", class: "reset", "aria-label": "Reset " + control.label }, "reset");
  const inputs = [];
  const set = (value, from) => {
    values[control.id] = clean(control, value);
    for (const each of inputs)
      if (each !== from) {
        each.value = each.type === "range" ? toPlace(control, values[control.id]) : values[control.id];
      }
    for (const each of inputs)
      if (each.type === "range")
        each.setAttribute("aria-valuetext", `${num(values[control.id], 6)} ${control.unit || ""}`.trim());
  };
  if (control.options) {
    const chosen = h(
      "select",
      { id, name: control.id },
      control.options.map(([value, text]) => h("option", { value }, plain(text)))
    );
    chosen.addEventListener("change", () => {
      set(chosen.value, chosen);
      changed();
    });
    inputs.push(chosen);
  } else {
    const slider = h("input", {
      type: "range",
      id,
      name: control.id,
      ...(control.log
        ? { min: 0, max: 100, step: control.power ? 100 / Math.log2(control.max / control.min) : 1 }
        : { min: control.min, max: control.max, step: control.step || 1 })
    });
    const box = h("input", {
      type: "number",
      "aria-label": name,
      min: control.min,
      max: control.max,
      step: control.whole ? 1 : "any",
      id: id + "-box"
    });
    slider.addEventListener("input", () => {
      set(fromPlace(control, Number(slider.value)), slider);
      changed();
    });
    box.addEventListener("change", () => {
      set(box.value);
      changed();
    });
    inputs.push(slider, box);
  }
  reset.addEventListener("click", () => {
    set(control.start);
    changed();
  });
  set(values[control.id] ?? control.start);
  return h("fieldset", {}, h("label", { class: "name", for: id }, name), h("div", { class: "row" }, inputs, reset));
}

function open(lab, given = {}) {
  if (lab !== current) steppers.clear();
  current = lab;
  controls = lab.controls(data);
  values = Object.fromEntries(controls.map(each => [each.id, clean(each, given[each.id] ?? each.start)]));
  for (const tab of $("tabs").children) {
    const chosen = tab.id === "tab-" + lab.id;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  $("panel").setAttribute("aria-labelledby", "tab-" + lab.id);
  $("title").textContent = lab.title;
  $("lead").textContent = lab.lead;
  $("controls").replaceChildren(...controls.map(made));
  paint();
}

// A text with its commands, which stand in backticks.
const coded = text => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

function paint() {
  const measured = Math.floor($("figures").clientWidth) - 26;
  if (measured > 0) wide = Math.min(900, measured);
  const drawn = current.draw(values, data),
    unfolded = [...$("figures").querySelectorAll("details")].map(each => each.open);
  if (!$("figures").contains(document.activeElement) || document.activeElement.tagName === "SUMMARY" || !data.live) {
    const at = [...$("figures").querySelectorAll("summary")].indexOf(document.activeElement);
    $("figures").replaceChildren(...drawn.figures);
    $("figures")
      .querySelectorAll("details")
      .forEach((each, i) => {
        each.open = unfolded[i] || false;
      });
    if (at >= 0) [...$("figures").querySelectorAll("summary")][at]?.focus();
  }
  $("formulas").replaceChildren(
    ...drawn.formulas.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, plain(text))])
  );
  $("sources").replaceChildren(
    ...drawn.sources.map(([badge, text]) => h("li", {}, h("i", { class: "badge" }, badge), " ", coded(plain(text))))
  );
  $("omits").replaceChildren(...drawn.omits.map(text => h("li", {}, text)));
  return drawn.summary;
}

// The address names simulator and values, so that a view can be linked: #speculation?K=5&p=0.8
function address() {
  const differ = controls
    .filter(each => values[each.id] !== each.start)
    .map(each => [each.id, String(values[each.id])]);
  return "#" + current.id + (differ.length ? "?" + new URLSearchParams(differ) : "");
}
function visit() {
  if (location.hash === written) return;
  const [id, rest] = location.hash.slice(1).split("?");
  const lab = labs.find(each => each.id === id) || current;
  open(lab, Object.fromEntries(new URLSearchParams(rest || "")));
}

function changed() {
  const summary = paint();
  clearTimeout(later);
  later = setTimeout(
    () => {
      written = address();
      if (location.hash !== written) location.replace(written);
      $("live").textContent = summary;
      told = Date.now();
    },
    Math.max(250, 1000 - (Date.now() - told))
  );
}

for (const lab of labs) {
  const tab = h("button", { type: "button", role: "tab", id: "tab-" + lab.id, "aria-controls": "panel" }, lab.name);
  tab.addEventListener("click", () => {
    open(lab);
    changed();
  });
  $("tabs").append(tab);
}
$("tabs").addEventListener("keydown", event => {
  const at = labs.indexOf(current),
    to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: labs.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  open(labs[(to + labs.length) % labs.length]);
  changed();
  $("tab-" + current.id).focus();
});
$("controls").addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", visit);
addEventListener("resize", () => {
  clearTimeout(later);
  later = setTimeout(paint, 100);
});

function about() {
  const { model, machine } = data;
  const here = machine
    ? `${plain(machine.name || "this machine")}: reads ${speed(machine.read)}, int8 ${rate(machine.int8)}`
    : "the machine's rates are not measured";
  $("about").textContent = model
    ? `${plain(model.name)} (${plain(model.bytes.name)}); ${here}. ${data.live ? "Live." : "Written " + plain(data.written) + "."}`
    : "No data yet.";
}

// Live: the server's answer replaces what it names. The key stays in this tab's memory.
async function look() {
  let wait = document.hidden ? 5000 : 500;
  try {
    const model = new URLSearchParams(location.search).get("model");
    const key = $("key").value,
      response = await fetch("v1/lab" + (model ? "?model=" + encodeURIComponent(model) : ""), {
        headers: key ? { Authorization: "Bearer " + key } : {}
      });
    if (response.status === 401) {
      $("login").hidden = false;
      $("state").textContent = "This server asks for an API key.";
      return;
    }
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error.message);
    const news = JSON.stringify(answer),
      first = !heard;
    if (news !== heard) Object.assign(data, answer);
    $("login").hidden = true;
    $("state").textContent = "";
    about();
    if (first) {
      written = null;
      visit();
    } else if (news !== heard) paint();
    heard = news;
  } catch (error) {
    $("state").textContent = plain(error.message);
    wait = 5000;
  }
  setTimeout(look, wait);
}
$("login").addEventListener("submit", event => {
  event.preventDefault();
  look();
});

about();
visit();
if (!location.hash) open(current);
if (data.live) look();

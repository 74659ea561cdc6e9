// Drawing: nodes, numbers as text, charts, stacked bars. Text enters as text nodes only, never as markup.
const node =
  space =>
  (name, attributes = {}, ...inside) => {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes))
      if (value !== null && value !== undefined) made.setAttribute(key, value);
    made.append(...inside.flat().filter(each => each !== null && each !== undefined));
    return made;
  };
const h = node("http://www.w3.org/1999/xhtml"),
  s = node("http://www.w3.org/2000/svg");
const range = (count, of = i => i) => Array.from({ length: count }, (_, i) => of(i));
const powers = (count, of = n => n) => range(count, i => of(2 ** i)); // 1, 2, 4, ...

// Names come from files and clients. Characters that reorder or hide text are shown by their number.
const plain = text =>
  String(text)
    .replace(
      /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
      each => "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0")
    )
    .slice(0, 2000);
const num = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size >= 1e15 || (size && size < 1e-4)) return value.toExponential(digits - 1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
};
const unit = (value, units, digits) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return num(value);
  const [size, name] = units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
  return num(value / size, digits) + " " + name;
};
const bytes = (value, digits = 4) =>
  unit(
    value,
    [
      [1e9, "GB"],
      [1e6, "MB"],
      [1e3, "kB"],
      [1, "B"]
    ],
    digits
  );
const both = value => `${bytes(value)} (${num(value / 2 ** 30, 4)} GiB)`;
const time = (value, digits = 3) =>
  unit(
    value,
    [
      [1, "s"],
      [1e-3, "ms"],
      [1e-6, "µs"],
      [1e-9, "ns"]
    ],
    digits
  );
const rate = value =>
  unit(value, [
    [1e12, "TOP/s"],
    [1e9, "GOP/s"],
    [1, "OP/s"]
  ]);
const speed = value =>
  unit(value, [
    [1e12, "TB/s"],
    [1e9, "GB/s"],
    [1, "B/s"]
  ]);
const percent = (value, digits = 3) => num(100 * value, digits) + " %";

let wide = 640; // of a figure, in CSS pixels: text keeps its size at any width
const SHAPES = [
  (x, y) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z`,
  (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`,
  (x, y) => `M${x - 5} ${y + 4}h10l-5 -9z`,
  (x, y) => `M${x - 5} ${y}l5 -5l5 5l-5 5z`,
  (x, y) => `M${x - 5} ${y - 4}h10l-5 9z`
];
const DASHES = ["", "6 4", "2 3", "8 3 2 3", "12 4"];

const ticks = (low, high, log) => {
  if (log) {
    const found = [];
    const all = Math.log10(high / low) < 2.2 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const each of all) found.push(each * 10 ** power);
    const inside = found.filter(each => each >= low * 0.999 && each <= high * 1.001);
    if (inside.length > 2 || high / low > 10)
      return inside.filter((_, i) => i % Math.ceil(inside.length / 7) === 0);
  }
  const rough = (high - low) / 5 || 1,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(each => each * power >= rough) * power;
  return range(
    Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1,
    i => (Math.ceil(low / step - 1e-9) + i) * step
  );
};

// A chart: series { name, points: [[x, y, label]], dots, dashed }. Points that are not finite are left out. Each series
// has a colour, and a dash or a shape as well. `rules` are labelled vertical or horizontal lines { x | y, label }.
function chart({ title, x, y, series, rules = [], summary }) {
  const width = Math.max(260, wide),
    height = 270,
    left = 58,
    right = 14,
    top = 12,
    bottom = 44;
  const drawn = series.map(each => ({
    ...each,
    points: each.points.filter(
      p => Number.isFinite(p[0]) && Number.isFinite(p[1]) && (!x.log || p[0] > 0) && (!y.log || p[1] > 0)
    )
  }));
  const all = axis => [
    ...drawn.flatMap(each => each.points.map(p => p[axis])),
    ...rules
      .map(each => (axis ? each.y : each.x))
      .filter(each => Number.isFinite(each) && (!(axis ? y : x).log || each > 0))
  ];
  const ends = (axis, given) => {
    const values = all(axis);
    let low = given.min ?? Math.min(...values, ...(given.log ? [] : [0])),
      high = given.max ?? Math.max(...values);
    if (!Number.isFinite(low)) low = given.log ? 1 : 0;
    if (!(high > low)) high = given.log ? low * 10 : low + 1;
    return [low, high];
  };
  const [x0, x1] = ends(0, x),
    [y0, y1] = ends(1, y),
    f = log => (log ? Math.log : v => v);
  const at = (v, low, high, log, from, to) =>
    from + ((f(log)(v) - f(log)(low)) / (f(log)(high) - f(log)(low))) * (to - from);
  const px = v => at(v, x0, x1, x.log, left, width - right),
    py = v => at(v, y0, y1, y.log, height - bottom, top);
  const short = v =>
    Math.abs(v) >= 1e4
      ? unit(v, [
          [1e12, "T"],
          [1e9, "G"],
          [1e6, "M"],
          [1e3, "k"]
        ]).replace(" ", "")
      : v && Math.abs(v) < 1e-3
        ? v.toExponential(0)
        : num(v);
  const parts = [];
  for (const v of ticks(y0, y1, y.log))
    parts.push(
      s("path", { class: "grid", d: `M${left} ${py(v)}H${width - right}` }),
      s("text", { class: "tick", x: left - 6, y: py(v) + 4, "text-anchor": "end" }, short(v))
    );
  for (const v of ticks(x0, x1, x.log))
    parts.push(s("text", { class: "tick", x: px(v), y: height - bottom + 16, "text-anchor": "middle" }, short(v)));
  parts.push(
    s("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }),
    s("text", { class: "name", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
    s(
      "text",
      { class: "name", transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" },
      y.label
    )
  );
  const labels = []; // above the lines
  for (const rule of rules) {
    if (Number.isFinite(rule.x) && rule.x >= x0 && rule.x <= x1) {
      parts.push(s("path", { class: "rule", d: `M${px(rule.x)} ${top}V${height - bottom}`, "data-rule": rule.x }));
      labels.push(
        s(
          "text",
          {
            class: "label",
            x: px(rule.x) + (px(rule.x) > width / 2 ? -4 : 4),
            y: top + 10,
            "text-anchor": px(rule.x) > width / 2 ? "end" : "start"
          },
          rule.label
        )
      );
    }
    if (Number.isFinite(rule.y) && rule.y >= y0 && rule.y <= y1) {
      parts.push(s("path", { class: "rule", d: `M${left} ${py(rule.y)}H${width - right}`, "data-rule": rule.y }));
      labels.push(s("text", { class: "label", x: width - right, y: py(rule.y) - 4, "text-anchor": "end" }, rule.label));
    }
  }
  const legend = [];
  drawn.forEach((each, i) => {
    const colour = "c" + (i % 6),
      shape = SHAPES[i % SHAPES.length],
      dash = DASHES[i % DASHES.length] || null;
    const mark = p =>
      s(
        "path",
        {
          class: "mark " + colour,
          d: shape(px(p[0]), py(p[1])),
          "data-series": plain(each.name),
          "data-x": p[0],
          "data-y": p[1]
        },
        s("title", {}, `${plain(p[2] || each.name)}: ${num(p[1], 4)} at ${num(p[0], 4)}`)
      );
    if (!each.dots && each.points.length)
      parts.push(
        s("path", {
          class: "line " + colour,
          "stroke-dasharray": dash,
          "data-series": plain(each.name),
          d: "M" + each.points.map(p => `${px(p[0]).toFixed(2)} ${py(p[1]).toFixed(2)}`).join("L")
        })
      );
    if (each.dots) parts.push(...each.points.map(mark));
    const inside = each.dots
      ? s("path", { class: "mark " + colour, d: shape(12, 7) })
      : s("path", { class: "line " + colour, "stroke-dasharray": dash, d: "M0 7H24" });
    legend.push(
      h(
        "li",
        {},
        s("svg", { viewBox: "0 0 24 14", "aria-hidden": "true" }, inside),
        plain(each.name) + (each.points.length ? "" : ": not measured")
      )
    );
  });
  parts.push(...labels);
  const xs = [...new Set(drawn.flatMap(each => each.points.map(p => p[0])))].sort((a, b) => a - b);
  const known = drawn.map(each => new Map(each.points.map(p => [p[0], p[1]])));
  const rows = xs.map(v => [num(v, 5), ...known.map(each => (each.has(v) ? num(each.get(v), 5) : ""))]);
  return figure(
    title,
    s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary || title }, parts),
    { legend, table: { head: [x.label, ...drawn.map(each => each.name)], rows } }
  );
}

// One bar of parts { name, value }, numbered in the bar and in the list below it; `limit` is a dashed line.
function stacked({ title, parts, limit, show = bytes, summary }) {
  const shown = parts.filter(each => each.value > 0),
    total = shown.reduce((a, each) => a + each.value, 0),
    width = Math.max(260, wide);
  const end = Math.max(total, limit ? limit.value : 0) || 1,
    cells = [],
    legend = [];
  let at = 0;
  shown.forEach((each, i) => {
    const from = (at / end) * (width - 2) + 1,
      size = (each.value / end) * (width - 2),
      look = each.open ? "area open" : "area c" + (i % 6);
    cells.push(
      s(
        "rect",
        {
          class: look,
          x: from,
          y: 16,
          width: size,
          height: 34,
          "data-part": plain(each.name),
          "data-value": each.value
        },
        s("title", {}, `${plain(each.name)}: ${show(each.value)}`)
      )
    );
    if (size > 14)
      cells.push(s("text", { class: "label", x: from + size / 2, y: 64, "text-anchor": "middle" }, String(i + 1)));
    legend.push(
      h(
        "li",
        {},
        s(
          "svg",
          { viewBox: "0 0 24 14", "aria-hidden": "true" },
          s("rect", { class: look, width: 14, height: 14, x: 5 })
        ),
        `${i + 1} ${plain(each.name)}: ${show(each.value)}`
      )
    );
    at += each.value;
  });
  if (limit) {
    const x = (limit.value / end) * (width - 2) + 1;
    cells.push(
      s("path", { class: "rule", d: `M${x} 4V54` }),
      s(
        "text",
        { class: "label", x: x > width / 2 ? x - 4 : x + 4, y: 12, "text-anchor": x > width / 2 ? "end" : "start" },
        limit.label
      )
    );
  }
  return figure(title, s("svg", { viewBox: `0 0 ${width} 70`, role: "img", "aria-label": summary || title }, cells), {
    legend,
    table: { head: ["part", "value"], rows: shown.map(each => [each.name, show(each.value)]) }
  });
}

// Rows of spans, such as slots over time: { name, spans: [{ from, to, kind, label }] }; kinds are named in `kinds`; `open` is one without a fill.
function spans({ title, rows, kinds, open, end, axis, summary }) {
  const left = 84,
    each = 18,
    width = Math.max(260, wide),
    height = rows.length * each + 34,
    parts = [];
  const px = v => left + (v / (end || 1)) * (width - left - 8);
  const look = kind => (kind === open ? "area open" : "area c" + kinds.indexOf(kind));
  rows.forEach((row, i) => {
    parts.push(
      s("text", { class: "tick", x: left - 6, y: i * each + 14, "text-anchor": "end" }, plain(row.name).slice(0, 12))
    );
    for (const span of row.spans)
      parts.push(
        s(
          "rect",
          {
            class: look(span.kind),
            x: px(span.from),
            y: i * each + 3,
            width: Math.max(0.5, px(span.to) - px(span.from)),
            height: each - 5,
            "data-kind": span.kind,
            "data-from": span.from,
            "data-to": span.to
          },
          s("title", {}, plain(span.label || span.kind))
        )
      );
  });
  for (const v of ticks(0, end || 1))
    parts.push(s("text", { class: "tick", x: px(v), y: height - 18, "text-anchor": "middle" }, num(v)));
  parts.push(s("text", { class: "name", x: width / 2, y: height - 3, "text-anchor": "middle" }, axis));
  const legend = kinds.map(kind =>
    h(
      "li",
      {},
      s(
        "svg",
        { viewBox: "0 0 24 14", "aria-hidden": "true" },
        s("rect", { class: look(kind), width: 14, height: 14, x: 5 })
      ),
      kind
    )
  );
  return figure(
    title,
    s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary || title }, parts),
    {
      legend,
      table: {
        head: ["row", "from", "to", "what"],
        rows: rows.flatMap(row =>
          row.spans.map(span => [row.name, num(span.from), num(span.to), span.label || span.kind])
        )
      }
    }
  );
}

const cellsOf = (name, cells) =>
  h(
    "tr",
    {},
    cells.map((each, i) =>
      h(name, name === "th" ? { scope: "col" } : {}, i || typeof each === "number" ? String(each) : plain(each))
    )
  );
const tableOf = ({ head, rows }) =>
  h(
    "table",
    {},
    h("thead", {}, cellsOf("th", head.map(plain))),
    h(
      "tbody",
      {},
      rows.map(row => cellsOf("td", row.map(plain)))
    )
  );

function figure(title, drawn, { legend = [], table } = {}) {
  return h(
    "figure",
    {},
    h("figcaption", {}, h("b", {}, title)),
    drawn,
    legend.length ? h("ul", { class: "legend" }, legend) : null,
    table ? h("details", {}, h("summary", {}, "The same numbers as a table"), scrolled(title, table)) : null
  );
}

const scrolled = (title, table) =>
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, tableOf(table));
const listing = (title, head, rows) => figure(title, scrolled(title, { head, rows }));

// Steps shown one at a time: it starts paused, and Play is a button. A figure that is drawn again goes on where it was.
const steppers = new Map();
function stepper(title, steps) {
  const state = steppers.get(title) || { at: 0, playing: false };
  steppers.set(title, state);
  const shown = h("div", { "aria-live": "polite" }),
    number = h("span", { class: "unit" });
  let timer = 0;
  const show = to => {
    state.at = (to + steps.length) % steps.length;
    shown.replaceChildren(...[steps[state.at]()].flat());
    number.textContent = ` step ${state.at + 1} of ${steps.length}`;
  };
  const run = playing => {
    state.playing = playing;
    clearInterval(timer);
    play.textContent = playing ? "Pause" : "Play";
    if (playing) timer = setInterval(() => (play.isConnected ? show(state.at + 1) : clearInterval(timer)), 1200);
  };
  const button = (text, act) => {
    const made = h("button", { type: "button" }, text);
    made.addEventListener("click", act);
    return made;
  };
  const move = by => () => {
    run(false);
    show(state.at + by);
  };
  const play = button("Play", () => run(!state.playing));
  show(Math.min(state.at, steps.length - 1));
  run(state.playing);
  return h(
    "figure",
    {},
    h("figcaption", {}, h("b", {}, title)),
    h("p", { class: "row" }, button("Back", move(-1)), button("Step", move(1)), play, number),
    shown
  );
}

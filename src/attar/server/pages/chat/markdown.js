// Markdown of answers. Nodes are made one by one: what a model writes becomes text, never markup, and no picture is
// loaded. An answer is read by lines, and each line changes the end of the document only. The last line may still grow:
// it is drawn on trial, and taken back before more is read. Thus an answer looks the same however it is cut, and costs
// its length: a line is read in parts of PIECE characters, and emphasis, links and code spans end with their piece.
const PIECE = 8192, DEEP = 10, OPENERS = 24;
const REORDERING = /[\u202a-\u202e\u2066-\u2069]/g; // text after them is not where it seems to be
const SPECIAL = /[\\`*_~[\]<]|https?:\/\//gi;
const TARGET = /\(\s{0,9}<?([^\s<>()]{0,2048}(?:\([^\s<>()]{0,512}\)[^\s<>()]{0,512})?)>?(?:\s{1,9}["'][^"'\n]{0,512}["'])?\s{0,9}\)/y;
const POINTED = /<(https?:\/\/[^\s<>]{1,2048})>/iy;
const BARE = /https?:\/\/[^\s<>"`|\\[\]]{1,2048}/iy;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?! )| |$)/;
const HEADING = /^ {0,3}(#{1,6})(?= |$)/, RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const visible = text => text.replace(REORDERING, each => `\u27e8U+${each.charCodeAt(0).toString(16).toUpperCase()}\u27e9`);

function address(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try { return new URL(text).href; } catch { return null; }
}

const link = href => make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" });

// The next run of as many backticks, by the place of a run.
function ticks(text) {
  const runs = [...text.matchAll(/`+/g)].reverse(), last = new Map(), next = new Map();
  for (const { 0: run, index } of runs) {
    next.set(index, last.get(run.length));
    last.set(run.length, index);
  }
  return next;
}

function runAt(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return text.slice(at, end);
}

// Emphasis, code spans and links of a piece of text, as a fragment. `open` holds what may still be closed: at most
// OPENERS, and each opener that is closed drops those above it. So nothing is searched for twice, or nested deeply.
function inline(text) {
  const out = [], next = ticks(text);
  let open = [], at = 0;
  const opens = (key, literal) => {
    if (open.length === OPENERS) open.shift();
    open.push({ key, at: out.length });
    out.push(literal);
  };
  const closes = (index, begin) => {
    out[open[index].at] = begin;
    out.push({ end: true });
    open.length = index;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) { out.push(text.slice(at)); break; }
    const here = found.index, mark = text[here], before = text[here - 1] || " ";
    const image = mark === "[" && before === "!" && here > at;
    if (here > at) out.push(text.slice(at, image ? here - 1 : here));
    at = here + 1;
    if (mark === "\\") {
      const escaped = /[!-/:-@[-`{-~]/.test(text[at] || "");
      out.push(escaped ? text[at++] : mark);
    } else if (mark === "`") {
      const run = runAt(text, here), end = next.get(here);
      at = here + run.length;
      if (end === undefined) { out.push(run); continue; }
      const code = text.slice(at, end).replaceAll("\n", " ");
      const padded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ");
      out.push(make("code", { textContent: visible(padded ? code.slice(1, -1) : code) }));
      at = end + run.length;
    } else if ("*_~".includes(mark)) {
      const run = runAt(text, here), after = text[here + run.length] || " ", key = run;
      at = here + run.length;
      const word = /[\p{L}\p{N}]/u, usable = mark === "~" ? run.length === 2 : run.length < 4;
      const ends = usable && /\S/.test(before) && !(mark === "_" && word.test(after));
      const begins = usable && /\S/.test(after) && !(mark === "_" && word.test(before));
      const index = ends ? open.findLastIndex(each => each.key === key) : -1;
      if (index >= 0) closes(index, { begin: mark === "~" ? ["del"] : [["em"], ["strong"], ["strong", "em"]][run.length - 1] });
      else if (begins) opens(key, run);
      else out.push(run);
    } else if (mark === "[") {
      opens(image ? "![" : "[", image ? "![" : "[");
    } else if (mark === "]") {
      const index = open.findLastIndex(each => each.key.endsWith("["));
      TARGET.lastIndex = at;
      const target = index >= 0 && TARGET.exec(text), href = target && address(target[1]);
      if (href) {
        closes(index, { href, image: open[index].key === "![" });
        open = open.filter(each => !each.key.endsWith("[")); // no link holds another
        at = TARGET.lastIndex;
      } else {
        if (index >= 0) open.splice(index, 1);
        out.push(mark);
      }
    } else if (mark === "<") {
      POINTED.lastIndex = here;
      const pointed = POINTED.exec(text), href = pointed && address(pointed[1]);
      out.push(href ? { href, text: pointed[1] } : mark);
      if (href) at = POINTED.lastIndex;
    } else {
      BARE.lastIndex = here;
      let bare = /\w/.test(before) ? "" : (BARE.exec(text) || [""])[0], end = bare.length;
      const after = bare.includes("(") ? "*_~.,;:!?'" : "*_~.,;:!?')";
      while (end && after.includes(bare[end - 1])) end--;
      bare = bare.slice(0, end);
      const href = address(bare);
      out.push(href ? { href, text: bare } : found[0]);
      at = here + (href ? bare : found[0]).length;
    }
  }
  return assembled(out);
}

function assembled(out) {
  const nest = [document.createDocumentFragment()];
  let words = "", linked = 0; // linked: depth of the link that is open
  const flush = () => { if (words) nest.at(-1).append(visible(words)); words = ""; };
  for (const each of out) {
    if (typeof each === "string" || (each.text && linked)) { words += each.text || each; continue; }
    flush();
    if (each instanceof Node) nest.at(-1).append(each);
    else if (each.end) {
      if (nest.length === linked) linked = 0;
      nest.pop();
    } else if (each.begin) {
      const nodes = each.begin.map(tag => make(tag));
      nodes.reduce((outer, inner) => (outer.append(inner), inner));
      nest.at(-1).append(nodes[0]);
      nest.push(nodes.at(-1));
    } else if (each.text) {
      nest.at(-1).append(link(each.href));
      nest.at(-1).lastChild.append(visible(each.text));
    } else {
      const made = link(each.href);
      if (each.image) made.append("image: "); // pictures from elsewhere are named, not loaded
      nest.at(-1).append(made);
      nest.push(made);
      linked = nest.length;
    }
  }
  flush();
  return nest[0];
}

const spread = line => line.replace(/^[ \t]+/, lead => lead.replaceAll("\t", "    "));
const indentOf = line => /^ */.exec(line)[0].length;
const stripped = (line, columns) => line.slice(Math.min(columns, indentOf(line)));
const isBlank = line => !line.trim();

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/, 64).map(cell => cell.trim().replaceAll("\\|", "|"));
}

const isDelimiter = line => line.includes("|") && /^[ :|-]+$/.test(line) && cellsOf(line).every(cell => /^:?-+:?$/.test(cell));

// Whether a paragraph is the head of a table, whose second line is the next one.
const isHead = ({ lines, from, text }, next) =>
  lines === 1 && !from && isDelimiter(next) && cellsOf(text).length === cellsOf(next).length;

function codeBlock(name) {
  const code = make("code"), button = make("button", { type: "button", textContent: "Copy" });
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", () => copy(code.textContent, button));
  const bar = make("div", { className: "bar" }, make("span", { textContent: visible(name.slice(0, 40)) || "code" }), button);
  return [make("div", { className: "code" }, bar, make("pre", { dir: "ltr" }, code)), code];
}

class Markdown {
  constructor(root) {
    this.root = root;
    this.rest = ""; // the last line, as far as it is known
    this.within = false; // whether a part of it has been read
    this.stack = []; // quotes and list items that are open
    this.leaf = null; // the paragraph, code block or table that is open
    this.kept = null; // what to go back to
    this.swapped = null; // a table on trial, and the paragraph in whose place it is
  }

  write(more) {
    this.undo();
    const text = this.rest + more;
    let from = 0, end = text.indexOf("\n");
    for (;;) {
      const length = (end < 0 ? text.length : end) - from;
      if (length > PIECE + 1) {
        const cut = from + PIECE + (/[\ud800-\udbff]/.test(text[from + PIECE - 1]) ? 1 : 0);
        this.take(text.slice(from, cut));
        this.fill();
        this.within = true;
        from = cut;
      } else if (end < 0) break;
      else {
        this.take(text.slice(from, end).replace(/\r$/, ""));
        this.fill();
        this.within = false;
        from = end + 1;
        end = text.indexOf("\n", from);
      }
    }
    this.rest = text.slice(from);
    this.keep();
    if (this.rest) this.take(this.rest.replace(/\r$/, ""));
    this.paint();
  }

  keep() {
    const { leaf } = this, nodes = [this.root];
    for (const each of this.stack) nodes.push(each.node, ...(each.list ? [each.list] : []));
    if (leaf && leaf.kind !== "p") nodes.push(leaf.node);
    const last = leaf && leaf.kind === "code" && leaf.node.lastChild;
    this.kept = {
      stack: this.stack.slice(), leaf: leaf && { ...leaf }, marks: nodes.map(node => [node, node.lastChild]),
      data: last && [last, last.length],
    };
    this.swapped = null;
  }

  undo() {
    if (!this.kept) return;
    const { stack, leaf, marks, data } = this.kept;
    if (this.swapped) this.swapped[0].replaceWith(this.swapped[1]);
    for (const [node, last] of marks) while (node.lastChild !== last) node.lastChild.remove();
    if (data) data[0].deleteData(data[1], data[0].length);
    Object.assign(this, { stack, leaf, kept: null });
    if (leaf) leaf.stale = true;
  }

  get place() { return this.stack.length ? this.stack.at(-1).node : this.root; }

  paint() {
    const { leaf } = this;
    if (!leaf || leaf.kind !== "p" || !leaf.stale) return;
    if (!leaf.from) leaf.node.replaceChildren();
    while (leaf.node.lastChild !== leaf.from) leaf.node.lastChild.remove();
    leaf.node.append(inline(leaf.text));
    leaf.stale = false;
  }

  // A long paragraph goes on with the next piece.
  fill() {
    const { leaf } = this;
    if (!leaf || leaf.kind !== "p" || leaf.text.length < PIECE) return;
    this.paint();
    Object.assign(leaf, { text: "", from: leaf.node.lastChild });
  }

  close() {
    this.paint();
    this.leaf = null;
  }

  cut(depth) {
    this.close();
    this.stack.length = depth;
  }

  take(line) {
    if (!this.within) this.line(spread(line));
    else if (this.leaf && this.leaf.kind === "code") this.code(line);
    else this.words(line, "");
  }

  words(text, between) {
    if (!this.leaf || this.leaf.kind !== "p") {
      this.close();
      this.leaf = { kind: "p", node: make("p"), text: "", from: null, lines: 0 };
      this.place.append(this.leaf.node);
    }
    const { leaf } = this;
    leaf.text += (leaf.lines ? between : "") + text;
    leaf.lines++;
    leaf.stale = true;
  }

  code(text) {
    const { node } = this.leaf;
    if (node.lastChild && node.lastChild.length < PIECE) node.lastChild.appendData(visible(text));
    else node.append(visible(text));
  }

  line(text) {
    let rest = text, depth = 0;
    for (; depth < this.stack.length; depth++) {
      const each = this.stack[depth];
      if (each.list) {
        if (isBlank(rest)) continue;
        if (indentOf(rest) < each.least) break;
        rest = stripped(rest, each.columns);
      } else {
        const quote = QUOTE.exec(rest);
        if (!quote) break;
        rest = rest.slice(quote[0].length);
      }
    }
    const leaf = depth === this.stack.length ? this.leaf : null;
    if (leaf && leaf.kind === "code") {
      const fence = FENCE.exec(rest);
      if (fence && fence[2][0] === leaf.fence[0] && fence[2].length >= leaf.fence.length && isBlank(fence[3])) this.leaf = null;
      else {
        this.code((leaf.begun ? "\n" : "") + stripped(rest, leaf.columns));
        leaf.begun = true;
      }
      return;
    }
    [rest, depth] = this.containers(rest, depth, leaf);
    this.block(rest, depth);
  }

  // Quotes and list items that begin with this line.
  containers(rest, depth, leaf) {
    while (depth < DEEP) {
      const quote = QUOTE.exec(rest), item = !quote && !RULE.test(rest) && ITEM.exec(rest);
      if (quote) {
        this.cut(depth);
        const node = make("blockquote");
        this.place.append(node);
        this.stack.push({ node });
        rest = rest.slice(quote[0].length);
      } else if (item) {
        const [whole, lead, mark] = item, number = parseInt(mark, 10), kind = mark.at(-1);
        // Within a paragraph a number is one more often than it begins a list.
        if (leaf && leaf === this.leaf && leaf.kind === "p" && (number > 1 || isBlank(rest.slice(whole.length)))) break;
        const sibling = this.stack[depth], goesOn = sibling && sibling.list && sibling.kind === kind;
        this.cut(depth);
        const list = goesOn ? sibling.list : make(number >= 0 ? "ol" : "ul");
        if (!goesOn) {
          if (number >= 0) list.start = number;
          this.place.append(list);
        }
        const node = make("li"), columns = Math.max(whole.length, lead.length + mark.length + 1);
        list.append(node);
        this.stack.push({ node, list, kind, columns, least: lead.length + 2 });
        rest = rest.slice(whole.length);
      } else break;
      depth++;
    }
    return [rest, depth];
  }

  block(rest, depth) {
    const heading = HEADING.exec(rest), fence = FENCE.exec(rest);
    const leaf = depth === this.stack.length ? this.leaf : null;
    if (isBlank(rest)) this.cut(depth);
    else if (heading) {
      this.cut(depth);
      let title = rest.slice(heading[0].length).trim(), end = title.length;
      while (title[end - 1] === "#") end--;
      if (!end || title[end - 1] === " ") title = title.slice(0, end).trim();
      this.place.append(make(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(title)));
    } else if (RULE.test(rest)) {
      this.cut(depth);
      this.place.append(make("hr"));
    } else if (fence && !(fence[2][0] === "`" && fence[3].includes("`"))) {
      this.cut(depth);
      const [box, node] = codeBlock(fence[3].trim().split(/[\s{]/, 1)[0]);
      this.place.append(box);
      this.leaf = { kind: "code", node, fence: fence[2], columns: fence[1].length, begun: false };
    } else if (leaf && leaf.kind === "table" && rest.includes("|")) this.row(leaf, cellsOf(rest), "td");
    else if (leaf && leaf.kind === "p" && isHead(leaf, rest)) this.table(leaf, cellsOf(rest));
    else if (this.leaf && this.leaf.kind === "p") this.words(rest.trim(), "\n"); // also where a quote lacks its mark
    else {
      this.cut(depth);
      this.words(rest.trim(), "\n");
    }
  }

  table(leaf, marks) {
    const head = make("thead"), body = make("tbody");
    const box = make("div", { className: "scroll" }, make("table", {}, head, body));
    const sides = marks.map(mark => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
    leaf.node.replaceWith(box);
    this.swapped = [box, leaf.node];
    this.leaf = { kind: "table", node: body, sides };
    this.row({ node: head, sides }, cellsOf(leaf.text), "th");
  }

  row({ node, sides }, cells, tag) {
    const made = sides.map((className, at) => make(tag, { className }, inline(cells[at] || "")));
    node.append(make("tr", {}, ...made));
  }
}

// An answer that is JSON throughout is shown as such, indented.
function structured(text) {
  if (!/^\s*[{[]/.test(text) || text.length > 1e6) return null;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return null; }
}

function json(text) {
  const [box, code] = codeBlock("JSON");
  code.append(visible(text));
  return box;
}

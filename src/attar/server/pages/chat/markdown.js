// Markdown of answers. An answer is read by lines, and each line changes the end of the document only. The last line may
// still grow: it is drawn on trial, and taken back before more is read. Thus an answer looks the same however it is cut,
// and costs its length: a line is read in parts of PIECE characters, and what `inline` finds ends with its piece.
const PIECE = 8192, DEEP = 10;
const QUOTE = /^ {0,3}>[ \t]?/, ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?![ \t])|[ \t]|$)/;
const HEADING = /^ {0,3}(#{1,6})(?= |$)/, UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/, RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const INDENT = 4; // columns before code without a fence

const leadOf = line => /^[ \t]*/.exec(line)[0];
const columnsOf = lead => [...lead].reduce((sum, each) => sum + (each === " " ? 1 : 4 - (sum % 4)), 0);
const indentOf = line => columnsOf(leadOf(line));
const isBlank = line => !line.trim();

// A line without its first columns, as far as they are blank. A tab stays one unless it is cut.
function stripped(line, columns) {
  const lead = leadOf(line);
  let at = 0, sum = 0;
  for (; sum < columns && at < lead.length; at++) sum += lead[at] === " " ? 1 : 4 - (sum % 4);
  return sum > columns ? " ".repeat(columnsOf(lead) - columns) + line.slice(lead.length) : line.slice(at);
}

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

const headingOf = (level, title) => make(`h${Math.min(6, level + 2)}`, {}, inline(title)); // h1 and h2 are the page's

class Markdown {
  constructor(root) {
    this.root = root;
    this.rest = ""; // the last line, as far as it is known
    this.within = false; // whether a part of it has been read
    this.stack = []; // quotes and list items that are open
    this.leaf = null; // the paragraph, code block or table that is open
    this.kept = null; // what to go back to
    this.swapped = null; // a table or heading on trial, and the paragraph in whose place it is
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
    const { leaf } = this;
    if (!this.within) this.line(line);
    else if (leaf && leaf.kind === "code") {
      this.code(leaf.between.slice(0, -1) + line);
      leaf.between = "\n";
    } else this.words(line, "");
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
        if (!isBlank(rest) && indentOf(rest) < each.least) break;
        rest = stripped(rest, each.columns);
      } else {
        const quote = QUOTE.exec(rest);
        if (!quote) break;
        rest = rest.slice(quote[0].length);
      }
    }
    const leaf = depth === this.stack.length ? this.leaf : null;
    if (leaf && leaf.kind === "code" && this.goesOn(leaf, rest)) return;
    [rest, depth] = this.containers(rest, depth, leaf);
    this.block(rest, depth);
  }

  // Whether a line belongs to the code that is open, which takes it. Code without a fence ends before its last blank lines.
  goesOn(leaf, rest) {
    const fence = leaf.fence && FENCE.exec(rest), blank = isBlank(rest);
    if (!leaf.fence && !blank && indentOf(rest) < INDENT) return false;
    if (fence && fence[2][0] === leaf.fence[0] && fence[2].length >= leaf.fence.length && isBlank(fence[3])) this.leaf = null;
    else if (!leaf.fence && blank) leaf.between += stripped(rest, INDENT) + "\n";
    else {
      this.code(leaf.between + stripped(rest, leaf.columns));
      leaf.between = "\n";
    }
    return true;
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
      this.place.append(headingOf(heading[1].length, title));
    } else if (leaf && leaf.kind === "p" && !leaf.from && this.underlines(rest)) {
      this.swap(leaf, headingOf(UNDERLINE.exec(rest)[1][0] === "=" ? 1 : 2, leaf.text), null);
    } else if (RULE.test(rest)) {
      this.cut(depth);
      this.place.append(make("hr"));
    } else if (fence && !(fence[2][0] === "`" && fence[3].includes("`"))) {
      this.cut(depth);
      this.open(fence[3].trim().split(/[\s{]/, 1)[0], { fence: fence[2], columns: fence[1].length });
    } else if (leaf && leaf.kind === "table" && rest.includes("|")) this.row(leaf, cellsOf(rest), "td");
    else if (leaf && leaf.kind === "p" && isHead(leaf, rest)) this.table(leaf, cellsOf(rest));
    else if (this.leaf && this.leaf.kind === "p") this.words(rest.trim(), "\n"); // also where a quote lacks its mark
    else if (indentOf(rest) >= INDENT) {
      this.cut(depth);
      this.open("", { fence: "", columns: INDENT });
      this.goesOn(this.leaf, rest);
    } else {
      this.cut(depth);
      this.words(rest.trim(), "\n");
    }
  }

  // One mark may still become a list item, or words, while its line is on trial.
  underlines(rest) {
    const found = UNDERLINE.exec(rest);
    return found && (found[1].length > 1 || !this.kept);
  }

  // Code that begins. `between` comes before its next line.
  open(name, about) {
    const [box, node] = codeBlock(name);
    this.place.append(box);
    this.leaf = { kind: "code", node, between: "", ...about };
  }

  // A paragraph turns out to be something else.
  swap(paragraph, node, leaf) {
    paragraph.node.replaceWith(node);
    this.swapped = [node, paragraph.node];
    this.leaf = leaf;
  }

  table(leaf, marks) {
    const head = make("thead"), body = make("tbody");
    const box = make("div", { className: "scroll" }, make("table", {}, head, body));
    const sides = marks.map(mark => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
    this.swap(leaf, box, { kind: "table", node: body, sides });
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

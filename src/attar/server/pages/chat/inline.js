// Text within blocks: emphasis, code spans, links, and references of characters (`&amp;`). Nodes are made one by one: what
// a model writes becomes text, never markup, and no picture is loaded.
const OPENERS = 24;
const REORDERING = /[\u202a-\u202e\u2066-\u2069]/g; // text after them is not where it seems to be
const SPECIAL = /[\\`*_~[\]<&]|https?:\/\//gi;
const TARGET = /\(\s{0,9}<?([^\s<>()]{0,2048}(?:\([^\s<>()]{0,512}\)[^\s<>()]{0,512})?)>?(?:\s{1,9}["'][^"'\n]{0,512}["'])?\s{0,9}\)/y;
const POINTED = /<(https?:\/\/[^\s<>]{1,2048})>/iy;
const BARE = /https?:\/\/[^\s<>"`|\\[\]]{1,2048}/iy;

const REFERENCE = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z]\w{1,31}));/g, REFERRED = new RegExp(REFERENCE, "y");
const NAMED = new Map(); // names of characters
for (const [first, names] of [
  [160, "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro " +
    "para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil " +
    "Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave " +
    "Uacute Ucirc Uuml Yacute THORN szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml " +
    "igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute " +
    "thorn yuml"],
  [913, "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho"],
  [931, "Sigma Tau Upsilon Phi Chi Psi Omega"],
  [945, "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigmaf sigma tau upsilon " +
    "phi chi psi omega"],
  [8592, "larr uarr rarr darr harr"],
]) names.split(" ").forEach((name, at) => NAMED.set(name, String.fromCharCode(first + at)));
const SIGNS = "amp & lt < gt > quot \" apos ' OElig \u0152 oelig \u0153 Scaron \u0160 scaron \u0161 ensp \u2002 " +
  "emsp \u2003 thinsp \u2009 ndash \u2013 mdash \u2014 lsquo \u2018 rsquo \u2019 sbquo \u201a ldquo \u201c rdquo \u201d " +
  "bdquo \u201e dagger \u2020 bull \u2022 hellip \u2026 permil \u2030 prime \u2032 lsaquo \u2039 rsaquo \u203a euro \u20ac " +
  "trade \u2122 lArr \u21d0 rArr \u21d2 hArr \u21d4 forall \u2200 part \u2202 exist \u2203 empty \u2205 nabla \u2207 " +
  "isin \u2208 notin \u2209 ni \u220b prod \u220f sum \u2211 minus \u2212 radic \u221a prop \u221d infin \u221e and \u2227 " +
  "or \u2228 cap \u2229 cup \u222a int \u222b there4 \u2234 sim \u223c cong \u2245 asymp \u2248 ne \u2260 equiv \u2261 " +
  "le \u2264 ge \u2265 sub \u2282 sup \u2283 sube \u2286 supe \u2287 oplus \u2295 otimes \u2297 perp \u22a5 sdot \u22c5";
for (const [, name, sign] of SIGNS.matchAll(/(\w+) ([^ ])/g)) NAMED.set(name, sign);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const visible = text => text.replace(REORDERING, each => `\u27e8U+${each.charCodeAt(0).toString(16).toUpperCase()}\u27e9`);

function character(code) {
  const known = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  return String.fromCodePoint(known ? code : 0xfffd);
}

// A text with the characters that it refers to. Names that are not known stay.
const resolved = text => text.replace(REFERENCE, (whole, decimal, hex, name) =>
  name ? NAMED.get(name) ?? whole : character(decimal ? parseInt(decimal, 10) : parseInt(hex, 16)));

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
    out.push(literal, ""); // the second for what closes a part of three marks
  };
  const closes = (index, begin) => {
    out[open[index].at] = begin;
    out.push({ end: true });
    open.length = index;
  };
  // Close a run of marks by `count` of them. Of three marks the others stay open.
  const emphasized = (index, count) => {
    const { key, at } = open[index], rest = key.slice(count), tags = [["em"], ["strong"], ["strong", "em"]];
    closes(index, { begin: key[0] === "~" ? ["del"] : tags[count - 1] });
    if (!rest) return;
    [out[at], out[at + 1]] = [rest, out[at]];
    open.push({ key: rest, at });
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
      const escaped = /[!-/:-@[-`{-~\n]/.test(text[at] || "");
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
      const run = runAt(text, here), after = text[here + run.length] || " ", three = mark.repeat(3);
      at = here + run.length;
      const word = /[\p{L}\p{N}]/u, usable = mark === "~" ? run.length === 2 : run.length < 4;
      const ends = usable && /\S/.test(before) && !(mark === "_" && word.test(after));
      const begins = usable && /\S/.test(after) && !(mark === "_" && word.test(before));
      const closed = left => open.findLastIndex(({ key }) => key === left || (key[0] === mark && (key === three || left === three)));
      let left = ends ? run : "", index = left ? closed(left) : -1;
      if (index < 0 && begins) opens(run, run);
      else if (index < 0) out.push(run);
      for (; left && index >= 0; index = left ? closed(left) : -1) { // `**a *b***` closes both
        const count = Math.min(left.length, open[index].key.length);
        emphasized(index, count);
        left = left.slice(count);
        if (left && closed(left) < 0) { out.push(left); left = ""; }
      }
    } else if (mark === "[") {
      opens(image ? "![" : "[", image ? "![" : "[");
    } else if (mark === "]") {
      const index = open.findLastIndex(each => each.key.endsWith("["));
      TARGET.lastIndex = at;
      const target = index >= 0 && TARGET.exec(text), href = target && address(resolved(target[1]));
      if (href) {
        closes(index, { href, image: open[index].key === "![" });
        open = open.filter(each => !each.key.endsWith("[")); // no link holds another
        at = TARGET.lastIndex;
      } else {
        if (index >= 0) open.splice(index, 1);
        out.push(mark);
      }
    } else if (mark === "&") {
      REFERRED.lastIndex = here;
      const [whole] = REFERRED.exec(text) || [mark];
      out.push(resolved(whole));
      at = here + whole.length;
    } else if (mark === "<") {
      POINTED.lastIndex = here;
      const pointed = POINTED.exec(text), href = pointed && address(pointed[1]);
      out.push(href ? { href, text: pointed[1] } : mark);
      if (href) at = POINTED.lastIndex;
    } else {
      BARE.lastIndex = here;
      let bare = /\w/.test(before) ? "" : (BARE.exec(text) || [""])[0], end = 0;
      for (let depth = 0; end < bare.length; end++) { // up to a bracket that was opened before it
        if (bare[end] === "(") depth++;
        if (bare[end] === ")" && --depth < 0) break;
      }
      while (end && "*_~.,;:!?'".includes(bare[end - 1])) end--;
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


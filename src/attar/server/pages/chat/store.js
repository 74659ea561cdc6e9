// Conversations that this browser keeps: each under a key of its own, a line about it and then its messages. Together
// they take at most LIMIT bytes, and the oldest make room. Options of more than OPTION characters are not kept. With
// these, the page keeps less than 5 MB. API keys are never among them.
const PREFIX = "attar.chat.", LIMIT = 4.7e6, OPTION = 1e5;
const bytesOf = (key, value) => 2 * (key.length + value.length); // as browsers count them

const store = {
  // Newest first. Damaged ones are dropped.
  list() {
    const found = [];
    try {
      for (const key of Object.keys(localStorage).filter(each => each.startsWith(PREFIX))) {
        const value = localStorage.getItem(key);
        try {
          const [at, title] = JSON.parse(value.slice(0, value.indexOf("\n")));
          found.push({ id: key.slice(PREFIX.length), at: Number(at), title: String(title), bytes: bytesOf(key, value) });
        } catch { localStorage.removeItem(key); }
      }
    } catch { return []; } // the browser keeps nothing
    return found.sort((one, other) => other.at - one.at);
  },

  read(id) {
    try {
      const value = localStorage.getItem(PREFIX + id), items = JSON.parse(value.slice(value.indexOf("\n") + 1));
      return Array.isArray(items) ? items.filter(each => each && ["user", "assistant", "tool"].includes(each.role)) : null;
    } catch { return null; }
  },

  // Whether it is kept.
  write({ id, at, title, items }) {
    const key = PREFIX + id, value = JSON.stringify([at, title]) + "\n" + JSON.stringify(items);
    const others = this.list().filter(each => each.id !== id);
    let used = bytesOf(key, value) + others.reduce((sum, each) => sum + each.bytes, 0);
    if (bytesOf(key, value) > LIMIT) return false;
    for (;;) {
      try {
        if (used <= LIMIT) { localStorage.setItem(key, value); return true; }
      } catch { /* the browser has less room */ }
      const oldest = others.pop();
      if (!oldest) return false;
      this.remove(oldest.id);
      used -= oldest.bytes;
    }
  },

  remove(id) { try { localStorage.removeItem(PREFIX + id); } catch { /* nothing is kept */ } },
  clear() { for (const { id } of this.list()) this.remove(id); },

  // Options, and the conversation of this tab.
  note(where, key, value) {
    const text = JSON.stringify(value);
    if (text.length > OPTION) return;
    try { where().setItem(key, text); } catch { /* nothing is kept */ }
  },
  noted(where, key) { try { return JSON.parse(where().getItem(key)); } catch { return null; } },
};
const tab = () => sessionStorage, browser = () => localStorage;

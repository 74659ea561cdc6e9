// What is kept, the list of conversations, and what the page's controls do.
let warned = false;
const gone = new Set(); // ids of conversations that were deleted, perhaps while an answer came

function save(saved) {
  if (gone.has(saved.id)) return;
  if (!saved.items.length) { store.remove(saved.id); past(); return; }
  saved.at = Date.now();
  keepOptions();
  if (!store.write(saved) && !warned) {
    warned = true;
    turn("note", "This browser has no room to keep the conversation.");
  }
  past();
}

function keepOptions() {
  store.note(browser, "attar.options", Object.fromEntries(kept.map(name => [name, $(name).value])));
  store.note(tab, "attar.tab", { id: chat.id, model: $("models").value || wanted });
}

function past() {
  const found = store.list();
  $("past").replaceChildren(...found.map(({ id, title }) => {
    const open = act(visible(title) || "Untitled", () => visit(id)), drop = act("\u00d7", () => forget(id));
    if (id === chat.id) open.setAttribute("aria-current", "true");
    drop.setAttribute("aria-label", `Delete ${visible(title)}`);
    return make("li", { className: id === chat.id ? "open" : "", title: visible(title) }, open, drop);
  }));
  $("none").hidden = found.length > 0;
  $("forget").hidden = !found.length;
  $("forget").textContent = "Delete all";
  $("forget").classList.remove("sure");
}

// Another conversation. An answer that is on its way is stopped and kept as far as it came.
function turnTo(next) {
  if (running) running.abort();
  edited = null; images = [];
  $("text").value = "";
  chat = next;
  show();
  redraw();
  past();
  panel(false);
  keepOptions();
  $("text").focus();
}

function visit(id) {
  const known = store.list().find(each => each.id === id), items = known && store.read(id);
  if (items) turnTo({ ...known, items });
  else { store.remove(id); past(); }
}

function forget(id) {
  gone.add(id);
  store.remove(id);
  if (id === chat.id) turnTo(fresh()); else { past(); $("text").focus(); }
}

function panel(open) {
  $("chats").classList.toggle("shown", open);
  $("list").setAttribute("aria-expanded", String(open));
}

$("ask").addEventListener("submit", event => { event.preventDefault(); submit(); });
$("login").addEventListener("submit", event => { event.preventDefault(); listed = false; $("text").focus(); });
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { attach($("files").files); $("files").value = ""; $("text").focus(); });
$("text").addEventListener("paste", event => { if (attach(event.clipboardData.files)) event.preventDefault(); });
document.addEventListener("dragover", event => { if (!$("attach").hidden) event.preventDefault(); });
document.addEventListener("drop", event => { if (attach(event.dataTransfer.files)) event.preventDefault(); });
$("stop").addEventListener("click", () => running && running.abort());
$("new").addEventListener("click", () => turnTo(fresh()));
$("list").addEventListener("click", () => panel(!$("chats").classList.contains("shown")));
$("cancel").addEventListener("click", () => { unedit(); $("text").focus(); });
$("forget").addEventListener("click", () => { // the second press does it
  if (!$("forget").classList.toggle("sure")) { [chat, ...store.list()].forEach(({ id }) => gone.add(id)); store.clear(); turnTo(fresh()); return; }
  $("forget").textContent = "Really delete all?";
});
for (const name of kept) $(name).addEventListener("change", keepOptions);
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (running) running.abort(); else unedit();
  panel(false);
});
window.addEventListener("storage", past);
$("models").addEventListener("change", () => {
  chats = true; before = null; looks = [];
  compose();
  keepOptions();
});

for (const [name, value] of Object.entries(store.noted(browser, "attar.options") || {})) if (kept.includes(name)) $(name).value = value;
const last = store.noted(tab, "attar.tab") || {};
wanted = last.model || "";
const known = store.list().find(each => each.id === last.id), items = known && store.read(known.id);
if (items) chat = { ...known, items };
redraw();
past();
look();

"""What a browser makes of the page: run by `test_browser.py`, with a Python that has Playwright.

`python browser_program.py URL CHROMIUM FOLDER`; writes screenshots into FOLDER and says what it saw as one JSON object.
The engine behind URL runs two choices at a time. No mouse is used anywhere, and nothing is given the focus but by Tab.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Route, sync_playwright

SIZES = {"wide": (1200, 760), "phone": (390, 780)}
SECONDS = 20.0
FIRST = 0.3  # seconds, at least, to the first token
MANY = 400  # tokens, which nobody waits for

CLOCK = """
  let now = 0;
  performance.now = () => now;
  window.setTimeout = work => { window.next = work; };
  window.tick = () => { now += 500; window.next(); };
"""
CELLS = """side => {  // row by row, each as the legend has its colour: free, active, cached; or ? if it does not
  const canvas = document.getElementById("blocks"), { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const legend = [...document.querySelectorAll(".key i")].map(each => getComputedStyle(each).backgroundColor);
  let seen = new Set(legend).size === 3 ? "" : "two states look alike";
  for (let top = 0; top + side <= height; top += side)
    for (let left = 0; left + side <= width; left += side) {
      const at = 4 * ((top + (side >> 1) - 1) * width + left + (side >> 1) - 1);
      const [red, green, blue, alpha] = data.subarray(at, at + 4);
      if (alpha) seen += "fac"[legend.indexOf(`rgb(${red}, ${green}, ${blue})`)] || "?";
    }
  return seen;
}"""
ASKING = """
  const send = window.fetch;
  window.asked = [];
  window.held = null;  // or a promise, for which what is asked waits
  window.fetch = async (where, options) => {
    if (where === "v1/chat/completions") { asked.push(JSON.parse(options.body)); await held; }
    return send(where, options);
  };
"""
OTHERS = """() => {  // somebody else's, who waits with two choices
  window.others = new AbortController();
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal: others.signal };
  fetch("v1/completions", { ...options, body: JSON.stringify({ prompt: "a", n: 3, max_tokens: 400 }) }).catch(() => 0);
}"""
BEHIND = "name => !!(document.activeElement.compareDocumentPosition($(name)) & Node.DOCUMENT_POSITION_FOLLOWING)"
OPTIONS = ("system", "temperature", "top_p", "seed")
STATES = ("free", "active", "cached")
FOCUS = """() => {
  const style = getComputedStyle(document.activeElement);
  return [document.activeElement.id, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
}"""


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.02)


class Walk:
    """A page, by keyboard."""

    def __init__(self, browser: Browser, url: str, size: tuple[int, int], models: tuple[str, ...] = ()) -> None:
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.add_init_script(ASKING)
        if models:
            told = {"object": "list", "data": [{"id": name} for name in models]}
            self.page.route("**/v1/models", lambda route: route.fulfill(json=told))
        self.page.goto(url)
        until(lambda: "tokens" in self.text("#model"))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def focus(self) -> str:
        return str(self.page.evaluate(FOCUS)[0])

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def to(self, name: str, key: str = "Tab") -> list[str]:
        """Walk there; what came by. Whatever has the focus must show it."""
        way = []
        for _ in range(40):
            self.press(key)
            at, seen = self.page.evaluate(FOCUS)
            assert seen, f"{at} has the focus and does not show it"
            way.append(at)
            if at == name:
                return way
        raise AssertionError(f"no way from {way[0]} to {name}: {way}")

    def set(self, name: str, value: str) -> None:
        if name in OPTIONS and not self.page.evaluate("$('options').open"):
            self.to_options()
        if self.focus() != name:
            self.to(name, "Tab" if self.page.evaluate(BEHIND, name) else "Shift+Tab")
        self.press("Control+A")
        self.page.keyboard.type(value)

    def say(self, text: str) -> None:
        if self.focus() != "text":
            self.to("text", "Shift+Tab")
        self.page.keyboard.type(text)
        self.press("Enter")

    def to_options(self) -> None:
        """Walk to the options and unfold them."""
        self.to("fold")
        self.press("Enter")

    def notes(self) -> int:
        return self.page.locator(".note").count()

    def answering(self) -> None:
        """Until the last answer has begun."""
        until(lambda: self.page.locator(".assistant").last.inner_text())

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is asked at the beginning is sent at the end."""
        self.page.evaluate("() => { held = new Promise(done => { window.release = done; }); }")
        yield
        self.page.evaluate("() => { release(); held = null; }")


def talk(browser: Browser, url: str, size: tuple[int, int], picture: Path) -> dict[str, Any]:
    walk = Walk(browser, url, size)
    page, seen = walk.page, {}
    seen["first"] = walk.focus()
    # The knobs, and Send by key.
    seen["folded"] = walk.to("fold")
    walk.press("Enter")
    seen["way"] = walk.to("tools")
    walk.to("text", "Shift+Tab")
    for name, value in (("max_tokens", "6"), ("system", "hm"), ("temperature", "0.5"), ("top_p", "0"), ("seed", "-7")):
        walk.set(name, value)
    walk.to("text", "Shift+Tab")
    page.keyboard.type("hello")
    walk.to("send")
    began = time.monotonic()
    with walk.held():
        walk.press("Enter")
        seen["while asked"] = walk.focus()
        time.sleep(FIRST)
    until(lambda: walk.notes() == 1)
    seen["first token"] = [walk.text("#ttft"), time.monotonic() - began]
    seen["after"] = walk.focus()
    # Stop by key, and by Escape.
    walk.set("max_tokens", str(MANY))
    walk.say("more")
    walk.answering()
    box, height = page.locator(".user").last.bounding_box(), page.evaluate("innerHeight")
    seen["in view"] = box is not None and 0 <= box["y"] <= height - box["height"]
    page.evaluate(OTHERS)
    until(lambda: walk.text("#waiting") == "2")
    until(lambda: float(walk.text("#rate")) > 0)
    seen["figures"] = {name: walk.text(f"#{name}") for name in ("running", "reused", "preemptions", *STATES)}
    seen["cells"] = page.evaluate(CELLS, 9)
    page.screenshot(path=str(picture))
    page.evaluate("others.abort()")
    seen["to stop"] = walk.to("stop")
    walk.press("Space")
    until(lambda: walk.notes() == 2)
    seen["stopped"] = walk.focus()
    walk.say("and")
    walk.answering()
    walk.press("Escape")
    until(lambda: walk.notes() == 3)
    # Whoever is at a knob stays there.
    walk.set("max_tokens", "2")
    with walk.held():
        walk.say("end")
        walk.to("temperature")
    until(lambda: walk.notes() == 4)
    seen["at a knob"] = walk.focus()
    seen["turns"] = page.locator(".user").all_inner_texts()
    seen["notes"] = page.locator(".note").all_inner_texts()
    # Another conversation by key, while an answer comes.
    walk.set("max_tokens", str(MANY))
    walk.say("lost")
    walk.answering()
    walk.to("new", "Shift+Tab")
    walk.press("Enter")
    until(lambda: page.locator("#stop").is_disabled())
    seen["left"] = [page.locator(".turn").count(), walk.focus()]
    walk.set("max_tokens", "2")
    walk.say("fresh")
    until(lambda: walk.notes() == 1)
    seen["asked"] = page.evaluate("asked")
    seen["too_wide"] = page.locator("html").evaluate("node => node.scrollWidth > node.clientWidth")
    seen["errors"] = walk.errors
    page.close()
    return seen


def read_back(browser: Browser, url: str) -> dict[str, Any]:
    """Where a reader is while an answer comes: in a window that does not hold it."""
    walk = Walk(browser, url, (1000, 320))
    page, seen = walk.page, {}

    def below() -> float:
        return float(page.evaluate("talk.scrollHeight - talk.clientHeight - talk.scrollTop"))

    def top() -> float:
        return float(page.evaluate("talk.scrollTop"))

    def back(key: str) -> float:
        """Where the key leads, from the end of what is there."""
        if walk.focus() != "talk":
            walk.to("talk", "Shift+Tab")
        before = top()
        walk.press(key)
        until(lambda: top() < before)
        return top()

    def to_the_end() -> bool:
        walk.press("End")
        time.sleep(0.1)
        return below() < 4

    def grown() -> None:
        """Until there are more lines."""
        before = page.evaluate("talk.scrollHeight")
        until(lambda: page.evaluate("talk.scrollHeight") > before)

    walk.set("max_tokens", str(MANY))
    walk.say("so many words " * 60)
    walk.answering()
    grown()
    seen["at the end"] = below()
    for key in ("ArrowUp", "PageUp", "Home"):
        at = back(key)
        away = below()
        grown()
        seen[key] = [away > 4, top() - at]
        until(to_the_end)  # lines may come between the key and its effect
        grown()
        seen[f"back from {key}"] = below()
    at = back("Home")
    walk.press("Escape")
    until(lambda: walk.notes() == 1)
    seen["stopped"] = [at, top()]
    walk.to("text")
    walk.say("and")
    walk.answering()
    seen["asked"] = below()
    walk.press("Escape")
    until(lambda: walk.notes() == 2)
    seen["noted"] = below()
    seen["errors"] = walk.errors
    page.close()
    return seen


def refusing(status: int) -> Callable[[Route], None]:
    return lambda route: route.fulfill(status=status, json={"error": {"message": "it broke"}})


def refused(browser: Browser, url: str) -> dict[str, Any]:
    """What is left of a question that had no answer, and of the conversation around it."""
    walk = Walk(browser, url, (1000, 700))
    page, seen = walk.page, {}
    walk.set("max_tokens", "2")
    walk.to("text", "Shift+Tab")
    walk.say("before")
    until(lambda: walk.notes() == 1)
    for status in (500, 401):
        page.route("**/v1/chat/completions", refusing(status))
        walk.set("text", "try this")
        walk.press("Enter")
        until(lambda: page.evaluate("running === null"))
        left = [page.input_value("#text"), page.locator(".user").all_inner_texts()]
        seen[str(status)] = [*left, page.locator(".error").last.inner_text()]
        page.unroute("**/v1/chat/completions")
    walk.press("Enter")
    until(lambda: walk.notes() == 2)
    seen["asked"] = page.evaluate("asked")[-1]["messages"]
    seen["typed"] = page.input_value("#text")
    page.close()
    return seen


def reload(browser: Browser, url: str) -> dict[str, Any]:
    """What is there of a conversation after the page is loaded again, and after another was begun."""
    walk = Walk(browser, url, (1000, 700))
    page, seen = walk.page, {}

    def turns() -> Any:
        return page.locator(".user, .assistant, .note").all_text_contents()

    for name, value in (("max_tokens", "4"), ("system", "hm"), ("temperature", "0.5")):
        walk.set(name, value)
    walk.to("text", "Shift+Tab")
    walk.say("first")
    until(lambda: walk.notes() == 1)
    before = turns()
    page.reload()
    until(lambda: "tokens" in walk.text("#model"))
    seen["turns"] = [before, turns()]
    seen["knobs"] = [page.input_value(f"#{name}") for name in ("temperature", "max_tokens", "system")]
    seen["said"] = page.evaluate("chat.items.map(each => each.content)")
    walk.say("more")
    until(lambda: walk.notes() == 2)
    seen["asked"] = page.evaluate("asked")[-1]
    walk.set("max_tokens", str(MANY))
    walk.to("text", "Shift+Tab")
    walk.say("lost")
    walk.answering()
    walk.to("new", "Shift+Tab")
    walk.press("Enter")
    until(lambda: page.locator("#stop").is_disabled())
    page.reload()
    until(lambda: "tokens" in walk.text("#model"))
    seen["left"] = [turns(), page.locator("#past li").count()]
    seen["errors"] = walk.errors
    page.close()
    return seen


def chooses(browser: Browser, url: str) -> dict[str, Any]:
    """Which model is asked where there are several: the first, the one that is chosen, and that one after a reload."""
    walk = Walk(browser, url, (1000, 700), ("one", "two"))
    page, seen = walk.page, {}
    walk.set("max_tokens", "2")
    walk.say("first")
    until(lambda: walk.notes() == 1)
    walk.to("models", "Shift+Tab")
    walk.press("ArrowDown")
    walk.to("text")
    walk.set("text", "second")
    walk.press("Enter")
    until(lambda: page.evaluate("asked.length === 2 && running === null"))
    seen["asked"] = [body["model"] for body in page.evaluate("asked")]
    page.reload()
    until(lambda: "tokens" in walk.text("#model"))
    seen["kept"] = page.input_value("#models")
    page.close()
    return seen


def completes(browser: Browser, url: str) -> dict[str, Any]:
    """What a page does whose model has no chat template."""
    walk = Walk(browser, url, (1000, 700))
    page, prompts = walk.page, []
    error = {"message": "this model has no chat template: use /v1/completions", "code": "no_chat_template"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error}))
    page.on("request", lambda each: prompts.append(each.post_data_json["prompt"]) if "/v1/comp" in each.url else None)
    walk.set("max_tokens", "4")
    walk.to("text", "Shift+Tab")
    for number, text in enumerate(("Once", "and"), 1):
        walk.say(text)
        until(lambda many=number: walk.notes() == many)
    seen = {
        "turns": page.locator(".assistant").all_text_contents(), "errors": page.locator(".error").count(),
        "prompts": prompts, "chats": len(page.evaluate("asked")),
    }  # fmt: skip
    page.close()
    return seen


def look(browser: Browser, url: str) -> dict[str, Any]:
    """What is drawn of what an engine says, by a clock that stands still between two looks: in the dark, the last."""
    page = browser.new_page(viewport={"width": 1200, "height": 760})
    sizes = (300, 300, 2000, 5000)
    states = [bytes((at // 2 + look) % 3 for at in range(count)) for look, count in enumerate(sizes)]  # no two alike
    generated = (1000, 1060, 1060, 1000)  # the last is another engine's
    said = iter(zip(states, generated, strict=True))

    def answer(route: Route) -> None:
        state, tokens = next(said)
        names = ("running", "waiting", "preemptions", "prompt_tokens", "blocks_free", "blocks_active", "blocks_cached")
        stats = dict.fromkeys(names, 0) | {"generated_tokens": tokens, "blocks": base64.b64encode(state).decode()}
        route.fulfill(json={"ready": {"model": "m", "context": 1}, "stats": stats})

    page.add_init_script(CLOCK)
    page.route("**/v1/engine", answer)
    found: dict[str, Any] = {"rates": [], "cells": []}
    for number, state in enumerate(states):
        if number == len(states) - 1:
            page.emulate_media(color_scheme="dark")
        page.evaluate("tick()") if number else page.goto(url)
        side = 9 if len(state) <= 1024 else 5 if len(state) <= 4096 else 3
        expected = "".join("fac"[each] for each in state)
        end = time.monotonic() + SECONDS
        while (drawn := page.evaluate(CELLS, side)) != expected and time.monotonic() < end:
            time.sleep(0.02)
        found["cells"].append(drawn == expected)
        found["rates"].append(page.inner_text("#rate"))
    page.close()
    return found


def main() -> None:
    url, chromium, folder = sys.argv[1:]
    with sync_playwright() as playwright:
        # a key's scrolling is one step: where a glide is when a busy machine draws next to nothing cannot be known
        flags = ["--no-sandbox", "--disable-smooth-scrolling"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        seen = {name: talk(browser, url, size, Path(folder) / f"{name}.png") for name, size in SIZES.items()}
        seen["look"] = look(browser, url)
        seen["read back"] = read_back(browser, url)
        seen["refused"] = refused(browser, url)
        seen["reload"] = reload(browser, url)
        seen["completes"] = completes(browser, url)
        seen["chooses"] = chooses(browser, url)
        browser.close()
    print(json.dumps(seen))


main()

"""What a browser makes of the page: run by `test_browser.py`, with a Python that has Playwright.

`python browser_program.py URL CHROMIUM FOLDER`; writes screenshots into FOLDER and says what it saw as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

SIZES = {"wide": (1200, 760), "phone": (390, 780)}
SECONDS = 20.0


def until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.05)


def say(page: Page, text: str) -> None:
    """By keyboard alone."""
    page.focus("#text")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def talk(browser: Browser, url: str, size: tuple[int, int], picture: Path) -> dict[str, Any]:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto(url)
    until(lambda: "tokens" in page.inner_text("#model"))
    page.fill("#max_tokens", "6")
    say(page, "hello")
    until(lambda: page.locator(".note").count() == 1)
    page.fill("#max_tokens", "400")
    say(page, "more")
    until(lambda: page.locator(".assistant").nth(1).inner_text())
    until(lambda: page.inner_text("#running") == "1")
    page.screenshot(path=str(picture))
    page.keyboard.press("Escape")
    until(lambda: page.locator(".note").count() == 2)
    return {
        "errors": errors,
        "turns": page.locator(".user").all_inner_texts(),
        "answered": bool(page.locator(".assistant").first.inner_text()),
        "notes": page.locator(".note").all_inner_texts(),
        "too_wide": page.locator("html").evaluate("node => node.scrollWidth > node.clientWidth"),
        "cells": page.locator("#blocks").evaluate("node => node.width * node.height"),
        "focus": page.locator("#text").evaluate("node => node === document.activeElement"),
    }


def main() -> None:
    url, chromium, folder = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        seen = {name: talk(browser, url, size, Path(folder) / f"{name}.png") for name, size in SIZES.items()}
        browser.close()
    print(json.dumps(seen))


main()

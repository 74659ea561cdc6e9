"""A browser to test pages with: the system's Chromium, by its DevTools protocol over two pipes. It needs no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 30.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
    "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, "Space": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Backspace": 8,
}  # fmt: skip
TEXTS = {"Enter": "\r", "Space": " "}


def need_chromium() -> str:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    return CHROMIUM


class Browser:
    """One tab. `errors` are exceptions and refusals of the page, `requests` the addresses that it asked for."""

    def __init__(self, folder: Path) -> None:
        command_in, self._write = os.pipe()
        self._read, command_out = os.pipe()
        redirect = f'exec "$@" 3<&{command_in} 4>&{command_out}'
        program = ["bash", "-c", redirect, "bash", need_chromium(), *FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            program, pass_fds=(command_in, command_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(command_in)
        os.close(command_out)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._read)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser is silent"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Page.loadEventFired":
                self._loaded += 1
        return event

    def open(self, url: str) -> None:
        """Load an address and wait until it has loaded."""
        before = self._loaded
        self.call("Page.navigate", url=url)
        while self._loaded == before:
            self._next()

    def show(self, width: int, height: int = 800, dark: bool = False, reduced: bool = False) -> None:
        """Set the size of the window in CSS pixels, the colour scheme, and the wish for less motion."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after another; a name with Shift+ is pressed with that."""
        for each in keys:
            key = each.removeprefix("Shift+")
            about: dict[str, Any] = {"key": " " if key == "Space" else key, "code": key, "modifiers": 8 * (key != each)}
            about["windowsVirtualKeyCode"] = KEYS[key]
            text = {"text": TEXTS[key]} if key in TEXTS else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def until(self, expression: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + SECONDS
        while not self.run(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.02)

    def picture(self, path: Path) -> None:
        """Save a picture of the whole page, for a person to look at."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

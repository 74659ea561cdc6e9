#!/usr/bin/env python3
"""Stands where llama.cpp's tests look for `llama-server`: starts attar, and passes bytes on to it.

Options of llama-server become those of `attar serve` where attar has them; others are ignored, and no request is
changed. The model is that of `SUITE_MODEL`, the embedded one by default. Servers with equal options are one process,
which outlives the tests: its id and port are in a file of `SUITE_POOL`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_SECONDS = 120.0
MODEL = os.environ.get("SUITE_MODEL", "demo")
MOST_CONTEXT = 512 if MODEL == "demo" else 8192
VALUES = {
    "--alias": "--name", "--cors-origins": "--origin", "--chat-template-file": "--chat-template",
    "--reasoning": "--reasoning", "--parallel": "--max-running",
}  # fmt: skip
SAMPLED = {"--temp": "temperature", "--seed": "seed"}


def options(words: list[str]) -> tuple[str, int, list[str]]:
    """Return host and port to listen at, and the options of `attar serve`."""
    given = dict(zip(words, [*words[1:], ""], strict=True))
    shares = 1 if "--kv-unified" in words else int(given.get("--parallel", 1))
    context = int(given.get("--ctx-size", MOST_CONTEXT)) // shares
    made = ["--context", str(min(context, MOST_CONTEXT)), "--alias", "*"]  # llama-server takes any name
    if given.get("--reasoning") == "auto":
        given["--reasoning"] = "on"  # which is what it means there, for templates that reason
    for name, own in VALUES.items():
        if name in given:
            made += [own, given[name]]
    for name, own in SAMPLED.items():
        if name in given:
            made += ["--sampling", f"{own}={given[name]}"]
    if "--api-key" in given:
        made += keyed(given["--api-key"])
    return given.get("--host", "127.0.0.1").split(",")[0], int(given["--port"]), made


def keyed(key: str) -> list[str]:
    """Return the options of a server that requires this key."""
    keys = Path(os.environ["SUITE_POOL"], hashlib.sha256(key.encode()).hexdigest()[:16] + ".keys")
    keys.write_text(key + "\n")
    keys.chmod(0o600)
    return ["--api-key-file", str(keys)]


def backend(made: list[str]) -> int:
    """Return the port of a server with these options, which is started where none runs."""
    pool = Path(os.environ["SUITE_POOL"])
    place = pool / (hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16] + ".json")
    if place.exists():
        port = int(json.loads(place.read_text())["port"])
        if ready(port):
            return port
    log = place.with_suffix(".log").open("w")
    command = [os.environ["SUITE_PYTHON"], "-m", "attar", "serve", MODEL, "--port", "0", "--json", *made]
    command += [] if MODEL == "demo" else ["--memory", "4GB"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    assert server.stdout is not None
    port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
    place.write_text(json.dumps({"pid": server.pid, "port": port}))
    end = time.monotonic() + START_SECONDS
    while not ready(port):
        if time.monotonic() > end or server.poll() is not None:
            sys.exit("attar does not become ready")
        time.sleep(0.05)
    return port


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):  # which needs no key
            return True
    except OSError:
        return False


async def forward(host: str, port: int, to: int) -> None:
    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(both, host, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    host, port, made = options(sys.argv[1:])
    asyncio.run(forward(host, port, backend(made)))

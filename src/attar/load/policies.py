"""Batching policies of attar's own server, compared: one server after another, each driven by the same requests.

A policy says when waiting requests may join (`protocol.scheduler_config`). A server is a process of its own, started
for one policy on a free port and ended before the next one starts, so no policy inherits another's cache.
"""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any, Final

from attar.errors import UserError
from attar.load import sweep
from attar.progress import Progress

POLICIES: Final = ("none", "static", "dynamic", "continuous")
HOST = "127.0.0.1"
POLL = 0.1  # seconds between two looks at a server that starts
LEAVE = 60.0  # seconds after which a server that was told to end is killed
LAST = 2000  # characters of a server's log that may be quoted


def parse(text: str) -> tuple[str, ...]:
    """Parse a list of policies such as static,continuous. Raises ValueError for an unknown or repeated one."""
    found = tuple(text.split(","))
    for policy in found:
        if policy not in POLICIES:
            raise UserError("name_unknown", f"unknown policy {policy[:80]!r}: known are {', '.join(POLICIES)}")
    if len(set(found)) < len(found):
        raise UserError("option_conflict", f"--batching {text} names a policy twice")
    return found


def compare(
    policies: Sequence[str],
    model: str,
    settings: Sequence[str],
    options: sweep.Options,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Drive the same loads through a server of `model` for each policy; `settings` are further words for `attar serve`.

    Return a report like that of `sweep.bench_serve`. Its runs have the policy as `policy`, and before their labels.
    Raises ValueError where a server does not start, or `bench_serve` does.
    """
    runs: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for policy in policies:
        with served(model, ["--scheduler", f"policy={policy}", *settings]) as url:
            report = sweep.bench_serve(replace(options, url=url), progress)
        runs += [{**run, "policy": policy, "label": f"{policy}, {run['label']}"} for run in report["runs"]]
    return {**report, "url": "servers of its own", "runs": runs}


@contextmanager
def served(model: str, settings: Sequence[str], limit: float = math.inf) -> Iterator[str]:
    """Run a server of `model` and yield its address once it is ready. Raises ValueError where it ends before that, or
    is not ready after `limit` seconds."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "attar", "serve", model, "--host", HOST, "--port", f"{port}", *settings]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _ready(process, log, f"http://{HOST}:{port}", limit)
        finally:
            process.terminate()
            try:
                process.wait(LEAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], log: IO[bytes], url: str, limit: float) -> str:
    end = time.monotonic() + limit
    while process.poll() is None:
        time.sleep(POLL)
        if time.monotonic() > end:
            raise UserError("server_unreachable", f"the server was not ready after {limit:.0f} s")
        with suppress(OSError):  # not listening yet, or 503
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
            return url
    log.seek(max(0, log.seek(0, 2) - LAST))
    said = log.read().decode(errors="replace").strip().splitlines()
    raise UserError("server_unreachable", f"the server ended while it started: {said[-1] if said else 'no output'}")

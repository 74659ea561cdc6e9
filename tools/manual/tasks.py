"""Tasks of the documentation: the blocks fenced `bash` of a page are one script, and that script must work for anyone.

    python tools/manual/tasks.py              # the five tasks that the documentation promises, with their seconds
    python tools/manual/tasks.py docs/howto_resume.md

A script starts in an empty folder with an empty home. Its PATH has `attar` and the programs of `TOOLS`, nothing else,
and it has no network but this machine's. Port 8000 of the pages becomes a free one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROMISED = {
    "howto_compress": "compress your own model",
    "howto_fit_memory": "fit a model into 8 GB",
    "howto_serve_with_key": "serve with a key",
    "howto_gguf": "make a GGUF file for llama.cpp",
    "howto_slow_request": "explain a slow request",
}
"""What a reader must reach within ten minutes from its page alone, by the page's name."""

TOOLS = ("cat", "cmp", "cp", "curl", "grep", "ls", "mkdir", "openssl", "rm", "sleep", "timeout")
LIMIT = 600.0  # seconds of one task


def script(page: str) -> str:
    """Return the commands of a page as one script for bash, which stops at the first that fails."""
    return "set -eo pipefail\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S))


def pages() -> list[Path]:
    """Return the pages that have commands for bash."""
    return sorted(path for path in (ROOT / "docs").glob("*.md") if "\n```bash\n" in path.read_text())


def lacking() -> list[str]:
    """Return the programs of `TOOLS` that this machine does not have."""
    return [name for name in TOOLS if shutil.which(name) is None]


def run(page: Path, folder: Path, limit: float = LIMIT) -> tuple[int, str, float]:
    """Run the script of a page in an empty folder below `folder`. Return its exit status, its output and its seconds.
    A script that takes longer than `limit` ends with subprocess.TimeoutExpired. Nothing that it started goes on."""
    programs, home, here = folder / "bin", folder / "home", folder / "here"
    for each in (programs, home, here):
        each.mkdir()
    for name in TOOLS:
        (programs / name).symlink_to(str(shutil.which(name)))
    found = ":".join(path for path in os.environ.get("PYTHONPATH", "").split(":") if path)
    (programs / "attar").write_text(f'#!/bin/sh\nPYTHONPATH="{found}" exec "{sys.executable}" -m attar "$@"\n')
    (programs / "attar").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        commands = script(page.read_text()).replace("8000", str(free.getsockname()[1]))
    environment = {"PATH": str(programs), "HOME": str(home), "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1"}
    if threads := os.environ.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = threads
    said, begun = folder / "output", time.monotonic()
    with said.open("wb") as output:
        shell = subprocess.Popen(
            [shutil.which("bash") or "/bin/bash", "-c", commands],
            cwd=here, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            status = shell.wait(limit)
            seconds = time.monotonic() - begun
        finally:
            # What a script leaves behind is in its process group. An empty group is no error.
            for kind in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(shell.pid, kind)
                except ProcessLookupError:
                    break
                if kind == signal.SIGTERM:
                    shell.wait()
    return status, said.read_text(), seconds


def main(names: list[str]) -> int:
    """Run the tasks of the pages named, print a line for each, and return the exit status."""
    if missing := lacking():
        print(f"no {', '.join(missing)} on this machine")
        return 2
    failed = 0
    for page in [Path(name) for name in names] or [ROOT / "docs" / f"{name}.md" for name in PROMISED]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                status, said, seconds = run(page, Path(folder))
            except subprocess.TimeoutExpired:
                status, said, seconds = 124, (Path(folder) / "output").read_text(), LIMIT
        print(f"{PROMISED.get(page.stem, page.stem)}: {seconds:.1f} s, exit status {status}", flush=True)
        if status:
            failed = 1
            print(said)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

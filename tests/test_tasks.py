"""Tasks of the pages under docs/ in a real shell: the blocks fenced `bash` of a page are one script.

A task starts servers, so it runs in a shell of its own and not in this process. The folder has `./model`, the embedded
model, and two texts. Port 8000 of the pages becomes a free one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TASKS = sorted(path for path in (ROOT / "docs").glob("*.md") if "\n```bash\n" in path.read_text())
LONGEST = 300.0  # seconds; a task takes less than a tenth of that where nothing else runs


def script(page: str) -> str:
    """The commands of a page."""
    return "set -eo pipefail\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S))


def test_there_are_tasks() -> None:
    assert len(TASKS) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_task(path: Path, demo: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    shutil.copytree(demo, tmp_path / "model")
    text = (ROOT / "LICENSE").read_text()
    (tmp_path / "text.txt").write_text(text[1000:3000])
    (tmp_path / "heldout.txt").write_text(text[5000:7000])
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "attar").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m attar "$@"\n')
    (programs / "attar").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        commands = script(path.read_text()).replace("8000", str(free.getsockname()[1]))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    said = tmp_path / "output"
    with said.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", commands],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = shell.wait(LONGEST)
        finally:
            # What a script leaves behind is in its process group. An empty group is no error.
            for kind in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(shell.pid, kind)
                except ProcessLookupError:
                    break
                if kind == signal.SIGTERM:
                    shell.wait()
    assert status == 0, said.read_text()

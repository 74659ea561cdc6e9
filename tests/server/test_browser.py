"""The page in a real browser, at the width of a desk and of a phone, by keyboard."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def seen(start: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the browser saw."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    found = PYTHON.exists() and subprocess.run([PYTHON, "-c", "import playwright"], capture_output=True)
    if not found or found.returncode:
        pytest.skip(f"no playwright in {PYTHON.parents[1].name}")
    server = start(step=0.05)  # an answer of 400 tokens lasts: there is time to look at it, and to stop it
    program = [PYTHON, str(HERE / "browser_program.py"), f"http://127.0.0.1:{server.port}", CHROMIUM]
    done = subprocess.run([*program, str(tmp_path_factory.mktemp("page"))], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", ["wide", "phone"])
def test_a_conversation(seen: dict[str, Any], size: str) -> None:
    page = seen[size]
    assert page["errors"] == []
    assert page["turns"] == ["hello", "more"]
    assert page["answered"]
    assert page["notes"][0].startswith("6 tokens")
    assert page["notes"][1] == "stopped"
    assert not page["too_wide"]
    assert page["cells"] > 0
    assert page["focus"]

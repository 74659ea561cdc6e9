"""What an installation has: one OpenMP runtime, the commit of its build, shell completion, and a release of wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from attar import version

ROOT = Path(__file__).resolve().parent.parent
ONE_RUNTIME = """
import re
import attar
attar.LLM
from attar.kernels.native import extension
assert extension.library is not None, extension._unavailable
found = set(re.findall(r"\\S*lib(?:gomp|iomp5|omp)[-.]\\S*", open("/proc/self/maps").read()))
print("\\n".join(sorted(found)))
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run([sys.executable, *words], env=given, capture_output=True, text=True, check=True)


def test_a_process_has_one_openmp_runtime() -> None:
    found = run("-c", ONE_RUNTIME).stdout.split()
    assert len(found) == 1
    assert "torch" in found[0]  # the wheel contains none, and the system's is not taken


@pytest.mark.parametrize("text, expected", [(None, "0"), ("", "0"), ("abc123-dirty\n", "0 (abc123-dirty)")])
def test_the_version_names_the_commit_of_a_build(
    text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / version.COMMIT_FILE).write_text(text)
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    monkeypatch.setattr(version, "__version__", "0")
    assert version.described() == expected


@pytest.mark.parametrize(
    "shell, environment, expected",
    [
        ("bash", {"COMP_WORDS": "attar comp", "COMP_CWORD": "1"}, "compress"),
        ("bash", {"COMP_WORDS": "attar compress --rec", "COMP_CWORD": "2"}, "--recipe"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "attar bench-s"}, "bench-serve"),
        ("fish", {"_TYPER_COMPLETE_ARGS": "attar merg", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "merge"),
    ],
)
def test_shells_complete_commands_and_options(shell: str, environment: dict[str, str], expected: str) -> None:
    code = "from attar.cli.main import app; app(prog_name='attar')"
    found = run("-c", code, _ATTAR_COMPLETE=f"complete_{shell}", **environment)
    assert expected in found.stdout


def test_the_release_builds_what_make_wheel_builds() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert any("make wheel " in step.get("run", "") for step in jobs["build"]["steps"])


def test_extras_are_documented() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in extras if f"| `{name}` |" not in page] == []

"""README.md keeps its word: its commands and its Python run as they stand, on the embedded model as `./model`.

Blocks fenced `sh` and `python` are run in order, in one folder; `yaml` is the recipe file that they name. Targets of
`make` are looked up and not run, since they run this. Blocks fenced otherwise are not run.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attar.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)
COMMANDS = [line for kind, body in BLOCKS if kind == "sh" for line in body.splitlines()]
ISSUE = [
    "attar compress ./model ./out --recipe gptq-w4g128 --calib text.txt --eval heldout.txt",
    "attar eval ./out --against ./model --text heldout.txt",
    'attar generate ./out --prompt "Once upon a time" --max-tokens 64 --temperature 0',
    "attar chat ./out",
    "attar inspect ./out",
    "attar verify ./out",
]


@pytest.fixture(scope="module")
def place(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a reader stands: `./model`, two texts and the recipe file, and nothing else."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(demo, folder / "model")
    text = (ROOT / "LICENSE").read_text()
    (folder / "text.txt").write_text(text[1000:3000])
    (folder / "heldout.txt").write_text(text[5000:7000])
    (yaml,) = (body for kind, body in BLOCKS if kind == "yaml")
    (folder / "recipe.yaml").write_text(yaml)
    with contextlib.chdir(folder):
        yield folder


def test_the_promised_commands_are_there() -> None:
    assert [line for line in COMMANDS if line in ISSUE] == ISSUE


def test_commands(place: Path) -> None:
    """All in one test, for they build on each other."""
    for command in COMMANDS:
        program, *arguments = shlex.split(command, comments=True)
        if program == "make":
            (target,) = arguments
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), command
            continue
        assert program == "attar", command
        result = CliRunner().invoke(app, arguments, input="Hello\n")
        assert result.exit_code == 0, f"{command}\n{result.output}"
        # What chat says is drawn, and may be nothing but a turn's end.
        assert result.stdout.strip() or arguments[0] == "chat", command


def test_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (body,) = (body for kind, body in BLOCKS if kind == "python")
    (place / "example.py").write_text(body)
    runpy.run_path("example.py", run_name="__main__")
    assert "torch.Size([3, " in capsys.readouterr().out


def test_the_tree_names_what_exists() -> None:
    tree = next(body for kind, body in BLOCKS if kind == "text")
    named = set(re.findall(r"^(\w+)/|^src/attar/ ", tree, re.M)) - {""}
    assert {"examples", "bench", "tools", "tests", "docs"} <= named
    for name in named:
        assert (ROOT / name).is_dir(), name
    for name in re.findall(r"^  (\S+) |  (\S+/) ", tree, re.M):
        assert (ROOT / "src" / "attar" / "".join(name)).exists(), name


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^):]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []

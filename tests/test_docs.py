"""Tests that README.md and the pages under docs/ hold: commands and Python run as they stand.

Blocks fenced `sh` and `python` run in the order of PAGES, in one folder. There the embedded model is `./model`, and the
Hub model that README names; `yaml` is the recipe file that a command names. Blocks fenced `bash` are a script, page by
page, which `test_tasks.py` runs from an empty folder. Commands in blocks fenced `console` are parsed and not run: each
option must exist. `NOT_RUN` lists the code that runs nowhere. Targets of `make`, files and links that a page names must
exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from huggingface_hub import constants
from typer.testing import CliRunner

from attar.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        "docs/command_line.md",
        "docs/errors.md",
        "docs/recipes.md",
        "docs/formats.md",
        "docs/quality.md",
        "docs/performance.md",
        "docs/planning.md",
        "docs/serving.md",
        "docs/replicas.md",
        "docs/ray.md",
        "docs/kubernetes.md",
        "docs/clients.md",
        "docs/structured_output.md",
        "docs/reasoning.md",
        "docs/tools.md",
        "docs/speculative_decoding.md",
        "docs/long_context.md",
        "docs/images.md",
        "docs/lab.md",
        "docs/adapters.md",
        "docs/numerics.md",
        "docs/architecture.md",
        "docs/roadmap.md",
        "docs/glossary.md",
        "docs/log/README.md",
        "docs/tutorial_first_model.md",
        "docs/tutorial_serve.md",
        "docs/tutorial_report.md",
        "docs/howto_compress.md",
        "docs/howto_fit_memory.md",
        "docs/howto_serve_with_key.md",
        "docs/howto_gguf.md",
        "docs/howto_target.md",
        "docs/howto_load_elsewhere.md",
        "docs/howto_kv_cache.md",
        "docs/howto_benchmark.md",
        "docs/howto_gpu.md",
        "docs/howto_slow_request.md",
        "docs/howto_resume.md",
        "docs/howto_tritonserver.md",
        "docs/howto_tune.md",
        "docs/method_smoothquant.md",
        "docs/method_awq.md",
        "docs/method_gptq.md",
        "docs/method_guided.md",
        "docs/kv_cache.md",
        "docs/gptq_awq_gguf.md",
        "docs/other_engines.md",
        "docs/errata.md",
        "docs/quantization_or_sparsity.md",
        "docs/from_tensorrt_llm.md",
        "docs/platforms.md",
        "docs/install.md",
        "docs/batching.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
    )
}
NOT_RUN = {
    "docs/images.md": "it needs a vision-language model and an image of the reader",
    "docs/howto_load_elsewhere.md": "transformers is another package; tests under checkpoints/ load outputs with it",
    "docs/ray.md": "Ray has an environment of its own, in which `make test-ray` runs the same call",
    "docs/serving.md": "reranking and filling in the middle need models of their own",
    "docs/tools.md": "the loop needs a model that calls, and a function of the reader",
}
"""Pages with code fenced `py`, which is not run, and why."""
BLOCKS = [
    (page, kind, body)
    for page, text in PAGES.items()
    for kind, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
]
COMMANDS = [line for _, kind, body in BLOCKS if kind == "sh" for line in body.splitlines()]
SHOWN = [line for _, kind, body in BLOCKS if kind == "console" for line in body.replace("\\\n", "").splitlines()]
ISSUE = [
    "attar compress ./model ./out --recipe gptq-w4g128 --calib text.txt --eval heldout.txt",
    "attar eval ./out --against ./model --text heldout.txt",
    'attar generate ./out --prompt "Once upon a time" --max-tokens 64 --temperature 0',
    "attar chat ./out",
    "attar inspect ./out",
    "attar verify ./out",
]
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def place(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a reader stands: `./model`, a cache that has the Hub model, two texts and the recipe file, nothing else."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(demo, folder / "model")
    cached = folder / "cache" / f"models--{HUB.replace('/', '--')}"
    shutil.copytree(demo, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    text = (ROOT / "LICENSE").read_text()
    (folder / "text.txt").write_text(text[1000:3000])
    (folder / "heldout.txt").write_text(text[5000:7000])
    (yaml,) = (body for _, kind, body in BLOCKS if kind == "yaml")
    (folder / "recipe.yaml").write_text(yaml)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield folder


def test_the_promised_commands_are_there() -> None:
    assert [line for line in COMMANDS if line in ISSUE] == ISSUE
    assert HUB in PAGES["README.md"].split("```")[1]


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150
    assert len(PAGES["README.md"].split()) <= 900


def test_commands(place: Path) -> None:
    """All in one test, for they build on each other."""
    for command in COMMANDS:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "attar", command
        result = CliRunner().invoke(app, arguments, input="Hello\n")
        assert result.exit_code == 0, f"{command}\n{result.output}"
        # What chat says is drawn, and may be nothing but a turn's end.
        assert result.stdout.strip() or arguments[0] == "chat", command


def test_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [body for _, kind, body in BLOCKS if kind == "python"]
    assert len(blocks) == 3
    (place / "example.py").write_text("".join(blocks))
    runpy.run_path("example.py", run_name="__main__")
    assert "torch.Size([3, " in capsys.readouterr().out


def test_commands_that_are_shown_can_be_parsed(place: Path) -> None:
    found = [line[line.index("attar ") :] for line in SHOWN if re.match(r"(\$ )?(\(.*&& )?attar ", line)]
    assert len(found) >= 20
    top = typer.main.get_command(app)
    for command in found:
        arguments = shlex.split(command, comments=True)[1:]
        if arguments[0].startswith("--"):  # these act when they are parsed; one writes into the shell's start file
            assert arguments[0] in {name for each in top.params for name in each.opts}, command
            continue
        with top.make_context("attar", arguments) as context:
            group = top
            while hasattr(group, "resolve_command"):
                name, group, arguments = group.resolve_command(context, arguments)
                context = group.make_context(name, list(arguments), parent=context)


def test_every_page_is_here() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))}
    assert sorted(found - {"docs/log/2026-11.md"}) == sorted(PAGES)


def test_every_block_is_run_or_listed() -> None:
    assert {page for page, kind, _ in BLOCKS if kind == "py"} | {
        page for page, text in PAGES.items() if re.search(r"^ +```py$", text, re.M)
    } == set(NOT_RUN)
    assert {kind for _, kind, _ in BLOCKS} <= {"sh", "python", "yaml", "bash", "console", "py", "json"}
    for page, text in PAGES.items():
        fences = re.findall(r"^(?: *)```(\w*)\n(.*?)^ *```$", text, re.M | re.S)
        assert not [
            body for kind, body in fences if not kind and re.search(r"^(\$ )?(attar|pip|make|curl) ", body, re.M)
        ], page


def test_every_command_is_listed() -> None:
    table = re.findall(r"^\| (`[^|]*`) \|", PAGES["docs/command_line.md"], re.M)
    listed = [name for cell in table for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^(?:\.PHONY: )?([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for text in PAGES.values() for target in re.findall(r"`make ([\w-]+)", text)}
    assert {"demo", "test"} <= named <= targets


def test_files_that_are_named_exist() -> None:
    for page, text in PAGES.items():
        for name in re.findall(r"`((?:src|tests|bench|tools|docs|examples)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page}: {name}"


def rows(heading: str) -> list[list[str]]:
    """The cells of each row of the table under a heading of docs/architecture.md."""
    section = PAGES["docs/architecture.md"].split(f"## {heading}\n")[1].split("\n## ")[0]
    return [re.split(r" \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| ")][1:]


def test_packages_are_in_their_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    wanted = [sorted(re.findall(r"\w+", layer)) for layer in layers if layer != "(__main__)"]
    found: dict[str, list[str]] = {}
    for number, names, _ in rows("Packages and layers"):
        found.setdefault(number, []).extend(re.findall(r"`(\w+)(?:/|\.py)`", names))
    assert list(found) == [str(at + 1) for at in range(len(found))]
    assert [sorted(names) for names in found.values()] == wanted
    source = ROOT / "src" / "attar"
    for name in (name for names in wanted for name in names):
        assert (source / name / "__init__.py").exists() or (source / f"{name}.py").exists(), name
    for folder in re.findall(r"`([\w/]+/)`", PAGES["docs/architecture.md"].split("**Rules of imports.**")[0]):
        assert any((parent / folder).is_dir() for parent in (ROOT, source, *source.iterdir())), folder


def test_what_an_addition_touches_exists() -> None:
    additions = rows("To add X, touch these files")
    assert len(additions) == 15
    for what, touched, tests in additions:
        for cell, under in ((touched, ROOT / "src" / "attar"), (tests, ROOT)):
            files = re.findall(r"`([\w./]+\.\w+)`", cell)
            assert files, what
            assert [name for name in files if not (under / name).is_file()] == [], what


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\](?:\(|: )(?!https?:)([^)\s]+)", PAGES[page]):
        path, _, anchor = link.partition("#")
        file = Path(os.path.normpath((ROOT / page).parent / path)) if path else ROOT / page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text()), link

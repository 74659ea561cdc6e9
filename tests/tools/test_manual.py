"""The documentation site: sources that are assembled, references that are generated, and the check of what is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
import yaml
from manual import assemble, check, references

from attar import errors
from attar.cli.main import app
from attar.compression.recipe.methods import METHODS
from attar.kv.schemes import SCHEMES
from attar.model.families import ARCHITECTURES
from attar.model.vision.wrappers import WRAPPERS

ROOT = Path(__file__).resolve().parents[2]


class _Plain(yaml.SafeLoader):
    """YAML whose tags for Python objects are read as None."""


_Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def nav() -> list[str]:
    """The pages in the site's navigation."""

    def walk(items: object) -> list[str]:
        if isinstance(items, str):
            return [items]
        children = items if isinstance(items, list) else items.values() if isinstance(items, dict) else ()
        return [page for each in children for page in walk(each)]

    return walk(yaml.load((ROOT / "mkdocs.yml").read_text(), _Plain)["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    logs = {name for name in assemble.pages() if name.startswith("log/2")}
    assert sorted(nav()) == sorted({*assemble.pages(), *references.PAGES} - logs)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return {name: make() for name, make in references.PAGES.items()}


def test_references_say_everything(made: dict[str, str]) -> None:
    line = made["reference/command_line.md"]
    for name, command in references.commands(typer.main.get_command(app)):
        assert f"## attar {name}\n" in line
        for each in command.params:
            assert all(spelling in line for spelling in each.opts if spelling.startswith("--")), each
    assert all(f"### {name}\n" in made["reference/methods.md"] for name in METHODS)
    assert all(f"| `{name}` |" in made["reference/kv_formats.md"] for name in SCHEMES)
    assert all(f"| `{name}` |" in made["reference/models.md"] for name in (*ARCHITECTURES, *WRAPPERS))
    assert all(f"`{code}`" in made["reference/error_codes.md"] for code in errors.CODES)
    for name in ("attar_steps_total", "attar_model_loads_total", "attar_replica_deaths_total"):
        assert f"| `{name}` | counter |" in made["reference/metrics.md"]
    assert "| `ATTAR_CPU` |" in made["reference/environment.md"]
    assert "| `POST /v1/chat/completions` |" in made["reference/http.md"]
    assert "| `temperature` | `number 0.." in made["reference/http.md"]
    assert "## attar.LLM\n" in made["reference/python.md"]


def test_rows_of_references_have_the_cells_of_their_head(made: dict[str, str]) -> None:
    for text in made.values():
        for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_links_are_those_of_the_site(tmp_path: Path) -> None:
    page = ROOT / "docs" / "log" / "README.md"
    source = "[a](../../README.md#install) [b](../serving.md) [c](https://x.y/z.md) [d](#here) [e](../../LICENSE)"
    found = assemble.LINK.sub(lambda each: assemble.link(page, each), source)
    assert found == "[a](../index.md#install) [b](../serving.md) [c](https://x.y/z.md) [d](#here) e"


def test_lists_are_read_as_lists() -> None:
    source = "Text:\n- one\n  two\n\n  ```py\n  x = 1\n  ```\n- three\n\nText\n  of prose\n\n```\n- code\n  more\n```"
    listed = "Text:\n\n- one\n    two\n\n    ```py\n    x = 1\n    ```\n- three\n\n"
    assert assemble.lists(source) == listed + "Text\n  of prose\n\n```\n- code\n  more\n```"


@pytest.mark.parametrize(
    "body",
    [
        '<script src="https://unpkg.com/x.js"></script>', '<link rel="stylesheet" href="//fonts.org/a.css">',
        '<img src="http://x.y/z.png">', '<a href="missing.html">x</a>', '<a href="#missing">x</a>',
        '<a href="../outside.html">x</a>', "<p>```py x ```</p>", '<a href="other.html#no">x</a>',
    ],
)  # fmt: skip
def test_the_check_sees(body: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.html").write_text("")
    (site / "other.html").write_text('<h1 id="yes">x</h1>')
    (site / "index.html").write_text('<a href="other.html#yes">x</a><a href="https://x.y">x</a><code>```</code>')
    assert check.problems(site) == []
    (site / "index.html").write_text(body)
    assert len(check.problems(site)) == 1


def test_the_check_sees_what_style_sheets_load(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    (tmp_path / "a.css").write_text("a { background: url('https://x.y/z.png') } b { background: url(data:image/png,) }")
    assert len(check.problems(tmp_path)) == 1

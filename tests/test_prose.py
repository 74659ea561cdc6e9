"""Pages and help keep the prose rules of `tools/manual/prose.py`: short sentences, and the field's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from manual import prose, references

from attar.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
HELP = {
    path: [text for text in (command.help, *(getattr(each, "help", "") for each in command.params)) if text]
    for path, command in references.commands(typer.main.get_command(app))
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path: Path) -> None:
    assert prose.problems(path.read_text()) == []


@pytest.mark.parametrize("command", HELP)
def test_help(command: str) -> None:
    for text in HELP[command]:
        said = text.partition("Examples:")[0]
        assert prose.listed(said) == []
        assert [each for each in prose.sentences(said) if prose.length(each) > prose.LONGEST] == []


def test_help_is_short_in_the_mean() -> None:
    said = "\n\n".join(text.partition("Examples:")[0] for texts in HELP.values() for text in texts)
    assert prose.mean(said) <= prose.MEAN


@pytest.mark.parametrize(
    "text, count",
    [
        ("One word after another. " * 3, 0),
        ("Each " + "word " * 30 + "counts.", 2),  # too long, and long in the mean
        ("The rooms of the house are a ladder. Nobody minds.", 4),
        ("```\nnobody\n```\n\n| nobody |\n\n# Nobody\n\n`nobody`, [a page](nobody.md).", 0),
        ("- " + "word " * 20 + "\n- " + "word " * 4 + "\n- short\n", 0),
        ("Daliri et al. wrote it.", 0),
    ],
)
def test_the_check_itself(text: str, count: int) -> None:
    assert len(prose.problems(text)) == count

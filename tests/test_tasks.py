"""Tasks of the pages under docs/ in a real shell: a page's commands alone, from an empty folder (`manual.tasks`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from manual import tasks

PAGES = tasks.pages()
TOOLS = pytest.mark.skipif(bool(tasks.lacking()), reason=f"no {', '.join(tasks.lacking())} on this machine")


def test_every_promised_task_has_its_page() -> None:
    assert set(tasks.PROMISED) <= {path.stem for path in PAGES}
    assert tasks.LIMIT == 600  # ten minutes


@TOOLS
def test_a_script_stops_at_the_first_failure(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```bash\nls $HOME\nls\ngrep no text\n```\n\nText.\n\n```bash\ncat never\n```\n")
    status, said, _ = tasks.run(page, tmp_path)
    assert status == 2
    assert said.strip() == "grep: text: No such file or directory"


@TOOLS
def test_a_script_has_no_other_programs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ cat never\n```\n\n```bash\npython3 -c 1\n```\n")
    status, said, _ = tasks.run(page, tmp_path)
    assert status == 127
    assert "python3" in said


@TOOLS
def test_a_script_ends_at_the_limit_with_what_it_started(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```bash\nsleep 1000 &\nwait\n```\n")
    with pytest.raises(subprocess.TimeoutExpired):
        tasks.run(page, tmp_path, limit=0.2)


@TOOLS
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_task(page: Path, tmp_path: Path) -> None:
    status, said, seconds = tasks.run(page, tmp_path)
    print(f"{page.stem}: {seconds:.1f} s")
    assert status == 0, said

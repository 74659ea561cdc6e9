"""Sources of the documentation site: the repository's pages, with links that hold there, and generated references.

    python tools/manual/assemble.py build/manual/pages

Pages are written for GitHub. This program makes of them what Python-Markdown reads: it follows links out of `docs/`,
indents what belongs to a list by four columns, and puts a blank line before a list. Pages of the repository's root
become pages of the site, README its first. Files that are no pages (LICENSE, examples) become code without a link.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RENAMED = {
    "README.md": "index.md", "SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}  # fmt: skip
"""Pages of the repository's root, and their names in the site."""

LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)|^(\[[^\]]+\]): (\S+)$", re.M)


def pages() -> dict[str, Path]:
    """Return every page that people write, by its path in the site."""
    found = {name: ROOT / source for source, name in RENAMED.items()}
    docs = ROOT / "docs"
    return found | {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}


def assemble(target: Path) -> None:
    """Write the site's sources to `target`, which is emptied first."""
    from manual import references

    shutil.rmtree(target, ignore_errors=True)
    for name, source in pages().items():
        write(target / name, page(source))
    for name, make in references.PAGES.items():
        write(target / name, make().replace("](errors.md", "](../errors.md").replace("](formats.md", "](../formats.md"))
    for picture in (ROOT / "docs").rglob("*.png"):
        shutil.copy(picture, target / picture.relative_to(ROOT / "docs"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def page(source: Path) -> str:
    """Return a page with its links and lists as the site needs them; code blocks stay as they are."""
    parts = re.split(r"(^ *```.*?^ *```$)", source.read_text(), flags=re.M | re.S)
    for at in range(0, len(parts), 2):
        parts[at] = LINK.sub(lambda found: link(source, found), parts[at])
    return lists("".join(parts))


def link(source: Path, found: re.Match[str]) -> str:
    """Return one link for the site. One that leads to no page or picture becomes its text alone."""
    label, to, reference, goal = found.groups()
    address = to or goal
    path, _, anchor = address.partition("#")
    if not path or re.match(r"https?:|mailto:", address):
        return found[0]
    file = Path(os.path.normpath(source.parent / path)).relative_to(ROOT)
    if file.suffix not in (".md", ".png"):
        return label[1:-1] if label else ""
    new = os.path.relpath(place(file), Path(place(source.relative_to(ROOT))).parent) + (f"#{anchor}" if anchor else "")
    return f"{label}({new})" if label else f"{reference}: {new}"


def place(file: Path) -> str:
    """Return where a file of the repository is in the site."""
    return RENAMED.get(file.as_posix(), file.as_posix().removeprefix("docs/"))


def lists(text: str) -> str:
    """Indent what belongs to a list item by four columns, and separate lists from the paragraph before them."""
    done: list[str] = []
    within, fenced, inside = 0, False, False  # columns of the item's text; in a code block; in a list
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        item = None if fenced else re.match(r"( *)(-|\d+\.) +", line)
        if item and not item[1]:
            if done and done[-1].strip() and not inside:
                done.append("")
            within, inside = len(item[0]), True
        elif line and not line.startswith(" ") and not fenced:
            lazy = inside and done[-1].strip() and not fence and not line.startswith("#")
            inside = bool(lazy)
        elif inside and line.startswith(" " * within):
            line = "    " + line[within:]
        if fence:
            fenced = not fenced
        done.append(line)
    return "\n".join(done)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tools")]
    assemble(Path(sys.argv[1]))

"""Checks of a built site: no page asks another host for anything, links lead somewhere, and no Markdown is left over.

    python tools/manual/check.py build/manual/site

Scripts of the theme contain addresses that they use only on pages with diagrams, or for links to a repository. This
site has neither, so only what pages and style sheets load is looked at.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href",
}  # fmt: skip
"""Attributes by which a page loads something without a click."""


class Page(HTMLParser):
    """What a page loads, links to and calls by id, and its text outside of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if (address := given.get(LOADED.get(tag, ""))) and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(address)
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        self.ids |= {str(given[each]) for each in ("id", "name") if given.get(each)}
        self._code += tag in ("code", "pre", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text.append(data)


def problems(site: Path) -> list[str]:
    """Return one sentence for each thing that is wrong with a site."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        found += [f"{name} loads {each}" for each in page.loads if urlsplit(each).netloc]
        if "```" in "".join(page.text):
            found.append(f"{name} shows a code block's fence: its indentation is not read")
        if name != "404.html":  # its links are absolute
            found += [f"{name}: no {each}" for each in page.links if not leads(site, path, each, pages)]
    for sheet in site.rglob("*.css"):
        outside = re.findall(r"url\(['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text())
        found += [f"{sheet.relative_to(site)} loads {each}" for each in outside]
    return found


def leads(site: Path, path: Path, address: str, pages: dict[Path, Page]) -> bool:
    """Return whether a link of the page at `path` leads to a file of the site and an id in it, or to another host."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    goal = goal / "index.html" if goal.is_dir() else goal
    if not goal.is_file() or site.resolve() not in goal.resolve().parents:
        return False
    fragment = unquote(parts.fragment)
    return not fragment or fragment.startswith("__") or goal.suffix != ".html" or fragment in pages[goal].ids


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]).resolve())
    print("\n".join(wrong) or "the site loads nothing from elsewhere, and its links hold")
    sys.exit(bool(wrong))

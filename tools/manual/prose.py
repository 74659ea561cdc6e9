"""Prose rules of pages and help: lengths of sentences, and words that have a better term.

    python tools/manual/prose.py README.md docs/*.md

A sentence makes one statement: the mean of a page is 14 words or fewer, and no sentence has more than 30. Tables, code
and headings are not counted. `WORDS` maps patterns of words that pages do not use to what they use in their place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MEAN, LONGEST = 14.0, 30
WORDS = {
    r"nobody|somebody|anybody": "no client, a user, any program",
    r"(?:the|a|one|each|every) (?:door|house|rooms?|floors?)": "middleware, dispatch, package, module, layer",
    r"rungs?|ladders?": "candidates",
    r"knobs?": "options, trainable parameters",
    r"likeliest": "most probable",
    r"keys and values in (?:8|4|2) bits": "an int8, int4 or 2-bit KV cache",
    r"output matrix": "LM head",
    r"largest step": "peak activation memory",
    r"in company|company of": "in a batch",
    r"strangers?": "untrusted input",
    r"(?:program|server|engine|kernel|process|thread)s? who": "a program that",
}
"""Patterns of words, matched whole and in any case, and what to write."""


def plain(text: str) -> str:
    """Return the running text of a Markdown page: without code blocks, tables, headings, comments and link targets."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    text = re.sub(r"(?<=\n)\n(?: {4,}\S.*\n)+", "\n", text)  # code by indentation, where no list is
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(?:\||#|\[[^\]]+\]: ).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "`code`", text)
    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's running text. An item of a list is at least one."""
    for paragraph in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", plain(text), flags=re.M):
        joined = " ".join(paragraph.split())
        for found in re.split(r"(?<=[.!?:])(?<!et al\.)(?<!e\.g\.)(?<!vs\.)[*)\"]*\s+(?=\S)", joined):
            if re.search(r"\w", found):
                yield found


def length(sentence: str) -> int:
    """Return the words of a sentence; numbers and code count as one each."""
    return len(re.findall(r"[\w`'%/.,-]*\w[\w`'%/.,-]*", sentence))


def mean(text: str) -> float:
    """Return the mean length of a page's sentences; 0 without any."""
    counts = [length(each) for each in sentences(text)]
    return sum(counts) / max(1, len(counts))


def problems(text: str) -> list[str]:
    """Return one sentence for everything on a page that breaks the rules."""
    found = [f"{length(each)} words: {each}" for each in sentences(text) if length(each) > LONGEST]
    if (words := mean(text)) > MEAN:
        found.append(f"{words:.1f} words a sentence in the mean")
    return found + listed(text)


def listed(text: str) -> list[str]:
    """Return the words of a text that have a better term."""
    return [
        f"{match[0]!r}: write {better}"
        for pattern, better in WORDS.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", plain(text), re.I)
    ]


if __name__ == "__main__":
    broken = False
    for name in sys.argv[1:]:
        for each in problems(Path(name).read_text()):
            print(f"{name}: {each}")
            broken = True
    sys.exit(broken)

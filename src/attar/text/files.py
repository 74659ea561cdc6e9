"""Text files of users: UTF-8, or one JSON object a line with the text under `text`."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from attar.errors import UserError


def read_text(path: str | Path) -> str:
    """Return the text of a file; for a .jsonl file, its objects' `text` one after another, a blank line between.

    Raises ValueError where the file is missing, no UTF-8, empty, or a line holds no text.
    """
    return "\n\n".join(read_texts(path))


def read_texts(path: str | Path) -> list[str]:
    """Return the texts of a .jsonl file separately; any other file is one text. Raises ValueError like `read_text`."""
    path = require_text(path)
    try:
        texts = [path.read_bytes().decode()]
    except UnicodeDecodeError as error:
        raise UserError("text_not_utf8", f"{path} is not UTF-8 text: byte {error.start} does not decode") from None
    if path.suffix == ".jsonl":  # not splitlines, which also splits at separators that JSON leaves as they are
        lines = enumerate(texts[0].split("\n"), 1)
        texts = [_text_of(line, path, number) for number, line in lines if line.strip()]
    if not any(text.strip() for text in texts):
        raise UserError("text_empty", f"{path} is empty")
    return texts


def require_text(path: str | Path) -> Path:
    """Return the path of a text file. Raises ValueError where there is none."""
    if not str(path):
        raise UserError("option_missing", "the name of a text file is empty")
    path = Path(path)
    if path.is_dir():
        raise UserError("file_wrong_kind", f"{path} is a folder: name a text file")
    if not path.exists():
        raise UserError("file_not_found", f"{path}: no such file{neighbours(path)}")
    return path


def neighbours(path: Path) -> str:
    """Return files next to `path` with similar names, as the end of a sentence."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        value = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise UserError("file_malformed", f"{path}, line {number}: expected a JSON object with a string under `text`")
    return value

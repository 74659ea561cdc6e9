"""Shared parts of the readers of untrusted files: their error, strict JSON, and names that are safe to show and write.

Everything in a checkpoint's file is checked before use, and an error names the file. This module holds what does not
depend on the file's format.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

MAX_WIDE = 8_000_000  # bytes of JSON that is not plain ASCII: each may take eight in memory
MAX_NAME = 1024  # bytes of a tensor's name
NEAR = 300  # names searched for near misses: difflib takes up to a millisecond for each
WORD = 96  # characters of such a name, more than models use: the time grows at least with their square
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

CONVERT = (
    "attar never opens pickles, because opening one can run code that it carries. If you trust the source, convert it: "
    "python -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s, d = 'SOURCE', 'CONVERTED'; "
    'M.from_pretrained(s).save_pretrained(d); T.from_pretrained(s).save_pretrained(d)"'
)


class CheckpointError(ValueError):
    """An error for a checkpoint that cannot be used as it is; the message names the file and the remedy."""


class VerificationError(CheckpointError):
    """An error for a readable checkpoint that does not compute what its receipt says."""


def parse_json(text: bytes | bytearray, where: str | Path) -> Any:
    """Decode JSON strictly: UTF-8, no byte-order mark, no repeated key, finite numbers, no trailing text; plain ASCII
    above `MAX_WIDE` bytes.

    Raises CheckpointError beginning with `where`.
    """
    if len(text) > MAX_WIDE and not (text.isascii() and b"\\u" not in text):
        raise CheckpointError(f"{where}: of more than {MAX_WIDE} bytes attar reads plain ASCII alone, without \\u")
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite
        )
    except RecursionError:
        raise CheckpointError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:  # includes bad UTF-8, bad syntax, and integers of thousands of digits
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {reprlib.repr(twice)} is given twice")
    return result


def _not_finite(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{reprlib.repr(digits)} is out of range")
    return value


def check_name(name: str) -> str | None:
    """Return the fault of a tensor's name, or None. Names end up in messages, receipts and file names of other
    tools."""
    if not name:
        return "an empty name"
    if not name.isprintable():  # controls, bidirectional marks, lone surrogates
        return f"a name with characters that do not print: {reprlib.repr(name)}"
    if len(name) > MAX_NAME // 4 and len(name.encode()) > MAX_NAME:
        return f"a name longer than {MAX_NAME} bytes: {reprlib.repr(name)}"
    if name[0] == "/" or (".." in name and ".." in name.split("/")):
        return f"a name that looks like a path out of the folder: {reprlib.repr(name)}"
    return None


def near(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the known names most like `name`, or the empty string.

    Names may be untrusted: only the first `NEAR` are compared, and none that is longer than `WORD`.
    """
    if len(name) > WORD:
        return ""
    short = [each for each in islice(known, NEAR) if len(each) <= WORD]
    close = difflib.get_close_matches(name, short, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def open_regular(path: Path) -> tuple[int, int]:
    """Return a descriptor to read the file with, and its size. Raises CheckpointError where it is missing, or no
    regular file (links are followed)."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {getattr(error, 'strerror', error)}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: not a regular file")
    return fd, status.st_size

"""Names that requests may use: the served model's, and those of its adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

MAX_ADAPTERS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,255}")  # includes Hub ids; the longest name in a request


def name_of(model: str) -> str:
    """Return a model's name: a folder's or file's own name, or a Hub id as given. Raises ValueError for the root, which
    has no name. A link keeps its own name: files in the Hub's cache link to files named by a hash."""
    path = Path(model).expanduser()
    name = Path(os.path.abspath(path)).name if path.exists() else model
    if not name:
        raise ValueError(f"{model} has no name that requests could ask for: give it one with --name")
    return name


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError where it is no valid model name for requests."""
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(
            f"--name {name[:160]!r}: a model's name is of letters, digits and . _ : @ / -, at most 256 of them"
        )
    return name


def parse_adapters(given: Sequence[str], model: str) -> tuple[tuple[str, str], ...]:
    """Parse adapters, each given as NAME=FOLDER, to be served beside `model`: (name, folder) of each.

    Raises ValueError for another form, a name that is invalid or taken, more than MAX_ADAPTERS, and a folder without an
    adapter.
    """
    if len(given) > MAX_ADAPTERS:
        raise ValueError(f"{len(given)} adapters: at most {MAX_ADAPTERS} are served at a time")
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            raise ValueError(
                f"an adapter is given as NAME=FOLDER, its name of letters, digits and . _ : -, not {each[:160]!r}"
            )
        if name in found or name == model:
            what = "the model's own name" if name == model else "the name of two adapters"
            raise ValueError(f"--adapter {name}: requests ask for one by its name, and this is {what}")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(f"--adapter {name}: {folder} holds no adapter_config.json: not a PEFT adapter's folder")
        found[name] = folder
    return tuple(found.items())

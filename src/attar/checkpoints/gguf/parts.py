"""Names of files that are parts of one model, as llama.cpp's `gguf-split` gives them: NAME-00001-of-00003.gguf.

A model goes by the path of its first part, which has the metadata; the others stand beside it. Their names follow from
the first's and are read from no file, so no part can lie elsewhere. Torch-free.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from attar.checkpoints.strict_io import CheckpointError

MAX_PARTS = 1024

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)


class PartName(NamedTuple):
    """The name of a part: NAME, which of the parts it is, from 1 on, and how many there are."""

    stem: str
    number: int
    parts: int

    def __str__(self) -> str:
        return f"{self.stem}-{self.number:05}-of-{self.parts:05}.gguf"


def part_name(path: Path) -> PartName | None:
    """Return what the name of a file says about it as a part; None where it is not the name of a part."""
    found = _NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return None
    return PartName(found["stem"], int(found["number"]), int(found["count"]))


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts, in order, where `path` has the name of a first one; otherwise `path` alone."""
    name = part_name(path)
    if name is None or name.number > 1 or name.parts > MAX_PARTS:
        return [path]
    return [path.with_name(str(name._replace(number=each))) for each in range(1, name.parts + 1)]


def outputs_of(target: Path) -> list[Path]:
    """Return the files of earlier outputs of this name, whole or in parts, those by which they are opened first."""
    names = [] if not target.parent.is_dir() else sorted(os.listdir(target.parent))
    parts = [(name, found) for name in names if (found := part_name(Path(name))) and found.stem == target.stem]
    ordered = [name for name, _ in sorted(parts, key=lambda each: each[1].number)]
    return [path for path in (target, *map(target.with_name, ordered)) if path.exists()]


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError where the GGUF file `target` may not be made or replaced."""
    if part_name(target) is not None:
        raise CheckpointError(
            "output_invalid", f"{target} has the name of a part of a model: name the model, and parts are numbered"
        )
    for path in outputs_of(target):
        if not path.is_file():
            raise CheckpointError("output_invalid", f"{path} is no file and is kept; choose another output")
        begins = path == target or len(part_paths(path)) > 1  # parts without a first are of no model
        if begins and not overwrite:
            raise CheckpointError(
                "output_exists", f"{path} exists and is kept; choose another output, or pass --overwrite"
            )

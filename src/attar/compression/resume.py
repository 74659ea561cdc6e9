"""Files on disk that let a killed computation resume: notes, logs of values, and folders of tensors.

Each is complete or absent, and is on disk before anything that relies on it. Its subject is stored with it, or in its
name, so that a computation resumes only its own files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints.receipts import receipt
from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.writer import ShardWriter, plan_files, sync_path
from attar.errors import UserError
from attar.formats.scheme import Part

SHORT = 40  # characters of a value worth printing: hashes are longer
FIGURES, SUMS = "figures.json", "sums.json"


class Damaged(UserError):
    """Files of a run differ from what it wrote. `sentence` says where and why, without the advice that ends the
    message."""

    def __init__(self, folder: Path, why: str) -> None:
        self.sentence = f"{folder}, which an interrupted run left, is damaged: {why}"
        super().__init__("state_damaged", f"{self.sentence}; --restart begins anew")


def write_note(path: Path, value: Any) -> None:
    """Write a note (JSON) atomically, so that it survives a crash. Raises ValueError where a number is not finite."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_path(path.parent)


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """Describe the differences, with both values where they are short. Empty where there are none."""
    found = []
    for key in sorted(now.keys() | then.keys()):
        values = now.get(key), then.get(key)
        if values[0] != values[1]:
            short = all(isinstance(each, int | float | str) and len(str(each)) <= SHORT for each in values)
            found.append(f"{key} ({values[0]} now, {values[1]} then)" if short else key)
    return ", ".join(found)


def save(folder: Path, figures: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write figures (JSON) and tensors to the new `folder` atomically. The hash of each file lies beside them: without
    it, a change by a disk or a copy would go unnoticed into training."""
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    parts = {name: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    with ShardWriter(temporary, plan_files(parts, sum(part.bytes for part in parts.values()) + 1)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
    (temporary / FIGURES).write_text(json.dumps(dict(figures), allow_nan=False))
    sync_path(temporary / FIGURES)
    sums = {path.name: receipt.sha256(path) for path in sorted(temporary.iterdir())}
    (temporary / SUMS).write_text(json.dumps(sums))
    sync_path(temporary / SUMS)
    temporary.rename(folder)
    sync_path(folder.parent)


def restore(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the figures and tensors that `save` wrote to `folder`. Raises `Damaged` where the files have changed
    since."""
    found: dict[str, Tensor] = {}
    try:
        sums = dict(json.loads((folder / SUMS).read_bytes()))
        if changed := [name for name, wanted in sums.items() if receipt.sha256(folder / name) != wanted]:
            raise Damaged(folder, f"{' and '.join(changed)} changed since it was written")
        for name in sums:
            if name.endswith(".safetensors"):
                with closing(TensorFile(folder / name)) as file:
                    found |= {tensor: file.read(tensor) for tensor in file.names()}
        return json.loads((folder / FIGURES).read_bytes()), found
    except Damaged:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(folder, str(error)) from None


class Log:
    """Values by key, on disk as they are made: JSON lines, the first of which states the subject. Tensors of the same
    subject are in `folder`, which exists once there are some."""

    def __init__(self, file: Path, about: str) -> None:
        self._values: dict[str, Any] = {}
        self._file, self.folder = file, file.with_suffix(".candidates")
        first = json.dumps({"about": about})
        lines = file.read_text().splitlines() if file.is_file() else []
        if lines and lines[0] == first:
            for line in lines[1:]:
                try:
                    key, value = json.loads(line)
                except ValueError:  # the line that a killed run left unfinished
                    break
                self._values[key] = value
        elif self.folder.is_dir():
            shutil.rmtree(self.folder)
        file.write_text("\n".join([first, *map(json.dumps, self._values.items())]) + "\n")

    @staticmethod
    def remove(file: Path) -> None:
        """Delete all that the log `file` holds."""
        file.unlink(missing_ok=True)
        shutil.rmtree(file.with_suffix(".candidates"), ignore_errors=True)

    def get(self, key: str) -> Any:
        """Return the value of the key, or None where there is none."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value
        with self._file.open("a") as file:
            file.write(json.dumps((key, value)) + "\n")
            file.flush()
            os.fsync(file.fileno())

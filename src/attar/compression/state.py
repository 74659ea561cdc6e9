"""What a run remembers on disk, so that a killed one loses at most the block it was in.

One JSON file: what the run is about (source, recipe, calibration, versions, machine), how many blocks are done, and
what was measured in them. It is replaced whole, after the tensors and hidden states it vouches for are on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attar.checkpoints.writer import sync_path
from attar.compression.block.record import Record

NAME = "state.json"
SHORT = 40  # characters of a value that is worth reading: hashes are longer


@dataclass
class RunState:
    folder: Path
    about: Mapping[str, Any]
    blocks_done: int = 0
    records: list[Record] = field(default_factory=list)
    observed: list[Any] = field(default_factory=list)
    """What the probes showed of each finished block."""

    @staticmethod
    def open(folder: Path, about: Mapping[str, Any], resume: bool) -> RunState:
        """The state an interrupted run left in `folder`, or a new one.

        Raises ValueError where the run left there was about something else: its hours may still be wanted.
        """
        path = folder / NAME
        if not resume or not path.is_file():
            return RunState(folder, about)
        try:
            left = json.loads(path.read_bytes())
            records = [Record(**record) for record in left["records"]]
            found_about = dict(left["about"])
            found = RunState(folder, about, int(left["blocks_done"]), records, list(left["observed"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: the state of an interrupted run is damaged ({error}); --restart begins anew"
            ) from None
        now = json.loads(json.dumps(dict(about)))
        if differs := differences(now, found_about):
            raise ValueError(
                f"{folder.parent}: an interrupted run of this output differs in {differs}; "
                "repeat its settings to resume it, or pass --restart to discard it"
            )
        return found

    def finish_block(self, layer: int, records: Sequence[Record], observed: Any) -> None:
        """Note that block `layer` is on disk."""
        assert layer == self.blocks_done, "blocks are done in order"
        self.blocks_done += 1
        self.records += records
        self.observed.append(observed)
        value = {
            "about": self.about,
            "blocks_done": self.blocks_done,
            "records": [asdict(record) for record in self.records],
            "observed": self.observed,
        }
        put(self.folder / NAME, value)


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """What differs, in words: with both values where they are short. Empty where nothing does."""
    found = []
    for key in sorted(now.keys() | then.keys()):
        values = now.get(key), then.get(key)
        if values[0] != values[1]:
            short = all(isinstance(each, int | float | str) and len(str(each)) <= SHORT for each in values)
            found.append(f"{key} ({values[0]} now, {values[1]} then)" if short else key)
    return ", ".join(found)


def put(path: Path, value: Any) -> None:
    """Write a note (JSON) for a run that resumes: it is there whole or not at all, and outlives a crash. Raises
    ValueError where a number is not finite."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_path(path.parent)

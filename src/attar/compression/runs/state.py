"""State of a run on disk, so that a killed one loses at most the block it was in.

It is one JSON file: the subject of the run (source, recipe, calibration, versions, machine), how many blocks are done,
and their measurements. It is replaced atomically, after the tensors and hidden states that it describes are on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attar.compression.block.record import Record
from attar.compression.resume import differences, write_note

NAME = "state.json"


@dataclass
class RunState:
    """Progress of a run, in a file of `folder`."""

    folder: Path
    about: Mapping[str, Any]
    blocks_done: int = 0
    records: list[Record] = field(default_factory=list)
    observed: list[Any] = field(default_factory=list)
    """Observations of the probes in each finished block."""

    @staticmethod
    def open(folder: Path, about: Mapping[str, Any], resume: bool) -> RunState:
        """Return the state that an interrupted run left in `folder`, or a new one. Raises ValueError where that run had
        another subject: its hours of work may still be wanted."""
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
        """Record that block `layer` is on disk."""
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
        write_note(self.folder / NAME, value)

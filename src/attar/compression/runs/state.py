"""What a run remembers on disk, so that a killed one loses at most the block it was in.

One JSON file: what the run is about (source, recipe, calibration, versions, machine), how many blocks are done, and
what was measured in them. It is replaced whole, after the tensors and hidden states it vouches for are on disk.
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
    """How far a run has come, in a file of `folder`."""

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
        write_note(self.folder / NAME, value)

"""Saves of a run of Adam on disk, from which a killed run resumes to the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.compression.resume import Damaged, differences, restore, save
from attar.errors import UserError

GENERATIONS = 2  # saves that are kept: should the newest be damaged, few steps are lost
MOMENTS = ("exp_avg", "exp_avg_sq")


class Saves:
    """Saves of an output's runs in the folder `state`, each after so many steps, to resume from. `about` is all that
    determines the bytes."""

    def __init__(self, state: Path, about: Mapping[str, Any], resumes: bool) -> None:
        self._state, self._about, self._resumes = state, about, resumes
        self.notes: list[str] = []
        self.figures: dict[str, Any] = {}
        """JSON-ready figures that each save has besides; those of the save that a run resumed from."""

    def _steps(self) -> list[int]:
        """Return the step numbers of the saves, the newest first."""
        return sorted((int(path.name.removeprefix("step-")) for path in self._state.glob("step-*[0-9]")), reverse=True)

    def _folder(self, step: int) -> Path:
        return self._state / f"step-{step}"

    def put(self, parameters: Sequence[Tensor], adam: torch.optim.Adam, losses: Sequence[float]) -> None:
        """Save the learned state. Once it is on disk, older saves are deleted, but for `GENERATIONS`."""
        tensors: dict[str, Tensor] = {}
        for i, each in enumerate(parameters):
            tensors |= {f"{i}.value": each.detach(), **{f"{i}.{key}": adam.state[each][key] for key in MOMENTS}}
        save(self._folder(len(losses)), {"about": self._about, "losses": list(losses), "more": self.figures}, tensors)
        for older in self._steps()[GENERATIONS:]:
            shutil.rmtree(self._folder(older))

    def resume(self, parameters: Sequence[Tensor], adam: torch.optim.Adam) -> list[float]:
        """Restore the parameters from the newest undamaged save; return the losses until then. Raises ValueError where
        there is none, or where it is of another run."""
        damaged: dict[int, str] = {}
        for step in self._steps() if self._resumes else ():
            try:
                figures, tensors = restore(self._folder(step))
            except Damaged as error:
                damaged[step] = error.sentence
                continue
            if differs := differences(json.loads(json.dumps(self._about)), figures["about"]):
                raise UserError(
                    "resume_mismatch",
                    f"an interrupted run of this output differs in {differs}: repeat its settings to resume it, or "
                    "pass --restart to discard it",
                )
            for newer, why in damaged.items():  # later steps write these saves again
                self.notes.append(f"The run went on after step {step}, not {newer}: {why}.")
                shutil.rmtree(self._folder(newer))
            for i, each in enumerate(parameters):
                with torch.no_grad():
                    each.copy_(tensors[f"{i}.value"])
                moments = {key: tensors[f"{i}.{key}"] for key in MOMENTS}
                adam.state[each] = {"step": torch.tensor(float(step)), **moments}
            self.figures = dict(figures.get("more", {}))
            return [float(loss) for loss in figures["losses"]]
        if damaged:
            raise UserError(
                "state_damaged",
                f"an interrupted run of this output left no save that is whole; {next(iter(damaged.values()))}: pass "
                "--restart to begin anew",
            )
        return []

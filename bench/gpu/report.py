"""What a run has found so far, on disk as soon as it is found, and how a run survives what fails in it.

Time on a card is dear, so a part that fails is noted and does not cost the others. A kernel that reads where nothing is
costs its process more: from then on the card answers it no more. Such a process begins itself anew behind that part
(`Broken`, and what catches it). What hangs in the driver comes back never: there the budget ends the process, and what
is on disk is what there is.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.timing import DEVICE

Row = dict[str, Any]


class Broken(Exception):
    """The card answers this process no more."""


def alive() -> bool:
    """Whether the card still answers this process."""
    if DEVICE == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        return float(torch.ones(1, device=DEVICE).sum()) == 1.0
    except RuntimeError:
        return False


class Report:
    """A run's results in OUT/gpu_check.json, `found`; or those that an earlier one left there, to go on with."""

    def __init__(self, out: Path, about: Row, resume: bool = False) -> None:
        self.path = out / "gpu_check.json"
        self.found: Row = about | {
            "checks": [], "measured": [], "errors": [], "left_out": [], "roofs": {}, "done": [], "now": "",
            "seconds": 0.0,
        }  # fmt: skip
        if resume:
            self.found = json.loads(self.path.read_text(encoding="utf-8"))

    def attempt(self, name: str, run: Callable[[], None]) -> None:
        """Run a part, and note where it fails. Raises Broken where nothing further can run in this process."""
        self.found["now"] = name
        try:
            run()
        except Exception as error:
            self.failed(name, f"{type(error).__name__}: {error}")
            print(f"  ERROR in {name}\n{traceback.format_exc(limit=-4)}", flush=True)
            if not alive():
                raise Broken(name) from error
        finally:
            self.found["done"].append(name)
            self.write()

    def failed(self, name: str, error: str) -> None:
        self.found["errors"].append({"name": name, "error": error[:2000]})

    def add(self, kind: str, row: Row) -> None:
        self.found[kind].append(row)
        self.write()

    def write(self) -> None:
        """As one, whenever the process is ended."""
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        os.replace(beside, self.path)

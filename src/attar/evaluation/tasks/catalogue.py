"""Names of tasks, and where their items come from. No import of the harness: the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attar.errors import UserError

MEMBERS: Mapping[str, tuple[str, ...]] = {
    "arc": ("arc_easy", "arc_challenge"),
    "arc_easy": ("arc_easy",),
    "arc_challenge": ("arc_challenge",),
    "chartqa": ("chartqa",),
    "gsm8k": ("gsm8k",),
    "hellaswag": ("hellaswag",),
    "ifeval": ("ifeval",),
    "lambada": ("lambada_openai",),
    "mmlu": ("mmlu",),
    "piqa": ("piqa",),
    "truthfulqa": ("truthfulqa_mc1", "truthfulqa_mc2"),
    "winogrande": ("winogrande",),
}
"""Tasks of the harness by the name that a user gives. Those of one entry read the same items, but for `arc`."""

IMAGES = ("chartqa",)
"""Tasks whose items have images. They are asked of local items alone: libraries decode images of the Hub's in place."""

FOLDERS = (
    "arc", "chartqa", "gsm8k", "hellaswag", "ifeval", "lambada", "mmlu/default", "piqa", "truthfulqa", "winogrande",
)  # fmt: skip
"""Folders of the harness that define these tasks: all of its folders take seconds to read."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A task, and the local items that stand in for the Hub's."""

    name: str
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> TaskSource:
        """Parse NAME or NAME=PATH. Raises UserError for an unknown name, an empty path, and a path of `arc`."""
        name, equals, path = text.partition("=")
        if name not in MEMBERS:
            raise UserError("name_unknown", f"unknown task {name!r}: known are {', '.join(MEMBERS)}")
        if equals and not path:
            raise UserError("option_malformed", f"a task is given as NAME or NAME=PATH, not {text!r}")
        if path and name == "arc":
            raise UserError("option_malformed", "arc has items of two kinds: give arc_easy=PATH and arc_challenge=PATH")
        if name in IMAGES and not path:
            raise UserError("option_malformed", f"{name} has items with images: give them as {name}=PATH")
        return cls(name, Path(path) if path else None)

"""The vision tower beside a GGUF file that is written: its mmproj file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attar.checkpoints import image_settings
from attar.checkpoints.folder import Folder
from attar.checkpoints.gguf import mmproj, mmproj_writer
from attar.checkpoints.sources.vision import tower_of_folder
from attar.checkpoints.vocabulary import is_gguf
from attar.errors import UserError


class TowerFile(NamedTuple):
    """The mmproj file `name` of a model's file, None for a model without a tower, and notes for the user."""

    name: str
    plan: mmproj_writer.Plan | None = None
    notes: tuple[str, ...] = ()

    def check(self, folder: Path, overwrite: bool) -> None:
        """Raise UserError (`output_exists`) where the file is in `folder` already, unless `overwrite`. A loader would
        read it beside a model without a tower as well."""
        path = folder / self.name
        if path.exists() and not overwrite:
            raise UserError("output_exists", f"{path} exists and is kept; choose another output, or pass --overwrite")

    def write(self, folder: Path) -> None:
        """Write the file to `folder`, where there is one. Raises CheckpointError where the disk is full."""
        if self.plan is not None:
            self.plan.write(folder / self.name, overwrite=True)

    def clear(self, folder: Path) -> None:
        """Remove the file that an earlier output left in `folder`, where this output has no tower."""
        if self.plan is None:
            (folder / self.name).unlink(missing_ok=True)


def tower_file(folder: Folder, name: str, language: Mapping[str, Any]) -> TowerFile:
    """Plan the mmproj file beside the GGUF file `name` with the metadata `language`.

    Raises UserError (`gguf_inexpressible`) where an mmproj file cannot describe the tower.
    """
    own, tower = mmproj.path_of(Path(name)).name, tower_of_folder(folder)
    if tower is None:
        return TowerFile(own)
    images = image_settings.read(folder.path)
    if images is None:
        said = "The vision tower is left out: the source has no preprocessor_config.json, so it takes no images."
        return TowerFile(own, notes=(said,))
    plan = mmproj_writer.plan(tower.config, tower.files, images, language, folder.path.resolve().name)
    return TowerFile(own, plan, (f"The vision tower is in {own}, which belongs beside the model's file.", *plan.notes))


def left_out(source: Path) -> tuple[str, ...]:
    """Return a note about the vision tower of a GGUF source, which no output but a copy of its file has; () where there
    is none."""
    path = mmproj.path_of(source)
    if not is_gguf(source) or not path.is_file():
        return ()
    return (f"The output has the language model alone: the vision tower stays in {path.name}.",)

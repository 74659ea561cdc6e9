"""What is asked of `compress`, before a recipe is settled: which model, into what, with which head and importances.

Recipes are held against it, one or several (`best` tries a list, a target changes the bits), and all that can be
refused before the first block is refused here, by the same code for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from attar.checkpoints.sources import hf, hub
from attar.checkpoints.vocabulary import is_gguf
from attar.compression import device_placement
from attar.compression.calibration import importance
from attar.compression.outputs.folder import Output
from attar.compression.outputs.gguf import GgufOutput
from attar.compression.recipe import requirements
from attar.compression.recipe.recipe import Recipe
from attar.compression.rotation import rotation
from attar.formats.codecs import ggml_mix


@dataclass(frozen=True)
class Ready:
    """A recipe that nothing speaks against, as it will run."""

    plan: Recipe
    checkpoint: hf.Checkpoint  # what the walk begins with: the source, rotated if the recipe says so
    output: Output | GgufOutput
    reads: bool  # whether the walk reads the inputs of linears


@dataclass(frozen=True)
class Order:
    """`to_file`: a GGUF file is written, not a folder. `importances` are those of a matrix that was given, [I] by
    module name; `calibrated`: there is calibration text, from which they can be had too."""

    source: hf.Checkpoint
    dst: Path
    to_file: bool
    head: str | None
    importances: Mapping[str, Tensor] | None
    calibrated: bool
    seed: int
    device: str

    @classmethod
    def take(
        cls,
        src: str | Path,
        dst: str | Path,
        head: str | None,
        imatrix: str | Path | None,
        calibrated: bool,
        seed: int,
        device: str,
    ) -> Order:
        """Raises ValueError (CheckpointError among them) where the source cannot be compressed into `dst`."""
        folder = hub.resolve(src)
        if not str(dst):  # an unset variable of a shell, which Path would take for the current folder
            raise ValueError("the output's name is empty: give a folder to write")
        if folder.resolve().is_relative_to(Path(dst).resolve()):
            raise ValueError(f"{dst} would replace the model that it is made from: choose another output")
        if is_gguf(folder):
            raise ValueError(f"{folder} is a GGUF file, which compress does not read: give the folder it was made from")
        source = hf.Checkpoint.open(folder)
        to_file = Path(dst).suffix.lower() == ".gguf"
        if imatrix is not None and not to_file:
            raise ValueError("an importance matrix is for GGUF files: give an output that ends in .gguf")
        importances = None if imatrix is None else importance.known(imatrix, source)
        return cls(source, Path(dst), to_file, head, importances, calibrated, seed, device)

    def ready(self, recipe: str | Path | Recipe, sequences: int | None, targeted: bool = False) -> Ready:
        """Hold a recipe against the model. `sequences` is how many of calibration text there will be at most, None
        without any; `targeted`: its bits are chosen later. Raises ValueError saying what speaks against it."""
        plan = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
        if self.head is not None:
            plan = plan.with_head(self.head)
        if plan.mix is not None and not self.to_file:
            raise ValueError(f"{plan.name} is a mix of GGUF files: give an output that ends in .gguf, not {self.dst}")
        if self.to_file and (plan.pruning is not None or plan.structured is not None):
            raise ValueError(f"{plan.name} writes a folder, not a GGUF file: give an output that does not end in .gguf")
        if self.to_file:
            plan = plan.for_file()
        checkpoint = self.source
        if plan.rotate is not None:
            if self.importances is not None:
                raise ValueError(
                    f"{plan.name}: an importance matrix weighs inputs as the model has them, and {plan.rotate.method} "
                    "turns them: leave it out, and give --calib, on which importances of the turned ones are measured"
                )
            checkpoint = rotation.rotated(checkpoint, plan, self.seed)
        # what options are for is known when the schemes are
        output = self.output(replace(plan, said=()) if targeted else plan, checkpoint)
        device_placement.check(plan, output.schemes.values(), self.to_file, self.device)
        reads = requirements.check(plan, checkpoint.config, output.schemes, sequences)
        requirements.check_sparse(plan, checkpoint, output.schemes)
        return Ready(plan, checkpoint, output, reads)

    def output(self, plan: Recipe, checkpoint: hf.Checkpoint) -> Output | GgufOutput:
        """Where everything will lie. Raises ValueError naming the linear whose shape a scheme cannot take."""
        if not self.to_file:
            return Output(checkpoint, plan)
        output = GgufOutput(checkpoint, plan, self.dst.name, self.weighs(plan) or self.importances is not None)
        output.importances = dict(self.importances or {})
        return output

    def weighs(self, plan: Recipe) -> bool:
        """Whether importances are to be had from calibration text before the walk."""
        dense = plan.mix in ggml_mix.DENSE_MIXES
        return self.to_file and not dense and self.calibrated and self.importances is None

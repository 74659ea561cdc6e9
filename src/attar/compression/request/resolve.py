"""Resolution of a request against its model: one recipe with everything that follows before the first block.

A request may try several recipes, and a target changes the bits of one. Each is resolved by the same code, which
rejects invalid combinations before anything is computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.convert.dense import DenseFolder, Original, open_dense
from attar.checkpoints.sources import hf, hub
from attar.compression import device_placement
from attar.compression.calibration import image_rows, importance
from attar.compression.calibration.amount import Calibration, is_text
from attar.compression.outputs import towers
from attar.compression.outputs.base import Output
from attar.compression.outputs.folder import FolderOutput
from attar.compression.outputs.gguf import GgufOutput
from attar.compression.recipe import requirements
from attar.compression.recipe.recipe import Recipe
from attar.compression.request.request import CompressionRequest
from attar.compression.rotation import rotation
from attar.errors import UserError
from attar.formats.codecs import ggml_mix
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class ResolvedCompression:
    """A request with one recipe that passed all checks, ready to run. `recipe` has the request's head, and the mix of a
    file. `checkpoint` is the model to compress: the `source`, rotated if the recipe says so. `importances` [I] by
    module name are those of a matrix that was given. `calibration`, its `tokenizer` and the ids `held_out` for the
    evaluation are there after `with_texts`."""

    request: CompressionRequest
    source: hf.Checkpoint
    recipe: Recipe
    checkpoint: hf.Checkpoint
    output: Output
    reads: bool  # whether the block pass reads the inputs of linears
    importances: Mapping[str, Tensor] | None
    calibration: Calibration | None = None
    tokenizer: Tokenizer | None = None
    held_out: list[int] | None = None

    @property
    def weighs(self) -> bool:
        """Return whether calibration text must give importances before the block pass."""
        return _weighs(self.request, self.recipe, self.importances)

    def with_texts(self) -> ResolvedCompression:
        """Read the texts that the request needs. Raises ValueError where the evaluation text is too short."""
        request, tokenizer, held_out = self.request, None, None
        if is_text(request.calibration) or request.evaluation is not None:
            tokenizer = vocabulary.tokenizer(self.source.folder.path)
        if request.evaluation is not None:
            assert tokenizer is not None
            held_out = tokenizer.encode(read_text(request.evaluation), add_special_tokens=False)[: request.eval_tokens]
            if len(held_out) < 2:
                raise UserError(
                    "text_too_short",
                    f"{request.evaluation} has {len(held_out)} token: at least 2 are needed to measure on",
                )
        return replace(self, calibration=request.calibration, tokenizer=tokenizer, held_out=held_out)

    def with_recipe(self, recipe: Recipe, sequences: int) -> ResolvedCompression:
        """Resolve another choice of bits on so many sequences, with the same texts. Raises ValueError as `resolve`."""
        found = resolve(self.request, self.source, recipe, sequences, targeted=True, importances=self.importances)
        return replace(found, calibration=self.calibration, tokenizer=self.tokenizer, held_out=self.held_out)

    def layout(self, recipe: Recipe) -> Output:
        """Return the layout of the same checkpoint with another choice of bits."""
        return _layout(self.request, recipe, self.checkpoint, self.importances)


def open_source(request: CompressionRequest) -> hf.Checkpoint:
    """Open the model. Raises ValueError (CheckpointError among them) where it cannot be compressed into the output."""
    folder = hub.resolve(request.src)
    request.require_apart(folder)
    if not vocabulary.is_gguf(folder):
        checkpoint = hf.Checkpoint.open(folder)
        if "quantization_config" not in checkpoint.folder.config:
            return _widest(checkpoint)
    checkpoint = open_dense(folder)
    if (original := compressed_original(checkpoint)) is not None and not request.requantize:
        raise UserError(
            "source_compressed",
            f"{folder} is compressed already ({original}): start from the original checkpoint, or pass --requantize, "
            "which compresses its decoded values",
        )
    return _widest(checkpoint)


def _widest(source: hf.Checkpoint) -> hf.Checkpoint:
    """Return a source in the widest dtype of its files, so that norms wider than the embedding lose nothing."""
    widest = source.widest()
    return source if widest == source.dtype else hf.Checkpoint.over(source.folder, widest)


def compressed_original(source: hf.Checkpoint) -> Original | None:
    """Return what a source was decoded from, where that was compressed; else None."""
    folder = source.folder
    return folder.original if isinstance(folder, DenseFolder) and folder.original.schemes else None


def resolve(
    request: CompressionRequest,
    source: hf.Checkpoint,
    recipe: str | Path | Recipe,
    sequences: int | None,
    *,
    targeted: bool = False,
    importances: Mapping[str, Tensor] | None = None,
) -> ResolvedCompression:
    """Check a recipe against the model and resolve it. `sequences` is the maximal number of calibration sequences, None
    without any; `targeted`: its bits are chosen later. Importances default to those of the request's matrix. Raises
    ValueError with the reason where the recipe cannot be applied."""
    if importances is None and request.imatrix is not None:
        importances = importance.known(request.imatrix, source)
    plan = request.planned(recipe)
    towers.check(plan, source)
    if request.calib_images is not None:
        image_rows.check(request.calib_images, source)
    checkpoint = source
    if plan.rotate is not None:
        if importances is not None:
            raise UserError(
                "option_conflict",
                f"{plan.name}: an importance matrix weighs inputs as the model has them, and {plan.rotate.method} "
                "turns them: leave it out, and give --calib, on which importances of the turned ones are measured",
            )
        checkpoint = rotation.rotated(source, plan, request.seed)
    # the schemes determine which options are read
    output = _layout(request, replace(plan, said=()) if targeted else plan, checkpoint, importances)
    device_placement.check(plan, output.schemes.values(), request.to_file, request.device)
    reads = requirements.check(plan, checkpoint.config, output.schemes, sequences)
    requirements.check_sparse(plan, checkpoint, output.schemes)
    return ResolvedCompression(request, source, plan, checkpoint, output, reads, importances)


def _layout(
    request: CompressionRequest, plan: Recipe, checkpoint: hf.Checkpoint, importances: Mapping[str, Tensor] | None
) -> Output:
    """Return the layout of the output. Raises ValueError naming the linear whose shape a scheme cannot take."""
    if not request.to_file:
        return FolderOutput(checkpoint, plan, request.vision)
    known = _weighs(request, plan, importances) or importances is not None
    target = Path(os.path.realpath(request.path))  # of a link
    output = GgufOutput(checkpoint, plan, target.name, known)
    output.tower.check(target.parent, request.overwrite)
    return output.weighing(importances or {})


def _weighs(request: CompressionRequest, plan: Recipe, importances: Mapping[str, Tensor] | None) -> bool:
    dense = plan.mix in ggml_mix.DENSE_MIXES
    return request.to_file and not dense and request.calibration is not None and importances is None

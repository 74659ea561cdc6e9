"""Mistakes in a request, found without torch and before a model is fetched. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from attar.checkpoints import writer
from attar.checkpoints.gguf import parts
from attar.checkpoints.sources import hub
from attar.checkpoints.strict_io import CheckpointError
from attar.compression.calibration.amount import is_text
from attar.compression.request.request import CompressionRequest
from attar.compression.search.candidates import Candidates, candidates
from attar.errors import UserError
from attar.images.pairs import read_pairs
from attar.text.files import neighbours, require_text


def check(request: CompressionRequest) -> Candidates | None:
    """Return the recipes that a request tries, None where it names one.

    Raises ValueError (CheckpointError among them) for unknown words in a recipe, options that do not go together, files
    that do not exist, a model that is nowhere on this machine and no Hub id, and an output that may not be made. What
    depends on the model's contents is checked by `resolve`.
    """
    tries = candidates(request.recipe)
    if tries is not None and request.target is not None:
        raise UserError(
            "option_conflict",
            f"a target chooses the bits of one recipe, and {request.recipe} tries several: leave the target out, or "
            "name one recipe with it, such as guided-w4g128",
        )
    if tries is not None and request.imatrix is not None:
        raise UserError(
            "option_conflict",
            f"{request.recipe} tries several recipes, which weigh errors by calibration text: leave the importance "
            "matrix out, or name one recipe with it, such as gptq-q4_k_m",
        )
    if tries is None:
        request.planned(request.recipe)
    elif not tries.own:  # impossible ones of attar's own lists are left out
        for name in tries.names:
            request.planned(name)
    _require_files(request)
    source = hub.local(os.fspath(request.src))
    if source is not None:
        request.require_apart(source)
    (parts if request.to_file else writer).check_target(Path(os.path.realpath(request.dst)), request.overwrite)
    return tries


def _require_files(request: CompressionRequest) -> None:
    """Raise ValueError for a file of the request that does not exist, and a folder of images without pairs."""
    if request.calibration is not None and is_text(request.calibration):
        require_text(str(request.calibration))
    if request.evaluation is not None:
        require_text(request.evaluation)
    if request.imatrix is not None and not (path := Path(request.imatrix)).is_file():
        raise CheckpointError("file_not_found", f"{path}: no such file{neighbours(path)}")
    for images in (request.calib_images, request.evaluation_images):
        if images is not None:
            read_pairs(images)

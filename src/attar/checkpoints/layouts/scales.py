"""The one number of a linear whose activations are rounded on a scale that was fixed at calibration.

It divides every activation and multiplies every product, so what no calibration can have found is refused when the
folder is opened, not met as NaN logits: four bytes are read for it.
"""

from __future__ import annotations

from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.strict_io import CheckpointError

DTYPES = ("float32", "float16", "bfloat16")


def activation_scale(folder: Folder, name: str) -> Tensor:
    """The scale stored as `name`, float32 [1]. Raises CheckpointError unless it is one number, finite and above 0."""
    part = folder.info(name)
    if part.dtype not in DTYPES or part.shape not in ((), (1,)):
        raise CheckpointError(f"{folder.path}: {name} must be one number, not {part.dtype} {list(part.shape)}")
    scale = folder.read(name).reshape(1).float()
    if not scale.isfinite().all() or float(scale) <= 0:
        raise CheckpointError(f"{folder.path}: {name} is {float(scale)}: a scale is finite and above 0")
    return scale

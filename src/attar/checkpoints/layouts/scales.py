"""The fixed activation scale of a linear: one number, found at calibration.

It divides every activation and multiplies every product. A value that no calibration can have found is therefore
refused when the folder is opened, before it becomes NaN logits; this reads four bytes.
"""

from __future__ import annotations

from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.strict_io import invalid

DTYPES = ("float32", "float16", "bfloat16")


def activation_scale(folder: Folder, name: str) -> Tensor:
    """Return the scale stored as `name`, float32 [1]. Raises CheckpointError unless it is one number, finite and above
    0."""
    part = folder.info(name)
    if part.dtype not in DTYPES or part.shape not in ((), (1,)):
        raise invalid(f"{folder.path}: {name} must be one number, not {part.dtype} {list(part.shape)}")
    scale = folder.read(name).reshape(1).float()
    if not scale.isfinite().all() or float(scale) <= 0:
        raise invalid(f"{folder.path}: {name} is {float(scale)}: a scale is finite and above 0")
    return scale

"""How a checkpoint's weights are stored, as `plan` counts them: from its headers, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attar.checkpoints import hf
from attar.formats.scheme import Scheme
from attar.model.config import ModelConfig
from attar.plan.costs import SHORT, Storage, matrices


def stored(path: Path) -> tuple[ModelConfig, Storage]:
    """The model of a folder, and the scheme of each of its linears. Raises CheckpointError as loading would.

    A quantized embedding has the scheme of the output matrix that it is tied to. Dense tensors count in the dtype of
    the embedding, for files keep one dtype; the few that some store wider are a rounding error of the sum.
    """
    checkpoint = hf.Checkpoint.open(path)
    config = checkpoint.config
    schemes: dict[str, Scheme | None] = {each.name: checkpoint.scheme_of(each.name) for each in matrices(config)}
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    blocks = (schemes[each.name] for each in matrices(config) if each.compressible)
    counts = Counter(SHORT[dtype] if scheme is None else scheme.name for scheme in blocks)
    name = " + ".join(name for name, _ in counts.most_common(2)) + (" + ..." if len(counts) > 2 else "")
    return config, Storage(None, schemes[config.names.head], dtype, schemes, name)

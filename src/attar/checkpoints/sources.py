"""A model on disk, whichever of the two it is: a Hugging Face folder or a GGUF file.

What is built from either is the same decoder, so that nobody above asks which it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from attar.checkpoints import gguf_checkpoint, hf
from attar.checkpoints.vocabulary import is_gguf
from attar.kernels.ops import Store
from attar.model.decoder import Decoder


def load(
    path: Path,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    store: Store | None = None,
) -> Decoder:
    """The whole model, ready to run. Arguments and errors as `hf.load`."""
    return (gguf_checkpoint.load if is_gguf(path) else hf.load)(path, dtype, progress, store)

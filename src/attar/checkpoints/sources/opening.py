"""A model on disk in either form: a Hugging Face folder or a GGUF file.

Both give the same decoder, so that code above does not depend on the form.
"""

from __future__ import annotations

from pathlib import Path

import torch

from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.sources import hf
from attar.checkpoints.vocabulary import is_gguf
from attar.kernels import dispatch
from attar.kernels.dispatch import BackendWeights
from attar.model.decoder import Decoder
from attar.progress import StageProgress


def load(
    path: Path,
    dtype: torch.dtype | None = None,
    progress: StageProgress | None = None,
    store: BackendWeights | None = None,
) -> Decoder:
    """Load the whole model, ready to run. Arguments and errors as `hf.load`."""
    return (gguf_checkpoint.load if is_gguf(path) else hf.load)(path, dtype, progress, store)


def load_on(
    path: Path,
    device: str,
    dtype: torch.dtype | None,
    progress: StageProgress | None = None,
) -> Decoder:
    """Load the model for measurements: on a CPU with the reference, elsewhere with the device's kernels, which compute
    in `dtype`. Raises ValueError also where the device cannot compute."""
    store = None
    if device != "cpu":
        assert dtype is not None, "kernels are laid out for one"
        store = dispatch.store(device=device, dtype=dtype)
    return load(path, dtype, progress, store)

"""Body of `attar verify`: check a user's model against its receipt, on this machine's kernels."""

from __future__ import annotations

import os

import torch

from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.receipt import Verdict
from attar.checkpoints.sources import hf, hub, opening
from attar.kernels import dispatch
from attar.progress import Progress


def verify(
    model: str | os.PathLike[str],
    *,
    hashes: bool = True,
    device: str = "cpu",
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Check a folder, GGUF file, Hub id or `demo`: every hash unless `hashes` is false, then every probe.

    Probes are computed in `dtype`. The model is loaded only once its hashes match. In float32 it is loaded for the
    native kernels where there are any, and replayed on each path that it has there; in another dtype for the reference.
    On a `device` other than the CPU, any dtype uses that device's kernels. `progress(stage, done, total)` reports the
    loading. Raises ValueError where the model cannot be loaded or its receipt is damaged.
    """
    dispatch.require(device)
    path, computed = hub.resolve(model), hf.compute_dtype(dtype, device)
    told = progress or (lambda stage, done, total: None)
    store = None
    if computed is not None and (device != "cpu" or computed == torch.float32):
        store = dispatch.store(device=device, dtype=computed)
    return receipt.verify(
        path,
        lambda: opening.load(path, computed, lambda done, total: told("loading", done, total), store),
        hashes=hashes,
    )

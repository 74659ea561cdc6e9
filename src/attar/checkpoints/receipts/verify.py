"""Body of `attar verify`: check a user's model against its receipt, on this machine's kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from attar.checkpoints.receipts import receipt, vision_probe
from attar.checkpoints.receipts.receipt import Verdict
from attar.checkpoints.sources import hf, hub, opening
from attar.checkpoints.sources.vision import load_vision
from attar.kernels import dispatch
from attar.progress import Progress

TOWER = "vision tower"


def verify(
    model: str | os.PathLike[str],
    *,
    hashes: bool = True,
    device: str = "cpu",
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Check a folder, GGUF file, Hub id or `demo`: every hash unless `hashes` is false, then every probe.

    Of a model with a vision tower an image is replayed as well. Probes are computed in `dtype`. The model is loaded
    only once its hashes match. In float32 it is loaded for the native kernels where there are any, and replayed on each
    path that it has there; in another dtype for the reference.
    On a `device` other than the CPU, any dtype uses that device's kernels. `progress(stage, done, total)` reports the
    loading. Raises ValueError where the model cannot be loaded or its receipt is damaged.
    """
    dispatch.require(device)
    path, computed = hub.resolve(model), hf.compute_dtype(dtype, device)
    told = progress or (lambda stage, done, total: None)
    store = None
    if computed is not None and (device != "cpu" or computed == torch.float32):
        store = dispatch.store(device=device, dtype=computed)
    verdict = receipt.verify(
        path,
        lambda: opening.load(path, computed, lambda done, total: told("loading", done, total), store),
        hashes=hashes,
    )
    found = receipt.read_receipt(path)
    if not verdict.ok or found is None or "vision" not in found.value:
        return verdict
    return _with_tower(verdict, path, found.value["vision"], torch.float32 if device != "cpu" else computed)


def _with_tower(verdict: Verdict, path: Path, about: object, dtype: torch.dtype | None) -> Verdict:
    """Return the verdict with that of the vision tower, which is computed on CPUs, whatever computes the decoder."""
    dtype = dtype or torch.float32
    vision = load_vision(path, dtype, dispatch.store() if dtype == torch.float32 else None)
    if vision is None:
        said = "the receipt has a vision tower, and the model none"
        return replace(verdict, ok=False, first_divergence=TOWER, detail=said)
    probe = about.get("probe") if isinstance(about, dict) else None
    ok, said = vision_probe.replay(probe, vision, str(path))
    if ok is False:
        return replace(verdict, ok=False, first_divergence=TOWER, detail=f"{TOWER}: {said}")
    return replace(verdict, detail=f"{verdict.detail}; {TOWER}: {said}")

"""A model on disk in either form: a Hugging Face folder or a GGUF file.

Both give the same decoder, and the storage of its weights for `plan`, so that code above does not depend on the form.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.sources import hf
from attar.checkpoints.vocabulary import is_gguf
from attar.formats.scheme import ITEM_BITS, Scheme
from attar.kernels import dispatch
from attar.kernels.dispatch import BackendWeights
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.plan.costs import SHORT, Storage, matrices
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
    model: Path | hf.Checkpoint, device: str, dtype: torch.dtype | None, progress: StageProgress | None = None
) -> Decoder:
    """Load a model, or that of an open checkpoint, for measurements: on a CPU with the reference, elsewhere with the
    device's kernels, which compute in `dtype`. Raises ValueError also where the device cannot compute."""
    store = None
    if device != "cpu":
        assert dtype is not None, "kernels are laid out for one"
        store = dispatch.store(device=device, dtype=dtype)
    if isinstance(model, hf.Checkpoint):
        return hf.load_again(model, dtype or model.dtype, store)
    return load(model, dtype, progress, store)


def stored(path: Path, whole: bool = True) -> tuple[ModelConfig, Storage]:
    """Return the configuration of a folder or GGUF file, and the scheme of each of its linears. Without `whole`, the
    header of a GGUF file is enough. Raises CheckpointError as loading does.

    A quantized embedding has the scheme of the LM head that it is tied to. Dense tensors count in the dtype of the
    embedding, because files keep one dtype; the few that some store wider are a rounding error of the sum.
    """
    if is_gguf(path):
        return _stored_gguf(path, whole)
    checkpoint = hf.Checkpoint.open(path)
    config = checkpoint.config
    schemes: dict[str, Scheme | None] = {each.name: checkpoint.scheme_of(each.name) for each in matrices(config)}
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    blocks = (schemes[each.name] for each in matrices(config) if each.compressible)
    counts = Counter(SHORT[dtype] if scheme is None else scheme.name for scheme in blocks)
    return config, Storage(None, schemes[config.names.head], dtype, schemes, _label(counts))


def _stored_gguf(path: Path, whole: bool) -> tuple[ModelConfig, Storage]:
    """Return the configuration and storage of a GGUF file as the CPU kernels run it."""
    checkpoint = GgufCheckpoint.open(path, torch.float32, as_stored=True, blocks=True, whole=whole)
    config = checkpoint.config
    all_of = list(matrices(config))
    schemes = {each.name: checkpoint.scheme_of(each.name) for each in all_of}
    embedding = None if config.tied else checkpoint.scheme_of(config.names.embed)
    # One dtype for all dense weights: the widest.
    ends = [] if config.tied or embedding is not None else [config.names.embed]
    dense = [name for name, scheme in schemes.items() if scheme is None] + ends
    dtype = max((checkpoint.decoded_as(name) for name in dense), key=ITEM_BITS.__getitem__, default="float32")
    counts = Counter(checkpoint.kind_of(each.name).name for each in all_of if each.compressible)
    return config, Storage(None, schemes[config.names.head], dtype, schemes, _label(counts), embedding)


def _label(counts: Counter[str]) -> str:
    return " + ".join(name for name, _ in counts.most_common(2)) + (" + ..." if len(counts) > 2 else "")

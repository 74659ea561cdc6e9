"""Storage of a model's weights for `plan`: from its headers, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.sources import hf
from attar.checkpoints.vocabulary import is_gguf
from attar.formats.scheme import ITEM_BITS, Scheme
from attar.model.config import ModelConfig
from attar.plan.costs import SHORT, Storage, matrices


def stored(path: Path) -> tuple[ModelConfig, Storage]:
    """Return the configuration of a folder or GGUF file, and the scheme of each of its linears. Raises CheckpointError
    as loading does.

    A quantized embedding has the scheme of the LM head that it is tied to. Dense tensors count in the dtype of the
    embedding, because files keep one dtype; the few that some store wider are a rounding error of the sum.
    """
    if is_gguf(path):
        return _stored_gguf(path)
    checkpoint = hf.Checkpoint.open(path)
    config = checkpoint.config
    schemes: dict[str, Scheme | None] = {each.name: checkpoint.scheme_of(each.name) for each in matrices(config)}
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    blocks = (schemes[each.name] for each in matrices(config) if each.compressible)
    counts = Counter(SHORT[dtype] if scheme is None else scheme.name for scheme in blocks)
    return config, Storage(None, schemes[config.names.head], dtype, schemes, _label(counts))


def _stored_gguf(path: Path) -> tuple[ModelConfig, Storage]:
    """Return the configuration and storage of a GGUF file as the CPU kernels run it."""
    checkpoint = GgufCheckpoint.open(path, torch.float32, as_stored=True, blocks=True)
    config = checkpoint.config
    all_of = list(matrices(config))
    schemes = {each.name: checkpoint.scheme_of(each.name) for each in all_of}
    # One dtype for all dense weights: the widest. The embedding of a model that is not tied is read as dense rows.
    dense = [name for name, scheme in schemes.items() if scheme is None] + ([] if config.tied else [config.names.embed])
    dtype = max((checkpoint.decoded_as(name) for name in dense), key=ITEM_BITS.__getitem__, default="float32")
    counts = Counter(checkpoint.kind_of(each.name).name for each in all_of if each.compressible)
    return config, Storage(None, schemes[config.names.head], dtype, schemes, _label(counts))


def _label(counts: Counter[str]) -> str:
    return " + ".join(name for name, _ in counts.most_common(2)) + (" + ..." if len(counts) > 2 else "")

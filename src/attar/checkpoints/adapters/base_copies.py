"""Tensors of the base model that PEFT saves into an adapter's file beside the adapter itself.

They are those of `modules_to_save`, and the embedding and LM head where one of them is a target. An adapter changes
nothing by them where they equal the base's own; else training changed them, and they would have to replace it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.sources.shards import open_checkpoint

WRAPPERS = (".base_layer", ".modules_to_save")  # ends of the names under which PEFT wraps modules of the base


def name_in_base(name: str) -> str:
    """Return the base's name of a tensor that the adapter's file has under `name`, without the common prefix."""
    owner, _, part = name.rpartition(".")
    for wrapper in WRAPPERS:
        owner = owner.removesuffix(wrapper)
    return f"{owner}.{part}"


def check(file: TensorFile, copies: Mapping[str, str], base: Path | None) -> None:
    """Raise CheckpointError where a tensor of the adapter file is not that of the base."""
    checkpoint = None if base is None else open_checkpoint(base, torch.float32, as_stored=True)
    for tensor, name in copies.items():
        if checkpoint is not None:
            module, _, part = name.rpartition(".")
            own = checkpoint.config.names
            tied = module == own.head and checkpoint.config.tied and not checkpoint.has(name)
            name = f"{own.embed}.{part}" if tied else name
            if checkpoint.has(name) and _same(checkpoint.matrix(name), file.read(tensor)):
                continue
        raise file.error(
            "adapter_invalid",
            f"{tensor!r} is a tensor of the base itself, and does not equal the base's: training changed it, or the "
            "adapter belongs to another base. Train without modules_to_save, or have PEFT save with "
            "save_embedding_layers=False",
        )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors are equal in the dtype of either."""
    if ours.shape != theirs.shape:
        return False
    return torch.equal(ours.to(theirs.dtype), theirs) or torch.equal(ours, theirs.to(ours.dtype))

"""Early exits on disk, in a layout of attar's own: there is no published one.

The config has `architectures: [AttarEarlyExit]`, `exit_layer`, the number of layers before the exit, and `hidden_size`,
`vocab_size`, `num_hidden_layers` of the model that it belongs to. Tensors: `norm.weight` [I], `norm.bias` where the
model's norms have one, `linear.weight` [I, I]; for a draft vocabulary `lm_head.weight` [`draft_vocab_size`, I] and
`d2t`, the token id of each row less the row's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.drafts.files import EXIT, HeadFolder, lay_out, write_head
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import Linear, Norm
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.drafts import early_exit
from attar.model.drafts.early_exit import EarlyExit


def read(path: Path, target: Decoder, store: BackendWeights | None = None) -> EarlyExit:
    """Read the exit of a folder for a model; in `store` where one is given, else in the model's dtype.

    Raises CheckpointError where it is of another hidden size, vocabulary or number of layers, or tensors are missing,
    left over, or of other shapes.
    """
    files, config = HeadFolder(path, target.dtype if store is None else None), target.config
    files.match(config.hidden, config.vocab_size)
    layers = exit_layer(files, config.layers)
    rows = files.integer("draft_vocab_size", default=config.vocab_size)
    tokens = files.indices("d2t", rows, config.vocab_size, offset=True) if rows != config.vocab_size else None
    bias = files.tensor("norm.bias", (config.hidden,)) if config.norm == "layer" else None
    norm = Norm(config.norm, files.tensor("norm.weight", (config.hidden,)), bias, config.norm_eps, name="norm")
    linear = Linear("linear", files.tensor("linear.weight", (config.hidden, config.hidden)))
    head = target.head
    if tokens is not None:
        head = Linear("lm_head", files.tensor("lm_head.weight", (rows, config.hidden)))
    files.finish()
    lay_out(store, target, (linear, head), (norm,))
    return early_exit.early_exit(target, layers, norm, linear, head, tokens)


def exit_layer(files: HeadFolder, layers: int) -> int:
    """Return the layers before the exit. Raises CheckpointError where the model has another number than the exit was
    made for, or not more than those."""
    made_for, found = files.integer("num_hidden_layers", default=layers), files.integer("exit_layer")
    if made_for != layers or found >= layers:
        raise files.error(
            f"leaves a model of {made_for} layers after {found}, and this one has {layers}: an exit is before the last"
        )
    return found


def write(folder: Path, target: ModelConfig, layers: int, tensors: Mapping[str, Tensor], tokens: Tensor | None) -> None:
    """Write an exit behind `layers` layers of a model; `tokens` are the ids of the LM head's rows, None for all."""
    config = {
        "architectures": [EXIT], "exit_layer": layers, "hidden_size": target.hidden, "vocab_size": target.vocab_size,
        "num_hidden_layers": target.layers,
        "draft_vocab_size": target.vocab_size if tokens is None else len(tokens),
    }  # fmt: skip
    more = {} if tokens is None else {"d2t": tokens - torch.arange(len(tokens))}
    write_head(folder, config, {**tensors, **more})

"""Medusa heads on disk: the layout of FasterDecoding, and that of vLLM, which is also written.

* FasterDecoding: residual block i of head k is `k.i.linear.weight` and `k.i.linear.bias`, its LM head `k.L.weight`, L
  the number of blocks; settings are `medusa_num_heads` and `medusa_num_layers`.
* vLLM: `blocks.k.layers.i.weight`, a bias if `medusa_fc_bias`, and `lm_heads.k.weight`; settings are `num_heads`,
  `num_hidden_layers`, `hidden_size` and `vocab_size`.

In vLLM's, `truncated_vocab_size` is the number of token ids in `token_map` that the LM heads' rows stand for; rows of
all tokens are cut to those. With `original_lm_head` all heads share `lm_heads.0.weight`, which are rows of the model's
own LM head. Where they are all of its rows, the model's is used itself, and the copy is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from attar.checkpoints.drafts.files import HeadFolder, lay_out, write_head
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import Linear
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.drafts.medusa import MedusaHeads


def read(path: Path, target: Decoder, store: BackendWeights | None = None) -> MedusaHeads:
    """Read the heads of a folder for a model; in `store` where one is given, else in the model's dtype.

    Raises CheckpointError where they are of another hidden size or vocabulary, or tensors are missing, left over, or of
    other shapes.
    """
    files, config, head = HeadFolder(path, target.dtype if store is None else None), target.config, target.head
    published = "medusa_num_heads" in files.config and not files.has("blocks.0.layers.0.weight")
    count = files.integer("num_heads", "medusa_num_heads")
    depth = files.integer("num_hidden_layers", "medusa_num_layers", default=1)
    if not published:
        files.match(config.hidden, config.vocab_size)
    rows = config.vocab_size if published else files.integer("truncated_vocab_size", default=config.vocab_size)
    tokens = files.indices("token_map", rows, config.vocab_size) if rows != config.vocab_size else None
    if not published and tokens is None:
        files.skip("token_map")
    bias = published or bool(files.config.get("medusa_fc_bias"))
    shape = (config.hidden, config.hidden)

    def block(name: str) -> Linear:
        return Linear(
            name, files.tensor(f"{name}.weight", shape),
            files.tensor(f"{name}.bias", shape[:1]).to(target.dtype) if bias else None,
        )  # fmt: skip

    names = "{k}.{i}.linear" if published else "blocks.{k}.layers.{i}"
    blocks = tuple(tuple(block(names.format(k=k, i=i)) for i in range(depth)) for k in range(count))
    if not published and files.config.get("original_lm_head"):
        files.skip("lm_heads.0.weight")
        heads = (head if tokens is None else _head(files, "lm_heads.0", config, tokens),) * count
    else:
        at = "{k}.{l}" if published else "lm_heads.{k}"
        heads = tuple(_head(files, at.format(k=k, l=depth), config, tokens) for k in range(count))
    files.finish()
    made = MedusaHeads(blocks, heads, config.vocab_size, tokens)
    lay_out(store, target, made.linears)
    return made


def _head(files: HeadFolder, name: str, config: ModelConfig, tokens: Tensor | None) -> Linear:
    """Return an LM head: rows of the draft vocabulary, or of all tokens, which are cut to it."""
    stored = f"{name}.weight"
    if tokens is None or (files.has(stored) and files.folder.info(stored).shape[0] == len(tokens)):
        rows = config.vocab_size if tokens is None else len(tokens)
        return Linear(name, files.tensor(stored, (rows, config.hidden)))
    return Linear(name, files.tensor(stored, (config.vocab_size, config.hidden))[tokens])


def write(folder: Path, target: ModelConfig, layers: int, tensors: Mapping[str, Tensor], tokens: Tensor | None) -> None:
    """Write heads of `layers` residual blocks each in vLLM's layout, all with the LM head `lm_heads.0.weight`; `tokens`
    are its rows' token ids, None for all."""
    count = sum(name.endswith(".layers.0.weight") for name in tensors)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": target.hidden,
        "vocab_size": target.vocab_size, "num_heads": count, "num_hidden_layers": layers, "medusa_fc_bias": True,
        "original_lm_head": True,
        "truncated_vocab_size": target.vocab_size if tokens is None else len(tokens),
    }  # fmt: skip
    write_head(folder, config, dict(tensors) if tokens is None else {**tensors, "token_map": tokens})

"""EAGLE and EAGLE-2 heads on disk, in SafeAILab's layout.

The config is that of a Llama of one layer, so such a folder is known by its tensors: `fc.weight`, and the block as
`layers.0.`, without `input_layernorm`. `fc.bias` is optional, and so is `embed_tokens.weight`, a copy of the target's.
"""

from __future__ import annotations

from pathlib import Path

from attar.checkpoints.drafts.eagle import block_parts, embedding_of, head_config
from attar.checkpoints.drafts.files import HeadFolder, lay_out
from attar.kernels.dispatch import BackendWeights
from attar.model.decoder import Decoder
from attar.model.drafts.eagle1 import Eagle1Head


def read(path: Path, target: Decoder, store: BackendWeights | None = None) -> Eagle1Head:
    """Read the head of a folder for a model; in `store` where one is given, else in the model's dtype.

    Raises CheckpointError where it is of another vocabulary or hidden size than the model's, is no single Llama block,
    or tensors are missing, left over, or of other shapes; ValueError for a config that cannot be read.
    """
    files = HeadFolder(path, target.dtype if store is None else None)
    config = head_config(files, target)
    files.match(target.config.hidden, target.config.vocab_size)
    parts = block_parts(files, config, target, "layers.0", config.hidden)
    made = Eagle1Head(
        config, target, embedding_of(files, target, config.hidden),
        parts.linear("fc", config.hidden, 2 * config.hidden), parts.attention,
        parts.norm("layers.0.post_attention_layernorm"), parts.feed_forward,
    )  # fmt: skip
    files.finish()
    lay_out(store, target, made.linears(), (made.feed_forward_norm,))
    return made

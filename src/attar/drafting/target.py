"""The model that drafts are trained for, as the engine runs it: hidden states, predictions, and its LM head's rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.parts import part_paths
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import opening
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.vocabulary import is_gguf
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch, ops
from attar.model import assembly
from attar.model.cache import ForwardBatch, KeptStates

LOGITS_AT_ONCE = 1 << 23


class Target:
    """A loaded model, computed by the CPU's kernels. Raises ValueError as loading does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decoder = opening.load(path, torch.float32, None, dispatch.store())
        self.config = self.decoder.config

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of its files by name."""
        if is_gguf(self.path):
            return {part.name: receipt.sha256(part) for part in part_paths(self.path)}
        return Checkpoint.open(self.path).folder.source_hashes()

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the embedding and the LM head, float32 [V, I] each, as the checkpoint has them."""
        opened = GgufCheckpoint.open if is_gguf(self.path) else Checkpoint.open
        embedding, head = assembly.build_ends(self.config, opened(self.path, torch.float32))
        return _dense(embedding.table), _dense(head.weight)

    @torch.no_grad()
    def states(self, ids: Tensor, layers: tuple[int, ...]) -> KeptStates:
        """Return the inputs of layers, [S * L, I] each, for token ids [S, L]."""
        step = ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1], keep=layers)
        self.decoder.states(ids.reshape(-1), step)
        return step.kept

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """Return inputs of the final norm [N, I] behind it: what the LM head and Medusa heads read."""
        return ops.norm(hidden, None, self.decoder.final_norm)[1]

    @torch.no_grad()
    def best(self, hidden: Tensor) -> Tensor:
        """Return the most probable next tokens, int64 [N], for inputs of the final norm [N, I]."""
        return torch.cat([self.decoder.logits(rows).argmax(-1) for rows in hidden.split(self._rows)])

    @torch.no_grad()
    def probabilities(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the next token's probabilities, float32 [N, V], or those of some tokens, whose sum is below 1."""
        parts = []
        for rows in hidden.split(self._rows):
            p = self.decoder.logits(rows).softmax(-1)
            parts.append(p if tokens is None else p[:, tokens])
        return torch.cat(parts)

    @property
    def _rows(self) -> int:
        return max(1, LOGITS_AT_ONCE // self.config.vocab_size)


def _dense(weight: object) -> Tensor:
    if isinstance(weight, PackedTensor):
        return weight.dequantize().float()
    assert isinstance(weight, Tensor)
    return weight.float()


def frequent(ids: Tensor, count: int, vocab_size: int) -> Tensor | None:
    """Return the `count` most frequent tokens of a text, int64, in order of id; the lowest ids where fewer occur. None
    for the whole vocabulary."""
    if count >= vocab_size:
        return None
    times = torch.bincount(ids.reshape(-1), minlength=vocab_size)
    return times.argsort(descending=True, stable=True)[:count].sort().values

"""The model that drafts are trained for: hidden states, predictions, and its LM head's rows.

The model runs in two ways. Measurements use the engine's CPU kernels. Training may use products in bfloat16, which are
several times as fast on processors with tiles (`kernels/tiles.py`). For SmolLM2-135M in 4 bits the most probable tokens
of both agree in 97 % of cases, and states differ by 1.7 % at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from attar import machine
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.parts import part_paths
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import opening
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.vocabulary import is_gguf
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch, ops, tiles
from attar.kernels.operands import Linear
from attar.model import assembly
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder, logits

LOGITS_AT_ONCE = 1 << 22


class States:
    """Hidden states and predictions of the target for N rows.

    The states are the inputs of some layers and of the final norm, float32 [N, I] each. Predictions are computed on
    first use.
    """

    def __init__(self, decoder: Decoder, parts: Mapping[int, Tensor]) -> None:
        self.parts, self._decoder = parts, decoder

    def of(self, layer: int) -> Tensor:
        """Return the inputs of a layer, [N, I]; the number of layers is the final norm's."""
        return self.parts[layer]

    @cached_property
    def best(self) -> Tensor:
        """The most probable next tokens, int64 [N]."""
        return self.predictions[0]

    @cached_property
    @torch.no_grad()
    def predictions(self) -> tuple[Tensor, Tensor]:
        """The most probable next tokens, int64 [N], and the logarithms of the sums of all tokens' exp(logit), [N]."""
        decoder, hidden = self._decoder, self.parts[self._decoder.config.layers]
        best, sums = [], []
        for rows in hidden.split(max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)):
            found = decoder.logits(rows)
            most, which = found.max(-1)
            best.append(which)
            sums.append(found.sub_(most[:, None]).exp_().sum(-1).log_() + most)
        return torch.cat(best), torch.cat(sums)


class Target:
    """A loaded model. Raises ValueError as loading does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decoder = opening.load(path, torch.float32, None, dispatch.store())
        self.config = self.decoder.config

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of its files by name."""
        if is_gguf(self.path):
            return {part.name: receipt.sha256(part) for part in part_paths(self.path)}
        return Checkpoint.open(self.path).folder.source_hashes()

    @cached_property
    def quick(self) -> Decoder:
        """The model with large matrices in bfloat16, where products are faster so and memory suffices; else the model
        itself."""
        numbers = sum(each.shape[0] * each.shape[1] for each in _linears(self.decoder))
        if not tiles.faster() or 4 * numbers > machine.examine().memory:
            return self.decoder
        made = opening.load(self.path, torch.float32)
        for each in _linears(made):
            large = each.shape[0] * each.shape[1] >= tiles.LEAST
            each.product_dtype = torch.bfloat16 if large else None
            weight = _dense(each.weight)
            if isinstance(each.weight, PackedTensor):  # its scheme may round rows
                each.dense = weight.bfloat16() if large else weight
            else:
                each.weight = weight.bfloat16() if large else weight
        return made

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The embedding and the LM head, float32 [V, I] each, as the checkpoint has them."""
        opened = GgufCheckpoint.open if is_gguf(self.path) else Checkpoint.open
        embedding, head = assembly.build_ends(self.config, opened(self.path, torch.float32))
        return _dense(embedding.table), _dense(head.weight)

    def states(self, ids: Tensor, layers: tuple[int, ...]) -> States:
        """Return the inputs of layers, [S * L, I] each, for token ids [S, L], as the engine computes them."""
        return _states(self.decoder, ids, layers)

    def quick_states(self, ids: Tensor, layers: tuple[int, ...]) -> States:
        """Return the inputs of layers as `states` does, but by `quick`, for training.

        Sequences run one by one, so that the states of one do not depend on others.
        """
        with torch.autocast("cpu", torch.bfloat16, enabled=self.quick is not self.decoder):  # attention
            found = [_states(self.quick, one[None], layers) for one in ids]
        return States(self.quick, {layer: torch.cat([each.of(layer) for each in found]) for layer in layers})

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """Return inputs of the final norm [N, I] behind it: what the LM head and Medusa heads read."""
        return ops.norm(hidden, None, self.decoder.final_norm)[1]

    def rows(self, tokens: Tensor | None) -> Linear:
        """Return the LM head's rows of some tokens, None for all, for `logits`."""
        head, bias = self.ends[1], self.decoder.head.bias
        weight = head if tokens is None else head[tokens]
        made = Linear("lm_head", weight, bias if bias is None or tokens is None else bias[tokens])
        if quick(weight):
            made.weight, made.product_dtype = weight.bfloat16(), torch.bfloat16
        return made

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: Linear) -> Tensor:
        """Return the logits of the LM head's `rows`, float32 [N, V], for inputs of the final norm [N, I]."""
        return logits(self.config, self.decoder.final_norm, rows, hidden)


def quick(weight: Tensor) -> bool:
    """Return whether training multiplies by this matrix in bfloat16."""
    return weight.numel() >= tiles.LEAST and tiles.faster()


@torch.no_grad()
def _states(decoder: Decoder, ids: Tensor, layers: tuple[int, ...]) -> States:
    step = ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1], keep=layers)
    decoder.states(ids.reshape(-1), step)
    return States(decoder, {layer: step.kept.of(layer) for layer in layers})


def _linears(decoder: Decoder) -> list[Linear]:
    return [*(each for block in decoder.blocks for each in block.linears()), decoder.head]


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

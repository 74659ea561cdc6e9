"""The one decoder: embedding, blocks, final norm, LM head. A model family is data (`config.py`), never a class.

`assembly.py` builds one from named weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels import ops
from attar.kernels.dispatch import BackendWeights, Table
from attar.kernels.operands import Linear, Norm, Routes
from attar.kernels.triton.store import GpuWeights
from attar.kv.pages import Bases
from attar.kv.schemes import SCHEMES, KvScheme
from attar.model.cache import ForwardBatch, KeptStates, KVCache
from attar.model.config import ModelConfig
from attar.model.layers import Block, MixtureOfExperts

Watch = Callable[[int, Tensor], None]
"""A function watch(i, hidden) that receives the output [N, I] of block i."""


@dataclass(eq=False)
class Embedding:
    """Token table [vocab, I], scaled (Gemma), plus learned positions [P, I] where the family has them."""

    table: Tensor | PackedTensor | Table
    dtype: torch.dtype  # of its rows
    scale: float = 1.0
    positions: Tensor | None = None
    offset: int = 0

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return ops.embed(self.table, ids, self.dtype, self.scale, self.positions, positions, self.offset)


@dataclass(eq=False)
class Decoder:
    config: ModelConfig
    embedding: Embedding
    blocks: list[Block]
    final_norm: Norm
    head: Linear
    store: BackendWeights | None = None  # where its weights are laid out for the native kernels
    first: int = 0  # layer of the model of its first block

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.weight.device

    @property
    def last(self) -> int:
        """Number of the model's last layer, whose output the final norm reads."""
        return self.config.layers - 1

    def cache(
        self, capacity: int, batch: int = 1, scheme: KvScheme | None = None, bases: Sequence[Bases] | None = None
    ) -> KVCache:
        """Return a KV cache in `scheme`, by default the lossless one."""
        return KVCache(self.config, capacity, batch, scheme or self.lossless, str(self.device), bases=bases)

    @property
    def lossless(self) -> KvScheme:
        """The scheme that stores keys and values without loss."""
        return SCHEMES["bfloat16" if self.dtype == torch.bfloat16 else "float32"]

    @property
    def by_token(self) -> str | None:
        """Reason why the work of a step is only known within it; None where it is known before."""
        experts = any(isinstance(block.feed_forward, MixtureOfExperts) for block in self.blocks)
        return "which experts run depends on the token" if experts else None

    def against_recording(self) -> str | None:
        """Return why a step cannot be recorded as native calls and replayed, or None where it can."""
        if self.store is None:
            return "the model is not laid out for the native kernels"
        if isinstance(self.store, GpuWeights):
            return "steps of a GPU are recorded as CUDA graphs"
        if self.store.refused:
            name, reason = next(iter(self.store.refused.items()))
            return f"{name}: {reason}"
        if self.by_token is not None:
            return self.by_token
        if any(linear.hadamard for block in self.blocks for linear in block.linears()):
            return "the inputs of some linears are rotated outside of the native kernels"
        if any(linear.adapter for block in self.blocks for linear in block.linears()) or self.head.adapter:
            return "an adapter adds its products"
        return None

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, step: ForwardBatch, rows: Tensor | None = None, watch: Watch | None = None
    ) -> Tensor:
        """Return logits, float32 [N, vocab], of token ids [N]; only of the chosen `rows` where they are given.

        Writes to the step's cache and advances it. Raises ValueError where a position lies past a learned position
        table.
        """
        return soft_capped(self.config, self.run(ids, step, rows, watch))

    def run(self, ids: Tensor, step: ForwardBatch, rows: Tensor | None = None, watch: Watch | None = None) -> Tensor:
        """Return the products of the LM head, before a soft cap; arguments as in `forward`."""
        stream, delta = self.states(ids, step, watch)
        routes = step.routes
        if rows is not None:
            stream, delta = stream[rows], None if delta is None else delta[rows]
            routes = None if routes is None else routes.of(rows)
        return self.products(stream, delta, routes)

    def states(self, ids: Tensor, step: ForwardBatch, watch: Watch | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the final norm's input: hidden states [N, I], and the pending addition to them."""
        if step.cache is not None and step.cache.recent and len(pieces := list(step.cache.pieces(step.lengths))) > 1:
            return self._states_by_piece(ids, step, pieces, watch)
        known, longest = self.config.learned_positions, max(step.horizons)
        if self.embedding.positions is not None and longest > known:
            raise UserError(
                "context_exceeded", f"the model has {known} learned positions: a length of {longest} is too long"
            )
        stream, delta = self.enter(ids, step)
        for i, block in enumerate(self.blocks, self.first):
            step.enter(i, stream, delta)
            stream, delta = block.forward(stream, delta, step)
            if watch is not None:
                watch(i, stream + delta)
        step.enter(self.first + len(self.blocks), stream, delta)
        if step.cache is not None:
            step.cache.advance(step.lengths)
        return self.leave(stream, delta)

    def enter(self, ids: Tensor, step: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Return the first block's input, (stream, delta) [N, I]."""
        stream = self.embedding.forward(ids, step.positions)
        if step.features is not None:
            stream[step.features.rows] = step.features.values.to(stream.dtype)
        return stream, None

    def leave(self, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the last block's output, passed on to the next stage where there are several."""
        return stream, delta

    def _states_by_piece(
        self, ids: Tensor, step: ForwardBatch, pieces: list[tuple[int, ...]], watch: Watch | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `states` in calls that the cache accepts. `watch` receives the pieces."""
        first = list(itertools.accumulate(step.lengths, initial=0))[:-1]
        if step.spans is not None:
            scheme = "this scheme" if step.cache is None else step.cache.scheme.name
            raise UserError("kv_unsupported", f"{scheme} takes images in pieces, whose rows must see each other")
        order, streams, deltas = [], [], []
        kept: list[KeptStates] = []
        for lengths in pieces:
            rows = torch.cat([torch.arange(at, at + n) for at, n in zip(first, lengths, strict=True)])
            first = [at + n for at, n in zip(first, lengths, strict=True)]
            features = None if step.features is None else step.features.of(rows)
            angles = None if step.angles is None else step.angles[:, rows]
            piece = ForwardBatch(
                lengths, step.horizon, step.cache, step.adapters, keep=step.keep, features=features, angles=angles
            )
            stream, delta = self.states(ids[rows], piece, watch)
            kept.append(piece.kept)
            order.append(rows)
            streams.append(stream)
            if delta is not None:
                deltas.append(delta)
        back = torch.cat(order).argsort()
        for layer in step.keep:
            step.enter(layer, torch.cat([each.of(layer) for each in kept])[back], None)
        return torch.cat(streams)[back], torch.cat(deltas)[back] if deltas else None

    def logits(self, stream: Tensor, delta: Tensor | None = None, routes: Routes | None = None) -> Tensor:
        return soft_capped(self.config, self.products(stream, delta, routes))

    def products(self, stream: Tensor, delta: Tensor | None = None, routes: Routes | None = None) -> Tensor:
        """Apply final norm and LM head to hidden states [N, I]; return float32 [N, vocab]."""
        return products(self.final_norm, self.head, stream, delta, routes)


def logits(config: ModelConfig, final_norm: Norm, head: Linear, stream: Tensor, delta: Tensor | None = None) -> Tensor:
    """Apply final norm, LM head and soft cap to hidden states [N, I]; return float32 [N, vocab]."""
    return soft_capped(config, products(final_norm, head, stream, delta))


def products(
    final_norm: Norm, head: Linear, stream: Tensor, delta: Tensor | None, routes: Routes | None = None
) -> Tensor:
    """Apply final norm and LM head to hidden states [N, I]; return float32 [N, vocab]."""
    _, x = ops.norm(stream, delta, final_norm)
    out = ops.linear(x, (head,), routes=routes)
    return out if out.dtype == torch.float32 else out.float()


def soft_capped(config: ModelConfig, logits: Tensor) -> Tensor:
    cap = config.logit_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)

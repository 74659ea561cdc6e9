"""The decoder of one process of several. `split.py` gives the cuts and their reasons.

Its blocks are ordinary blocks with fewer heads and a narrower feed-forward, each followed by a sum over the processes
that share its layers. Only the ends differ: an embedding with some of the rows, an LM head whose logits are gathered,
and, between stages, hidden states that are received and sent. All processes of a model call the same methods with the
same rows, in the same order; only the first one knows the purpose of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.kernels import ops
from attar.kernels.dispatch import BackendWeights
from attar.kernels.group import Group
from attar.kernels.operands import Adapter, Linear, Norm, Routes
from attar.model import assembly
from attar.model.assembly import Weights
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder, Embedding, Watch
from attar.model.split import Cut, Split
from attar.progress import StageProgress

PIECE = 256  # rows of a step that stages pass on at a time: enough for products to be bound by arithmetic


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups that a process exchanges with; None where it is alone."""

    layers: Group | None = None  # the processes that compute the same layers
    stages: Group | None = None  # the processes of the same place, stage after stage

    def abort(self) -> None:
        for group in (self.layers, self.stages):
            if group is not None:
                group.abort()

    def leave(self) -> None:
        for group in (self.layers, self.stages):
            if group is not None:
                group.leave()


@dataclass(eq=False, kw_only=True)
class SplitEmbedding(Embedding):
    """Rows of the token table from `first` on: other rows are zero here, and rows of all processes are added up."""

    first: int
    rows: int
    sum: Callable[[Tensor], Tensor]

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        own = ids - self.first
        missing = (own < 0) | (own >= self.rows)
        found = ops.embed(self.table, own.masked_fill(missing, 0), self.dtype, self.scale)
        hidden = self.sum(found.masked_fill_(missing[:, None], 0.0))
        if self.positions is None:
            return hidden
        return hidden + self.positions[positions + self.offset].to(self.dtype)


class Lead(Protocol):
    """The messages by which the first process announces its calls to the model's other processes."""

    def call(self, ids: Tensor, step: ForwardBatch, rows: Tensor | None) -> None:
        """Announce `Decoder.run` with these arguments."""

    def logits(self, rows: int, routes: Routes | None) -> bool:
        """Announce `Decoder.logits` of so many rows, which come by broadcast; False where the others know of it
        already."""

    def adapt(self, number: int, folder: str) -> None:
        """Announce an adapter that the first process has read: number 0 is for every row."""


@dataclass(eq=False, kw_only=True)
class SplitDecoder(Decoder):
    """One process's part of a decoder. `config` describes the part; `split.config` the whole model."""

    split: Split
    groups: Groups
    lead: Lead | None = None  # in the first process

    @property
    def last(self) -> int:
        return self.split.config.layers - 1

    def against_recording(self) -> str | None:
        return "several processes compute a step together"

    def run(self, ids: Tensor, step: ForwardBatch, rows: Tensor | None = None, watch: Watch | None = None) -> Tensor:
        if self.lead is not None:
            self.lead.call(ids, step, rows)
        return super().run(ids, step, rows, watch)

    def logits(self, stream: Tensor, delta: Tensor | None = None, routes: Routes | None = None) -> Tensor:
        together = self.groups.layers
        if self.lead is not None and together is not None and self.lead.logits(len(stream), routes):
            whole = stream if delta is None else stream + delta
            stream, delta = together.broadcast(whole.contiguous()), None
        return super().logits(stream, delta, routes)

    def states(self, ids: Tensor, step: ForwardBatch, watch: Watch | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute `Decoder.states`; several stages work on a step of many rows in pieces, several at a time."""
        if step.cache is not None and step.cache.recent and len(list(step.cache.pieces(step.lengths))) > 1:
            return super().states(ids, step, watch)  # comes back here with each piece that the cache accepts
        streams, deltas = [], []
        for rows, piece in self._pieces(step):
            stream, delta = super().states(ids[rows], piece, watch)
            assert delta is not None, "every stage has blocks"
            streams.append(stream)
            deltas.append(delta)
        stream, delta = (each[0] if len(each) == 1 else torch.cat(each) for each in (streams, deltas))
        stages, share = self.groups.stages, self.split.share
        if stages is None:
            return stream, delta
        if share.stage == share.pp - 1:
            self._send(stream, delta, 0)
        elif share.stage == 0:
            stream, delta = self._receive(len(stream), share.pp - 1)
            if watch is not None:
                watch(self.last, stream + delta)
        return stream, delta

    def _pieces(self, step: ForwardBatch) -> Iterator[tuple[slice, ForwardBatch]]:
        """Yield the step as steps of some of its rows, to be taken one by one: each begins where the cache then
        ends."""
        rows, starts = sum(step.lengths), list(itertools.accumulate(step.lengths, initial=0))
        count = 1 if self.groups.stages is None or step.cache is None else max(1, rows // PIECE)
        for first, last in itertools.pairwise(rows * i // count for i in range(count + 1)):
            lengths = tuple(
                max(0, min(last, start + n) - max(first, start)) for start, n in zip(starts, step.lengths, strict=False)
            )
            piece = step if count == 1 else ForwardBatch(lengths, step.horizon, step.cache, step.adapters, step.device)
            yield slice(first, last), piece

    def enter(self, ids: Tensor, step: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        before = self.split.share.stage - 1
        return super().enter(ids, step) if before < 0 else self._receive(len(ids), before)

    def leave(self, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        share = self.split.share
        if share.stage < share.pp - 1 and self.groups.stages is not None:
            assert delta is not None, "every stage has blocks"
            self._send(stream, delta, share.stage + 1)
        return stream, delta

    def _send(self, stream: Tensor, delta: Tensor, stage: int) -> None:
        """Send stream and delta separately, so that the next norm adds them as it would here."""
        assert self.groups.stages is not None
        for each in (stream, delta):
            self.groups.stages.send(each.contiguous(), stage)

    def _receive(self, rows: int, stage: int) -> tuple[Tensor, Tensor]:
        stages, shape = self.groups.stages, (rows, self.config.hidden)
        assert stages is not None
        return stages.receive(shape, self.dtype, stage), stages.receive(shape, self.dtype, stage)

    def products(self, stream: Tensor, delta: Tensor | None = None, routes: Routes | None = None) -> Tensor:
        """Compute `Decoder.products` in the first process; return [0, vocab] in the others, some of which compute
        columns of it."""
        nothing = torch.empty((0, self.config.vocab_size), dtype=torch.float32, device=stream.device)
        if self.split.vocabulary is None:
            return nothing
        own, together = super().products(stream, delta, routes), self.groups.layers
        if together is None:
            return own
        pieces = together.gather(F.pad(own, (0, _widest(self.split) - own.shape[1])).contiguous())
        return nothing if pieces is None else torch.cat(pieces, 1)[:, : self.config.vocab_size].contiguous()


def _widest(split: Split) -> int:
    """Return the greatest number of logit columns of a process: all have as many but the last, which may have fewer."""
    assert split.vocabulary is not None
    start, stop = split.vocabulary
    return start // split.share.place if split.share.place else stop


def cut_adapter(adapter: Adapter, cut: Cut) -> Adapter:
    """Return the part of a linear layer's adapter for a process that keeps `cut` of the layer.

    A cut of outputs keeps their rows of B and the whole of A. A cut of inputs keeps their columns of A, whose products
    with the whole of B are added up like the layer's own parts.
    """
    down, up = adapter.down, adapter.up
    if cut.rows is not None:
        up = torch.cat([up[start:stop] for start, stop in cut.rows])
    if cut.columns is not None:
        down = down[:, slice(*cut.columns)].clone()
    return Adapter(down, up)


def build(
    split: Split,
    weights: Weights,
    groups: Groups,
    on_block: StageProgress | None = None,
    store: BackendWeights | None = None,
) -> SplitDecoder:
    """Build one process's part of a model. `weights` holds the parts of linear layers and token table that `split`
    keeps.

    Raises ValueError like `assembly.build`.
    """
    together = groups.layers
    final_norm = assembly.build_final_norm(split.block, weights)
    embedding, head = _ends(split, weights, final_norm, store)
    if together is not None and split.vocabulary is not None:
        start, stop = split.vocabulary
        embedding = SplitEmbedding(**vars(embedding), first=start, rows=stop - start, sum=together.sum)
    blocks = assembly.build_blocks(split.block, weights, split.layers, on_block, store)
    for i, block in enumerate(blocks):
        block.attention.layer = i  # of its own cache
        block.sum = None if together is None else together.sum
    first = split.layers.start
    return SplitDecoder(split.own, embedding, blocks, final_norm, head, store, first, split=split, groups=groups)


def _ends(split: Split, weights: Weights, final_norm: Norm, store: BackendWeights | None) -> tuple[Embedding, Linear]:
    """Build embedding and LM head of a process, laid out with the final norm; without rows where it has neither."""
    if split.vocabulary is None:
        if store is not None:
            store.take_norm(final_norm)
        none = torch.empty((0, split.config.hidden), dtype=weights.dtype)
        return Embedding(none, weights.dtype), Linear(split.config.names.head, none)
    start, stop = split.vocabulary
    embedding, head = assembly.build_ends(replace(split.block, vocab_size=stop - start), weights)
    assembly.lay_out_ends(embedding, head, final_norm, store)
    return embedding, head

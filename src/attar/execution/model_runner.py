"""Runs the scheduler's plans: integers in, logits out.

The pages of all blocks lie here, and a sequence is its row of block numbers. A step in which every sequence adds one
token, or one and the same number of drafts, is replayed from a recording (`recordings.py`). Any other step is run in
full, to the same numbers: one with a piece of a prompt, where Python is a small part, with a sequence that takes an
adapter, or with a tree of drafts (`branches.py`), whose rows differ in every step.

On a GPU recordings are CUDA graphs (`cuda_graphs.py`), for a few numbers of rows, each of which also serves fewer. A
row there is a sequence of its own, so a sequence with drafts is several rows of one block table, and any numbers of
drafts are replayed: in each layer all keys are written before a row reads them.
Logits stay on the device, where tokens are chosen, and a step returns before the device has done it. So the next may be
run before the host knows those tokens: it reads them on the device (`InflightTokens`).

On CPUs a row's numbers do not depend on the other rows of a step, nor on the chunking of a prompt, so neither do a
sequence's tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

import torch
from torch import Tensor

from attar.execution import cuda_graphs
from attar.execution.branches import copies_of, rows_of
from attar.execution.recordings import Recordings, StepKind
from attar.execution.step_inputs import InflightTokens, TokenRows, angles, features, of_image, spans
from attar.execution.unfinished import Unfinished
from attar.execution.watched import Watched, watched
from attar.faults import InjectedFault, point
from attar.kernels import dispatch, ops
from attar.kv.moving import move_sinks
from attar.kv.pages import Bases
from attar.kv.schemes import KvScheme
from attar.kv.sparse_prefill import SparsePrefill
from attar.model import cache, sparse_layers
from attar.model.cache import Features, ForwardBatch, KeptStates, KVCache, sent
from attar.model.decoder import Decoder
from attar.model.rope import turned_by
from attar.model.sparse_layers import SparseLayers
from attar.scheduling.step_plan import Copy, Evicted, ScheduledTokens, StepPlan

logger = logging.getLogger(__name__)

LOGIT_ROWS = 32  # rows of one chunk whose logits are made at once, where all are wanted

Watch = Callable[[ScheduledTokens, int, Tensor], None]
"""A callback watch(chunk, first, numbers), called with the numbers of the chunk's rows from `first` on, in order.

Some calls cover all rows. The numbers are on the model's device, which may still be working on them: reading them
waits.
"""


class Wanted(NamedTuple):
    """Additional results of a chunk: the logits of all its rows, or the hidden states that the LM head reads."""

    logits: Watch | None = None
    hidden: Watch | None = None


class BlockCounts(NamedTuple):
    """Numbers of blocks of a KV cache.

    With `sliding`, layers with a sliding window have so many blocks, of their own; the others have `blocks`.
    """

    blocks: int
    sliding: int = 0


class Runner:
    """The model and its KV cache of `blocks` blocks in `scheme`, for sequences of up to `context` tokens.

    A number of blocks is that of every layer; `BlockCounts` may give layers with a sliding window blocks of their own.

    At most `sequences` run at a time, with at most `drafts` drafts together; their unfinished blocks have memory, where
    the scheme stores those apart. `bases`
    are for calibrated schemes. `record` records decode steps as graphs: by default, on a GPU, as CUDA graphs; there is
    one block more then, which belongs to no sequence.
    """

    def __init__(
        self,
        decoder: Decoder,
        blocks: int | BlockCounts,
        context: int,
        scheme: KvScheme | None = None,
        sequences: int = 1,
        bases: List[Bases] | None = None,
        record: cuda_graphs.Record | None = None,
        drafts: int = 0,
    ) -> None:
        self.decoder, self.context, self.scheme = decoder, context, scheme or decoder.lossless
        self._unfinished = Unfinished(sequences)
        self.device = decoder.device
        if record is None and self.device.type == "cuda":
            if (reason := cuda_graphs.against(decoder)) is not None:
                logger.warning("every decode step is run in full: %s", reason)
            else:
                record = cuda_graphs.CudaRecorder(self.device)
        tails, spare = self._unfinished.count, int(record is not None)
        counts = blocks if isinstance(blocks, BlockCounts) else BlockCounts(blocks)
        self.slides = counts.sliding > 0 and any(window is not None for window in decoder.config.windows)
        """Whether layers with a sliding window have blocks of their own."""
        sliding = counts.sliding + spare if self.slides else 0
        self.pages = cache.pool(
            decoder.config, counts.blocks + spare, self.scheme, str(self.device), tails=tails, bases=bases,
            sliding=sliding,
        )  # fmt: skip
        self.block = self.pages[0].block
        ropes = {rope for rope in decoder.config.ropes if rope is not None}
        self.horizons = tuple(sorted({at for rope in ropes for at in rope.horizons(context)}))
        """Lengths past each of which all keys of a sequence are others (`Rope.horizons`)."""
        self.kind, most = StepKind(self.slides), sequences + drafts  # to be completed before the first step
        self.recordings = None
        if record is None and decoder.against_recording() is None and not self.horizons:
            self.recordings = Recordings(decoder, self.pages, context, self.scheme, most, self._unfinished, self.kind)
        self.graphs = None
        if record is not None:
            self.graphs = cuda_graphs.Graphs(decoder, self.pages, context, most, record, self.slides)
        self.kept: KeptStates | None = None
        """Hidden states of the last step's rows, in order; None where it raised, or was replayed as a graph."""
        self.waits = waits(decoder)
        """Reason why a step is complete when it returns; None where it may still be under way."""
        self._evicts = False
        self._prefill: SparsePrefill | None = None
        self.skipped = Counter[str]()
        """Keys whose values rows of prompts skipped, those of each head and layer, by sequences; the engine takes
        them."""
        self._watch = Watched(decoder, self.pages)
        self._features_of: Callable[[List[int]], Tensor] | None = None

    def read_few(self, found: SparseLayers) -> None:
        """Have rows of outputs choose which keys they read, from now on; called before the first step.

        Rows of prompts read all. Raises ValueError where the cache's scheme or the device does not allow it.
        """
        sparse_layers.attach(self.pages, self.decoder, found, self.context)
        self.kind.reads_few = True

    def prefill_few(self, settings: SparsePrefill) -> None:
        """Have rows of prompts read few keys, but for the last of each prompt, from now on.

        Raises ValueError where the device does not allow it.
        """
        settings.check(self.device.type)
        self._prefill = settings

    def evict_keys(self) -> None:
        """Let sequences drop keys (`scheduling/evicting.py`), from now on; called before the first step.

        Rows of the others have the same bits as before.
        """
        self._evicts = self.kind.moves = True

    def take_images(self, features: Callable[[List[int]], Tensor], turns: bool) -> None:
        """Let sequences have images, from now on; called before the first step.

        `features` returns the rows [M, I] that negative ids stand for. With `turns` tokens behind an image have other
        positions than their indexes. Rows of other sequences have the same bits as before.
        """
        self._features_of = features
        self.kind.moves = self.kind.moves or turns

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every graph now, rather than on first use."""
        if self.graphs is not None:
            self.graphs.record_all()

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, wanted: dict[str, Wanted] | None = None, inflight_tokens: InflightTokens | None = None
    ) -> Tensor:
        """Run the step; return logits [S, V] behind the last `samples` rows of each chunk, in order, on the model's
        device.

        The device may still be working on them, and the next step overwrites them. `wanted` maps sequence ids to
        additional results of a chunk, whose callbacks may wait. `inflight_tokens` has the tokens that their sequences
        do not have yet. A step, or parts of it, can be run again until the next one is run or the scheduler commits it,
        to the same bits: it writes slots that it does not read before. After a step that raised, `release` comes first.
        Raises torch.OutOfMemoryError where the device has too little memory for it.
        """
        self.kept = None
        chunks = plan.chunks
        for copy in (*plan.copies, *copies_of(chunks, self.block)):
            self._copy(copy)
        if self.slides:
            for copy in (*plan.sliding_copies, *copies_of(chunks, self.block, sliding=True)):
                self._copy(copy, sliding=True)
        for evicted in plan.evictions:
            self._evict(evicted)
        if not chunks:
            return self._no_logits()
        for chunk in chunks:
            try:
                point("runner.memory", chunk.sequence.id)
            except InjectedFault as fault:
                raise torch.OutOfMemoryError(str(fault)) from fault
        plain = not any(map(watched, chunks)) and all(
            chunk.rows == chunk.samples and not chunk.sequence.adapter and chunk.tree is None and not of_image(chunk)
            for chunk in chunks
        )
        if not wanted and plain and self._replayable(chunks):
            for chunk in chunks:
                point("runner.replay", chunk.sequence.id)
            told = TokenRows.of(chunks, inflight_tokens)
            if self.graphs is not None:
                return self._replay_graph(self.graphs, chunks, told)
            assert self.recordings is not None
            logits = self.recordings.replay(chunks, told)
            self.kept = self.recordings.kept
            return logits
        return self._run(chunks, wanted or {}, inflight_tokens)

    def _copy(self, copy: Copy, sliding: bool = False) -> None:
        """Copy whole blocks: the rest behind the slots is overwritten before it is read. Of two groups of layers, copy
        the blocks of one."""
        point("runner.copy", copy.sequence.id)
        for pages, window in zip(self.pages, self.decoder.config.windows, strict=True):
            if not self.slides or sliding == (window is not None):
                for part in pages.parts():
                    part[copy.target] = part[copy.source]

    def _evict(self, evicted: Evicted) -> None:
        """Fill blocks with the keys that a sequence keeps. It can be done again: no block is both read and written."""
        eviction = evicted.sequence.eviction
        assert eviction is not None
        if eviction.once:
            self._watch.evict(evicted, self.context)
            return
        (source,), (target,) = evicted.sources, evicted.targets
        for pages, rope in zip(self.pages, self.decoder.config.ropes, strict=True):
            turn = None if rope is None else turned_by(rope, evicted.dropped, self.context)
            move_sinks(pages, source, target, eviction.sinks, turn)

    def _replayable(self, chunks: List[ScheduledTokens]) -> bool:
        """Return whether a step whose rows are all sampled can be replayed."""
        if self.graphs is not None:
            return sum(chunk.rows for chunk in chunks) <= self.graphs.most
        return self.recordings is not None and self.recordings.takes(chunks)

    def _replay_graph(self, graphs: cuda_graphs.Graphs, chunks: List[ScheduledTokens], rows: TokenRows) -> Tensor:
        graph, row = graphs.of(len(rows.ids)), 0
        for chunk in chunks:
            for at in range(chunk.start, chunk.start + chunk.rows):
                graph.inputs.put(row, rows.ids[row], at, chunk.sequence.blocks, chunk.sequence.sliding)
                row += 1
        return graph.run(row, rows.complete)

    def _run(
        self, chunks: List[ScheduledTokens], wanted: dict[str, Wanted], inflight_tokens: InflightTokens | None
    ) -> Tensor:
        parts, repeated = rows_of(chunks, self.block)
        width = max(len(part.blocks) for part in parts)
        tables = torch.zeros((len(parts), width), dtype=torch.int32)
        sliding = torch.zeros_like(tables) if self.slides else None
        for row, part in enumerate(parts):
            point("runner.table", part.chunk.sequence.id)
            tables[row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
            if sliding is not None:
                sliding[row, : len(part.sliding)] = torch.tensor(part.sliding, dtype=torch.int32)
        told = TokenRows.of(chunks, inflight_tokens)
        found = features(chunks, told.ids, self._features_of)
        seen = None if found is None else Features(*sent(self.device, *found))
        (ids,) = sent(self.device, torch.tensor(told.ids))
        told.complete(ids)
        tails = None
        if self.scheme.recent:
            assert len(parts) == len(chunks), "a tree of drafts, and unfinished blocks that lie apart"
            tails = self._unfinished.tails(chunks, self.block)
        view = KVCache.over(self.pages, tables, [part.start for part in parts], tails, sliding)
        if self.kind.reads_few:
            view.dense_until = [part.chunk.sequence.prompt for part in parts]
        if self._prefill is not None:
            view.read_few(self._prefill, [part.chunk.sequence.prompt for part in parts])
        turned = angles(chunks)
        if self.kind.moves and turned is None:
            view.offsets = [part.chunk.sequence.dropped + part.chunk.sequence.shift for part in parts]
        horizons = tuple(part.chunk.sequence.horizon for part in parts) if self.horizons else self.context
        adapters = tuple(part.chunk.sequence.adapter for part in parts)
        lengths = tuple(part.rows for part in parts)
        ranking = self._watch.rows(chunks) if self._evicts else None
        step = ForwardBatch(
            lengths, horizons, view, adapters, keep=self.kind.keep, repeated=repeated, watched=ranking, features=seen,
            angles=None if turned is None else sent(self.device, turned)[0], spans=spans(chunks),
        )  # fmt: skip
        stream, delta = self.decoder.states(ids, step)
        if ranking is not None:
            self._watch.take(chunks, step.queries)
        self.kept = step.kept
        if view.skipped is not None:
            for part, count in zip(parts, view.skipped.tolist(), strict=True):
                self.skipped[part.chunk.sequence.id] += count
        ends = torch.tensor([chunk.rows for chunk in chunks]).cumsum(0)
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            point("runner.rows", chunk.sequence.id)
            if (want := wanted.get(chunk.sequence.id)) is not None:
                start = end - chunk.rows
                if want.hidden is not None:
                    want.hidden(chunk, 0, ops.norm(*_rows(stream, delta, start, end), self.decoder.final_norm)[1])
                if want.logits is not None:
                    for at in range(start, end, LOGIT_ROWS):
                        rows = slice(at, min(at + LOGIT_ROWS, end))
                        routes = None if step.routes is None else step.routes.of(rows)
                        piece = _rows(stream, delta, rows.start, rows.stop)
                        want.logits(chunk, at - start, self.decoder.logits(*piece, routes))
        sampled = [range(end - chunk.samples, end) for chunk, end in zip(chunks, ends.tolist(), strict=True)]
        last = torch.tensor([row for rows in sampled for row in rows], dtype=torch.int64)
        if not len(last):
            return self._no_logits()
        routes = None if step.routes is None else step.routes.of(last)
        (last,) = sent(self.device, last)
        return self.decoder.logits(stream[last], None if delta is None else delta[last], routes)

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self.decoder.config.vocab_size), device=self.device)

    def release(self) -> None:
        """Release the memory of results; recordings on a CPU go with it. Graphs stay: each step writes all their
        inputs, so none is ever half made."""
        if self.recordings is not None:
            self.recordings.clear()
        self.kept = None
        dispatch.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def waits(decoder: Decoder) -> str | None:
    """Return why the host waits for the device within a step of this model; None where it does not. It is None on CPUs
    too. The reference on a device waits in every layer's attention, but only comparisons use it."""
    return None if decoder.device.type == "cpu" else decoder.by_token


def _rows(stream: Tensor, delta: Tensor | None, start: int, end: int) -> tuple[Tensor, Tensor | None]:
    return stream[start:end], None if delta is None else delta[start:end]

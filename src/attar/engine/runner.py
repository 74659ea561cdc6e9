"""Runs what the scheduler planned: integers in, logits out.

The pages of all blocks lie here, and a sequence is its row of block numbers. A step in which every sequence adds one
token is replayed from a recording (`decoding.py`), one for each number of sequences; the last few are kept. Any other
step, with a piece of a prompt in it, is run in full: there Python is a small part.

On CPUs a row's numbers do not depend on the other rows of a step, nor on how a prompt was cut into steps, so neither do
a sequence's tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.engine.decoding import Decoding
from attar.engine.sequence import Sequence
from attar.engine.step import Chunk, Copy, StepPlan
from attar.faults import point
from attar.kernels import ops
from attar.kernels.pages import Pages
from attar.model import cache
from attar.model.cache import KVCache, Step
from attar.model.decoder import Decoder

RECORDINGS = 4  # numbers of sequences whose decode step is kept ready

LOGIT_ROWS = 32  # of one chunk whose logits are made at once, where all are wanted

Watch = Callable[[Chunk, int, Tensor], None]
"""watch(chunk, first, numbers): numbers of the chunk's rows from `first` on, in order, all of them in some calls."""


@dataclass(slots=True)
class Wanted:
    """What somebody wants of a chunk besides the logits after it: of all its rows, the logits, or the hidden states
    that the output matrix would take."""

    logits: Watch | None = None
    hidden: Watch | None = None


@dataclass(slots=True)
class _Batch:
    """A recorded decode step, and what each row of its block table holds: whose blocks it lists."""

    decoding: Decoding
    cache: KVCache
    rows: list[list[int]]


def horizon(sequence: Sequence) -> int:
    """The longest that the sequence can get."""
    return sequence.prompt + sequence.max_tokens


class Runner:
    """The model and `blocks` blocks for keys and values, kept in `dtype`, for sequences of up to `context` tokens."""

    def __init__(self, decoder: Decoder, blocks: int, context: int, dtype: torch.dtype | None = None) -> None:
        lossless = torch.bfloat16 if decoder.dtype == torch.bfloat16 else torch.float32
        self.decoder, self.context = decoder, context
        self.pages: list[Pages] = cache.pool(decoder.config, blocks, dtype or lossless)
        self.block = self.pages[0].block
        self.grows = any(rope is not None and rope.grows for rope in decoder.config.ropes)
        """Whether keys depend on how long their sequence can get: then no other sequence can use them."""
        self._recorded = decoder.against_recording() is None and not self.grows
        self._batches: OrderedDict[int, _Batch] = OrderedDict()

    @torch.inference_mode()
    def run(self, plan: StepPlan, wanted: dict[str, Wanted] | None = None) -> Tensor:
        """Run the step; returns logits [S, V] after each chunk that samples, in order. The next step overwrites them.

        `wanted` says by sequence id who wants more of a chunk. A step, or parts of it, can be run again until the
        scheduler commits it, to the same bits: what it writes are slots that it does not read before. After a step that
        raised, `release` comes first.
        """
        for copy in plan.copies:
            self._copy(copy)
        chunks = plan.chunks
        if not chunks:
            return torch.empty(0, self.decoder.config.vocab_size)
        if self._recorded and not wanted and all(chunk.rows == 1 and chunk.samples for chunk in chunks):
            return self._replay(chunks)
        return self._run(chunks, wanted or {})

    def _copy(self, copy: Copy) -> None:
        """Whole blocks: what lies behind the slots is overwritten before it is read."""
        point("runner.copy", copy.sequence.id)
        for pages in self.pages:
            for part in (pages.keys, pages.values, pages.key_scales, pages.value_scales):
                if part is not None:
                    part[copy.target] = part[copy.source]

    def _replay(self, chunks: List[Chunk]) -> Tensor:
        batch = self._batches.get(len(chunks)) or self._batch(len(chunks))
        self._batches.move_to_end(len(chunks))
        tables = batch.cache.tables.numpy()
        for row, chunk in enumerate(chunks):
            point("runner.replay", chunk.sequence.id)
            blocks = chunk.sequence.blocks
            if batch.rows[row] != blocks:  # few steps bring a block, and fewer swap one for the prefix tree's
                tables[row, : len(blocks)] = blocks
                batch.rows[row] = blocks.copy()
            batch.cache.filled[row] = chunk.start
        return batch.decoding.step([chunk.sequence.tokens[-1] for chunk in chunks])

    def _batch(self, sequences: int) -> _Batch:
        tables = torch.zeros((sequences, -(-self.context // self.block)), dtype=torch.int32)
        view = KVCache.over(self.pages, tables, [0] * sequences)
        batch = _Batch(Decoding(self.decoder, view, self.context), view, [[]] * sequences)
        self._batches[sequences] = batch
        if len(self._batches) > RECORDINGS:
            self._batches.popitem(last=False)
        return batch

    def _run(self, chunks: List[Chunk], wanted: dict[str, Wanted]) -> Tensor:
        width = max(len(chunk.sequence.blocks) for chunk in chunks)
        tables = torch.zeros((len(chunks), width), dtype=torch.int32)
        ids: list[int] = []
        for row, chunk in enumerate(chunks):
            point("runner.table", chunk.sequence.id)
            tables[row, : len(chunk.sequence.blocks)] = torch.tensor(chunk.sequence.blocks, dtype=torch.int32)
            ids += chunk.sequence.tokens[chunk.start : chunk.start + chunk.rows]
        view = KVCache.over(self.pages, tables, [chunk.start for chunk in chunks])
        horizons = tuple(horizon(chunk.sequence) for chunk in chunks) if self.grows else self.context
        step = Step(tuple(chunk.rows for chunk in chunks), horizons, view)
        stream, delta = self.decoder.states(torch.tensor(ids), step)
        ends = torch.tensor([chunk.rows for chunk in chunks]).cumsum(0)
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            point("runner.rows", chunk.sequence.id)
            if (want := wanted.get(chunk.sequence.id)) is not None:
                start = end - chunk.rows
                if want.hidden is not None:
                    want.hidden(chunk, 0, ops.norm(*_rows(stream, delta, start, end), self.decoder.final_norm)[1])
                if want.logits is not None:
                    for at in range(start, end, LOGIT_ROWS):
                        piece = _rows(stream, delta, at, min(at + LOGIT_ROWS, end))
                        want.logits(chunk, at - start, self.decoder.logits(*piece))
        last = (ends - 1)[torch.tensor([chunk.samples for chunk in chunks])]
        if not len(last):
            return torch.empty(0, self.decoder.config.vocab_size)
        return self.decoder.logits(stream[last], None if delta is None else delta[last])

    def release(self) -> None:
        """Give memory of results back; recordings go with it."""
        self._batches.clear()
        ops.release()


def _rows(stream: Tensor, delta: Tensor | None, start: int, end: int) -> tuple[Tensor, Tensor | None]:
    return stream[start:end], None if delta is None else delta[start:end]

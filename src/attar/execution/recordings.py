"""The recorded decode steps of a runner on CPUs: one for each number of sequences and of rows, of which a few are kept.

A step is replayed where every sequence adds one token, or one and the same number of drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attar.execution.recorded_step import Decoding
from attar.execution.step_inputs import TokenRows
from attar.execution.unfinished import Unfinished
from attar.kv.pages import PagedKV
from attar.kv.schemes import KvScheme
from attar.model.cache import KeptStates, KVCache
from attar.model.decoder import Decoder
from attar.scheduling.step_plan import ScheduledTokens

LARGEST = 4  # largest decode steps that are kept ready; of smaller ones more


class _Batch(NamedTuple):
    """A recorded decode step, and the blocks listed by each row of its block tables."""

    decoding: Decoding
    cache: KVCache
    rows: list[list[int]]
    sliding: list[list[int]]


@dataclass
class StepKind:
    """What all steps of a runner have: `sliding`: block tables of layers with a sliding window. `reads_few`: rows of
    outputs read few keys. `moves`: rows may turn by other angles than those of their slots. `keep`: layers whose inputs
    a step keeps."""

    sliding: bool = False
    reads_few: bool = False
    moves: bool = False
    keep: tuple[int, ...] = ()


class Recordings:
    """The recordings of steps over `pages`, for sequences of up to `context` tokens.

    `rows` are those of the largest step. `kind` may change until the first step.
    """

    def __init__(
        self, decoder: Decoder, pages: list[PagedKV], context: int, scheme: KvScheme, rows: int,
        unfinished: Unfinished, kind: StepKind,
    ) -> None:  # fmt: skip
        self._decoder, self._pages, self._context, self._scheme = decoder, pages, context, scheme
        self._unfinished, self._kind, self._block = unfinished, kind, pages[0].block
        self._most = LARGEST * rows  # rows of all recordings together
        self._batches: OrderedDict[tuple[int, int], _Batch] = OrderedDict()  # by sequences and rows of each
        self.kept: KeptStates | None = None
        """Hidden states of the last step's rows, in order."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Sequences, and rows of each, of the recordings; the last one used is the last."""
        return list(self._batches)

    def takes(self, chunks: List[ScheduledTokens]) -> bool:
        """Return whether a step whose rows are all sampled can be replayed. Sequences have as many rows each, which are
        of one block, where unfinished blocks lie apart."""
        rows, size = chunks[0].rows, self._block
        if len(chunks) * rows > self._most or any(chunk.rows != rows for chunk in chunks):
            return False
        return not self._scheme.recent or all(c.start // size == (c.start + c.rows - 1) // size for c in chunks)

    def replay(self, chunks: List[ScheduledTokens], rows: TokenRows) -> Tensor:
        """Run a step that it `takes`; return the logits behind each row, which the next step overwrites."""
        key = len(chunks), chunks[0].rows
        batch = self._batches.get(key) or self._batch(*key)
        self._batches.move_to_end(key)
        if self._scheme.recent:
            batch.cache.tails = self._unfinished.tails(chunks, self._block)
        tables = batch.cache.block_tables.numpy()
        for row, chunk in enumerate(chunks):
            blocks = chunk.sequence.blocks
            if batch.rows[row] != blocks:  # few steps bring a block, and fewer swap one for the prefix tree's
                tables[row, : len(blocks)] = blocks
                batch.rows[row] = blocks.copy()
            if batch.cache.sliding_tables is not None and batch.sliding[row] != chunk.sequence.sliding:
                batch.sliding[row] = own = chunk.sequence.sliding.copy()
                batch.cache.sliding_tables.numpy()[row, : len(own)] = own
            batch.cache.filled[row] = chunk.slot
            if batch.cache.offsets is not None:
                batch.cache.offsets[row] = chunk.sequence.dropped + chunk.sequence.shift
            if batch.cache.dense_until is not None:
                batch.cache.dense_until[row] = chunk.sequence.prompt
        ids = rows.ids
        if rows.late:
            known = torch.tensor(ids)
            rows.complete(known)
            ids = known.tolist()
        logits = batch.decoding.step(ids)
        self.kept = batch.decoding.kept
        return logits

    def clear(self) -> None:
        """Forget all recordings, and release the memory of their results."""
        self._batches.clear()
        self.kept = None

    def _batch(self, sequences: int, rows: int) -> _Batch:
        tables = torch.zeros((sequences, -(-self._context // self._block)), dtype=torch.int32)
        sliding = torch.zeros_like(tables) if self._kind.sliding else None
        view = KVCache.over(self._pages, tables, [0] * sequences, sliding=sliding)
        if self._kind.reads_few:
            view.dense_until = [0] * sequences
        if self._kind.moves:
            view.offsets = [0] * sequences
        decoding = Decoding(self._decoder, view, self._context, rows=rows, keep=self._kind.keep)
        batch = _Batch(decoding, view, [[]] * sequences, [[]] * sequences)
        while self._batches and sequences * rows + sum(n * r for n, r in self._batches) > self._most:
            self._batches.popitem(last=False)
        self._batches[sequences, rows] = batch
        return batch

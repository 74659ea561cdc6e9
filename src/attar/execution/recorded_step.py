"""Decode steps: one new token for each sequence of a cache, or the same number of them, again and again.

A step is a few hundred calls of kernels that are the same for every token; only numbers in fixed places change: the
token ids, positions, slots and lengths. For a native model the first step is therefore recorded, and the others write
those numbers and replay it. Python between the kernels then costs microseconds. This is the CPU's analogue of a CUDA
graph; on a GPU it is one. A model that cannot be recorded, such as a mixture of experts, runs every step in full, to
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import UserError
from attar.execution import cuda_graphs
from attar.kernels.native import extension
from attar.model.cache import ForwardBatch, KeptStates, KVCache
from attar.model.decoder import Decoder, soft_capped


class Decoding:
    """Decode steps of all sequences of `cache`, none of which exceeds `horizon` positions.

    Each appends `rows` tokens to every sequence. `record` records them as graphs: by default, on a GPU, as CUDA graphs;
    those are of one row, and keep no hidden states. Other steps keep those that enter the layers `keep`.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        horizon: int,
        record: cuda_graphs.Record | None = None,
        rows: int = 1,
        keep: tuple[int, ...] = (),
    ) -> None:
        self.decoder, self.cache, self.horizon, self.keep = decoder, cache, horizon, keep
        self.lengths = (rows,) * len(cache.filled)
        self.ids = torch.zeros(sum(self.lengths), dtype=torch.int64)
        if record is None and decoder.device.type == "cuda" and cuda_graphs.against(decoder) is None:
            record = cuda_graphs.CudaRecorder(decoder.device)
        self._record_graph = record
        self._graph: cuda_graphs.Graph | None = None
        self.recorded = decoder.against_recording() is None or record is not None
        self._recording: extension.Recording | None = None

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append the tokens, those of a sequence side by side; return the logits behind each, float32 [tokens, vocab].
        The next step overwrites them. Raises ValueError where the cache is full."""
        if not self.recorded:
            self._step = self._next()
            return self.decoder.forward(torch.tensor(tokens, device=self.decoder.device), self._step, None)
        if self._record_graph is not None:
            return self._replay_graph(tokens, self._record_graph)
        self.ids.numpy()[:] = tokens
        if self._recording is None:
            self._record()
        else:
            self._move_on()
            self._recording.replay()
            self.cache.advance(self.lengths)
        return soft_capped(self.decoder.config, self._out)

    @property
    def calls(self) -> Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Native calls of the recorded step, in order; none where steps are not recorded."""
        return () if self._recording is None else self._recording.calls

    @property
    def kept(self) -> KeptStates:
        """Hidden states of the last step: a replay writes them where the recorded step did."""
        return self._step.kept

    def _next(self) -> ForwardBatch:
        return ForwardBatch(self.lengths, self.horizon, self.cache, keep=self.keep)

    def _replay_graph(self, tokens: Sequence[int], record: cuda_graphs.Record) -> Tensor:
        self._require_room()

        def put(inputs: cuda_graphs.Inputs) -> None:
            for row, (token, at, table) in enumerate(zip(tokens, self.cache.filled, tables, strict=True)):
                inputs.put(row, token, at, table)

        assert self.cache.sliding_tables is None, "a graph of an engine has its own inputs"
        tables = self.cache.block_tables[:, : -(-self.horizon // self.cache.block)].tolist()
        if self._graph is None:
            self._graph = cuda_graphs.Graph(
                self.decoder, self.cache.layers, len(tokens), self.horizon, (0,), record, put
            )
        put(self._graph.inputs)
        logits = self._graph.run(len(tokens))
        self.cache.advance(self.lengths)
        return logits

    def _require_room(self) -> None:
        if max(self.cache.filled) + max(self.lengths) > min(self.cache.capacity, self.horizon):
            raise UserError("context_exceeded", f"the KV cache holds {self.cache.capacity} positions: it is full")

    def _record(self) -> None:
        self._step = step = self._next()
        for rope in dict.fromkeys(self.decoder.config.ropes):
            if rope is not None:
                step.rotation(rope)  # the angles of all positions are the same in every step
        with extension.record() as recording:
            self._out = self.decoder.run(self.ids, step)
        self._recording = recording

    def _move_on(self) -> None:
        """Write the places of the next rows into the tensors that the recorded calls read."""
        place, block = self._step.place, self.cache.block
        assert place is not None
        self._require_room()
        if self._step.sliding is not None and self.cache.sliding_tables is not None:
            self._write_slots(self.cache.sliding_tables, self._step.sliding.slot_mapping)
        tables, slots = self.cache.block_tables.numpy(), place.slot_mapping.numpy()
        positions, own, lengths = place.positions.numpy(), self._step.positions.numpy(), place.lengths.numpy()
        row = 0
        for s, (first, rows) in enumerate(zip(self.cache.filled, self.lengths, strict=True)):
            for at in range(first, first + rows):
                slots[row] = int(tables[s, at // block]) * block + at % block
                positions[row] = own[row] = at
                row += 1
            if place.tails is not None:
                place.tails[s] = self.cache.tails(s, (first + rows - 1) // block)
            lengths[s] = first + rows
        if self.cache.offsets is not None:
            self._step.turn_again()
        if place.dense_until is not None and self.cache.dense_until is not None:
            place.dense_until.numpy()[:] = self.cache.dense_until

    def _write_slots(self, tables: Tensor, slots: Tensor) -> None:
        """Write the slots of the next rows, by the block tables of layers with a sliding window."""
        named, written, block, row = tables.numpy(), slots.numpy(), self.cache.block, 0
        for s, (first, rows) in enumerate(zip(self.cache.filled, self.lengths, strict=True)):
            for at in range(first, first + rows):
                written[row] = int(named[s, at // block]) * block + at % block
                row += 1

"""The block pass: one block in memory at a time, read, compressed, written, and run again for the next.

The probes and calibration text go through the blocks. Where a recipe corrects for earlier rounding, so does the same
text as the original model sees it. Each stream lies in two files that take turns: block i reads one and writes the
other, so a killed pass finds the inputs of its block unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts.probes import ProbeRun
from attar.checkpoints.writer import ShardWriter
from attar.compression import device_placement
from attar.compression.block import passes
from attar.compression.block.record import Record, weight_error
from attar.compression.block.work import BlockWork, CalibrationStates
from attar.compression.calibration import coverage, gradients, hidden_states
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.calibration.loss_weights import Guide
from attar.compression.memory import give_back
from attar.compression.recipe.recipe import HEAD
from attar.compression.request.resolve import ResolvedCompression
from attar.compression.runs.state import RunState
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.model.decoder import build_block, build_final_norm
from attar.progress import Progress

STREAMS = ("probe", "calibration", "original")  # streams through the blocks; the last uses the original weights


class Walk:
    """One pass over all blocks: the states of every stream go through, and each block is compressed. Runs once."""

    def __init__(
        self,
        resolved: ResolvedCompression,
        writer: ShardWriter,
        state: RunState,
        ids: Tensor | None,
        probes: ProbeRun,
        guide: Guide | None,
        name: str,
    ) -> None:
        """Pass calibration `ids` [S, L], if any, and the probes through. The coverage of that text is stored under
        `name`."""
        self.name = name
        self.guide, self.device = guide, torch.device(resolved.request.device)
        self.checkpoint, self.output, self.recipe = resolved.checkpoint, resolved.output, resolved.recipe
        self.writer, self.state = writer, state
        self.config = self.checkpoint.config
        self.head_records: list[Record] = []  # not part of the state: a resumed run does the LM head anew
        # Two files in turn: block i reads number i % 2 and writes the other.
        self.streams: list[tuple[HiddenStates, HiddenStates]] = []
        self.probes = probes
        corrects = self.recipe.corrects
        sources = [self.probes.ids] if ids is None else [self.probes.ids, *[ids] * (1 + corrects)]
        spare, rows = (
            (resolved.request.calib_memory - hidden_states.IN_A_BLOCK) // (1 + corrects),
            hidden_states.rows_at_once(self.config),
        )
        for stream, tokens, limit in zip(STREAMS, sources, (1 << 20, spare, spare), strict=False):
            shape = (*tokens.shape, self.config.hidden)
            at = device_placement.CPU if stream == STREAMS[0] else self.device
            files = [HiddenStates(state.folder / f"{stream}-{i}.f32", shape, limit // 2, rows, at) for i in range(2)]
            self.streams.append((files[0], files[1]))
        if not state.blocks_done:
            self._embed(sources)

    def run(self, report: Progress) -> dict[str, Any]:
        """Compress all blocks that are not done; return the finished probes. To be called once."""
        try:
            report("blocks", self.state.blocks_done, self.config.layers)
            for layer in range(self.state.blocks_done, self.config.layers):
                self._block(layer)
                give_back()
                report("blocks", layer + 1, self.config.layers)
            return self._finish(report)
        finally:
            for stream in (each for pair in self.streams for each in pair):
                stream.close()

    def _embed(self, sources: list[Tensor]) -> None:
        """Write the hidden states that enter the first block."""
        for (first, _), tokens in zip(self.streams, sources, strict=True):
            stored = None if first is self._original(0) else self.output.round_embedding
            hidden_states.embed(self.checkpoint, tokens, first, stored)
            first.settle()

    @torch.inference_mode()
    def _block(self, layer: int) -> None:
        block = build_block(self.config, self.checkpoint, layer)
        for linear in block.linears():
            linear.keep_dense = False  # its float32 copies would take four times the block
        inputs = self.streams[1][layer % 2] if len(self.streams) > 1 else None
        guide = None if self.guide is None else self.guide.of(layer)
        original = self._original(layer)
        device_placement.move(block, self.device)
        work = BlockWork(
            block, None if inputs is None else CalibrationStates(inputs, original), self.recipe, self.output.schemes,
            self.config.architecture, self.output.importances, guide, self.output.sizes,
        )  # fmt: skip
        records = passes.run(work)
        device_placement.move(block, device_placement.CPU)
        self.output.write_block(self.writer, block, layer)
        if inputs is not None:
            outputs = self.streams[1][1 - layer % 2] if layer + 1 < self.config.layers else None
            device_placement.move(block, self.device)
            seen = coverage.Coverage(block)
            for batch in inputs.batches():
                out = block.run(inputs.read(batch), inputs.step(batch), seen.hook)
                if not out.isfinite().all():
                    raise ValueError(f"the output of block {layer} holds a NaN or an infinity")
                if outputs is not None:
                    outputs.write(batch, out)
            coverage.keep(self.state.folder, self.name, layer, seen)
            if outputs is not None:
                outputs.settle()
            if original is not None and outputs is not None and (after := self._original(layer + 1)) is not None:
                gradients.advance(self.checkpoint, layer, original, after)
                after.settle()
        device_placement.move(block, device_placement.CPU)
        rows, observed = self.probes.run(layer, block, self._probe_rows(layer))
        self._set_probe_rows(layer + 1, rows)
        self.writer.sync()
        self.state.finish_block(layer, records, observed)

    def _original(self, layer: int) -> HiddenStates | None:
        """Return the calibration states that enter block `layer` of the original model, where the recipe needs them."""
        return self.streams[2][layer % 2] if len(self.streams) > 2 else None

    def _probe_rows(self, layer: int) -> Tensor:
        """Return the probes' hidden states that enter block `layer`."""
        stream = self.streams[0][layer % 2]
        return stream.read(range(stream.shape[0]))

    def _set_probe_rows(self, layer: int, rows: Tensor) -> None:
        stream = self.streams[0][layer % 2]
        stream.write(range(stream.shape[0]), rows)
        stream.settle()

    @torch.inference_mode()
    def _finish(self, report: Progress) -> dict[str, Any]:
        """Return the probes' logits, and write the LM head if it is compressed: one pass over its rows for both."""
        rows = self._probe_rows(self.config.layers)
        last = rows.view(*self.probes.ids.shape, -1)[:, -1]
        norm = build_final_norm(self.config, self.checkpoint)
        found = torch.empty(len(last), self.config.vocab_size)

        def seen(ids: Tensor, head: Linear) -> None:
            found[:, ids] = self.probes.logits(norm, head, last)
            report("output matrix", int(ids[-1]) + 1, self.config.vocab_size)

        if self.output.head is None:
            for ids, head in hidden_states.head_rows(self.checkpoint):
                seen(ids, head)
        else:
            self.output.write_head(self.writer, self._rounded_head(seen))
        return self.probes.finish(self.state.observed, found)

    def _rounded_head(self, seen: Callable[[Tensor, Linear], None]) -> Iterator[PackedTensor]:
        """Yield the LM head as it is stored, passing it to `seen` on the way; at the end, add its record."""
        assert self.output.head is not None
        wrong = whole = 0.0
        for ids, head in hidden_states.head_rows(self.checkpoint):
            weight = head.weight
            assert isinstance(weight, Tensor)
            packed = self.output.round_head(weight)
            head.weight = self.output.as_read(packed)
            size = float(torch.linalg.vector_norm(weight, dtype=torch.float64)) ** 2
            whole += size
            wrong += size * weight_error(weight, packed)
            seen(ids, head)
            yield packed
        error = wrong / whole if whole else 0.0
        self.head_records = [Record(HEAD, self.output.head.name, "weight", error, error)]

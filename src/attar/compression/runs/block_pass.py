"""The block pass: one block in memory at a time, read, compressed, written, and run again for the next.

The probes and calibration text go through the blocks. Where a recipe corrects for earlier rounding, so does the same
text as the original model sees it. Each stream lies in two files that take turns: block i reads one and writes the
other, so a killed pass finds the inputs of its block unchanged.

The state of the run is one JSON file: its subject (source, recipe, calibration, versions, machine), how many blocks are
done, and their measurements. It is replaced atomically, after the tensors and hidden states that it describes are on
disk, so that a killed run loses at most the block it was in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts.probes import ProbeRun
from attar.checkpoints.writer import ShardWriter
from attar.compression import device_placement
from attar.compression.block import passes
from attar.compression.block.record import Record, error_on
from attar.compression.block.work import BlockWork
from attar.compression.calibration import coverage, gradients, hidden_states
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.calibration.image_rows import ImageRows
from attar.compression.calibration.loss_weights import Guide
from attar.compression.memory import give_back, large_blocks_kept
from attar.compression.recipe.recipe import HEAD
from attar.compression.request.resolve import ResolvedCompression
from attar.compression.resume import differences, write_note
from attar.compression.stages import Stages
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.model.assembly import build_block, build_final_norm
from attar.model.layers import Block
from attar.progress import Progress

STATE = "state.json"
STREAMS = ("probe", "calibration", "original")  # streams through the blocks; the last uses the original weights


@dataclass
class RunState:
    """Progress of a run, in a file of `folder`. `observed` are observations of the probes in each finished block."""

    folder: Path
    about: Mapping[str, Any]
    blocks_done: int = 0
    records: list[Record] = field(default_factory=list)
    observed: list[Any] = field(default_factory=list)

    @staticmethod
    def open(folder: Path, about: Mapping[str, Any], resume: bool) -> RunState:
        """Return the state that an interrupted run left in `folder`, or a new one. Raises ValueError where that run had
        another subject: its hours of work may still be wanted."""
        path = folder / STATE
        if not resume or not path.is_file():
            return RunState(folder, about)
        try:
            left = json.loads(path.read_bytes())
            records = [Record(**record) for record in left["records"]]
            found_about = dict(left["about"])
            found = RunState(folder, about, int(left["blocks_done"]), records, list(left["observed"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "state_damaged", f"{path}: the state of an interrupted run is damaged ({error}); --restart begins anew"
            ) from None
        if differs := differences(json.loads(json.dumps(dict(about))), found_about):
            raise UserError(
                "resume_mismatch",
                f"{folder.parent}: an interrupted run of this output differs in {differs}; "
                "repeat its settings to resume it, or pass --restart to discard it",
            )
        return found

    def finish_block(self, layer: int, records: Sequence[Record], observed: Any) -> None:
        """Record that block `layer` is on disk."""
        assert layer == self.blocks_done, "blocks are done in order"
        self.blocks_done += 1
        self.records += records
        self.observed.append(observed)
        value = {"about": self.about, "blocks_done": self.blocks_done}
        value |= {"records": [asdict(record) for record in self.records], "observed": self.observed}
        write_note(self.folder / STATE, value)


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
        images: ImageRows | None = None,
    ) -> None:
        """Pass calibration `ids` [S, L], if any, and the probes through. The coverage of that text is stored under
        `name`. The last sequences may have rows of `images`."""
        self._images = images
        self.name, self.guide, self.device = name, guide, torch.device(resolved.request.device)
        self.checkpoint, self.output, self.recipe = resolved.checkpoint, resolved.output, resolved.recipe
        self.writer, self.state, self.probes = writer, state, probes
        self.config = self.checkpoint.config
        self.head_records: list[Record] = []  # not part of the state: a resumed run does the LM head anew
        self._stages, self._begun = Stages(), state.blocks_done
        # Two files in turn: block i reads number i % 2 and writes the other.
        self.streams: list[tuple[HiddenStates, HiddenStates]] = []
        corrects, rows = self.recipe.corrects, hidden_states.rows_at_once(self.config)
        sources = [probes.ids] if ids is None else [probes.ids, *[ids] * (1 + corrects)]
        spare = (resolved.request.calib_memory - hidden_states.IN_A_BLOCK) // (1 + corrects)
        for stream, tokens, limit in zip(STREAMS, sources, (1 << 20, spare, spare), strict=False):
            shape = (*tokens.shape, self.config.hidden)
            at = device_placement.CPU if stream == STREAMS[0] else self.device
            places = None if images is None or stream == STREAMS[0] else images.places(len(tokens))
            paths = [state.folder / f"{stream}-{i}.f32" for i in range(2)]
            files = [HiddenStates(path, shape, limit // 2, rows, at, places) for path in paths]
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

    @property
    def block_seconds(self) -> dict[str, float]:
        """Return the mean seconds of a block by stage, of the blocks that this process compressed."""
        count = self.state.blocks_done - self._begun
        return {name: seconds / count for name, seconds in self._stages.seconds.items()} if count else {}

    def _embed(self, sources: list[Tensor]) -> None:
        """Write the hidden states that enter the first block."""
        for (first, _), tokens in zip(self.streams, sources, strict=True):
            stored = None if first is self._original(0) else self.output.round_embedding
            hidden_states.embed(self.checkpoint, tokens, first, stored, self._images)
            first.settle()

    @torch.inference_mode()
    def _block(self, layer: int) -> None:
        timed = self._stages.timed
        with timed("read"):
            block = build_block(self.config, self.checkpoint, layer)
            for linear in block.linears():
                linear.keep_dense = False  # its float32 copies would take four times the block
        inputs = self.streams[1][layer % 2] if len(self.streams) > 1 else None
        guide = None if self.guide is None else self.guide.of(layer)
        original = self._original(layer)
        device_placement.move(block, self.device)
        work = BlockWork(
            block, None if inputs is None else (inputs, original), self.recipe, self.output.schemes,
            self.config.architecture, self.output.importances, guide, self.output.sizes,
        )  # fmt: skip
        work.stages = self._stages
        with timed("solve"):
            records = passes.run(work)
        device_placement.move(block, device_placement.CPU)
        with timed("write"):
            self.output.write_block(self.writer, block, layer)
        if inputs is not None:
            device_placement.move(block, self.device)
            with timed("outputs"), work.unpacked(), large_blocks_kept():
                self._outputs(layer, block, inputs, original)
        with timed("probes"):
            device_placement.move(block, device_placement.CPU)
            rows, observed = self.probes.run(layer, block, self._probe_rows(layer))
            stream = self.streams[0][1 - layer % 2]
            stream.write(range(stream.shape[0]), rows)
            stream.settle()
        with timed("write"):
            self.writer.sync()
            self.state.finish_block(layer, records, observed)

    def _outputs(self, layer: int, block: Block, inputs: HiddenStates, original: HiddenStates | None) -> None:
        """Run the compressed block `layer` for the inputs of the next one, if any, and for its coverage."""
        outputs = self.streams[1][1 - layer % 2] if layer + 1 < self.config.layers else None
        seen = coverage.Coverage(block)
        for batch in inputs.batches():
            out = block.run(inputs.read(batch), inputs.step(batch), seen.hook)
            if not out.isfinite().all():
                raise UserError("not_finite", f"the output of block {layer} holds a NaN or an infinity")
            if outputs is not None:
                outputs.write(batch, out)
        coverage.keep(self.state.folder, self.name, layer, seen)
        if outputs is not None:
            outputs.settle()
        if original is not None and outputs is not None and (after := self._original(layer + 1)) is not None:
            gradients.advance(self.checkpoint, layer, original, after)
            after.settle()

    def _original(self, layer: int) -> HiddenStates | None:
        """Return the calibration states that enter block `layer` of the original model, where the recipe needs them."""
        return self.streams[2][layer % 2] if len(self.streams) > 2 else None

    def _probe_rows(self, layer: int) -> Tensor:
        """Return the probes' hidden states that enter block `layer`."""
        stream = self.streams[0][layer % 2]
        return stream.read(range(stream.shape[0]))

    @torch.inference_mode()
    def _finish(self, report: Progress) -> dict[str, Any]:
        """Return the probes' logits, and write the LM head if it is compressed: one pass over its rows for both."""
        last = self._probe_rows(self.config.layers).view(*self.probes.ids.shape, -1)[:, -1]
        norm = build_final_norm(self.config, self.checkpoint)
        found = torch.empty(len(last), self.config.vocab_size)

        def seen(ids: Tensor, head: Linear) -> None:
            found[:, ids] = self.probes.logits(norm, head, last)
            report("LM head", int(ids[-1]) + 1, self.config.vocab_size)

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
            wrong += size * error_on(None, weight, packed)
            seen(ids, head)
            yield packed
        error = wrong / whole if whole else 0.0
        self.head_records = [Record(HEAD, self.output.head.name, "weight", error, error)]

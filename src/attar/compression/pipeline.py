"""`compress`: a checkpoint in, a smaller one out, with a receipt of what it cost.

The walk goes block by block with one block in memory: read it, run the recipe on it, write it at its place in the
output, and run it again, now compressed, so that the next block is calibrated on what it will really see. Output files
are laid out before the first block, because their sizes follow from the schemes alone.

A killed run resumes. Its state on disk is one number, the blocks done, beside the hidden states that enter the next
block and the records gathered so far; tensors reach the disk before the number does. Everything random is drawn from
counters, so the bytes are those of an uninterrupted run, given the same torch build, instruction set and thread count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints import hf, hub, receipt
from attar.checkpoints.probes import ProbeRun
from attar.checkpoints.vocabulary import is_gguf
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, allocated, atomic_folder, plan_files, require_free
from attar.compression import calibrate
from attar.compression.calibrate import Calibration, HiddenStates
from attar.compression.memory import give_back, large_blocks_apart
from attar.compression.output import Output, model_card
from attar.compression.passes import BlockWork, Record, weight_error
from attar.compression.recipe import HEAD, Recipe, Rtn, parse_head
from attar.compression.state import RunState
from attar.formats.packed import PackedTensor
from attar.kernels.operands import Linear
from attar.metrics.measure import measure
from attar.model.decoder import build_block, build_embedding, build_final_norm, build_head
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

HEAD_ROWS = 4096  # of the output matrix, in memory at once; zero points are packed 32 rows at a time

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total)"""


@dataclass(frozen=True)
class Compressed:
    """What `compress` did. `cost` holds the evaluation figures, None where no text was given."""

    path: Path
    recipe: str
    head: str  # the scheme of the output matrix, or `keep`
    bits_per_weight: float  # stored bits of the compressed linears over their weights
    bytes: int  # of all weight files
    source_bytes: int
    seconds: float
    records: tuple[Record, ...]
    cost: Mapping[str, Any] | None
    notes: tuple[str, ...]  # what whoever loads it elsewhere must know

    def to_dict(self) -> dict[str, Any]:
        figures = dict(self.cost or {})
        return {
            "path": str(self.path),
            "recipe": self.recipe,
            "head": self.head,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes,
            "source_bytes": self.source_bytes,
            "seconds": round(self.seconds, 3),
            "kl_mean": figures.get("kl_mean"),
            "evaluation": self.cost,
            "layers": [asdict(record) for record in self.records],
            "notes": list(self.notes),
        }


def compress(
    src: str | Path,
    dst: str | Path,
    *,
    recipe: str | Path | Recipe = "gptq-w4g128",
    head: str | None = None,
    calibration: Calibration | None = None,
    evaluation: str | Path | None = None,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
    calib_memory: int = 2 << 30,
    max_shard_bytes: int = MAX_SHARD,
    eval_tokens: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
) -> Compressed:
    """Compress the checkpoint `src` (folder, Hub id or `demo`) into the folder `dst`.

    `recipe` is a name such as `gptq-w4g128`, a YAML file, or a Recipe. `head` is what the output matrix is stored in,
    whatever the recipe says of it: `bf16` (as it is), `int8`, `int4`, or a scheme of weights alone. `calibration` is a
    text file, token ids [S][L], or `self` for text sampled from the model; recipes that only round need none.
    `evaluation` is a held-out text file on which the cost is measured. At most `calib_memory` bytes of calibration
    activations are held in memory. A killed run resumes, unless `resume` is false.

    Raises ValueError (CheckpointError among them) for anything a user can mend: an unknown recipe word, a group size
    that does not divide, an existing output, a full disk, a NaN in a named layer.
    """
    began = time.monotonic()
    report = progress or (lambda stage, done, total: None)
    plan = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    if head is not None:
        plan = replace(plan, head=parse_head(head))
    source = hub.resolve(src)
    if not str(dst):  # an unset variable of a shell, which Path would take for the current folder
        raise ValueError("the output's name is empty: give a folder to write")
    if source.resolve().is_relative_to(Path(dst).resolve()):
        raise ValueError(f"{dst} would replace the model that it is made from: choose another output")
    if is_gguf(source):
        raise ValueError(f"{source} is a GGUF file, which compress does not read: give the folder it was made from")
    checkpoint = hf.Checkpoint.open(source)
    output = Output(checkpoint, plan)
    tokenizer = _tokenizer(checkpoint.folder.path, calibration, evaluation)
    needs_inputs = not isinstance(plan.passes[0], Rtn) or any(s.static for s in output.schemes.values() if s)
    if needs_inputs and calibration is None:
        raise ValueError(f"{plan.name} needs calibration: give a text file, or `self` to sample it from the model")
    held_out = None
    if evaluation is not None:
        assert tokenizer is not None
        held_out = tokenizer.encode(read_text(evaluation), add_special_tokens=False)[:eval_tokens]
        if len(held_out) < 2:
            raise ValueError(f"{evaluation} has {len(held_out)} token: at least 2 are needed to measure on")
    files = plan_files(output.layout, max_shard_bytes)

    with atomic_folder(dst, overwrite) as work, large_blocks_apart():
        hashes = checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total))
        source_hash = receipt.combined_hash(hashes)
        ids = None
        if needs_inputs and calibration is not None:
            drawn = work.state / f"self-{source_hash[:16]}-{samples}x{length}-{seed}.i32"
            amount = calibrate.Amount(samples, length, seed)
            ids = calibrate.tokens(
                calibration, checkpoint, tokenizer, amount, drawn, lambda done, total: report("sampling", done, total)
            )
        about = receipt.environment() | {
            "source": source_hash,
            "recipe": plan.to_dict(),
            "calibration": None if ids is None else calibrate.token_hash(ids),
            "seed": seed,
            "shard": max_shard_bytes,
        }
        state = RunState.open(work.state, about, resume)
        probes = ProbeRun(checkpoint.config, seed)
        if not state.blocks_done:
            tokens = probes.ids.numel() + (0 if ids is None else ids.numel())
            needed = sum(f.size for f in files) + 2 * 4 * tokens * checkpoint.config.hidden
            had = [*(work.out / f.name for f in files), *work.state.glob("*.f32")]  # by a killed run, and used again
            require_free(work.out, needed - allocated(had))
        with ShardWriter(work.out, files, output.written(state.blocks_done)) as writer:
            walk = Walk(checkpoint, output, plan, writer, state, ids, calib_memory, probes)
            probed = walk.run(report)
            records = state.records + walk.head_records
            output.copy_rest(writer, report)
            writer.finish()
        output.write_config(work.out)
        cost = None
        if held_out is not None:
            assert tokenizer is not None
            cost = measure(
                hf.load(work.out, torch.float32),
                held_out,
                base=hf.load(checkpoint.folder.path, torch.float32),
                bos=tokenizer.added_bos,
                bytes_of=tokenizer,
                progress=lambda done, total: report("evaluating", done, total),
            ).to_dict()
        result = Compressed(
            Path(dst),
            plan.name,
            plan.head_name,
            output.bits_per_weight,
            sum(f.size for f in files),
            sum(f.size for f in checkpoint.folder.files.values()),
            time.monotonic() - began,
            tuple(records),
            cost,
            output.notes,
        )
        card = model_card(plan.name, plan.head_name, result.bits_per_weight, result.bytes, cost, output.notes)
        (work.out / "README.md").write_text(card)
        receipt.write(work.out, about, hashes, [asdict(r) for r in records], output.bits_per_weight, cost, probed)
    return result


def _tokenizer(folder: Path, calibration: Calibration | None, evaluation: str | Path | None) -> Tokenizer | None:
    """Only a text needs the tokenizer: ids and `self` do without."""
    text_calibration = isinstance(calibration, str | Path) and str(calibration) != calibrate.SELF
    return Tokenizer.load(folder) if text_calibration or evaluation is not None else None


class Walk:
    """The block walk: the calibration states and the probes go through the blocks, each compressed on the way."""

    def __init__(
        self,
        checkpoint: hf.Checkpoint,
        output: Output,
        recipe: Recipe,
        writer: ShardWriter,
        state: RunState,
        ids: Tensor | None,
        memory: int,
        probes: ProbeRun,
    ) -> None:
        self.checkpoint, self.output, self.recipe = checkpoint, output, recipe
        self.writer, self.state = writer, state
        self.config = checkpoint.config
        self.head_records: list[Record] = []  # not part of the state: a resumed run does the output matrix anew
        # Two files in turn: block i reads number i % 2 and writes the other.
        self.streams: list[tuple[HiddenStates, HiddenStates]] = []
        self.probes = probes
        sources = [self.probes.ids] if ids is None else [self.probes.ids, ids]
        spare, rows = memory - calibrate.IN_A_BLOCK, calibrate.rows_at_once(self.config)
        for name, tokens, limit in zip(("probe", "calibration"), sources, (1 << 20, spare), strict=False):
            shape = (*tokens.shape, self.config.hidden)
            files = [HiddenStates(state.folder / f"{name}-{i}.f32", shape, limit // 2, rows) for i in range(2)]
            self.streams.append((files[0], files[1]))
        if not state.blocks_done:
            self._embed(sources)

    def run(self, report: Progress) -> dict[str, Any]:
        """Compress all blocks that are not done; returns the finished probes. To be called once."""
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
        """Hidden states that enter the first block; only the rows of the table that are needed are read."""
        for (first, _), tokens in zip(self.streams, sources, strict=True):
            used, place = torch.unique(tokens, return_inverse=True)
            needed = replace(self.config, vocab_size=len(used))
            embedding = build_embedding(needed, self.checkpoint.rows(used))
            if self.output.packed_ends:
                assert isinstance(embedding.table, Tensor)
                embedding.table, embedding.dtype = self.output.round_head(embedding.table), torch.float32
            for batch in first.batches():
                step = first.step(batch)
                rows = place[batch.start : batch.stop].reshape(-1)
                first.write(batch, embedding.forward(rows, step.positions).float())
            first.settle()

    @torch.inference_mode()
    def _block(self, layer: int) -> None:
        block = build_block(self.config, self.checkpoint, layer)
        for linear in block.linears():
            linear.keep_dense = False  # its float32 copies would take four times the block
        inputs = self.streams[1][layer % 2] if len(self.streams) > 1 else None
        work = BlockWork(block, inputs, self.recipe, self.output.schemes, self.config.architecture)
        records = work.run()
        self.output.write_block(self.writer, block, layer)
        if inputs is not None and layer + 1 < self.config.layers:
            outputs = self.streams[1][1 - layer % 2]
            for batch in inputs.batches():
                out = block.run(inputs.read(batch), inputs.step(batch))
                if not out.isfinite().all():
                    raise ValueError(f"the output of block {layer} holds a NaN or an infinity")
                outputs.write(batch, out)
            outputs.settle()
        rows, seen = self.probes.run(layer, block, self._probe_rows(layer))
        self._set_probe_rows(layer + 1, rows)
        self.writer.sync()
        self.state.finish_block(layer, records, seen)

    def _probe_rows(self, layer: int) -> Tensor:
        """The probes' hidden states that enter block `layer`."""
        stream = self.streams[0][layer % 2]
        return stream.read(range(stream.shape[0]))

    def _set_probe_rows(self, layer: int, rows: Tensor) -> None:
        stream = self.streams[0][layer % 2]
        stream.write(range(stream.shape[0]), rows)
        stream.settle()

    @torch.inference_mode()
    def _finish(self, report: Progress) -> dict[str, Any]:
        """The probes' logits, and the output matrix written if it is compressed: one pass over its rows for both."""
        rows = self._probe_rows(self.config.layers)
        last = rows.view(*self.probes.ids.shape, -1)[:, -1]
        norm = build_final_norm(self.config, self.checkpoint)
        found = torch.empty(len(last), self.config.vocab_size)

        def seen(ids: Tensor, head: Linear) -> None:
            found[:, ids] = self.probes.logits(norm, head, last)
            report("output matrix", int(ids[-1]) + 1, self.config.vocab_size)

        if self.output.head is None:
            for ids, head in self._head():
                seen(ids, head)
        else:
            self.output.write_head(self.writer, self._rounded_head(seen))
        return self.probes.finish(self.state.observed, found)

    def _head(self) -> Iterator[tuple[Tensor, Linear]]:
        """The output matrix of the source, some rows at a time, with their ids."""
        for ids in torch.arange(self.config.vocab_size).split(HEAD_ROWS):
            yield ids, build_head(replace(self.config, vocab_size=len(ids)), self.checkpoint.rows(ids))

    def _rounded_head(self, seen: Callable[[Tensor, Linear], None]) -> Iterator[PackedTensor]:
        """The same as it is stored, shown to `seen` on the way; at the end, its record."""
        assert self.output.head is not None
        wrong = whole = 0.0
        for ids, head in self._head():
            weight = head.weight
            assert isinstance(weight, Tensor)
            packed = head.weight = self.output.round_head(weight)
            size = float(torch.linalg.vector_norm(weight, dtype=torch.float64)) ** 2
            whole += size
            wrong += size * weight_error(weight, packed)
            seen(ids, head)
            yield packed
        error = wrong / whole if whole else 0.0
        self.head_records = [Record(HEAD, self.output.head.name, "weight", error, error)]

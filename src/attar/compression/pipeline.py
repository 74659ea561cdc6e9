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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints import hf, hub, receipt, sources
from attar.checkpoints.gguf_writer import atomic_file
from attar.checkpoints.probes import ProbeRun
from attar.checkpoints.vocabulary import is_gguf
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, allocated, atomic_folder, require_free
from attar.compression import (
    allocate,
    best,
    calibrate,
    coverage,
    gradients,
    importance,
    place,
    requirements,
    rotation,
    spin,
    tune,
)
from attar.compression.allocate import Target
from attar.compression.calibrate import Calibration, HiddenStates
from attar.compression.gguf_output import GgufOutput
from attar.compression.guide import Guide, key
from attar.compression.memory import give_back, large_blocks_apart
from attar.compression.methods import AutoRound, Gptq, Prune, SpinQuant, SqueezeLlm, Structured
from attar.compression.output import Output, model_card
from attar.compression.passes import BlockWork, Record, weight_error
from attar.compression.recipe import HEAD, Recipe, parse_head
from attar.compression.rotated import RotatedCheckpoint
from attar.compression.state import RunState
from attar.formats import ggml_mix
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import ops
from attar.kernels.operands import Linear
from attar.metrics.measure import measure
from attar.model.decoder import build_block, build_embedding, build_final_norm, build_head, compressible
from attar.plan.costs import matrices
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

STREAMS = ("probe", "calibration", "original")  # what goes through the blocks; the last as if nothing were compressed
FILE_HEADS = {"int8": "q8_0", "int4": "q4_0"}
"""What the words for an output matrix mean in a GGUF file."""
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
    warnings: tuple[str, ...] = ()  # of calibration text that says too little
    allocated: float | None = None  # bits a weight that a target chose, of the blocks' linears alone

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
            "warnings": list(self.warnings),
            "allocated_bits": self.allocated,
        }


def default_recipe(dst: str | Path) -> str:
    """What the output asks for where nobody says."""
    return "q4_k_m" if Path(dst).suffix.lower() == ".gguf" else "gptq-w4g128"


def compress(
    src: str | Path,
    dst: str | Path,
    *,
    recipe: str | Path | Recipe = "gptq-w4g128",
    head: str | None = None,
    target: Target | None = None,
    ladder: Sequence[Scheme] | None = None,
    calibration: Calibration | None = None,
    imatrix: str | Path | None = None,
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
    device: str = "cpu",
) -> Compressed:
    """Compress the checkpoint `src` (folder, Hub id or `demo`) into the folder `dst`, or the file, if it ends in .gguf.

    `recipe` is a name such as `gptq-w4g128`, a YAML file, or a Recipe; of several names, or `best-w4g128`, the one is
    kept that does best on calibration text set aside (`best`). `head` is what the output matrix is stored in,
    whatever the recipe says of it: `bf16` (as it is), `int8`, `int4`, or a scheme of weights alone. `calibration` is a
    text file, token ids [S][L], or `self` for text sampled from the model; recipes that only round need none. `imatrix`
    is an importance matrix for a GGUF file, which weighs errors by it; with calibration alone one is computed.
    With a `target`, each linear gets the scheme of `ladder` that `allocate` chooses, by default the recipe's with other
    bits. `evaluation` is a held-out text file on which the cost is measured. At most `calib_memory` bytes of
    calibration activations are held in memory. A killed run resumes, unless `resume` is false. On a `device` that is no
    CPU each block is moved there, run and solved there, and what came of it comes back to be written (`place`).

    Raises ValueError (CheckpointError among them) for anything a user can mend: an unknown recipe word, a group size
    that does not divide, an existing output, a full disk, a NaN in a named layer.
    """
    began = time.monotonic()
    report = progress or (lambda stage, done, total: None)
    ops.require(device)
    source = hub.resolve(src)
    if not str(dst):  # an unset variable of a shell, which Path would take for the current folder
        raise ValueError("the output's name is empty: give a folder to write")
    if source.resolve().is_relative_to(Path(dst).resolve()):
        raise ValueError(f"{dst} would replace the model that it is made from: choose another output")
    if is_gguf(source):
        raise ValueError(f"{source} is a GGUF file, which compress does not read: give the folder it was made from")
    checkpoint = original = hf.Checkpoint.open(source)
    to_file = Path(dst).suffix.lower() == ".gguf"
    if imatrix is not None and not to_file:
        raise ValueError("an importance matrix is for GGUF files: give an output that ends in .gguf")
    known = None if imatrix is None else importance.known(imatrix, checkpoint)

    def weighing(plan: Recipe) -> bool:
        return to_file and plan.mix not in ggml_mix.DENSE_MIXES and calibration is not None and known is None

    def laid_out(plan: Recipe, checkpoint: hf.Checkpoint) -> Output | GgufOutput:
        if not to_file:
            return Output(checkpoint, plan)
        output = GgufOutput(checkpoint, plan, Path(dst).name, weighing(plan) or known is not None)
        output.importances = known or {}
        return output

    def ready(
        recipe: str | Path | Recipe, sequences: int | None
    ) -> tuple[Recipe, hf.Checkpoint, Output | GgufOutput, bool]:
        """A recipe as it will run, the source as it begins with, what comes out, and whether inputs are read: all that
        can be refused before the first block is."""
        plan, checkpoint = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe), original
        if head is not None:
            plan = replace(plan, head=parse_head(FILE_HEADS.get(head, head) if to_file else head))
        if plan.mix is not None and not to_file:
            raise ValueError(f"{plan.name} is a mix of GGUF files: give an output that ends in .gguf, not {dst}")
        whole = plan.rotate is not None or plan.structured is not None or plan.tune is not None
        if to_file and (plan.pruning is not None or whole):
            raise ValueError(f"{plan.name} writes a folder, not a GGUF file: give an output that does not end in .gguf")
        if to_file:
            plan = plan.for_file()
        if plan.rotate is not None:
            if target is not None:
                raise ValueError(
                    f"{plan.name}: a target measures the model as it is, not rotated: leave one of them out"
                )
            checkpoint = rotation.rotated(checkpoint, plan, seed)
        output = laid_out(plan, checkpoint)
        place.check(plan, output.schemes.values(), to_file, device)
        reads = requirements.check(plan, checkpoint.config, output.schemes, sequences, to_file)
        return plan, checkpoint, output, reads

    choice = None
    if (names := best.recipes(recipe)) is not None:
        if target is not None:
            raise ValueError("a target chooses bits and a list chooses among recipes: give one of the two")
        if imatrix is not None:
            raise ValueError("recipes of a list are tried without an importance matrix: name one with --imatrix")

        def make(name: str, ids: list[list[int]], out: Path) -> float:
            return compress(
                src, out, recipe=name, head=head, calibration=ids, seed=seed, calib_memory=calib_memory,
                overwrite=True, resume=resume, progress=progress, device=device,
            ).bits_per_weight  # fmt: skip

        amount = calibrate.Amount(samples, length, seed)
        choice = best.for_output(
            names, checkpoint, calibration, amount, Path(dst), overwrite, resume, make, ready, head, report
        )
        recipe, calibration = choice.winner, choice.calibration
    plan, checkpoint, output, needs_inputs = ready(recipe, _sequences(calibration, samples))
    weighs = weighing(plan)
    tokenizer = _tokenizer(checkpoint.folder.path, calibration, evaluation)
    rounding = plan.rounding if isinstance(plan.rounding, Gptq | Prune) else Gptq()
    couples = isinstance(rounding, Gptq) and rounding.couple
    held_out = None
    if evaluation is not None:
        assert tokenizer is not None
        held_out = tokenizer.encode(read_text(evaluation), add_special_tokens=False)[:eval_tokens]
        if len(held_out) < 2:
            raise ValueError(f"{evaluation} has {len(held_out)} token: at least 2 are needed to measure on")
    chosen = None
    if target is not None:
        amount = calibrate.Amount(samples, length, seed)
        chosen = allocate.for_output(
            checkpoint, plan, target, ladder, calibration, amount, Path(dst), overwrite, resume,
            lambda recipe: sum(f.size for f in laid_out(recipe, checkpoint).plans(max_shard_bytes)), report,
        )  # fmt: skip
        plan, calibration = chosen.allocation.recipe, chosen.calibration
        output = laid_out(plan, checkpoint)
    files = output.plans(max_shard_bytes)

    with (atomic_file if to_file else atomic_folder)(dst, overwrite) as work, large_blocks_apart():
        if not resume:
            work.clear()
        hashes = checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total))
        source_hash = receipt.combined_hash(hashes)
        ids = None
        if (needs_inputs or weighs) and calibration is not None:
            drawn = work.state / f"self-{source_hash[:16]}-{samples}x{length}-{seed}.i32"
            amount = calibrate.Amount(samples, length, seed)
            ids = calibrate.tokens(
                calibration, checkpoint, tokenizer, amount, drawn, lambda done, total: report("sampling", done, total)
            )
            requirements.enough(plan, len(ids))
        about = receipt.environment() | {
            "source": source_hash,
            "recipe": plan.to_dict(),
            "calibration": None if ids is None else calibrate.token_hash(ids),
            "seed": seed,
            "shard": max_shard_bytes,
        }
        if device != "cpu":
            about["device"] = device
        if imatrix is not None:
            about["imatrix"] = receipt.sha256(Path(imatrix))
        if chosen is not None:
            about["allocation"] = chosen.allocation.to_dict()
        state = RunState.open(work.state, about, resume)
        if weighs and ids is not None:
            assert isinstance(output, GgufOutput)
            output.importances = importance.kept(checkpoint, ids, work.state, key(about), calib_memory, report)
            ids = ids if needs_inputs else None
        walked = ids  # less what judges at the end
        if ids is not None and plan.tune is not None and len(ids) > 1:
            judges = set(tune.aside(ids))
            walked = ids[[s for s in range(len(ids)) if s not in judges]]
        spun = None
        if isinstance(plan.rotate, SpinQuant):
            assert walked is not None
            assert isinstance(checkpoint, RotatedCheckpoint)
            spun = spin.learn(checkpoint, walked, plan.rotate, work.state, key(about), seed)
        guide = None
        weighs_each = isinstance(plan.rounding, SqueezeLlm)
        if rounding.guide or couples or weighs_each:
            assert walked is not None
            rows = _guided(checkpoint, plan, output.schemes, whole=rounding.guide < 2)
            guide = Guide(work.state, key(about), rows, walked.numel(), rounding.guide, couples, weighs_each)
        probes = ProbeRun(checkpoint.config, seed)
        if not state.blocks_done:
            row = 4 * checkpoint.config.hidden
            streams = probes.ids.numel() + (0 if ids is None else (1 + rounding.correct) * ids.numel())
            needed = sum(f.size for f in files) + 2 * row * streams
            needed += row * ids.numel() if ids is not None and plan.tune is not None else 0  # what tuning aims at
            if guide is not None and walked is not None:
                first = 0 if guide.collected else row * (checkpoint.config.layers + 2) * walked.numel()
                needed = guide.bytes + max(first, needed)  # the gradients are gone before the walk begins
            had = [*(work.out / f.name for f in files), *work.state.glob("*.f32"), *work.state.glob("*.hints")]
            require_free(work.out, needed - allocated(had))  # by a killed run, and used again
        if guide is not None and walked is not None:
            guide.collect(checkpoint, walked, calib_memory, seed, report)
        with ShardWriter(work.out, files, output.written(state.blocks_done)) as writer:
            walk = Walk(checkpoint, output, plan, writer, state, walked, calib_memory, probes, guide, device)
            probed = walk.run(report)
            records = state.records + walk.head_records
            output.copy_rest(writer, report)
            writer.finish()
        output.write_config(work.out)
        tuned = None
        if plan.tune is not None:
            assert ids is not None
            assert isinstance(output, Output)
            dense = [name for name, scheme in output.schemes.items() if scheme is None and plan.reshapes(name)]
            tuned = tune.run(checkpoint, work.out, work.state, ids, plan.tune, seed=seed, progress=report, dense=dense)
            with ShardWriter(work.out, files, output.layout) as writer:
                for name, tensor in tuned.tensors.items():
                    writer.write(name, tensor)
                writer.finish()
            probed = tune.probes(work.out, seed)
            records = [replace(r, measure=f"{r.measure}, before tuning") if r.name != HEAD else r for r in records]
        warnings: tuple[str, ...] = ()
        if walked is not None:
            columns = max(each.columns for each in matrices(checkpoint.config) if each.compressible)
            shown = coverage.kept(work.state, checkpoint.config.layers)
            warnings = tuple(coverage.warnings(walked.numel(), columns, shown))
        made = work.out / files[0].name if to_file else work.out
        cost = None
        if held_out is not None:
            assert tokenizer is not None
            cost = measure(
                sources.load(made, torch.float32),
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
            warnings,
            None if chosen is None else chosen.allocation.bits_per_weight,
        )
        if isinstance(output, Output):
            about_it = (plan.name, plan.head_name, result.bits_per_weight, result.bytes, cost, output.notes)
            (work.out / "README.md").write_text(model_card(*about_it, output.method))
        about |= {} if tuned is None else {"tune": tuned.to_dict()}
        about |= {} if spun is None else {"rotation": {"before": spun.before, "after": spun.after}}
        about |= {} if choice is None else {"selection": choice.to_dict()}
        about |= {"warnings": list(warnings)} if warnings else {}
        receipt.write(made, about, hashes, [asdict(r) for r in records], output.bits_per_weight, cost, probed)
    for search in (chosen, choice):
        if search is not None:
            search.forget()
    return result


def _sequences(calibration: Calibration | None, samples: int) -> int | None:
    """How many there will be, at most."""
    if calibration is None:
        return None
    return samples if isinstance(calibration, str | Path) else len(calibration)


def _tokenizer(folder: Path, calibration: Calibration | None, evaluation: str | Path | None) -> Tokenizer | None:
    """Only a text needs the tokenizer: ids and `self` do without."""
    text_calibration = isinstance(calibration, str | Path) and str(calibration) != calibrate.SELF
    return Tokenizer.load(folder) if text_calibration or evaluation is not None else None


def _guided(
    checkpoint: hf.Checkpoint, recipe: Recipe, schemes: Mapping[str, Scheme | None], whole: bool
) -> dict[int, dict[str, tuple[int, int]]]:
    """By block, the linears to compress with their shapes; unless their rows are solved for as a whole, not
    those whose rows share a scale."""
    found = {}
    for layer in range(checkpoint.config.layers):
        names = compressible(checkpoint.config, layer)
        pruned = {name for name in names if recipe.pattern_for(name) is not None}
        chosen = [
            n for n in names if (n in pruned if (scheme := schemes.get(n)) is None else whole or scheme.weight.by_row)
        ]
        found[layer] = {name: checkpoint.linear_shape(name) for name in chosen}
    return found


class Walk:
    """The block walk: the calibration states and the probes go through the blocks, each compressed on the way."""

    def __init__(
        self,
        checkpoint: hf.Checkpoint,
        output: Output | GgufOutput,
        recipe: Recipe,
        writer: ShardWriter,
        state: RunState,
        ids: Tensor | None,
        memory: int,
        probes: ProbeRun,
        guide: Guide | None,
        device: str = "cpu",
    ) -> None:
        self.guide, self.device = guide, torch.device(device)
        self.checkpoint, self.output, self.recipe = checkpoint, output, recipe
        self.writer, self.state = writer, state
        self.config = checkpoint.config
        self.head_records: list[Record] = []  # not part of the state: a resumed run does the output matrix anew
        # Two files in turn: block i reads number i % 2 and writes the other.
        self.streams: list[tuple[HiddenStates, HiddenStates]] = []
        self.probes = probes
        corrects = isinstance(recipe.rounding, Gptq | Prune | AutoRound | Structured) and recipe.rounding.correct
        sources = [self.probes.ids] if ids is None else [self.probes.ids, *[ids] * (1 + corrects)]
        spare, rows = (memory - calibrate.IN_A_BLOCK) // (1 + corrects), calibrate.rows_at_once(self.config)
        for name, tokens, limit in zip(STREAMS, sources, (1 << 20, spare, spare), strict=False):
            shape = (*tokens.shape, self.config.hidden)
            at = place.CPU if name == STREAMS[0] else self.device
            files = [HiddenStates(state.folder / f"{name}-{i}.f32", shape, limit // 2, rows, at) for i in range(2)]
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
            assert isinstance(embedding.table, Tensor)
            rounded = None if first is self._original(0) else self.output.round_embedding(embedding.table)
            if rounded is not None:
                embedding.table, embedding.dtype = rounded, torch.float32
            for batch in first.batches():
                step = first.step(batch)
                rows = place[batch.start : batch.stop].reshape(-1)
                first.write(batch, embedding.forward(rows, step.positions.cpu()).float())
            first.settle()

    @torch.inference_mode()
    def _block(self, layer: int) -> None:
        block = build_block(self.config, self.checkpoint, layer)
        for linear in block.linears():
            linear.keep_dense = False  # its float32 copies would take four times the block
        inputs = self.streams[1][layer % 2] if len(self.streams) > 1 else None
        weights = self.output.importances if isinstance(self.output, GgufOutput) else {}
        guide = None if self.guide is None else self.guide.of(layer)
        original = self._original(layer)
        place.move(block, self.device)
        work = BlockWork(
            block, inputs, self.recipe, self.output.schemes, self.config.architecture, weights, guide, original,
            self.output.sizes if isinstance(self.output, Output) else None,
        )  # fmt: skip
        records = work.run()
        place.move(block, place.CPU)
        self.output.write_block(self.writer, block, layer)
        if inputs is not None and layer + 1 < self.config.layers:
            outputs = self.streams[1][1 - layer % 2]
            place.move(block, self.device)
            seen = coverage.Coverage(block)
            for batch in inputs.batches():
                out = block.run(inputs.read(batch), inputs.step(batch), seen.tap)
                if not out.isfinite().all():
                    raise ValueError(f"the output of block {layer} holds a NaN or an infinity")
                outputs.write(batch, out)
            outputs.settle()
            coverage.keep(self.state.folder, layer, seen)
            if original is not None and (after := self._original(layer + 1)) is not None:
                gradients.advance(self.checkpoint, layer, original, after)
                after.settle()
        place.move(block, place.CPU)
        rows, observed = self.probes.run(layer, block, self._probe_rows(layer))
        self._set_probe_rows(layer + 1, rows)
        self.writer.sync()
        self.state.finish_block(layer, records, observed)

    def _original(self, layer: int) -> HiddenStates | None:
        """The calibration states that enter block `layer` of the original model, where the recipe needs them."""
        return self.streams[2][layer % 2] if len(self.streams) > 2 else None

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
            packed = self.output.round_head(weight)
            head.weight = self.output.as_read(packed)
            size = float(torch.linalg.vector_norm(weight, dtype=torch.float64)) ** 2
            whole += size
            wrong += size * weight_error(weight, packed)
            seen(ids, head)
            yield packed
        error = wrong / whole if whole else 0.0
        self.head_records = [Record(HEAD, self.output.head.name, "weight", error, error)]

"""One recipe carried out in a work folder, from measurements of the original model to the cost of the output.

The order is fixed: hints of the loss are gathered before the first block changes. The block pass compresses and writes
block after block, tuning trains the numbers beside codes, then the cost is measured. Each step keeps its results on
disk under the name of the run, so that a killed one continues where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.probes import ProbeRun
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.writer import MAX_SHARD, ShardWriter, Workspace, allocated, require_free
from attar.compression.block.record import Record
from attar.compression.block.work import on_tiles
from attar.compression.calibration import coverage, domain, image_rows, importance, texts
from attar.compression.calibration.amount import count_sequences, drawn_name
from attar.compression.calibration.domain import DomainCheck
from attar.compression.calibration.image_rows import ImageRows
from attar.compression.calibration.loss_weights import Guide, key
from attar.compression.outputs.base import Output
from attar.compression.outputs.tower_schemes import UNCHANGED
from attar.compression.recipe import requirements
from attar.compression.recipe.methods import SpinQuant, SqueezeLlm
from attar.compression.recipe.recipe import HEAD, Recipe
from attar.compression.request.resolve import ResolvedCompression, compressed_original
from attar.compression.resume import write_note
from attar.compression.rotation import spinquant_training
from attar.compression.rotation.rotated import RotatedCheckpoint
from attar.compression.runs import image_cost
from attar.compression.runs.block_pass import STATE, RunState, Walk
from attar.compression.search.allocate import Allocation
from attar.compression.training import tune
from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.images.pairs import METADATA
from attar.kernels import tiles
from attar.metrics.measure import measure
from attar.model.assembly import compressible
from attar.model.decoder import Decoder
from attar.plan.costs import matrices
from attar.progress import Progress

OF_THE_ORIGINAL = ("self-*.i32", "images-*", "rotations-*", "importances-*", "guide-*", "coverage-*", "surprise-*")
"""Files of a work folder that do not depend on the chosen bits. Coverage is among them, because it may have been the
original's; a block pass that measures it stores it anew."""


def begin_anew(work: Workspace) -> None:
    """Remove the results of one choice of bits, so that a block pass by another can begin. The state goes first, so
    that a kill meanwhile never leaves half a pass that looks whole."""
    (work.state / STATE).unlink(missing_ok=True)
    kept = {path for pattern in OF_THE_ORIGINAL for path in work.state.glob(pattern)}
    for path in {*work.out.iterdir(), *work.state.iterdir()} - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class Run:
    """A recipe carried out in a work folder: gather hints of the loss, compress the blocks, tune, measure, in this
    order. `given` [S, L] is calibration text, if the recipe reads any. `name` identifies the whole request, whatever
    bits are chosen: measurements of the original by an earlier run are found again, and no other run's. The sequences
    by which tuning judges at the end are kept from all earlier steps."""

    def __init__(
        self,
        asked: ResolvedCompression,
        work: Workspace,
        hashes: Mapping[str, str],
        report: Progress,
        drawn_at: Path | None = None,
        allocation: Allocation | None = None,
    ) -> None:
        """Prepare a run. `hashes` are those of the source's files. Additional text that the model writes is kept in the
        folder `drawn_at`, if other runs read it too. Bits are those that were asked for, or those of an allocation.
        Raises ValueError where an interrupted run had another subject, and as `texts.tokens`."""
        resolved, request = asked, asked.request
        if allocation is not None and asked.calibration is not None:
            sequences = count_sequences(asked.calibration, request.amount) + request.drawn
            resolved = asked.with_recipe(allocation.recipe, sequences)
        self.request, self.source, self.work, self.report = request, asked.source, work, report
        self._resolved, self.plan, self.checkpoint = resolved, resolved.recipe, resolved.checkpoint
        self.given, self._drawn = self._texts(receipt.combined_hash(hashes), drawn_at or work.state)
        self.images = self._with_images(receipt.combined_hash(hashes), drawn_at or work.state)
        about = self._about(asked.recipe, hashes)
        self.name = key(about)
        if allocation is not None:
            about |= {"recipe": self.plan.to_dict(), "allocation": allocation.to_dict()}
        self.state = RunState.open(work.state, about, request.resume)
        self.files = self.output.plans(request.max_shard_bytes)
        self.made = work.out / self.files[0].name if request.to_file else work.out
        self.probes = ProbeRun(self.checkpoint.config, request.seed)
        self.probed: dict[str, Any] = {}
        self.records: list[Record] = []
        self.block_seconds: dict[str, float] = {}
        self.learned: dict[str, Any] = {}  # results of the steps that learn, for the receipt
        self.guide: Guide | None = None
        self.surprise: DomainCheck | None = None  # of the calibration text, if measured
        self.ids = self.given if resolved.reads else None
        self.walked: Tensor | None = None
        if self.ids is not None:
            judged = self.plan.tune is not None and len(self.ids) > 1
            self.walked = self._with_drawn(tune.without_judges(self.ids) if judged else self.ids)

    @property
    def output(self) -> Output:
        return self._resolved.output

    def _texts(self, source: str, drawn_at: Path) -> tuple[Tensor | None, Tensor | None]:
        """Return the calibration text [S, L] that the recipe reads, and the additional text of the model, [D, L]."""
        resolved, amount = self._resolved, self.request.amount
        if resolved.calibration is None or not (resolved.reads or resolved.weighs):
            return None, None
        drawn, told = self.work.state / drawn_name(source, amount), partial(self.report, "sampling")
        given = texts.tokens(resolved.calibration, self.source, resolved.tokenizer, amount, drawn, told)
        requirements.enough(self.plan, len(given))
        if not amount.drawn:
            return given, None
        besides = amount.besides(given.shape[1])
        drawn, told = drawn_at / drawn_name(source, besides), partial(self.report, "drawing")
        return given, texts.written(self.source, besides, drawn, told)

    def _with_images(self, source: str, folder: Path) -> ImageRows | None:
        """Return the calibration sequences with images, made once for all runs that read the same folder."""
        images, text = self.request.calib_images, self.given
        if images is None or text is None:
            return None
        subject = [source, str(images.absolute()), receipt.sha256(images / METADATA), texts.token_hash(text)]
        at = folder / f"images-{key({'subject': subject, 'samples': self.request.samples})}"
        told = partial(self.report, "images")
        return image_rows.kept_or_made(
            images, self.source, text, self.request.samples, at, self.request.calib_memory, told
        )

    def _about(self, recipe: Recipe, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Return all that determines the run, for the receipt and for a run that resumes."""
        request = self.request
        about = receipt.environment() | {
            "source": receipt.combined_hash(hashes),
            "recipe": recipe.to_dict(),
            "calibration": None if self.given is None else texts.token_hash(self._with_drawn(self.given)),
            "seed": request.seed,
            "shard": MAX_SHARD if request.max_shard_bytes is None else request.max_shard_bytes,
        }
        about |= {"drawn": request.drawn} if request.drawn else {}
        about |= {} if self.images is None else {"calibration_images": self.images.to_dict()}
        about |= {} if request.vision == UNCHANGED else {"vision": request.vision}
        about |= {} if request.device == "cpu" else {"device": request.device}
        about |= {"products": "bfloat16"} if self._on_tiles(recipe) else {}
        original = compressed_original(self.source)
        about |= {} if original is None else {"original": original.to_dict()}
        return about | ({} if request.imatrix is None else {"imatrix": receipt.sha256(Path(request.imatrix))})

    def _on_tiles(self, recipe: Recipe) -> bool:
        """Return whether bfloat16 products on tiles decide last bits, and so must not change where a run resumes."""
        linears = (each for each in matrices(self.checkpoint.config) if each.compressible)
        large = any(each.rows * each.columns >= tiles.LEAST for each in linears)
        return large and on_tiles(recipe, self.request.device)

    def _with_drawn(self, ids: Tensor) -> Tensor:
        """Return sequences followed by those that the model wrote, and by those with images."""
        besides = [] if self._drawn is None else [self._drawn]
        besides += [] if self.images is None else [self.images.ids]
        return torch.cat([ids, *besides]) if besides else ids

    def gather(self) -> None:
        """Measure the original model before the block pass: a learned rotation, then importances and gradients of the
        rotated model. Raises ValueError also where the disk has no room for the run."""
        if isinstance(self.plan.rotate, SpinQuant):
            assert self.walked is not None
            assert isinstance(self.checkpoint, RotatedCheckpoint)
            seed, options = self.request.seed, self.plan.rotate
            spun = spinquant_training.learn(self.checkpoint, self.walked, options, self.work.state, self.name, seed)
            self.learned["rotation"] = {"before": spun.before, "after": spun.after}
        if self.given is not None and self._resolved.weighs:
            read = self._with_drawn(self.given) if self.walked is None else self.walked
            memory = self.request.calib_memory
            known = importance.kept(self.checkpoint, read, self.work.state, self.name, memory, self.report, self.images)
            self._resolved = replace(self._resolved, output=self.output.weighing(known))
        guide, couples = self.plan.guide, self.plan.couples
        weighs_each = isinstance(self.plan.rounding, SqueezeLlm)
        if guide or couples or weighs_each:
            assert self.walked is not None
            linears = _guided(self.checkpoint, self.plan, self.output.schemes, whole=guide < 2)
            about = key({"run": self.name, "linears": linears})  # a choice of bits can change these
            self.guide = Guide(self.work.state, about, linears, self.walked.numel(), guide, couples, weighs_each)
        if not self.state.blocks_done:
            self._require_room()
        if self.guide is not None and self.walked is not None:
            memory, seed = self.request.calib_memory, self.request.seed
            self.guide.collect(self.checkpoint, self.walked, memory, seed, self.report, self.images)

    def look(self) -> None:
        """Measure the surprise of the original by the calibration text, before the hours of the block pass. A NaN is
        not reported here, for the block pass names its position."""
        if self.given is None:
            return
        kept = self.work.state / f"surprise-{self.name}.json"
        if kept.is_file():
            found = json.loads(kept.read_bytes())
            self.surprise = None if found is None else DomainCheck(**found)
        else:
            self.surprise = domain.surprise(self.source, self.given, self.work.state, self.request.device)
            write_note(kept, None if self.surprise is None else asdict(self.surprise))

    def _require_room(self) -> None:
        row, ids, walked = 4 * self.checkpoint.config.hidden, self.ids, self.walked
        streams = self.probes.ids.numel() + (0 if walked is None else (1 + self.plan.corrects) * walked.numel())
        needed = sum(f.size for f in self.files) + 2 * row * streams
        if ids is not None and self.plan.tune is not None:  # targets of tuning
            own = self.plan.tune.drawn * ids.shape[1]
            needed += row * (ids.numel() + own if own else self._with_drawn(ids).numel())
        if self.guide is not None and self.walked is not None:
            first = 0 if self.guide.collected else row * (self.checkpoint.config.layers + 2) * self.walked.numel()
            needed = self.guide.bytes + max(first, needed)  # the gradients are gone before the block pass begins
        had = [*(self.work.out / f.name for f in self.files), *self.work.state.glob("*.f32")]
        had += [] if self.guide is None else self.work.state.glob(f"guide-{self.guide.key}-*")
        require_free(self.work.out, needed - allocated(had))  # files of a killed run, which are used again

    def walk(self) -> None:
        """Compress and write every block, and write the tensors outside blocks."""
        with ShardWriter(self.work.out, self.files, self.output.written(self.state.blocks_done)) as writer:
            walk = Walk(
                self._resolved, writer, self.state, self.walked, self.probes, self.guide, self.name, self.images
            )
            self.probed = walk.run(self.report)
            self.records, self.block_seconds = self.state.records + walk.head_records, walk.block_seconds
            self.output.copy_rest(writer, self.report)
            writer.finish()
        self.output.write_config(self.work.out)

    def tune(self) -> None:
        """Train scales and norms, where the recipe says so; the probes are then those of the tuned model."""
        if self.plan.tune is None:
            return
        assert self.ids is not None
        dense = [name for name, scheme in self.output.schemes.items() if scheme is None and self.plan.reshapes(name)]
        tuned = tune.run(
            self.checkpoint, self.made, self.work.state, (self.ids, self._drawn), self.plan.tune,
            seed=self.request.seed, progress=self.report, dense=dense,
        )  # fmt: skip
        with ShardWriter(self.work.out, self.files, [name for file in self.files for name in file.slots]) as writer:
            self.output.write_again(writer, tuned.tensors)
            writer.finish()
        self.probed = tune.probes(self.made, self.request.seed)
        self.records = [
            each if each.name == HEAD else replace(each, measure=f"{each.measure}, before tuning")
            for each in self.records
        ]
        self.learned["tune"] = tuned.to_dict()

    def divergence(self, ids: Tensor) -> float:
        """Return the mean KL of the output from the original, in nats, at every position of token ids [T, L]. It is
        measured in float32 by the reference, as bits are chosen, whatever the device."""
        windows = [[*row, 0] for row in ids.tolist()]  # no divergence depends on the last token
        made, base = opening.load(self.made, torch.float32), hf.load_again(self.source, torch.float32)
        return measure(made, windows, base=base, context=ids.shape[1]).figures["kl_mean"].value

    def shared(self, read: Tensor | None) -> float | None:
        """Return the fraction of the evaluation text in a calibration text [S, L]; None unless both exist."""
        held_out = self._resolved.held_out
        return None if held_out is None or read is None else domain.shared(held_out, read)

    def warnings(self, shared: float | None) -> tuple[str, ...]:
        """Return warnings about the calibration text; `shared` is the fraction of the evaluation text in it."""
        shown: tuple[str, ...] = ()
        if self.given is not None:
            read = self._with_drawn(self.given) if self.walked is None else self.walked
            shown = coverage.of(self.checkpoint.config, read, self.work.state, self.name)
        left_out = () if self.images is None else self.images.warnings
        return *shown, *domain.warnings(self.surprise, shared), *left_out

    def measure(self) -> dict[str, Any] | None:
        """Measure the cost on the evaluation text, if there is one: by the reference in float32, or on the device as
        `attar eval` does. Raises ValueError where the device has no room for both models."""
        held_out, tokenizer = self._resolved.held_out, self._resolved.tokenizer
        if held_out is None:
            return None
        assert tokenizer is not None
        try:
            return measure(
                self._whole(self.made), held_out, base=self._whole(self.source), bos=tokenizer.added_bos,
                bytes_of=tokenizer, progress=partial(self.report, "evaluating"),
            ).to_dict()  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise UserError(
                "memory_insufficient",
                f"{self.request.device} has too little memory to measure the output beside the original: the same "
                "command without --eval ends at once, and `attar eval OUTPUT --against ORIGINAL` measures it on a CPU "
                f"({error})",
            ) from None

    def measure_images(self) -> dict[str, Any] | None:
        """Measure the cost on texts behind images, if a folder of them was given."""
        images = self.request.evaluation_images
        return None if images is None else image_cost.measure(images, self.made, self.source, self.report)

    def _whole(self, model: Path | hf.Checkpoint) -> Decoder:
        device = self.request.device
        return opening.load_on(model, device, hf.compute_dtype(None, device))


def _guided(
    checkpoint: hf.Checkpoint, recipe: Recipe, schemes: Mapping[str, Scheme | None], whole: bool
) -> dict[int, dict[str, tuple[int, int]]]:
    """Return, by block, the linears to compress with their shapes. Those whose rows share a scale are left out, unless
    rows are solved for as a `whole`."""

    def chosen(name: str) -> bool:
        scheme = schemes.get(name)
        return recipe.pattern_for(name) is not None if scheme is None else whole or scheme.weight.by_row

    config = checkpoint.config
    return {
        layer: {name: checkpoint.linear_shape(name) for name in compressible(config, layer) if chosen(name)}
        for layer in range(config.layers)
    }

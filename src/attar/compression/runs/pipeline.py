"""The function `compress`: it makes a smaller checkpoint, with a receipt of the quality loss.

One block is in memory at a time: read it, run the recipe on it, write it at its place in the output. Then run it again,
now compressed, so that the next block is calibrated on its real inputs. Output files are laid out before the first
block, because their sizes follow from the schemes alone.

A killed run resumes. Its state on disk is one number, the blocks done, beside the hidden states that enter the next
block and the records gathered so far; tensors reach the disk before the number does. All randomness comes from
counters, so the bytes are those of an uninterrupted run, given the same torch build, instruction set and thread count.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attar.checkpoints.convert.towers import left_out
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.writer import atomic_file, output_path
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import atomic_folder
from attar.compression.block.record import Record
from attar.compression.calibration import domain
from attar.compression.calibration.amount import Calibration, drawn_name
from attar.compression.memory import large_blocks_apart
from attar.compression.outputs import towers
from attar.compression.outputs.folder import FolderOutput
from attar.compression.outputs.gguf import GgufOutput
from attar.compression.outputs.tower_schemes import UNCHANGED
from attar.compression.recipe.recipe import Recipe
from attar.compression.request.request import CompressionRequest, Target
from attar.compression.request.resolve import (
    ResolvedCompression,
    compressed_original,
    open_source,
    resolve,
)
from attar.compression.resume import write_note
from attar.compression.runs import image_cost, tower_cost
from attar.compression.runs.mistakes import check
from attar.compression.runs.run import Run, begin_anew
from attar.compression.search import best, bit_budget, compare_rtn
from attar.compression.search.best import Choice
from attar.compression.search.bit_budget import Allocated
from attar.compression.search.candidates import Candidates
from attar.compression.search.compare_rtn import Gain
from attar.errors import UserError
from attar.kernels import dispatch
from attar.model.vision.wrappers import OUTSIDE
from attar.progress import Progress

DRAFT_SHARE = 0.6
"""Share of a model's bytes above which drafts of a copy that has all layers do not pay: a right draft saves less than
a step, some are wrong, and each reads that share of one."""


@dataclass(frozen=True)
class Compressed:
    """Result of `compress`. `cost` holds the evaluation figures, None where no text was given."""

    path: Path
    recipe: str
    head: str  # the scheme of the LM head, or `keep`
    bits_per_weight: float  # stored bits of the compressed linears over their weights
    bytes: int  # of all weight files
    source_bytes: int
    seconds: float
    records: tuple[Record, ...]
    cost: Mapping[str, Any] | None
    notes: tuple[str, ...]  # for users who load it elsewhere
    images: Mapping[str, Any] | None = None  # figures on texts behind images
    vision: Mapping[str, Any] | None = None  # scheme and cost of the vision tower and projector
    warnings: tuple[str, ...] = ()  # about too little calibration text
    allocated: float | None = None  # bits a weight of the linears that a target decided
    reached: float | None = None  # the KL of the output, on the text by which bits were chosen
    selection: Mapping[str, Any] | None = None  # among several recipes: `best.Choice.to_dict`
    tuned: Mapping[str, Any] | None = None  # gain of tuning: `tune.Tuned.to_dict`
    texts: Mapping[str, Any] | None = None  # kind of the texts: `domain.to_dict`
    gain: Mapping[str, Any] | None = None  # over plain rounding, on unread text: a `compare_rtn.Gain`
    block_seconds: Mapping[str, float] = field(default_factory=dict)  # mean of a block by stage, as in `stages`

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "recipe": self.recipe, "head": self.head, "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes, "source_bytes": self.source_bytes, "seconds": round(self.seconds, 3),
            "kl_mean": (self.cost or {}).get("kl_mean"), "evaluation": self.cost, "images": self.images,
            "vision": {key: value for key, value in (self.vision or {}).items() if key != "probe"} or None,
            "layers": [asdict(record) for record in self.records], "notes": list(self.notes),
            "warnings": list(self.warnings), "allocated_bits": self.allocated, "allocated_kl": self.reached,
            "selection": self.selection, "tune": self.tuned, "texts": self.texts, "gain": self.gain,
            "block_seconds": {name: round(seconds, 4) for name, seconds in self.block_seconds.items()},
        }  # fmt: skip


def compress(
    src: str | Path,
    dst: str | Path,
    *,
    recipe: str | Path | Recipe = "gptq-w4g128",
    head: str | None = None,
    calibration: Calibration | None = None,
    target: Target | None = None,
    evaluation: str | Path | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Compress the checkpoint `src` (folder, GGUF file, Hub id or `demo`) into the folder `dst`, or the file, if it
    ends in .gguf. `CompressionRequest` describes the arguments, and has more of them for `compress_request`."""
    asked = CompressionRequest(
        src, dst, recipe=recipe, head=head, calibration=calibration, target=target, evaluation=evaluation
    )
    return compress_request(asked, progress)


def compress_request(request: CompressionRequest, progress: Progress | None = None) -> Compressed:
    """Compress as a request asks. Raises ValueError (CheckpointError among them) for anything a user can mend: an
    unknown recipe word, a group size that does not divide, an existing output, a full disk, a NaN in a named layer."""
    began, report = time.monotonic(), progress or (lambda stage, done, total: None)
    dispatch.require(request.device)
    tries = check(request)
    source, choice = open_source(request), None
    if request.evaluation_images is not None:
        image_cost.check(request.evaluation_images, source.folder.path)
    if tries is not None:
        choice = _choice(request, source, tries, report)
        request = replace(request, recipe=choice.winner, calibration=choice.calibration)
    resolved = resolve(request, source, request.recipe, request.sequences, targeted=request.target is not None)
    return replace(_carry_out(resolved, report, choice), seconds=time.monotonic() - began)


def _choice(request: CompressionRequest, source: Checkpoint, tries: Candidates, report: Progress) -> Choice:
    """Try several recipes, each an output of its own."""
    if (request.drawn or request.calib_images) and request.sequences is not None and not tries.own:
        found = [resolve(request, source, name, request.sequences) for name in tries.names]
        if not any(each.reads or each.weighs for each in found):
            raise UserError(
                "calibration_unused",
                f"{request.recipe}: these read text only to be chosen by: leave drawn text and images out",
            )

    def make(name: str, ids: list[list[int]], out: Path) -> float:
        trial = replace(
            request, dst=out, recipe=name, calibration=ids, evaluation=None,
            evaluation_images=None, overwrite=True,
        )  # fmt: skip
        return _carry_out(resolve(trial, source, name, trial.sequences), report, trial=True).bits_per_weight

    return best.for_output(tries, request, source, report, make)


def _carry_out(
    asked: ResolvedCompression, report: Progress, choice: Choice | None = None, trial: bool = False
) -> Compressed:
    """Make the output, by the bits of the recipe, or by those that a target chooses until the output keeps it. A
    `choice` among recipes was made before. A `trial` is made for a choice, or to compare with, and is not reported."""
    request, chosen, reached, gained = asked.request, None, None, None
    target = request.target
    may_read = (
        asked.reads or asked.weighs or (target is not None and target.candidates is not None)
    )  # activation scales
    if (request.drawn or request.calib_images) and not (may_read or trial or choice is not None):
        besides = "the images" if request.calib_images else "the drawn text"
        raise UserError(
            "calibration_unused", f"{asked.recipe.name} reads no calibration text here: leave {besides} out"
        )
    asked = asked.with_texts()
    if target is not None:
        chosen = bit_budget.for_output(asked, report)
        asked = replace(asked, calibration=chosen.calibration)
    drawn_at = request.path.parent if trial else None if choice is None else choice.folder
    made = (atomic_file if request.to_file else atomic_folder)(request.path, request.overwrite)
    with made as work, large_blocks_apart():
        if not request.resume:
            work.clear()
        hashes = asked.source.folder.source_hashes(lambda done, total: report("hashing", done, total))
        while True:
            run = Run(asked, work, hashes, report, drawn_at, None if chosen is None else chosen.allocation)
            run.gather()
            if not trial:
                run.look()
            run.walk()
            run.tune()
            if chosen is None:
                break
            reached = run.divergence(chosen.measured)
            if (other := chosen.after(reached)) is None:
                break
            begin_anew(work)  # first: a run that is killed here finds no pass by other bits
            other.note()
            report("target missed", len(other.missed), bit_budget.WALKS)
            chosen = other
        if chosen is None and choice is None and not trial:
            gained = _gain(asked, run, hashes)
        result = _finished(run, hashes, choice, chosen, reached, gained, trial)
        if isinstance(run.output, GgufOutput):
            run.output.tower.clear(Path(os.path.realpath(request.path)).parent)
    for search in (chosen, choice):
        if search is not None:
            search.forget()
    return result


def _gain(asked: ResolvedCompression, run: Run, hashes: Mapping[str, str]) -> Gain | None:
    """Compare the output with plain rounding, on text that nothing here has read. Returns None where a recipe reads
    none, there is no more text of its kind, or this machine has too little memory to compare, which is reported."""
    rounded, state, request = compare_rtn.plain(run.plan), run.work.state, asked.request
    if asked.calibration is None or run.given is None or rounded is None:
        return None
    kept = state / f"gain-{run.name}.json"
    if kept.is_file():
        return Gain.from_dict(json.loads(kept.read_bytes()))
    if not compare_rtn.fits(asked.source):
        run.report("comparing with plain rounding takes too much memory", 1, 1)
        return None
    amount = request.amount
    unread = replace(amount, samples=compare_rtn.SEQUENCES, seed=compare_rtn.UNREAD + amount.seed)
    drawn = state / drawn_name(receipt.combined_hash(hashes), unread)
    ids = compare_rtn.sequences(asked.calibration, asked.source, asked.tokenizer, amount, drawn)
    if ids is None:
        return None
    importances = asked.importances
    if request.to_file and run.plan.rotate is None:  # once is enough, but for rotated inputs
        importances = run.output.importances
    plain = replace(
        request, dst=state / ("plain.gguf" if request.to_file else "plain"), recipe=rounded, imatrix=None,
        calibration=run.given.tolist(), evaluation=None, evaluation_images=None, vision=UNCHANGED,
        overwrite=True,
    )  # fmt: skip
    trial = resolve(plain, asked.source, rounded, plain.sequences, importances=importances)

    def told(stage: str, done: int, total: int) -> None:
        if stage == "blocks":
            run.report("rounding plainly, to compare", done, total)

    made = _carry_out(trial, told, trial=True)
    found = compare_rtn.compare(asked.source, run.made, made.path, ids, run.report)
    write_note(kept, asdict(found))
    return found


def _finished(
    run: Run,
    hashes: Mapping[str, str],
    choice: Choice | None,
    chosen: Allocated | None,
    reached: float | None,
    gained: Gain | None,
    trial: bool,
) -> Compressed:
    """Write the receipt and the model card; return the output's cost and its notes."""
    output = run.output
    if isinstance(output, GgufOutput) and not trial:
        output.tower.write(run.work.out)
    about, cost, seen = dict(run.state.about), run.measure(), run.measure_images()
    share = run.shared(next((search.read for search in (choice, chosen) if search is not None), run.given))
    warnings, kinds = run.warnings(share), domain.to_dict(run.surprise, share)
    if chosen is not None and reached is not None:
        warnings += chosen.warnings(reached)
        about["allocation"] = chosen.finished(reached)
    tower = output.tower if isinstance(output, FolderOutput) else None
    if isinstance(output, GgufOutput):  # a file may lack the tower, and has norms in float32
        copied = mmproj.stored(run.made, OUTSIDE.get(run.source.config.architecture, ()))
    else:
        copied = towers.copied(run.source, tower)
    about |= {"copied": copied} if copied else {}
    vision, doubt = (None, "") if trial else tower_cost.measure(run.made, run.source, tower)
    warnings += (doubt,) if doubt else ()
    warnings += left_out(run.source.folder.path)
    about.pop("vision", None)
    about |= {} if vision is None else {"vision": vision}
    if run.request.as_draft:
        about["drafts_for"] = receipt.combined_hash(hashes)
        if (part := sum(f.size for f in run.files) / run.source.folder.size) > DRAFT_SHARE:
            warnings += (
                f"The copy has {part:.0%} of the model's bytes, so a draft takes about as long as a token. Drafts pay "
                f"where a copy has {DRAFT_SHARE:.0%} at most.",
            )
    if gained is not None:
        warnings += gained.warnings(run.plan.name)
        about["gain"] = asdict(gained)
    if (original := compressed_original(run.source)) is not None:
        warnings += (
            f"The source was compressed already ({original}): its decoded values are the original here, and what that "
            "compression cost is not in these figures.",
        )
    result = Compressed(
        path=output_path(run.request.path, run.files) if run.request.to_file else run.request.path,
        recipe=run.plan.name,
        head=run.plan.head_name,
        bits_per_weight=output.bits_per_weight,
        bytes=sum(f.size for f in run.files),
        source_bytes=run.source.folder.size,
        seconds=0.0,  # set at the very end
        records=tuple(run.records),
        cost=cost,
        images=seen,
        vision=vision,
        notes=output.notes,
        warnings=warnings,
        allocated=None if chosen is None else chosen.allocation.bits_per_weight,
        reached=reached,
        selection=None if choice is None else choice.to_dict(),
        tuned=run.learned.get("tune"),
        texts=kinds,
        gain=None if gained is None else asdict(gained),
        block_seconds=run.block_seconds,
    )
    output.write_card(run.work.out, result.bytes, cost)
    about |= run.learned
    about |= {} if choice is None else {"selection": result.selection}
    about |= {} if kinds is None else {"texts": kinds}
    about |= {} if seen is None else {"images": seen}
    about |= {"warnings": list(warnings)} if warnings else {}
    records = [asdict(record) for record in run.records]
    receipt.write(run.made, about, hashes, records, result.bits_per_weight, cost, run.probed)
    return result

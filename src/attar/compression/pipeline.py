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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attar.checkpoints import receipt
from attar.checkpoints.gguf.writer import atomic_file
from attar.checkpoints.writer import MAX_SHARD, atomic_folder
from attar.compression import allocate, best, calibrate, domain, requirements
from attar.compression.block.record import Record
from attar.compression.calibrate import Calibration
from attar.compression.guide import key
from attar.compression.memory import large_blocks_apart
from attar.compression.order import Order
from attar.compression.output import Output, model_card
from attar.compression.recipe import Recipe
from attar.compression.run import Run
from attar.compression.state import RunState
from attar.compression.target import Target
from attar.compression.walk import Progress
from attar.formats.scheme import Scheme
from attar.kernels import ops
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer


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
    reached: float | None = None  # the KL of what came of them, on the text by which they were chosen
    selection: Mapping[str, Any] | None = None  # of several recipes: `best.Choice.to_dict`
    tuned: Mapping[str, Any] | None = None  # what tuning gained: `tune.Tuned.to_dict`
    texts: Mapping[str, Any] | None = None  # of what kind they are: `domain.to_dict`

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
            "allocated_kl": self.reached,
            "selection": self.selection,
            "tune": self.tuned,
            "texts": self.texts,
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
    drawn: int = 0,
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
    text file, token ids [S][L], or `self` for text sampled from the model; recipes that only round need none. With
    `drawn`, it is followed by so many sequences that the model writes: what several recipes, or the bits of a target,
    are chosen by, and what tuning judges by, is the given text alone. `imatrix`
    is an importance matrix for a GGUF file, which weighs errors by it; with calibration alone one is computed.
    With a `target`, each linear gets the scheme of `ladder` that `allocate` chooses, by default the recipe's with other
    bits; an output that misses a target of KL is made anew with more, twice at most. `evaluation` is a held-out text
    file on which the cost is measured. At most `calib_memory` bytes of calibration activations are held in memory. A
    killed run resumes, unless `resume` is false. On a `device` that is no CPU each block is moved there, run and solved
    there, and what came of it comes back to be written (`place`); the cost is measured there too, in bfloat16.

    Raises ValueError (CheckpointError among them) for anything a user can mend: an unknown recipe word, a group size
    that does not divide, an existing output, a full disk, a NaN in a named layer.
    """
    report = progress or (lambda stage, done, total: None)
    ops.require(device)
    amount = calibrate.Amount(samples, length, seed, drawn)
    if drawn and (calibration is None or calibrate.is_drawn(calibration)):
        raise ValueError("text is drawn to go with a calibration text: give one, or more samples of `self`")
    settings = _Settings(amount, calib_memory, max_shard_bytes, overwrite, resume, report, time.monotonic())
    names = best.recipes(recipe)
    if names is not None and target is not None:
        raise ValueError(
            f"a target chooses the bits of one recipe, and {recipe} tries several: leave the target out, or name one "
            "recipe with it, such as guided-w4g128"
        )
    if names is not None and imatrix is not None:
        raise ValueError(
            f"{recipe} tries several recipes, which weigh errors by calibration text: leave the importance matrix out, "
            "or name one recipe with it, such as gptq-q4_k_m"
        )
    order = Order.take(src, dst, head, imatrix, calibration is not None, seed, device)
    choice = None
    if names is not None:
        if drawn and calibration is not None and not best.is_ladder(recipe):
            count = calibrate.count(calibration, amount) + drawn
            readies = (order.ready(name, count) for name in names)
            if not any(each.reads or order.weighs(each.plan) for each in readies):
                raise ValueError(f"{recipe}: these read text only to be chosen by: leave the drawn text out")

        def make(name: str, ids: list[list[int]], out: Path) -> float:
            trial = replace(order, dst=out)
            return _carry_out(trial, name, ids, replace(settings, overwrite=True), trial=True).bits_per_weight

        choice = best.for_output(
            names, order.source, calibration, amount, order.dst, overwrite, resume, make, order.ready, head, report,
            ladder=best.is_ladder(recipe), device=device,
        )  # fmt: skip
        recipe, calibration = choice.winner, choice.calibration
    while True:
        try:
            return _carry_out(
                order, recipe, calibration, settings, target=target, ladder=ladder, imatrix=imatrix,
                evaluation=evaluation, eval_tokens=eval_tokens, choice=choice,
            )  # fmt: skip
        except _Missed:
            settings = replace(settings, resume=True)  # with what was measured for the bits that did not do


class _Missed(Exception):
    """An output has not kept its target of KL, and bits can be chosen anew."""


@dataclass(frozen=True)
class _Settings:
    """What holds for an output and for each recipe that is tried on the way to it."""

    amount: calibrate.Amount
    calib_memory: int
    max_shard_bytes: int
    overwrite: bool
    resume: bool
    report: Progress
    began: float


def _carry_out(
    order: Order,
    recipe: str | Path | Recipe,
    calibration: Calibration | None,
    settings: _Settings,
    *,
    target: Target | None = None,
    ladder: Sequence[Scheme] | None = None,
    imatrix: str | Path | None = None,
    evaluation: str | Path | None = None,
    eval_tokens: int | None = None,
    choice: best.Choice | None = None,
    trial: bool = False,
) -> Compressed:
    """`compress` with one recipe. Of a `trial` nobody asks what kind of text it read: the one that is kept says it."""
    amount, resume, report, device = settings.amount, settings.resume, settings.report, order.device
    sequences, chosen = None if calibration is None else calibrate.count(calibration, amount) + amount.drawn, None
    ready = order.ready(recipe, sequences, target is not None)
    may_read = ready.reads or order.weighs(ready.plan) or ladder is not None  # some of which fix activation scales
    if amount.drawn and not (may_read or trial or choice is not None):
        raise ValueError(f"{ready.plan.name} reads no calibration text here: leave the drawn text out")
    texts = calibrate.is_text(calibration) or evaluation is not None
    tokenizer = Tokenizer.load(order.source.folder.path) if texts else None
    held_out = None if evaluation is None else _held_out(tokenizer, evaluation, eval_tokens)
    if target is not None:
        chosen = allocate.for_output(
            ready.checkpoint, ready.plan, target, ladder, calibration, amount, order.dst, settings.overwrite, resume,
            lambda plan: sum(f.size for f in order.output(plan, order.source).plans(settings.max_shard_bytes)),
            lambda plan: order.ready(plan, sequences, True), report, ready.output, order.weighs(ready.plan),
        )  # fmt: skip
        calibration = chosen.calibration
        ready = order.ready(chosen.allocation.recipe, len(calibration) + amount.drawn)
    files = ready.output.plans(settings.max_shard_bytes)
    made = (atomic_file if order.to_file else atomic_folder)(order.dst, settings.overwrite)
    with made as work, large_blocks_apart():
        if not resume:
            work.clear()
        hashes = ready.checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total))
        source = receipt.combined_hash(hashes)
        ids = more = None
        if calibration is not None and (ready.reads or order.weighs(ready.plan)):
            ids = calibrate.tokens(
                calibration, ready.checkpoint, tokenizer, amount, work.state / calibrate.drawn_name(source, amount),
                lambda done, total: report("sampling", done, total),
            )  # fmt: skip
            requirements.enough(ready.plan, len(ids))
            if amount.drawn:  # once for all recipes that are tried, in the folder of what is known of them
                place = order.dst.parent if trial else work.state
                if choice is not None and choice.folder is not None:
                    place = choice.folder
                besides = amount.besides(ids.shape[1])
                more = calibrate.written(
                    order.source, besides, place / calibrate.drawn_name(source, besides),
                    lambda done, total: report("drawing", done, total),
                )  # fmt: skip
        read = ids if ids is None or more is None else torch.cat([ids, more])
        about = receipt.environment() | {
            "source": source,
            "recipe": ready.plan.to_dict(),
            "calibration": None if read is None else calibrate.token_hash(read),
            "seed": order.seed,
            "shard": settings.max_shard_bytes,
        }
        about |= {"drawn": amount.drawn} if amount.drawn else {}
        about |= {} if device == "cpu" else {"device": device}
        about |= {} if imatrix is None else {"imatrix": receipt.sha256(Path(imatrix))}
        about |= {} if chosen is None else {"allocation": chosen.allocation.to_dict()}
        state = RunState.open(work.state, about, resume)
        run = Run(order, ready, work, state, ids, more, key(about), files, settings.calib_memory, report)
        run.gather()
        surprise = None if trial else run.surprise()
        run.walk()
        run.tune()
        reached = None if chosen is None else run.divergence(chosen.measured)
        if chosen is not None and reached is not None and chosen.again(reached):
            work.clear()  # first: a run that is killed here finds neither half of a walk by other bits
            chosen.aim_for_less(reached)
            report("target missed", len(chosen.allocation.aims), allocate.WALKS)
            raise _Missed
        cost = None if held_out is None else run.measure(held_out, tokenizer)
        given = next((search.read for search in (choice, chosen) if search is not None), ids)
        share = None if held_out is None or given is None else domain.shared(held_out, given)
        warnings, kinds = run.warnings(surprise, share), domain.to_dict(surprise, share)
        if chosen is not None and reached is not None:
            warnings += chosen.missed(reached)
            about["allocation"] = chosen.finished(reached)
        result = Compressed(
            order.dst,
            ready.plan.name,
            ready.plan.head_name,
            ready.output.bits_per_weight,
            sum(f.size for f in files),
            sum(f.size for f in order.source.folder.files.values()),
            time.monotonic() - settings.began,
            tuple(run.records),
            cost,
            ready.output.notes,
            warnings,
            None if chosen is None else chosen.allocation.bits_per_weight,
            reached,
            None if choice is None else choice.to_dict(),
            run.learned.get("tune"),
            kinds,
        )
        if isinstance(ready.output, Output):
            said = (result.recipe, result.head, result.bits_per_weight, result.bytes, cost, result.notes)
            (work.out / "README.md").write_text(model_card(*said, ready.output.method), encoding="utf-8")
        about |= run.learned
        about |= {} if choice is None else {"selection": result.selection}
        about |= {} if kinds is None else {"texts": kinds}
        about |= {"warnings": list(warnings)} if warnings else {}
        records = [asdict(record) for record in run.records]
        receipt.write(run.made, about, hashes, records, result.bits_per_weight, cost, run.probed)
    for search in (chosen, choice):
        if search is not None:
            search.forget()
    return result


def _held_out(tokenizer: Tokenizer | None, text: str | Path, limit: int | None) -> list[int]:
    assert tokenizer is not None
    ids = tokenizer.encode(read_text(text), add_special_tokens=False)[:limit]
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} token: at least 2 are needed to measure on")
    return ids

"""`compress`: a checkpoint in, a smaller one out, with a receipt of what it cost.

The walk goes block by block with one block in memory: read it, run the recipe on it, write it at its place in the
output, and run it again, now compressed, so that the next block is calibrated on what it will really see. Output files
are laid out before the first block, because their sizes follow from the schemes alone.

A killed run resumes. Its state on disk is one number, the blocks done, beside the hidden states that enter the next
block and the records gathered so far; tensors reach the disk before the number does. Everything random is drawn from
counters, so the bytes are those of an uninterrupted run, given the same torch build, instruction set and thread count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.gguf.writer import atomic_file
from attar.checkpoints.receipts import receipt
from attar.checkpoints.writer import MAX_SHARD, Workspace, atomic_folder
from attar.compression.block.record import Record
from attar.compression.calibration import domain
from attar.compression.calibration import texts as calibrate
from attar.compression.calibration.loss_weights import key
from attar.compression.calibration.texts import Calibration
from attar.compression.memory import large_blocks_apart
from attar.compression.outputs.folder import Output, model_card
from attar.compression.outputs.gguf import GgufOutput
from attar.compression.recipe import requirements
from attar.compression.recipe.recipe import Recipe
from attar.compression.request.order import Order, Ready
from attar.compression.request.settings import Settings
from attar.compression.runs.block_pass import Progress
from attar.compression.runs.run import Run, begin_anew
from attar.compression.search import best, bit_budget, candidates
from attar.compression.search import compare_rtn as gain
from attar.compression.search.bit_budget import Allocated
from attar.compression.search.compare_rtn import Gain
from attar.compression.search.target import Target
from attar.compression.state import RunState, put
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
    allocated: float | None = None  # bits a weight of the linears that a target chose for
    reached: float | None = None  # the KL of what came of them, on the text by which they were chosen
    selection: Mapping[str, Any] | None = None  # of several recipes: `best.Choice.to_dict`
    tuned: Mapping[str, Any] | None = None  # what tuning gained: `tune.Tuned.to_dict`
    texts: Mapping[str, Any] | None = None  # of what kind they are: `domain.to_dict`
    gain: Mapping[str, Any] | None = None  # over plain rounding, on text that was not read: `gain.Gain.to_dict`

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
            "gain": self.gain,
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
    kept that does best on calibration text set aside (`best`), and of `ablate-` with a name the steps that help there.
    `head` is what the output matrix is stored in, whatever the recipe says of it: `bf16` (as it is), `int8`, `int4`, or
    a scheme of weights alone. `calibration` is a text file, token ids [S][L], or `self` for text that the model writes;
    recipes that only round need none. With `drawn`, it is followed by so many sequences that the model writes: what
    several recipes, or the bits of a target, are chosen by, and what tuning judges by, is the given text alone.
    `imatrix` is an importance matrix for a GGUF file, which weighs errors by it; calibration alone gives one. With a
    `target`, each linear gets the scheme of `ladder` that `allocate` chooses, by default the recipe's with other
    bits; an output that misses a target of KL is made anew with more, twice at most, where there is more to choose, and
    of those that all miss it the nearest is kept. `evaluation` is a held-out text file on which the cost is measured.
    At most `calib_memory` bytes of calibration activations are held in memory. A killed run resumes, unless `resume` is
    false. On a `device` that is no CPU each block is moved there, run and solved there, and what came of it comes back
    to be written (`place`); the cost is measured there too, in bfloat16.

    Raises ValueError (CheckpointError among them) for anything a user can mend: an unknown recipe word, a group size
    that does not divide, an existing output, a full disk, a NaN in a named layer.
    """
    report = progress or (lambda stage, done, total: None)
    ops.require(device)
    amount = calibrate.Amount(samples, length, seed, drawn)
    if drawn and (calibration is None or calibrate.is_drawn(calibration)):
        raise ValueError("text is drawn to go with a calibration text: give one, or more samples of `self`")
    settings = Settings(amount, calib_memory, max_shard_bytes, overwrite, resume, report, time.monotonic())
    tries = candidates.candidates(recipe)
    if tries is not None and target is not None:
        raise ValueError(
            f"a target chooses the bits of one recipe, and {recipe} tries several: leave the target out, or name one "
            "recipe with it, such as guided-w4g128"
        )
    if tries is not None and imatrix is not None:
        raise ValueError(
            f"{recipe} tries several recipes, which weigh errors by calibration text: leave the importance matrix out, "
            "or name one recipe with it, such as gptq-q4_k_m"
        )
    order = Order.take(src, dst, head, imatrix, calibration is not None, seed, device)
    choice = None
    if tries is not None:
        if drawn and calibration is not None and not tries.ladder:
            count = calibrate.count(calibration, amount) + drawn
            readies = (order.ready(name, count) for name in tries.names)
            if not any(each.reads or order.weighs(each.plan) for each in readies):
                raise ValueError(f"{recipe}: these read text only to be chosen by: leave the drawn text out")

        def make(name: str, ids: list[list[int]], out: Path) -> float:
            trial = replace(order, dst=out)
            return _carry_out(trial, name, ids, replace(settings, overwrite=True), _Wish(trial=True)).bits_per_weight

        choice = best.for_output(tries, order, settings, calibration, make)
        recipe, calibration = choice.winner, choice.calibration
    wish = _Wish(target, ladder, imatrix, evaluation, eval_tokens, choice)
    return _carry_out(order, recipe, calibration, settings, wish)


@dataclass(frozen=True)
class _Wish:
    """What is wanted of one recipe. Of a `trial` nobody asks what kind of text it read: what is kept says it."""

    target: Target | None = None
    ladder: Sequence[Scheme] | None = None
    imatrix: str | Path | None = None
    evaluation: str | Path | None = None
    eval_tokens: int | None = None
    choice: best.Choice | None = None
    trial: bool = False


def _carry_out(
    order: Order, recipe: str | Path | Recipe, calibration: Calibration | None, settings: Settings, wish: _Wish
) -> Compressed:
    """`compress` with one recipe, by the bits that it names, or by those that a target chooses until they keep it."""
    drawn, chosen, reached = settings.amount.drawn, None, None
    sequences = None if calibration is None else calibrate.count(calibration, settings.amount) + drawn
    ready = order.ready(recipe, sequences, wish.target is not None)
    may_read = ready.reads or order.weighs(ready.plan) or wish.ladder is not None  # some of which fix activation scales
    if drawn and not (may_read or wish.trial or wish.choice is not None):
        raise ValueError(f"{ready.plan.name} reads no calibration text here: leave the drawn text out")
    texts = calibrate.is_text(calibration) or wish.evaluation is not None
    tokenizer = Tokenizer.load(order.source.folder.path) if texts else None
    held_out = None if wish.evaluation is None else _held_out(tokenizer, wish.evaluation, wish.eval_tokens)
    if wish.target is not None:
        chosen = bit_budget.for_output(order, ready, settings, wish.target, wish.ladder, calibration)
        calibration = chosen.calibration
    made = (atomic_file if order.to_file else atomic_folder)(order.dst, settings.overwrite)
    with made as work, large_blocks_apart():
        if not settings.resume:
            work.clear()
        hashes = order.source.folder.source_hashes(lambda done, total: settings.report("hashing", done, total))
        making = _Making(order, settings, wish, work, ready, calibration, tokenizer, hashes)
        while True:
            run = making.walked(chosen)
            if chosen is None:
                break
            reached = run.divergence(chosen.measured)
            if (other := chosen.after(reached)) is None:
                break
            begin_anew(work)  # first: a run that is killed here finds nothing of a walk by other bits
            other.note()
            settings.report("target missed", len(other.missed), bit_budget.WALKS)
            chosen = other
        gained = making.gain(run) if chosen is None and wish.choice is None and not wish.trial else None
        result = making.finished(run, held_out, chosen, reached, gained)
    for search in (chosen, wish.choice):
        if search is not None:
            search.forget()
    return result


@dataclass(frozen=True, eq=False)
class _Making:
    """An output being made in the folder `work`, of a recipe that is `asked`."""

    order: Order
    settings: Settings
    wish: _Wish
    work: Workspace
    asked: Ready
    calibration: Calibration | None
    tokenizer: Tokenizer | None
    hashes: Mapping[str, str]  # of the source's files

    def walked(self, chosen: Allocated | None) -> Run:
        """All blocks compressed and written, by the bits that were `chosen`, if any were. What is asked of the original
        is kept under a name that knows nothing of the choice: another one finds it again."""
        ready = self.asked
        if chosen is not None:
            sequences = len(chosen.calibration) + self.settings.amount.drawn
            ready = self.order.ready(chosen.allocation.recipe, sequences, targeted=True)
        given, drawn = self._texts(ready)
        about = self._about(given, drawn)
        name = key(about)
        if chosen is not None:
            about |= {"recipe": ready.plan.to_dict(), "allocation": chosen.allocation.to_dict()}
        state = RunState.open(self.work.state, about, self.settings.resume)
        run = Run(self.order, ready, self.settings, self.work, state, given, drawn, name)
        run.gather()
        if not self.wish.trial:
            run.look()
        run.walk()
        run.tune()
        return run

    def _texts(self, ready: Ready) -> tuple[Tensor | None, Tensor | None]:
        """The calibration text [S, L] that a recipe reads, and what the model writes to go with it, [D, L]."""
        if self.calibration is None or not (ready.reads or self.order.weighs(ready.plan)):
            return None, None
        amount, report, state = self.settings.amount, self.settings.report, self.work.state
        source = receipt.combined_hash(self.hashes)
        given = calibrate.tokens(
            self.calibration, ready.checkpoint, self.tokenizer, amount, state / calibrate.drawn_name(source, amount),
            lambda done, total: report("sampling", done, total),
        )  # fmt: skip
        requirements.enough(ready.plan, len(given))
        if not amount.drawn:
            return given, None
        place = self.order.dst.parent if self.wish.trial else state
        if self.wish.choice is not None and self.wish.choice.folder is not None:
            place = self.wish.choice.folder  # once for all recipes that are tried, where what is known of them is kept
        besides = amount.besides(given.shape[1])
        return given, calibrate.written(
            self.order.source, besides, place / calibrate.drawn_name(source, besides),
            lambda done, total: report("drawing", done, total),
        )  # fmt: skip

    def _about(self, given: Tensor | None, drawn: Tensor | None) -> dict[str, Any]:
        """All that is asked, for the receipt and for whoever resumes."""
        read = given if given is None or drawn is None else torch.cat([given, drawn])
        about = receipt.environment() | {
            "source": receipt.combined_hash(self.hashes),
            "recipe": self.asked.plan.to_dict(),
            "calibration": None if read is None else calibrate.token_hash(read),
            "seed": self.order.seed,
            "shard": self.settings.max_shard_bytes,
        }
        about |= {"drawn": self.settings.amount.drawn} if self.settings.amount.drawn else {}
        about |= {} if self.order.device == "cpu" else {"device": self.order.device}
        return about | ({} if self.wish.imatrix is None else {"imatrix": receipt.sha256(Path(self.wish.imatrix))})

    def gain(self, run: Run) -> Gain | None:
        """The output beside plain rounding, on text that nothing here has read. None where a recipe reads none or there
        is no more of its kind, and where this machine has too little memory to compare, which is reported."""
        rounded, state, amount = gain.plain(run.plan), self.work.state, self.settings.amount
        if self.calibration is None or run.given is None or rounded is None:
            return None
        kept = state / f"gain-{run.name}.json"
        if kept.is_file():
            return Gain.from_dict(json.loads(kept.read_bytes()))
        source = self.order.source
        if not gain.fits(source):
            self.settings.report("comparing with plain rounding takes too much memory", 1, 1)
            return None
        unread = replace(amount, samples=gain.SEQUENCES, seed=gain.UNREAD + amount.seed)
        drawn = state / calibrate.drawn_name(receipt.combined_hash(self.hashes), unread)
        ids = gain.sequences(self.calibration, source, self.tokenizer, amount, drawn)
        if ids is None:
            return None
        importances = self.order.importances
        if isinstance(run.output, GgufOutput) and run.plan.rotate is None:  # once is enough, but for turned inputs
            importances = run.output.importances
        dst = state / ("plain.gguf" if self.order.to_file else "plain")
        trial = replace(self.order, dst=dst, importances=importances)
        quiet = replace(self.settings, overwrite=True, report=lambda stage, done, total: None)
        made = _carry_out(trial, rounded, run.given.tolist(), quiet, _Wish(trial=True))
        found = gain.compare(source.folder.path, run.made, made.path, ids, self.settings.report)
        put(kept, found.to_dict())
        return found

    def finished(
        self,
        run: Run,
        held_out: list[int] | None,
        chosen: Allocated | None,
        reached: float | None,
        gained: Gain | None,
    ) -> Compressed:
        """What the output cost and what is to be said of it, with the receipt and the model card written."""
        choice, output, about = self.wish.choice, run.output, dict(run.state.about)
        cost = None if held_out is None else run.measure(held_out, self.tokenizer)
        given = next((search.read for search in (choice, chosen) if search is not None), run.given)
        share = None if held_out is None or given is None else domain.shared(held_out, given)
        warnings, kinds = run.warnings(share), domain.to_dict(run.surprise, share)
        if chosen is not None and reached is not None:
            warnings += chosen.warnings(reached)
            about["allocation"] = chosen.finished(reached)
        if gained is not None:
            warnings += gained.warnings(run.plan.name)
            about["gain"] = gained.to_dict()
        result = Compressed(
            self.order.dst,
            run.plan.name,
            run.plan.head_name,
            output.bits_per_weight,
            sum(f.size for f in run.files),
            sum(f.size for f in self.order.source.folder.files.values()),
            time.monotonic() - self.settings.began,
            tuple(run.records),
            cost,
            output.notes,
            warnings,
            None if chosen is None else chosen.allocation.bits_per_weight,
            reached,
            None if choice is None else choice.to_dict(),
            run.learned.get("tune"),
            kinds,
            None if gained is None else gained.to_dict(),
        )
        if isinstance(output, Output):
            said = (result.recipe, result.head, result.bits_per_weight, result.bytes, cost, result.notes)
            (self.work.out / "README.md").write_text(model_card(*said, output.method), encoding="utf-8")
        about |= run.learned
        about |= {} if choice is None else {"selection": result.selection}
        about |= {} if kinds is None else {"texts": kinds}
        about |= {"warnings": list(warnings)} if warnings else {}
        records = [asdict(record) for record in run.records]
        receipt.write(run.made, about, self.hashes, records, result.bits_per_weight, cost, run.probed)
        return result


def _held_out(tokenizer: Tokenizer | None, text: str | Path, limit: int | None) -> list[int]:
    assert tokenizer is not None
    ids = tokenizer.encode(read_text(text), add_special_tokens=False)[:limit]
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} token: at least 2 are needed to measure on")
    return ids

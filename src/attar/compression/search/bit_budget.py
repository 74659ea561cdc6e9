"""The bits of one output: chosen before its block pass, and chosen anew where the output misses a target of KL.

The block pass does what measurements leave out (`allocate.py`), so its output may cost more than was measured. Then the
aim is lowered by as much as the target was missed, and a pass by other bits follows (`Allocated.after`). That choice
finds all candidates rounded. For a target of KL they stay on disk until the output is there, and those of the default
candidates take twice the space of the model in 16 bits.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts.receipt import combined_hash
from attar.checkpoints.sources import hf
from attar.compression.calibration import texts
from attar.compression.calibration.amount import count_sequences, drawn_name, is_drawn
from attar.compression.calibration.loss_weights import key
from attar.compression.recipe import requirements
from attar.compression.recipe.recipe import Override, Recipe
from attar.compression.request.resolve import ResolvedCompression
from attar.compression.resume import Log
from attar.compression.rotation.rotated import RotatedCheckpoint
from attar.compression.search.allocate import Allocation, Allocator, Storage
from attar.compression.search.sensitivity import apart, divisible
from attar.compression.search.target import Group, candidates_for, reachable, rounding_for, undecided
from attar.compression.training import tune
from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.model import assembly
from attar.model.assembly import all_compressible
from attar.model.decoder import Decoder
from attar.progress import Progress

WALKS = 3  # maximal block passes to keep a target of KL
SLACK = 0.98  # factor on a lowered aim


@dataclass(frozen=True, eq=False)
class Allocated:
    """An allocation for one output. The block pass continues with the calibration tokens in `read` [S, L] on which
    nothing was chosen; choices were made by the others, `measured` [T, L]."""

    allocation: Allocation
    calibration: list[list[int]]
    read: Tensor
    measured: Tensor
    aims: tuple[float, ...]  # for a target of KL: it, then the aim of each later pass
    missed: tuple[float, ...]  # divergences of earlier outputs, each more than the target
    _bits: Allocator
    _load: Callable[[], Decoder]  # the original, rotated if the recipe says so
    _key: str  # of all that outputs depend on: misses of other recipes do not count
    _drawn: Path  # calibration text sampled from the model, if any

    def finished(self, kl: float) -> dict[str, Any]:
        """Return the receipt's entry, once the output has the mean divergence `kl` on `measured`."""
        walks = {"kl_aims": list(self.aims), "kl_missed": list(self.missed)}
        return self.allocation.to_dict() | walks | {"kl_finished": kl}

    def after(self, kl: float) -> Allocated | None:
        """Return the next allocation, for an output with the mean divergence `kl` on `measured`; None where it is kept.
        The block pass does what is not part of measurements, and it rounds for the outputs of earlier blocks that are
        already rounded: so an output may miss its target. Then the aim is lowered, until `WALKS` passes were made or no
        larger choice is left. If all outputs missed, the nearest is kept. An earlier one is made again, to the same
        bytes, which is simpler than keeping them all and takes no space."""
        goal, found, missed = self.allocation.target.kl, self.allocation, (*self.missed, kl)
        if goal is None or kl <= goal or self.aims[-1] in self.aims[:-1]:  # remade, as the nearest of all
            return None
        if len(missed) < WALKS and set(found.choice) != {len(found.candidates) - 1}:
            # Less than was measured, hence another choice, unless the front ends.
            aim = SLACK * min(self.aims[-1], found.measured) * goal / kl
            if (closer := self._choose(aim)).measured < found.measured:
                return replace(self, allocation=closer, aims=(*self.aims, aim), missed=missed)
        if (least := min(missed)) < kl:
            aim = self.aims[missed.index(least)]
            return replace(self, allocation=self._choose(aim), aims=(*self.aims, aim), missed=missed)
        return None

    def _choose(self, aim: float) -> Allocation:
        return self._bits.choose(self._load(), aim)

    def note(self) -> None:
        """Record this allocation for a run that resumes."""
        self._bits.log.put(self._key, [self.aims, self.missed])

    def warnings(self, kl: float) -> tuple[str, ...]:
        """Return warnings about an output that is kept although its divergence exceeds the target."""
        goal = self.allocation.target.kl
        if goal is None or kl <= goal:
            return ()
        return (
            f"the output's KL is {kl:.4g} on the text that bits were chosen by, more than the target of {goal:.4g}: "
            f"groups rounded one by one came to {self.allocation.measured:.4g}; name larger schemes, or ask for less",
        )

    def forget(self) -> None:
        """Remove the files that resuming would need."""
        Log.remove(self._bits.file)
        self._drawn.unlink(missing_ok=True)


def for_output(resolved: ResolvedCompression, report: Progress) -> Allocated:
    """Allocate for the target of a request; measurements are kept beside the output until it is there. A run that
    resumes continues with those of a killed one. Every candidate scheme is checked before anything is sampled or
    measured. Raises ValueError as `Allocator`, where there is nothing to calibrate on, and where the output exists."""
    request, recipe, checkpoint = resolved.request, resolved.recipe, resolved.checkpoint
    target, calibration, amount = request.target, request.calibration, request.amount
    assert target is not None
    if request.path.exists() and not request.overwrite:  # fails now, not after all measurements
        raise UserError(
            "output_exists", f"{request.path} exists and is kept; choose another output, or pass --overwrite"
        )
    rounding_for(recipe)
    candidates = target.candidates or candidates_for(recipe)
    if calibration is None:
        raise UserError(
            "calibration_missing",
            "a target needs calibration to measure on: give --calib a text file, or `self` to sample it",
        )
    sequences = count_sequences(calibration, amount)
    divisible(sequences)
    trials = list(_trials(checkpoint, recipe, candidates))
    recipe.check_read(trials)
    for trial in trials:
        resolved.with_recipe(trial, sequences + amount.drawn)
    names = checkpoint.config.names
    stored = checkpoint.folder.info(checkpoint.stored_name(f"{names.layer.format(i=0)}.{names.output}.weight")).dtype
    free = undecided(recipe, all_compressible(checkpoint.config))
    if free:
        whole = Group(0, tuple(free), tuple(map(checkpoint.linear_shape, free)))
        reachable(target, [whole], [scheme.with_scale_dtype(stored) for scheme in candidates])
    tokenizer = texts.tokenizer_for(calibration, checkpoint.folder.path)
    dst = request.path.absolute()
    dst.parent.mkdir(parents=True, exist_ok=True)
    file = dst.parent / f".{dst.name}.attar-allocation.jsonl"
    source = ""
    if is_drawn(calibration):
        source = combined_hash(checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total)))
    drawn = file.with_suffix(f".{drawn_name(source, amount)}")
    if not request.resume:
        Log.remove(file)
        drawn.unlink(missing_ok=True)
    ids = texts.tokens(calibration, resolved.source, tokenizer, amount, drawn, partial(report, "sampling"))
    rest, measured = apart(ids)
    seen = rest
    if recipe.tune is not None:  # tuning judges by text that nothing before it has seen
        requirements.enough(recipe, len(rest))
        seen = tune.without_judges(rest)

    def bytes_of(plan: Recipe) -> int:
        output = resolved.layout(replace(plan, said=()))  # another choice may read options that this one does not
        return sum(each.size for each in output.plans(request.max_shard_bytes))

    def load() -> Decoder:
        wide = copy.copy(checkpoint)
        wide.dtype = torch.float32
        if isinstance(wide, RotatedCheckpoint):
            wide.rounded = {*wide.rounded, *free}  # also linears that the recipe alone would keep
        return assembly.build(wide.config, wide)

    model = load()
    storage = Storage(resolved.output, resolved.weighs, stored, bytes_of)
    original = None if recipe.rotate is None else lambda: hf.load_again(resolved.source, torch.float32)
    bits = Allocator(model, recipe, target, (seen, measured), file, storage, report, original)
    about = {"recipe": recipe.to_dict(), "target": target.to_dict(), "calibration": texts.token_hash(ids)}
    walks = f"walks of {key(about | {'seed': request.seed, 'drawn': amount.drawn, 'device': request.device})}"
    aims, missed = map(tuple, bits.log.get(walks) or ([] if target.kl is None else [target.kl], []))
    found = bits.choose(model, aims[-1] if aims else None)
    return Allocated(found, rest.tolist(), ids, measured, aims, missed, bits, load, walks, drawn)


def _trials(checkpoint: hf.Checkpoint, recipe: Recipe, candidates: Sequence[Scheme]) -> Iterator[Recipe]:
    """Yield the recipe with each candidate scheme in turn, to check against the model. Only one linear of each kind
    and shape that can be chosen for gets an override: overrides for every linear, all experts of a mixture among them,
    take long."""
    kinds: dict[tuple[str, tuple[int, int]], str] = {}
    for name in undecided(recipe, all_compressible(checkpoint.config)):
        kinds.setdefault((re.sub(r"\d+", "", name), checkpoint.linear_shape(name)), name)
    for scheme in candidates:
        yield replace(recipe, overrides=(*recipe.overrides, *(Override(name, scheme) for name in kinds.values())))

"""Bit allocation: which linears get how many bits, by what each choice does to the model's predictions.

Uniform bits spend as much on linears that hardly matter as on those that do. Here every group of linears is compressed
alone, with each scheme of a ladder, and the divergence from the original is measured (`sensitivity.py`; forward passes
only). A multiple-choice knapsack (`knapsack.py`) then spends the budget where it buys most, as if damages added up.
They do not quite: errors meet in later layers. So the choice is measured whole, then each group one scheme up and one
down around it, and the knapsack decides again among those neighbours; a step is kept only if the whole model is closer
for it. (The local search of EvoPress, Sieberling et al. 2024, arXiv:2410.14649, with measured steps for random ones.)

What comes out is a recipe with an override for each linear, which the usual walk then runs with all of its methods:
transforms, guides and corrections are not part of the measurements, which the receipt says (`unmeasured`); nor is text
that the model writes to go with what was given. The output matrix, overrides and what a recipe keeps are left as the
recipe says; so is what the mix of a GGUF file makes of the ends of a model. What that costs is part of every divergence
of the whole model, and so of a target of KL. Where the output misses such a target nevertheless, less is aimed for, by
as much as it was missed, and a walk by other bits follows (`Allocated.after`). That choice finds all candidates
rounded: for a target of KL they stay on disk until the output is there, and those of the default ladder take twice the
room of a model in 16 bits.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints import hf
from attar.checkpoints.receipt import combined_hash
from attar.checkpoints.writer import allocated, require_free
from attar.compression import calibrate, knapsack, requirements, tune
from attar.compression.calibrate import Calibration
from attar.compression.gguf_output import GgufOutput
from attar.compression.guide import key
from attar.compression.order import Order, Ready
from attar.compression.output import Output
from attar.compression.recipe import Override, Recipe
from attar.compression.sensitivity import Choice, Group, Log, Trial, apart, divisible, fingerprint, groups_of
from attar.compression.settings import Settings
from attar.compression.target import Target, ladder_for, rounding_for
from attar.formats.scheme import Scheme
from attar.model.decoder import Decoder, all_compressible

ROUNDS = 3  # of steps around the choice
WALKS = 3  # to keep a target of KL, at most
SLACK = 0.98  # of what would just do, where less is aimed for
HEADER = 64  # bytes a linear by which the headers of files may differ between schemes

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total)"""


@dataclass(frozen=True, eq=False)
class Allocation:
    """What was chosen: `choice` [G] indexes `ladder`; `alone` [G][C] are the divergences with one group compressed.

    `measured` is the divergence of the whole model as chosen, `unrefined` that of the first choice, and `uniform` that
    of each scheme for all groups: all on the same tokens, each group rounded by itself.
    """

    recipe: Recipe
    target: Target
    ladder: tuple[Scheme, ...]
    groups: tuple[Group, ...]
    alone: tuple[tuple[float, ...], ...]
    choice: Choice
    unrefined: float
    measured: float
    uniform: tuple[float, ...]
    tokens: int
    calibration: str  # the hash of the tokens that calibrated
    selection: str  # of those that divergences were measured on

    @property
    def bits_per_weight(self) -> float:
        return _bits(self.groups, self.ladder, self.choice)

    def to_dict(self) -> dict[str, Any]:
        """For the receipt."""
        each_uniform = [
            {"bits": _bits(self.groups, self.ladder, (c,) * len(self.groups)), "kl": kl}
            for c, kl in enumerate(self.uniform)
        ]
        return {
            "target": self.target.to_dict(),
            "ladder": [scheme.name for scheme in self.ladder],
            "calibration": self.calibration,
            "selection": self.selection,
            "rounding": self.recipe.rounding.method,
            "without": unmeasured(self.recipe, self.ladder),
            "tokens": self.tokens,
            "bits": self.bits_per_weight,
            "kl": self.measured,
            "kl_unrefined": self.unrefined,
            "uniform": each_uniform,
            "groups": [
                {
                    "layer": group.layer,
                    "linears": list(group.linears),
                    "weights": group.weights,
                    "kl": list(row),
                    "chosen": self.ladder[chosen].name,
                }
                for group, row, chosen in zip(self.groups, self.alone, self.choice, strict=True)
            ],
        }


def unmeasured(recipe: Recipe, ladder: Sequence[Scheme] = ()) -> list[str]:
    """What of a recipe and its ladder is not part of measurements, and follows in the walk or when the model runs:
    methods, options of its rounding, and the rounding of activations, for weights alone are swapped."""
    found = [each.method for each in recipe.passes[:-1]]
    found += [name for name in ("polish", "guide", "couple", "correct") if getattr(recipe.rounding, name, False)]
    found += [] if recipe.tune is None else [recipe.tune.method]
    used = [*ladder, *(each.scheme for each in recipe.overrides if each.scheme is not None)]
    return found + ["activation rounding"] * any(scheme.activation is not None for scheme in used)


@dataclass(frozen=True, eq=False)
class Allocated:
    """An allocation for one output, with the calibration tokens for the walk to go on with, which are those `read`
    [S, L] that nothing was chosen on; by the others, `measured` [T, L], choices were made."""

    allocation: Allocation
    calibration: list[list[int]]
    read: Tensor
    measured: Tensor
    aims: tuple[float, ...]  # for a target of KL: it, then what each later walk aimed for
    missed: tuple[float, ...]  # the divergences of the outputs before this one, each more than the target
    _bits: Allocator
    _folder: Path  # of the original
    _key: str  # of all that outputs depend on: another recipe's misses are not this one's
    _drawn: Path  # what was drawn from the model to calibrate on, if anything

    def finished(self, kl: float) -> dict[str, Any]:
        """For the receipt, once the output itself has the mean divergence `kl` on `measured`."""
        walks = {"kl_aims": list(self.aims), "kl_missed": list(self.missed)}
        return self.allocation.to_dict() | walks | {"kl_finished": kl}

    def after(self, kl: float) -> Allocated | None:
        """What to walk by next, for the output has the mean divergence `kl` on `measured`; None where it is kept.

        The walk does what is not part of measurements, and it rounds what earlier blocks, already rounded, make of the
        text: so an output may miss its target. Then less is aimed for, until `WALKS` were made or nothing larger is
        there to choose. Of outputs that all missed the nearest is kept: an earlier one is made again, to the same
        bytes, which is simpler than keeping them all and takes no room.
        """
        goal, found, missed = self.allocation.target.kl, self.allocation, (*self.missed, kl)
        if goal is None or kl <= goal or self.aims[-1] in self.aims[:-1]:  # made again, and nearer than all others
            return None
        if len(missed) < WALKS and set(found.choice) != {len(found.ladder) - 1}:
            # Less than was measured, hence another choice than this, unless the front ends before.
            aim = SLACK * min(self.aims[-1], found.measured) * goal / kl
            if (closer := self._choose(aim)).measured < found.measured:
                return replace(self, allocation=closer, aims=(*self.aims, aim), missed=missed)
        if (least := min(missed)) < kl:
            aim = self.aims[missed.index(least)]
            return replace(self, allocation=self._choose(aim), aims=(*self.aims, aim), missed=missed)
        return None

    def _choose(self, aim: float) -> Allocation:
        return self._bits.choose(hf.load(self._folder, torch.float32), aim)

    def note(self) -> None:
        """Have a run that resumes go on with this one."""
        self._bits.log.put(self._key, [self.aims, self.missed])

    def warnings(self, kl: float) -> tuple[str, ...]:
        """What to say of an output that is kept, although its divergence is more than the target allows."""
        goal = self.allocation.target.kl
        if goal is None or kl <= goal:
            return ()
        return (
            f"the output's KL is {kl:.4g} on the text that bits were chosen by, more than the target of {goal:.4g}: "
            f"groups rounded one by one came to {self.allocation.measured:.4g}; name larger schemes, or ask for less",
        )

    def forget(self) -> None:
        """Remove what resuming would need."""
        Log.remove(self._bits.file)
        self._drawn.unlink(missing_ok=True)


def for_output(
    order: Order,
    ready: Ready,
    settings: Settings,
    target: Target,
    ladder: Sequence[Scheme] | None,
    calibration: Calibration | None,
) -> Allocated:
    """Allocate for the output of an order, beside which the measurements are kept until it is there; a run that resumes
    goes on with those of a killed one. Whether a recipe can be made is asked for every scheme of the ladder before
    anything is drawn or measured.

    Raises ValueError as `Allocator`, where there is nothing to calibrate on, and where the output exists.
    """
    if order.dst.exists() and not settings.overwrite:  # said now, not after all measurements
        raise ValueError(f"{order.dst} exists and is kept; choose another output, or pass --overwrite")
    recipe, checkpoint, amount, report = ready.plan, ready.checkpoint, settings.amount, settings.report
    rounding_for(recipe)
    ladder = tuple(ladder or ladder_for(recipe))
    if calibration is None:
        raise ValueError("a target needs calibration to measure on: give --calib a text file, or `self` to sample it")
    sequences = calibrate.count(calibration, amount)
    divisible(sequences)
    for rung in _rungs(checkpoint, recipe, ladder):
        order.ready(rung, sequences + amount.drawn, targeted=True)
    names = checkpoint.config.names
    first = f"{names.layer.format(i=0)}.{names.output}.weight"
    stored = checkpoint.folder.info(checkpoint.stored_name(first)).dtype
    if free := _free(checkpoint, recipe):
        whole = Group(0, tuple(free), tuple(map(checkpoint.linear_shape, free)))
        _reachable(target, [whole], [scheme.with_scale_dtype(stored) for scheme in ladder])
    folder = checkpoint.folder.path
    tokenizer = calibrate.tokenizer_for(calibration, folder)
    dst = order.dst.absolute()
    dst.parent.mkdir(parents=True, exist_ok=True)
    file = dst.parent / f".{dst.name}.attar-allocation.jsonl"
    source = ""
    if calibrate.is_drawn(calibration):
        source = combined_hash(checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total)))
    drawn = file.with_suffix(f".{calibrate.drawn_name(source, amount)}")
    if not settings.resume:
        Log.remove(file)
        drawn.unlink(missing_ok=True)
    ids = calibrate.tokens(
        calibration, checkpoint, tokenizer, amount, drawn, lambda done, total: report("sampling", done, total)
    )
    rest, measured = apart(ids)
    seen = rest
    if recipe.tune is not None:  # which judges by text that nothing before it has seen
        requirements.enough(recipe, len(rest))
        seen = tune.without_judges(rest)

    def bytes_of(plan: Recipe) -> int:
        return sum(each.size for each in order.output(plan, order.source).plans(settings.max_shard_bytes))

    decoder = hf.load(folder, torch.float32)
    bits = Allocator(
        decoder, recipe, target, ladder, seen, measured, file, stored, bytes_of, report, ready.output,
        order.weighs(recipe),
    )  # fmt: skip
    about = {"recipe": recipe.to_dict(), "target": target.to_dict(), "calibration": calibrate.token_hash(ids)}
    walks = f"walks of {key(about | {'seed': order.seed, 'drawn': amount.drawn, 'device': order.device})}"
    aims, missed = map(tuple, bits.log.get(walks) or ([] if target.kl is None else [target.kl], []))
    found = bits.choose(decoder, aims[-1] if aims else None)
    return Allocated(found, rest.tolist(), ids, measured, aims, missed, bits, folder, walks, drawn)


def _rungs(checkpoint: hf.Checkpoint, recipe: Recipe, ladder: Sequence[Scheme]) -> Iterator[Recipe]:
    """The recipe with each scheme of the ladder in turn, to be held against the model: for one linear of each kind and
    shape that can be chosen for, since overrides for every linear, all experts of a mixture among them, take long."""
    kinds: dict[tuple[str, tuple[int, int]], str] = {}
    for name in _free(checkpoint, recipe):
        kinds.setdefault((re.sub(r"\d+", "", name), checkpoint.linear_shape(name)), name)
    for scheme in ladder:
        overrides = (Override(name, scheme) for name in kinds.values())
        yield replace(recipe, overrides=(*recipe.overrides, *overrides))


def _free(checkpoint: hf.Checkpoint, recipe: Recipe) -> list[str]:
    """The linears about which neither an override nor `keep` decides."""
    decided = [*(override.match for override in recipe.overrides), *recipe.keep]
    names = all_compressible(checkpoint.config)
    return [name for name in names if not any(fnmatch.fnmatchcase(name, match) for match in decided)]


def _reachable(target: Target, groups: Sequence[Group], ladder: Sequence[Scheme]) -> None:
    """Raise ValueError where a target of bits lies outside what the ladder can give."""
    if target.bits is None or len(ladder) < 2:
        return
    ends = sorted((_bits(groups, (scheme,), (0,) * len(groups)), scheme.name) for scheme in ladder)
    (least, smallest), (most, largest) = ends[0], ends[-1]
    if not least <= target.bits <= most:
        least, most = math.ceil(1e3 * least) / 1e3, math.floor(1e3 * most) / 1e3  # both can be asked for
        raise ValueError(
            f"{target.bits:g} bits a weight are out of reach: the linears take {least:g} with {smallest} everywhere, "
            f"and {most:g} with {largest}"
        )


class Allocator:
    """Schemes of a ladder chosen for every group of a dense decoder, as often as is asked: each choice costs what none
    before it has measured. `log` keeps that. Deterministic, given the same torch, machine and threads."""

    def __init__(
        self,
        decoder: Decoder,
        recipe: Recipe,
        target: Target,
        ladder: Sequence[Scheme],
        ids: Tensor,
        measured: Tensor,
        file: Path,
        scale_dtype: str = "float32",
        bytes_of: Callable[[Recipe], int] | None = None,
        progress: Progress | None = None,
        output: Output | GgufOutput | None = None,
        weighs: bool = False,
    ) -> None:
        """`ids` [S, L] are calibration tokens, `measured` [T, L] others, on which divergences are measured. `file` is
        the log's. `scale_dtype` is what scales are stored in. `bytes_of` says how many bytes the weight files of a
        recipe have, for a target of bytes. `output` says how all is stored that is not chosen for, None: as it is;
        `weighs`, whether the walk rounds with importances that it measures.

        Raises ValueError where no choice keeps the target, a scheme does not fit a linear, or there is nothing to
        choose.
        """
        self._recipe, self._target, self._ids, self._measured = recipe, target, ids, measured
        self._progress, self._output, self._weighs, self.file = progress, output, weighs, file
        self._rounding, self._groups = rounding_for(recipe), groups_of(decoder, recipe)
        _check(self._groups, ladder)
        named = {scheme.name: scheme.with_scale_dtype(scale_dtype) for scheme in ladder}
        self._ladder = tuple(sorted(named.values(), key=lambda scheme: sum(g.bytes(scheme) for g in self._groups)))
        if len(self._ladder) < 2:
            raise ValueError("a ladder has at least two schemes to choose among")
        self._budget = _budget(target, self._groups, self._ladder, recipe, bytes_of)
        self.log = Log(
            file, fingerprint(decoder, self._groups, self._ladder, self._rounding, ids, measured, output, weighs)
        )

    def choose(self, decoder: Decoder, aim: float | None = None) -> Allocation:
        """The choice of what the target asks for. `aim` is for a target of KL that outputs have missed: a lower one.

        Raises ValueError where not even the largest schemes keep a target of KL.
        """
        groups, ladder, count = self._groups, self._ladder, len(self._groups)
        goal, budget = self._target.kl, self._budget
        aim = goal if aim is None else aim
        done, total = 0, count * (len(ladder) + 2 * ROUNDS)

        def told() -> None:
            nonlocal done
            done = min(done + 1, total)
            if self._progress is not None:
                self._progress("allocating", done, total)

        finished = f"{self._target.to_dict()}, {budget}, {aim}"
        if (known := self.log.get(finished)) is not None:  # the run was killed after this
            return self._allocation(known)
        if goal is not None:  # which outputs may miss, whereupon candidates are wanted again
            size = sum(group.bytes(scheme) for group in groups for scheme in ladder)
            require_free(self.log.folder, size - allocated(self.log.folder.glob("*/*")))
        trial = Trial(
            decoder, groups, ladder, self._rounding, self._ids, self._measured, self.log, told, self._output,
            self._weighs, keeps=goal is not None,
        )  # fmt: skip
        alone = trial.alone()
        front = knapsack.front([
            [(group.bytes(scheme), cost) for scheme, cost in zip(ladder, row, strict=True)]
            for group, row in zip(groups, alone, strict=True)
        ])  # fmt: skip
        if budget is None:
            assert goal is not None
            assert aim is not None
            at = _smallest_within(front, goal, aim, trial)
        else:
            within = front.within(budget)
            assert within is not None, "the smallest choice is on the front, and within the budget"
            at = within
        first = front.choice(at)
        unrefined = trial.whole(first)
        choice, refined = refine(trial, first, unrefined, int(front.bytes[at]) if budget is None else budget)
        uniform = [trial.whole((c,) * count) for c in range(len(ladder))]
        value = {"choice": choice, "unrefined": unrefined, "measured": refined, "uniform": uniform, "alone": alone}
        value["tokens"] = trial.tokens
        self.log.put(finished, value)
        done = total
        told()
        return self._allocation(value)

    def _allocation(self, value: Mapping[str, Any]) -> Allocation:
        """What the log holds of a choice."""
        choice = tuple(value["choice"])
        plain = [Scheme.parse(scheme.name) for scheme in self._ladder]  # what stores it says the dtype of its scales
        chosen = zip(self._groups, choice, strict=True)
        overrides = [Override(name, plain[c]) for group, c in chosen for name in group.linears]
        return Allocation(
            replace(self._recipe, overrides=(*self._recipe.overrides, *overrides)), self._target, self._ladder,
            tuple(self._groups), tuple(map(tuple, value["alone"])), choice, value["unrefined"], value["measured"],
            tuple(value["uniform"]), value["tokens"], calibrate.token_hash(self._ids),
            calibrate.token_hash(self._measured),
        )  # fmt: skip


def _check(groups: Sequence[Group], ladder: Sequence[Scheme]) -> None:
    """Raise ValueError, naming the linear, where a scheme does not fit it."""
    for group in groups:
        for name, (_, columns) in zip(group.linears, group.shapes, strict=True):
            for scheme in ladder:
                try:
                    scheme.check(columns)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None


def _bits(groups: Sequence[Group], ladder: Sequence[Scheme], choice: Choice) -> float:
    size = sum(group.bytes(ladder[chosen]) for group, chosen in zip(groups, choice, strict=True))
    return 8 * size / sum(group.weights for group in groups)


def _budget(
    target: Target,
    groups: Sequence[Group],
    ladder: Sequence[Scheme],
    recipe: Recipe,
    bytes_of: Callable[[Recipe], int] | None,
) -> int | None:
    """Bytes that the groups may take; None where the target is a divergence. Raises ValueError where the smallest
    choice takes more, or bits are asked for that the largest does not."""
    if target.kl is not None:
        return None
    _reachable(target, groups, ladder)
    least = sum(group.bytes(ladder[0]) for group in groups)
    if target.bits is not None:
        budget = math.floor(target.bits * sum(group.weights for group in groups) / 8)
    else:
        assert target.size is not None
        assert bytes_of is not None, "a size is of files, which the caller lays out"
        smallest = [Override(name, ladder[0]) for group in groups for name in group.linears]
        headers = HEADER * sum(len(group.linears) for group in groups)
        whole = bytes_of(replace(recipe, overrides=(*recipe.overrides, *smallest)))
        budget = target.size - (whole - least) - headers
    if budget < least:
        over = f"{least - budget:,} bytes more than the target leaves"
        raise ValueError(f"with {ladder[0].name} everywhere the linears take {least:,} bytes, {over}")
    return budget


def _smallest_within(found: knapsack.Front, goal: float, aim: float, trial: Trial) -> int:
    """The smallest point of the front whose choice, measured, has at most the divergence `aim`, by bisection: along the
    front it falls, but for noise far below the difference of most points. The last point, if none has.

    Raises ValueError where even that has more than `goal`.
    """
    low, high = -1, len(found) - 1
    if (least := trial.whole(found.choice(high))) > goal:
        raise ValueError(
            f"a KL of {goal:g} cannot be kept: with the largest schemes it is {least:.3g}; name larger ones, or allow "
            "more"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if trial.whole(found.choice(middle)) <= aim:
            high = middle
        else:
            low = middle
    return high


def refine(trial: Trial, choice: Choice, measured: float, budget: int) -> tuple[Choice, float]:
    """Step from a choice, whose divergence is `measured`, to neighbours that the model is closer with, within `budget`
    bytes; returns the last choice and its divergence.

    In each round every group is measured one scheme up and one down, the others as chosen. The knapsack takes the best
    of these steps together; where that is no gain, only the four, then the two that promise most; then the search ends.
    """
    for _ in range(ROUNDS):
        steps = trial.neighbours(choice)
        for limit in (len(choice), 2, 1):
            proposed = _proposed(trial, choice, measured, steps, budget, limit)
            found = measured if proposed == choice else trial.whole(proposed)
            if found < measured:
                choice, measured = proposed, found
                break
        else:
            return choice, measured
    return choice, measured


def _proposed(
    trial: Trial, choice: Choice, measured: float, steps: Sequence[Mapping[int, float]], budget: int, limit: int
) -> Choice:
    """What the steps promise most of together, of those up the `limit` that gain most a byte, of those down the `limit`
    that lose least a byte."""

    def size(g: int, c: int) -> int:
        return trial.groups[g].bytes(trial.ladder[c])

    moves = sorted(
        (
            ((measured - kl) / max(1, abs(size(g, c) - size(g, choice[g]))), g, c)
            for g, row in enumerate(steps)
            for c, kl in row.items()
        ),
        reverse=True,
    )
    up, down = ([(g, c) for _, g, c in moves if (c > choice[g]) == rises][:limit] for rises in (True, False))
    options = [[choice[g], *(c for c in row if (g, c) in up or (g, c) in down)] for g, row in enumerate(steps)]
    found = knapsack.front([
        [(size(g, c), 0.0 if c == choice[g] else steps[g][c] - measured) for c in row] for g, row in enumerate(options)
    ])  # fmt: skip
    at = found.within(budget)
    assert at is not None, "the choice itself is within"
    return tuple(row[i] for row, i in zip(options, found.choice(at), strict=True))

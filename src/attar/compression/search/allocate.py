"""Bit allocation: the bits of each linear, chosen by the effect of each choice on the model's predictions.

Uniform bits spend as much on linears that hardly matter as on those that do. Here every group of linears is compressed
alone, with each candidate scheme, and the divergence from the original is measured (`sensitivity.py`; forward passes
only). A multiple-choice knapsack (`knapsack.py`) then spends the budget where it gains most, as if damages added up.
They do not quite: errors interact in later layers. So the choice is measured as a whole, then each group one scheme up
and one down around it, and the knapsack decides again among those neighbours. A step is kept only if the whole model is
closer for it. (The local search of EvoPress, Sieberling et al. 2024, arXiv:2410.14649, with measured steps for random
ones.)

The result is a recipe with an override for each linear, which the usual block pass then runs with all of its methods.
Transforms, guides and corrections are not part of the measurements, which the receipt says (`unmeasured`). Additional
text that the model writes is not either. A rotation is, because the rotated model is measured; of a learned one, its
initial matrix. The LM head, overrides and kept linears are left as the recipe says. So is what the mix of a GGUF file
makes of the ends of a model. Their cost is part of every divergence of the whole model, and so of a target of KL
(`bit_budget.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints.writer import allocated, require_free
from attar.compression.calibration import texts
from attar.compression.outputs.base import Output
from attar.compression.recipe.methods import SpinQuant
from attar.compression.recipe.recipe import Override, Recipe, naming
from attar.compression.request.request import Target
from attar.compression.resume import Log
from attar.compression.search import knapsack
from attar.compression.search.sensitivity import Experiment, Trial
from attar.compression.search.target import (
    Choice,
    Group,
    bits_per_weight,
    candidates_for,
    groups_of,
    reachable,
    rounding_for,
)
from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.model.decoder import Decoder
from attar.progress import Progress

ROUNDS = 3  # rounds of steps around the choice


@dataclass(frozen=True, eq=False)
class Allocation:
    """Result of an allocation: `choice` [G] indexes `candidates`; `alone` [G][C] are the divergences with one group
    compressed. `measured` is the divergence of the whole model as chosen, `unrefined` that of the first choice, and
    `uniform` that of each scheme for all groups: all on the same tokens, each group rounded by itself."""

    recipe: Recipe
    target: Target
    candidates: tuple[Scheme, ...]
    groups: tuple[Group, ...]
    alone: tuple[tuple[float, ...], ...]
    choice: Choice
    unrefined: float
    measured: float
    uniform: tuple[float, ...]
    tokens: int
    calibration: str  # hash of the calibration tokens
    selection: str  # hash of the tokens that divergences were measured on

    @property
    def bits_per_weight(self) -> float:
        return bits_per_weight(self.groups, self.candidates, self.choice)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict for the receipt."""
        return {
            "target": self.target.to_dict(),
            "ladder": [scheme.name for scheme in self.candidates],
            "calibration": self.calibration,
            "selection": self.selection,
            "rounding": self.recipe.rounding.method,
            "without": unmeasured(self.recipe, self.candidates),
            "tokens": self.tokens,
            "bits": self.bits_per_weight,
            "kl": self.measured,
            "kl_unrefined": self.unrefined,
            "uniform": [
                {"bits": bits_per_weight(self.groups, self.candidates, (c,) * len(self.groups)), "kl": kl}
                for c, kl in enumerate(self.uniform)
            ],
            "groups": [
                {"layer": group.layer, "linears": list(group.linears), "weights": group.weights}
                | {"kl": list(row), "chosen": self.candidates[chosen].name}
                for group, row, chosen in zip(self.groups, self.alone, self.choice, strict=True)
            ],
        }


def unmeasured(recipe: Recipe, candidates: Sequence[Scheme] = ()) -> list[str]:
    """Return the parts of a recipe and its candidates that measurements leave out, and that follow in the block pass or
    at run time: methods, options of its rounding, and the rounding of activations, since only weights are swapped."""
    found = ["learned rotation"] * isinstance(recipe.rotate, SpinQuant)
    found += [each.method for each in recipe.passes[:-1]]
    found += [name for name in ("polish", "guide", "couple", "correct") if getattr(recipe.rounding, name, False)]
    found += [] if recipe.tune is None else [recipe.tune.method]
    used = [*candidates, *(each.scheme for each in recipe.overrides if each.scheme is not None)]
    return found + ["activation rounding"] * any(scheme.activation is not None for scheme in used)


@dataclass(frozen=True, eq=False)
class Storage:
    """Storage of the chosen schemes. `bytes_of` returns the bytes of a recipe's weight files, for a target of bytes.
    `output` is how all other tensors are stored, None: unchanged. `weighs` is whether the block pass rounds with
    importances that it measures."""

    output: Output | None = None
    weighs: bool = False
    scale_dtype: str = "float32"
    bytes_of: Callable[[Recipe], int] | None = None


class Allocator:
    """Choice of a candidate scheme for every group of a dense decoder. Choices may be repeated: each measures only what
    none before it has measured, and `log` keeps that. Deterministic, given the same torch, machine and threads."""

    def __init__(
        self,
        decoder: Decoder,
        recipe: Recipe,
        target: Target,
        texts: tuple[Tensor, Tensor],
        file: Path,
        storage: Storage = Storage(),
        progress: Progress | None = None,
        original: Callable[[], Decoder] | None = None,
    ) -> None:
        """Prepare the measurements. The first of `texts` are calibration tokens [S, L]; on the second [T, L]
        divergences are measured. `file` is the log's. `original` loads the model that divergences are from, None: it is
        `decoder`. Raises ValueError where no choice keeps the target, a scheme does not fit a linear, or there is
        nothing to choose."""
        self._recipe, self._target, self._storage = recipe, target, storage
        self._progress, self._original, self.file = progress, original, file
        groups, candidates = groups_of(decoder, recipe), target.candidates or candidates_for(recipe)
        _check(groups, candidates)
        named = {scheme.name: scheme.with_scale_dtype(storage.scale_dtype) for scheme in candidates}
        self._groups = groups
        self._candidates = tuple(
            sorted(named.values(), key=lambda scheme: sum(group.bytes(scheme) for group in groups))
        )
        if len(self._candidates) < 2:
            raise UserError("target_invalid", "candidates has at least two schemes to choose among")
        self._budget = _budget(target, self._groups, self._candidates, self._over)
        self._experiment = Experiment(
            groups, self._candidates, rounding_for(recipe), *texts, storage.output, storage.weighs
        )
        self.log = Log(file, self._experiment.fingerprint(decoder))

    def choose(self, decoder: Decoder, aim: float | None = None) -> Allocation:
        """Return the choice that meets the target. `aim` replaces a target of KL that outputs have missed by a lower
        one. Raises ValueError where not even the largest schemes keep a target of KL."""
        groups, candidates, count = self._groups, self._candidates, len(self._groups)
        goal, budget, over = self._target.kl, self._budget, cache(self._over)
        aim = goal if aim is None else aim
        done, total = 0, count * (len(candidates) + 2 * ROUNDS)

        def told() -> None:
            nonlocal done
            done = min(done + 1, total)
            if self._progress is not None:
                self._progress("allocating", done, total)

        finished = f"{self._target.to_dict()}, {budget}, {aim}"
        known = self.log.get(finished)  # present, if the run was killed after this
        if known is not None and over(tuple(known["choice"])) <= 0:  # file sizes may have changed since
            return self._allocation(known)
        if goal is not None:  # outputs may miss it, and then need candidates again
            size = sum(group.bytes(scheme) for group in groups for scheme in candidates)
            require_free(self.log.folder, size - allocated(self.log.folder.glob("*/*")))
        trial = Trial(decoder, self._experiment, self.log, told, keeps=goal is not None, original=self._original)
        alone = trial.alone()
        front = knapsack.front([
            [(group.bytes(scheme), cost) for scheme, cost in zip(candidates, row, strict=True)]
            for group, row in zip(groups, alone, strict=True)
        ])  # fmt: skip
        if budget is None:
            assert goal is not None
            assert aim is not None
            at = _smallest_within(front, goal, aim, trial)
            first, budget = front.choice(at), int(front.bytes[at])
        else:
            found = _best_within(front, [range(len(candidates))] * count, budget, over)
            first = (0,) * count if found is None else found  # the budget is known to suffice for it
        unrefined = trial.whole(first)
        choice, refined = refine(trial, first, unrefined, budget, over)
        uniform = [trial.whole((c,) * count) for c in range(len(candidates))]
        value = {"choice": choice, "unrefined": unrefined, "measured": refined, "uniform": uniform, "alone": alone}
        value["tokens"] = trial.tokens
        self.log.put(finished, value)
        done = total
        told()
        return self._allocation(value)

    def _allocation(self, value: Mapping[str, Any]) -> Allocation:
        """Return the allocation stored in the log."""
        choice = tuple(value["choice"])
        return Allocation(
            self._with(choice), self._target, self._candidates, tuple(self._groups), tuple(map(tuple, value["alone"])),
            choice, value["unrefined"], value["measured"], tuple(value["uniform"]), value["tokens"],
            texts.token_hash(self._experiment.ids), texts.token_hash(self._experiment.measured),
        )  # fmt: skip

    def _with(self, choice: Choice) -> Recipe:
        """Return the recipe with the chosen schemes."""
        plain = [Scheme.parse(scheme.name) for scheme in self._candidates]  # the output determines the dtype of scales
        chosen = zip(self._groups, choice, strict=True)
        overrides = [Override(name, plain[c]) for group, c in chosen for name in group.linears]
        return replace(self._recipe, overrides=(*self._recipe.overrides, *overrides))

    def _over(self, choice: Choice) -> int:
        """Return by how many bytes the weight files of a choice exceed a target of size, 0 for any other target. The
        files are laid out for this: the number of parts of a linear differs between schemes, and names differ between
        formats, which the schemes together decide."""
        if self._target.size is None:
            return 0
        assert self._storage.bytes_of is not None, "a size is of files, which the caller lays out"
        return self._storage.bytes_of(self._with(choice)) - self._target.size


def _check(groups: Sequence[Group], candidates: Sequence[Scheme]) -> None:
    """Raise ValueError, naming the linear, where a scheme does not fit it."""
    for group in groups:
        for name, (_, columns) in zip(group.linears, group.shapes, strict=True):
            for scheme in candidates:
                with naming(name):
                    scheme.check(columns)


def _budget(
    target: Target, groups: Sequence[Group], candidates: Sequence[Scheme], over: Callable[[Choice], int]
) -> int | None:
    """Return the bytes that the groups may take, or None where the target is a divergence. For a target of size the
    files' headers are those of the smallest choice. Raises ValueError where the smallest choice takes more, or where
    the target asks for more bits than the largest."""
    if target.kl is not None:
        return None
    reachable(target, groups, candidates)
    least = sum(group.bytes(candidates[0]) for group in groups)
    if target.bits is not None:
        budget = math.floor(target.bits * sum(group.weights for group in groups) / 8)
    else:
        budget = least - over((0,) * len(groups))
    if budget < least:
        more = f"{least - budget:,} bytes more than the target leaves"
        raise UserError(
            "target_unreachable", f"with {candidates[0].name} everywhere the linears take {least:,} bytes, {more}"
        )
    return budget


def _smallest_within(found: knapsack.Front, goal: float, aim: float, trial: Trial) -> int:
    """Return the smallest point of the front whose measured choice has at most the divergence `aim`, by bisection.
    Along the front the divergence falls, but for noise far below the difference of most points. The last point, if none
    has. Raises ValueError where even the last point exceeds `goal`."""
    low, high = -1, len(found) - 1
    if (least := trial.whole(found.choice(high))) > goal:
        raise UserError(
            "target_unreachable",
            f"a KL of {goal:g} cannot be kept: with the largest schemes it is {least:.3g}; name larger ones, or allow "
            "more",
        )
    while high - low > 1:
        middle = (low + high) // 2
        if trial.whole(found.choice(middle)) <= aim:
            high = middle
        else:
            low = middle
    return high


def _best_within(
    found: knapsack.Front, options: Sequence[Sequence[int]], budget: int, over: Callable[[Choice], int]
) -> Choice | None:
    """Return the best choice of a front that takes at most `budget` bytes and for which `over` is not positive. A
    choice that exceeds it reduces the budget of the following ones by the excess. `options` are the schemes of each
    group on the front. None where no choice is left."""
    while (at := found.within(budget)) is not None:
        choice = tuple(row[i] for row, i in zip(options, found.choice(at), strict=True))
        if (excess := over(choice)) <= 0:
            return choice
        budget = int(found.bytes[at]) - excess
    return None


def refine(
    trial: Trial, choice: Choice, measured: float, budget: int, over: Callable[[Choice], int]
) -> tuple[Choice, float]:
    """Step from a choice, whose divergence is `measured`, to neighbours closer to the original; return the last choice
    and its divergence. Choices stay within `budget` bytes, with `over` not positive. In each round every group is
    measured one scheme up and one down, the others as chosen. The knapsack takes the best of these steps together;
    where that is no gain, only the four, then the two that promise most; then the search ends."""
    for _ in range(ROUNDS):
        steps = trial.neighbours(choice)
        for limit in (len(choice), 2, 1):
            proposed = _proposed(trial, choice, measured, steps, budget, over, limit)
            found = measured if proposed == choice else trial.whole(proposed)
            if found < measured:
                choice, measured = proposed, found
                break
        else:
            return choice, measured
    return choice, measured


def _proposed(
    trial: Trial,
    choice: Choice,
    measured: float,
    steps: Sequence[Mapping[int, float]],
    budget: int,
    over: Callable[[Choice], int],
    limit: int,
) -> Choice:
    """Return the best combination of steps: of those up the `limit` that gain most a byte, of those down the `limit`
    that lose least a byte."""

    def size(g: int, c: int) -> int:
        return trial.groups[g].bytes(trial.candidates[c])

    moves = [
        ((measured - kl) / max(1, abs(size(g, c) - size(g, choice[g]))), g, c)
        for g, row in enumerate(steps)
        for c, kl in row.items()
    ]
    moves.sort(reverse=True)
    up, down = ([(g, c) for _, g, c in moves if (c > choice[g]) == rises][:limit] for rises in (True, False))
    options = [[choice[g], *(c for c in row if (g, c) in up or (g, c) in down)] for g, row in enumerate(steps)]
    found = knapsack.front([
        [(size(g, c), 0.0 if c == choice[g] else steps[g][c] - measured) for c in row] for g, row in enumerate(options)
    ])  # fmt: skip
    best = _best_within(found, options, budget, over)
    return choice if best is None else best

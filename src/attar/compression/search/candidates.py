"""Recipes to try where the best is kept (`best`): a list, one of attar's own lists, or one recipe step by step.

`rtn-w4g128,guided-w4g128` names the recipes. `best-w4g128` stands for attar's own recipes at that scheme, from the
cheapest up (`RECIPES`), less the candidates that the model or the scheme cannot take. QuaRot's matrix before down,
which costs run time, is a candidate only where activations are rounded: only there does it gain what it costs.

`ablate-rotate+awq+gptq+tune-w4g128` begins with plain rounding and adds that recipe's steps one at a time: the
rounding, each transform in its order, the rotation, the tuning. A step stays only if it brought the output closer to
the original, so the kept recipe has only the steps that helped. A pruning is no step, since zeros must be chosen
somehow. Nor is smoothattention, which is for KV caches that round keys and has no effect here.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attar.compression.recipe import parser
from attar.compression.recipe.methods import ROUNDINGS, Rtn, SmoothAttention
from attar.compression.recipe.parser import Spelling, parse_scheme
from attar.errors import UserError
from attar.formats.codecs import ggml_mix
from attar.formats.weight_formats import Lookup

BEST, ABLATION = "best-", "ablate-"
RECIPES: Mapping[str, tuple[str, ...]] = {
    "weights": ("rtn", "awq", "gptq", "qronos", "autoround", "guided", "rotate+guided", "guided+tune"),
    "activations": (
        "rtn", "smoothquant+gptq", "guided", "quarot+gptq", "quarot+guided", "spinquant+guided",
        "spinquant+guided+tune",
    ),
    "tables": ("rtn", "squeezellm", "gptq", "qronos", "qronos+tune"),
    "file": ("rtn", "awq", "gptq", "qronos", "guided", "rotate+guided"),
}  # fmt: skip
"""Candidates for schemes of weights alone, of rounded activations, of lookup tables, and for mixes of a GGUF file."""


@dataclass(frozen=True)
class Listed:
    """All of these recipes, in order. Impossible ones may be left out where the list is attar's `own`."""

    names: tuple[str, ...]
    own: bool = False

    @property
    def count(self) -> int:
        return len(self.names)

    def following(self, divergences: Sequence[float]) -> str | None:
        """Return the next recipe to try, given the KL divergences of those tried; None after the last."""
        return self.names[len(divergences)] if len(divergences) < len(self.names) else None


@dataclass(frozen=True)
class Ablation:
    """A recipe whose steps must each show that they help. Raises ValueError where it has none that could be removed."""

    whole: Spelling
    own = False

    def __post_init__(self) -> None:
        if not self.steps:
            raise UserError(
                "recipe_without_effect",
                f"{ABLATION}{self.whole.name}: there is no step in {self.whole.name} that could be left out",
            )

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the methods that may stay or go, in the order in which they are added."""
        *before, last = self.whole.passes
        found = [last.method] if last.method in ROUNDINGS and not isinstance(last, Rtn) else []
        found += [each.method for each in before if not isinstance(each, SmoothAttention)]
        if self.whole.rotate is not None and (self.whole.scheme is not None or self.whole.mix is not None):
            found.append(self.whole.rotate.method)
        return (*found, *([] if self.whole.tune is None else [self.whole.tune.method]))

    @property
    def count(self) -> int:
        return 1 + len(self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the recipes to check against the model before the first is made: plain rounding, each step alone, and
        all."""
        return tuple(dict.fromkeys(map(self._with, ((), *((step,) for step in self.steps), self.steps))))

    def following(self, divergences: Sequence[float]) -> str | None:
        """Return the next recipe to try, given the KL divergences of those tried; None after the last."""
        if not divergences:
            return self._with(())
        kept, least = list[str](), divergences[0]
        for step, divergence in zip(self.steps, divergences[1:], strict=False):
            if divergence < least:
                kept.append(step)
                least = divergence
        left = self.steps[len(divergences) - 1 :]
        return self._with((*kept, left[0])) if left else None

    def _with(self, kept: Sequence[str]) -> str:
        """Return the name of the recipe with these of its steps."""
        whole, (*before, last) = self.whole, self.whole.passes
        if last.method in self.steps and last.method not in kept:
            last = Rtn()
        passes = *(each for each in before if each.method not in self.steps or each.method in kept), last
        rotate = whole.rotate if whole.rotate is not None and whole.rotate.method in kept else None
        tune = whole.tune if whole.tune is not None and whole.tune.method in kept else None
        return replace(whole, passes=passes, rotate=rotate, tune=tune).name


Candidates = Listed | Ablation


def candidates(name: object) -> Candidates | None:
    """Return the candidates that a name stands for, or None where it is one recipe's. Raises ValueError on unknown
    words."""
    if not isinstance(name, str):
        return None
    if name.startswith(BEST):
        scheme = name.removeprefix(BEST)
        return Listed(tuple(f"{step}-{scheme}" for step in RECIPES[_kind(scheme)]), own=True)
    if name.startswith(ABLATION):
        return Ablation(parser.parse(name.removeprefix(ABLATION)))
    return Listed(tuple(part.strip() for part in name.split(","))) if "," in name else None


def _kind(scheme: str) -> str:
    """Return the key in `RECIPES` for a scheme. Raises ValueError on an unknown word."""
    if ggml_mix.find(scheme) is not None:
        return "file"
    found = parse_scheme(scheme)
    if isinstance(found.weight, Lookup):
        return "tables"
    return "weights" if found.activation is None else "activations"

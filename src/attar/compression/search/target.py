"""What is asked of an allocation of bits: the target it must keep, and the ladder of schemes it chooses among."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from attar.compression.recipe.methods import Gptq, Rtn
from attar.compression.recipe.recipe import Recipe
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import GgmlBlocks

K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")


@dataclass(frozen=True, slots=True)
class Target:
    """What the result must keep: `bits` a weight of the blocks' linears that no override decides about, `size` in bytes
    of all weight files, or the mean `kl` on the tokens that allocation measures on. One of them."""

    bits: float | None = None
    size: int | None = None
    kl: float | None = None

    def __post_init__(self) -> None:
        given = list(self.to_dict().values())
        if len(given) != 1:
            raise ValueError("give one target: bits, size or KL")
        if not given[0] > 0 or not math.isfinite(given[0]):
            raise ValueError(f"a target is a positive number, not {given[0]}")

    def to_dict(self) -> dict[str, float]:
        pairs = (("bits", self.bits), ("size", self.size), ("kl", self.kl))
        return {name: value for name, value in pairs if value is not None}


def rounding_for(recipe: Recipe) -> Gptq | Rtn:
    """The rounding by which a target tries schemes. Raises ValueError where the recipe's is none that can be tried."""
    if isinstance(recipe.rounding, Gptq | Rtn):
        return recipe.rounding
    raise ValueError(
        f"{recipe.name}: a target rounds each linear in many schemes, which is done for rtn, gptq, qronos and guided, "
        f"not for {recipe.rounding.method}: name one of those, or leave the target out"
    )


def ladder_for(recipe: Recipe) -> tuple[Scheme, ...]:
    """The schemes that a recipe chooses among where nobody says otherwise: its own grid with other bits, or K-quants.

    Raises ValueError where its scheme is neither a grid of integers in groups nor a type of GGUF files.
    """
    scheme = recipe.scheme
    if scheme is not None and isinstance(scheme.weight, GgmlBlocks):
        return tuple(map(Scheme.parse, K_QUANTS))
    grid = None if scheme is None or scheme.activation is not None else scheme.weight
    if scheme is None or not isinstance(grid, Grid) or grid.kind != "int" or grid.group_size is None:
        raise ValueError(
            f"{recipe.name} has no ladder of bits: give a recipe such as gptq-w4g128, or name the schemes to choose "
            "among, such as w2g64,w3g128,w4g128,w6g128"
        )
    fine = min(grid.group_size, 64)  # few bits need small groups
    rungs = [replace(grid, bits=2, group_size=fine), replace(grid, bits=3), replace(grid, bits=3, group_size=fine)]
    rungs += [replace(grid, bits=bits) for bits in (4, 5, 6, 8)]
    return tuple(replace(scheme, weight=rung) for rung in dict.fromkeys(rungs))


def parse_ladder(text: str) -> tuple[Scheme, ...]:
    """Schemes by name, with commas between. Raises ValueError on an unknown one."""
    return tuple(Scheme.parse(name.strip()) for name in text.split(","))

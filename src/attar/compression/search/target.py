"""The subjects of bit allocation: groups of linears that share a scheme, and candidate schemes.

Linears are grouped where they must have one scheme, because engines fuse them: q, k and v; gate and up; in a mixture,
those of all experts.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attar.compression.recipe.methods import Gptq, Rtn
from attar.compression.recipe.recipe import Recipe
from attar.compression.request.request import Target
from attar.errors import UserError
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.kernels.operands import Linear
from attar.model.decoder import Decoder
from attar.model.layers import Block, MixtureOfExperts

Choice = tuple[int, ...]
"""For each group, the index of its scheme among the candidates."""

K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")


def rounding_for(recipe: Recipe) -> Gptq | Rtn:
    """Return the rounding by which a target tries schemes. Raises ValueError where the recipe's rounding cannot be
    tried."""
    if isinstance(recipe.rounding, Gptq | Rtn):
        return recipe.rounding
    raise UserError(
        "option_conflict",
        f"{recipe.name}: a target rounds each linear in many schemes, which is done for rtn, gptq, qronos and guided, "
        f"not for {recipe.rounding.method}: name one of those, or leave the target out",
    )


def candidates_for(recipe: Recipe) -> tuple[Scheme, ...]:
    """Return a recipe's default candidate schemes: its own grid with other bits, or K-quants. Raises ValueError where
    its scheme is neither a grid of integers in groups nor a type of GGUF files."""
    scheme = recipe.scheme
    if scheme is not None and isinstance(scheme.weight, GgmlBlocks):
        return tuple(map(Scheme.parse, K_QUANTS))
    grid = None if scheme is None or scheme.activation is not None else scheme.weight
    if scheme is None or not isinstance(grid, Grid) or grid.kind != "int" or grid.group_size is None:
        raise UserError(
            "scheme_unsupported",
            f"{recipe.name} has no candidates of other bits: give a recipe such as gptq-w4g128, or name the schemes to "
            "choose among, such as w2g64,w3g128,w4g128,w6g128",
        )
    fine = min(grid.group_size, 64)  # few bits need small groups
    grids = [replace(grid, bits=2, group_size=fine), replace(grid, bits=3), replace(grid, bits=3, group_size=fine)]
    grids += [replace(grid, bits=bits) for bits in (4, 5, 6, 8)]
    return tuple(replace(scheme, weight=each) for each in dict.fromkeys(grids))


def undecided(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """Return the linears about which neither an override nor `keep` decides."""
    decided = [*(override.match for override in recipe.overrides), *recipe.keep]
    return [name for name in names if not any(fnmatch.fnmatchcase(name, match) for match in decided)]


@dataclass(frozen=True, slots=True)
class Group:
    """Linears of one block that share a scheme: their names and shapes (out, in)."""

    layer: int
    linears: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.shapes))

    def bytes(self, scheme: Scheme) -> int:
        return sum(map(scheme.bytes, self.shapes))


def groups_of(decoder: Decoder, recipe: Recipe) -> list[Group]:
    """Return the groups to choose for, block by block: the linears about which neither an override nor `keep` decides.
    Raises ValueError where there are none."""
    found = []
    for layer, block in enumerate(decoder.blocks):
        for linears in _fused(block):
            names = undecided(recipe, [each.name for each in linears])
            if free := [each for each in linears if each.name in names]:
                found.append(Group(layer, tuple(e.name for e in free), tuple(e.shape for e in free)))
    if not found:
        raise UserError(
            "recipe_conflict", f"{recipe.name} leaves nothing to choose: its overrides decide about every linear"
        )
    return found


def _fused(block: Block) -> Iterator[tuple[Linear, ...]]:
    yield block.attention.qkv
    yield (block.attention.output,)
    forwards = list(block.feed_forwards())
    if isinstance(block.feed_forward, MixtureOfExperts):
        yield tuple(linear for each in forwards for linear in each.up)
        yield tuple(each.down for each in forwards)
    else:
        yield forwards[0].up
        yield (forwards[0].down,)


def bits_per_weight(groups: Sequence[Group], candidates: Sequence[Scheme], choice: Choice) -> float:
    """Return stored bits over weights, of groups in the candidate schemes that `choice` indexes."""
    size = sum(group.bytes(candidates[chosen]) for group, chosen in zip(groups, choice, strict=True))
    return 8 * size / sum(group.weights for group in groups)


def reachable(target: Target, groups: Sequence[Group], candidates: Sequence[Scheme]) -> None:
    """Raise ValueError where a target of bits lies outside the range of the candidates."""
    if target.bits is None or len(candidates) < 2:
        return
    ends = sorted((bits_per_weight(groups, (scheme,), (0,) * len(groups)), scheme.name) for scheme in candidates)
    (least, smallest), (most, largest) = ends[0], ends[-1]
    if not least <= target.bits <= most:
        least, most = math.ceil(1e3 * least) / 1e3, math.floor(1e3 * most) / 1e3  # inwards: reachable
        raise UserError(
            "target_unreachable",
            f"{target.bits:g} bits a weight are out of reach: the linears take {least:g} with {smallest} everywhere, "
            f"and {most:g} with {largest}",
        )

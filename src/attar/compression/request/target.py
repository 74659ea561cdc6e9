"""The target that a choice of bits must keep, and the schemes it may choose among."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attar.formats.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Target:
    """What the result must keep: `bits` a weight of the blocks' linears that no override decides about, `size` in bytes
    of all weight files, or the mean `kl` on the tokens that allocation measures on. One of them.

    `ladder` are the schemes to choose among; without it they follow from the recipe.
    """

    bits: float | None = None
    size: int | None = None
    kl: float | None = None
    ladder: tuple[Scheme, ...] | None = None

    def __post_init__(self) -> None:
        given = list(self.to_dict().values())
        if len(given) != 1:
            raise ValueError("give one target: bits, size or KL")
        if not given[0] > 0 or not math.isfinite(given[0]):
            raise ValueError(f"a target is a positive number, not {given[0]}")

    def to_dict(self) -> dict[str, float]:
        """Return the number to keep under its name, for the receipt, which has the ladder elsewhere."""
        pairs = (("bits", self.bits), ("size", self.size), ("kl", self.kl))
        return {name: value for name, value in pairs if value is not None}


def parse_ladder(text: str) -> tuple[Scheme, ...]:
    """Schemes by name, with commas between. Raises ValueError on an unknown one."""
    return tuple(Scheme.parse(name.strip()) for name in text.split(","))

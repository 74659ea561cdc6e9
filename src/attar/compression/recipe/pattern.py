"""Patterns of zeros, by name: `s50` is half of the weights, wherever they are; `2:4` keeps two of every four in a row.

An n:m pattern keeps at most n weights of every m consecutive inputs of an output (NVIDIA's convention, in which 2:4 has
two *non-zeros*). Its zeros are where hardware expects them; those of `s50` are wherever they hurt least, which costs
less quality. Torch-free: planners read recipes too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attar.errors import UserError

LARGEST = 16  # m of n:m: the C(m, n) supports are enumerated, so it must stay small

_FORM = re.compile(r"s(?P<percent>[1-9][0-9]?)|(?P<n>[1-9][0-9]?):(?P<m>[1-9][0-9]?)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """`zeros` of every `of` weights are zero: consecutive inputs of one output where `grouped`, anywhere otherwise."""

    zeros: int
    of: int
    grouped: bool

    @staticmethod
    def parse(name: str) -> Pattern:
        """Parse `s1` .. `s99`, percent of zeros, or n:m with n < m <= 16. Raises ValueError on anything else."""
        found = _FORM.fullmatch(name)
        if found is None:
            raise UserError(
                "sparsity_invalid",
                f"unknown sparsity {name!r}: it is s and the percentage of zeros, such as s50, or the weights kept of "
                "every few, such as 2:4 or 4:8",
            )
        if found["percent"]:
            return Pattern(int(found["percent"]), 100, grouped=False)
        kept, of = int(found["n"]), int(found["m"])
        if not kept < of <= LARGEST:
            raise UserError(
                "sparsity_invalid", f"sparsity {name} keeps {kept} of every {of}: needed is fewer, of {LARGEST} at most"
            )
        return Pattern(of - kept, of, grouped=True)

    @property
    def name(self) -> str:
        return f"{self.of - self.zeros}:{self.of}" if self.grouped else f"s{self.zeros}"

    def check(self, columns: int) -> None:
        """Raise ValueError where a row of so many inputs does not divide into groups."""
        if self.grouped and columns % self.of:
            raise UserError(
                "group_size_indivisible", f"{self.name} sparsity needs columns divisible by {self.of}, not {columns}"
            )

"""Kind and amount of calibration text, as asked for. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attar.compression.recipe.methods import MOST_DRAWN
from attar.errors import UserError

Calibration = str | Path | Sequence[Sequence[int]]
"""A text file, token ids [S][L], or `SELF`."""

SELF = "self"

BESIDES = 2 << 32
"""Offset of the seed of text sampled in addition to a calibration text."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Amount of text to use, and the seed of all sampling."""

    samples: int = 128  # sequences
    length: int = 512  # tokens of each
    seed: int = 0
    drawn: int = 0  # additional sequences that the model writes

    def __post_init__(self) -> None:
        if self.samples < 1 or self.length < 2 or self.seed < 0:
            raise UserError(
                "option_out_of_range",
                "calibration takes at least 1 sequence of at least 2 tokens, and a seed of at least 0",
            )
        if not 0 <= self.drawn <= MOST_DRAWN:
            raise UserError(
                "option_out_of_range",
                f"0 to {MOST_DRAWN} sequences can be drawn from the model besides, not {self.drawn}",
            )

    def besides(self, length: int) -> Amount:
        """Return the amount of additional text, in sequences of `length` tokens: other text than `SELF` of the same
        seed."""
        return Amount(self.drawn, length, BESIDES + self.seed)


def is_text(calibration: Calibration | None) -> bool:
    """Return whether the calibration is a text file."""
    return isinstance(calibration, str | Path) and not is_drawn(calibration)


def is_drawn(calibration: Calibration | None) -> bool:
    """Return whether the model is to write the calibration text."""
    return isinstance(calibration, str | Path) and str(calibration) == SELF


def count_sequences(calibration: Calibration, amount: Amount) -> int:
    """Return the maximal number of sequences."""
    return amount.samples if isinstance(calibration, str | Path) else len(calibration)


def drawn_name(source: str, amount: Amount) -> str:
    """Return the file name for text sampled from the model whose files have the hash `source`."""
    return f"self-{source[:16]}-{amount.samples}x{amount.length}-{amount.seed}.i32"

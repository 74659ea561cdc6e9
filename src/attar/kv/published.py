"""KV cache formats as their papers have them, for measurements alone: `attar eval --kv` knows them. Torch-free.

    kivi4-published, kivi2-published    KIVI (Liu et al. 2024): keys per channel in groups of 32 tokens, values per
                                        token in groups of 32 columns. The last 128 values are always in 16 bits, a
                                        window that slides. Keys gather in 16 bits until there are 128 of them
    nuq4-published, nuq3-published,     KVQuant (Hooper et al. 2024): keys per channel before rotation, values per
    nuq2-published                      token, calibrated levels; the hundredth that stands out, and the first token
                                        of a sequence, in 16 bits

They are simulated: pages hold floats, and a row reads what its step would have found in a cache of the paper
(`kernels/ref_published.py`). No engine serves them: `kivi4`, `kivi2`, `nuq4` and `nuq3` of `schemes.py` are served, and
differ from the papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attar.errors import UserError

ONE_SIDE = 0.005  # of KVQuant's numbers stand out above, and as many below
FLOAT16 = 16  # bits


@dataclass(frozen=True, slots=True)
class PublishedFormat:
    """A KV cache format as published. `group` and `window` are KIVI's: of tokens or columns, and of tokens."""

    name: str
    method: Literal["kivi", "kvquant"]
    bits: int
    group: int = 32
    window: int = 128

    @property
    def calibrated(self) -> bool:
        """Return whether levels and thresholds are calibrated on the model."""
        return self.method == "kvquant"

    def check(self, head_dim: int) -> None:
        """Raise ValueError where the format does not support heads of such a size."""
        if self.method == "kivi" and head_dim % self.group:
            raise UserError("kv_unsupported", f"{self.name} keeps groups of {self.group} columns, not {head_dim}")

    def bits_per_value(self, kv_heads: int, head_dim: int, context: int, outliers: float | None = None) -> float:
        """Return the bits of a key's or value's number in a sequence of `context` tokens, with all that lies beside it.

        KIVI's keys gather between no and `window` unrounded tokens: half of it is counted. `outliers` is the share of
        numbers that stood out in KVQuant's keys, by default the share that calibration aims at. An outlier has 16 bits
        and a column in whole bytes; a token has a byte for the number of its outliers in keys, and a scale and a
        centre of 16 bits each in values.
        """
        if self.method == "kivi":
            rounded = self.bits + 2 * FLOAT16 / self.group
            unrounded = (self.window / 2 + self.window) / 2
            return rounded + (FLOAT16 - rounded) * min(1.0, unrounded / context)
        width = kv_heads * head_dim
        each = FLOAT16 + (8 if width <= 256 else 16)
        of_keys = (2 * ONE_SIDE if outliers is None else outliers) * each + 8 / width
        of_values = 2 * outliers_of_a_side(width) / width * each + 2 * FLOAT16 / width
        stored = self.bits + (of_keys + of_values) / 2
        return stored + (FLOAT16 - stored) / context

    def model_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one layer that all sequences share: KVQuant's levels, and a centre and a range of each
        channel of keys, in 16 bits."""
        return 2 * (2 * kv_heads * head_dim + 2 * (1 << self.bits)) if self.calibrated else 0


def outliers_of_a_side(width: int) -> int:
    """Return how many of a token's `width` values lie at or beyond the quantile of one side, which is interpolated
    between two of them."""
    return int(ONE_SIDE * (width - 1)) + 1


PUBLISHED: Mapping[str, PublishedFormat] = {
    each.name: each
    for each in (
        PublishedFormat("kivi4-published", "kivi", 4),
        PublishedFormat("kivi2-published", "kivi", 2),
        PublishedFormat("nuq4-published", "kvquant", 4),
        PublishedFormat("nuq3-published", "kvquant", 3),
        PublishedFormat("nuq2-published", "kvquant", 2),
    )
}

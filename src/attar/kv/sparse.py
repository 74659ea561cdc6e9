"""Settings of sparse attention: how many keys a row reads. Torch-free.

A row reads whole runs of 16 slots (`schemes.RUN`), because keys of a run share cache lines. How many is a function of
the row's position and these settings alone, so a row reads as much in any batch, chunk or replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from attar.errors import UserError
from attar.kv.schemes import RUN, KvScheme, Layout

DENSE_BELOW = 2048  # tokens up to which full attention is as fast
LEAST = 128  # tokens that a fraction reads at least
LAYOUTS = (Layout.FLOAT32, Layout.BFLOAT16, Layout.INT8, Layout.FP8)  # of caches beside which one-bit keys are kept


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Read the `topk` highest-ranked tokens, or one in `share`, and every token where there are `dense_below` or fewer.

    One of `topk` and `share` is zero. Raises ValueError for other values.
    """

    topk: int = 0
    share: int = 0
    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        valid = (self.topk >= 2 * RUN and self.share == 0) or (self.topk == 0 and self.share >= 2)
        if not valid or self.topk > 1 << 30 or self.share > 1 << 16 or self.dense_below < 0:
            raise UserError("option_out_of_range", f"sparse attention reads {2 * RUN} tokens or more, or 1/2 or less")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `topk:512` or `topk:1/16`. Raises ValueError for other text."""
        method, _, amount = text.partition(":")
        top, slash, share = amount.partition("/")
        numbers = all(each.isascii() and each.isdecimal() and len(each) < 10 for each in (top, share if slash else "1"))
        if method != "topk" or not numbers or (slash and top != "1"):
            raise UserError("option_malformed", f"sparse attention is topk:TOKENS or topk:1/N, not {text!r}")
        return cls(share=int(share)) if slash else cls(topk=int(top))

    def __str__(self) -> str:
        return f"topk:1/{self.share}" if self.share else f"topk:{self.topk}"

    def runs(self, length: int) -> int | None:
        """Return the runs that a row with `length` visible tokens reads; None where it reads all."""
        total = -(-length // RUN)
        budget = max(LEAST // RUN, -(-total // self.share)) if self.share else -(-self.topk // RUN)
        return None if length <= self.dense_below or budget >= total else budget

    def tokens_read(self, length: int) -> int:
        """Return the keys that a row with `length` visible tokens reads in a sparse layer."""
        runs = self.runs(length)  # the newest run is always read, and ends with the row's own token
        return length if runs is None else RUN * (runs - 1) + (length - 1) % RUN + 1

    @property
    def whole(self) -> int:
        """Return the greatest length at which a row reads every token."""
        return max(self.dense_below, LEAST if self.share else RUN * -(-self.topk // RUN))

    def check(self, scheme: KvScheme, device: str = "cpu", processes: int = 1, trees: bool = False) -> None:
        """Raise ValueError (`option_conflict`) for what sparse attention does not go with.

        That is a cache of another scheme, another device than a CPU, several processes, and trees of drafts, whose
        slots are not their positions.
        """
        kept = ", ".join(LAYOUTS)
        against = (
            (scheme.layout not in LAYOUTS, f"reads caches of {kept} (--kv), not {scheme.name}"),
            (device != "cpu", f"runs on CPUs (--device cpu), not on {device}"),
            (processes > 1, f"runs in one process (--tp 1 --pp 1), not in {processes}"),
            (trees, "takes chains of drafts (--draft), not trees (--draft-tree)"),
        )
        for refused, why in against:
            if refused:
                raise UserError("option_conflict", f"sparse attention {why}")

    @staticmethod
    def bytes(kv_heads: int, head_dim: int, block: int) -> int:
        """Return the bytes of one block's one-bit keys in one sparse layer, their scales included."""
        return kv_heads * block * (-(-head_dim // 8) + 2)

"""Settings of sparse prefill: what rows of prompts read, except the last rows of a prompt. Torch-free.

Two methods. `tri-shape` (Li et al. 2024, SCBench): a row reads the first tokens and the newest. `skip` (Yuan et al.
2025, BLASST): a row reads the keys of all tokens, and skips values whose weights are small for sure. What a row reads
is a function of its position, the length of its prompt and, for `skip`, its own scores. So its bits are the same in
any batch, chunk or replay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from attar.errors import UserError
from attar.kv.schemes import RUN

SINKS, WINDOW, LAST = 64, 2048, 128  # tokens, by default
LOST = 0.01  # share of a row's attention weight
WHOLE = 1024  # tokens up to which skipping gains nothing
MOST = 1 << 24  # tokens of any of these


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """Rows of a prompt before its `last` ones read the first `sinks` and the newest `window` tokens.

    Where `window` is zero they skip values instead, by which a row loses at most the share `lost` of its attention
    weight. Raises ValueError (`option_out_of_range`) for other numbers.
    """

    sinks: int = 0
    window: int = 0
    lost: float = 0.0
    last: int = LAST

    def __post_init__(self) -> None:
        shape = self.window >= RUN and self.sinks >= 0 and self.lost == 0
        skips = self.window == self.sinks == 0 and 1e-9 <= self.lost <= 0.5
        if not (shape or skips) or self.last < 1 or max(self.sinks, self.window, self.last) > MOST:
            message = f"sparse prefill reads a window of {RUN} tokens or more, or skips up to half of the weight"
            raise UserError("option_out_of_range", message)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `tri-shape`, `tri-shape:SINKS+WINDOW+LAST`, `skip` or `skip:SHARE`.

        Raises ValueError (`option_malformed`) for other text.
        """
        if text == "tri-shape":
            return cls(sinks=SINKS, window=WINDOW)
        if text == "skip":
            return cls(lost=LOST)
        if found := re.fullmatch(r"tri-shape:(\d{1,9})\+(\d{1,9})\+(\d{1,9})", text, re.ASCII):
            return cls(sinks=int(found[1]), window=int(found[2]), last=int(found[3]))
        if found := re.fullmatch(r"skip:(\d{0,3}\.?\d{1,9})", text, re.ASCII):
            return cls(lost=float(found[1]))
        message = f"sparse prefill is tri-shape, tri-shape:SINKS+WINDOW+LAST, skip or skip:SHARE, not {text!r}"
        raise UserError("option_malformed", message)

    def __str__(self) -> str:
        if self.skips:
            return f"skip:{f'{self.lost:.9f}'.rstrip('0')}"
        return f"tri-shape:{self.sinks}+{self.window}+{self.last}"

    @property
    def skips(self) -> bool:
        """Whether rows skip values, rather than read the first and the newest tokens."""
        return self.window == 0

    @property
    def whole(self) -> int:
        """Return the greatest length at which every row reads every token."""
        return WHOLE if self.skips else self.sinks + self.window

    def until(self, prompt: int) -> int:
        """Return the position of the first row that reads every token, in a prompt of `prompt` tokens."""
        return max(0, prompt - self.last)

    def alike(self, prompt: int) -> int:
        """Return how many first tokens of a sequence have the keys and values of any sequence that begins alike.

        The last tokens of its prompt do not, because a longer prompt has them in its middle.
        """
        return max(self.until(prompt), self.whole)

    def tokens_read(self, length: int) -> int:
        """Return the keys that a row with `length` visible tokens reads, in a layer without a sliding window."""
        return length if self.skips else min(length, self.whole)

    def bound(self) -> str:
        """Say what a row may lose."""
        if self.skips:
            return f"each row skips at most {100 * self.lost:g} % of its attention weight"
        return f"rows before the last {self.last} of a prompt read {self.sinks} first and {self.window} newest tokens"

    def check(self, device: str = "cpu", processes: int = 1, trees: bool = False) -> None:
        """Raise ValueError (`option_conflict`) for what sparse prefill does not go with.

        That is another device than a CPU, several processes, and trees of drafts, whose slots are not their positions.
        """
        against = (
            (device != "cpu", f"runs on CPUs (--device cpu), not on {device}"),
            (processes > 1, f"runs in one process (--tp 1 --pp 1), not in {processes}"),
            (trees, "takes chains of drafts (--draft), not trees (--draft-tree)"),
        )
        for refused, why in against:
            if refused:
                raise UserError("option_conflict", f"sparse prefill {why}")

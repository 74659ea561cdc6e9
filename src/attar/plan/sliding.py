"""Blocks of layers with a sliding window: how many a sequence holds, and how many a cache needs. Torch-free.

Layers of a model are in two groups. Layers without a window keep every token. Layers with one form the *sliding* group,
whose blocks are released once every later row's window begins behind them. Windows of one model are of one length in
all known families; where they differ, the group keeps the longest.

A row at position p reads the positions p - window + 1 to p. A sequence whose steps under way have r rows therefore
needs r + window - 1 neighbouring positions, which touch at most `held` + r // block blocks. Rows of a step are shared
by all sequences, so the blocks for them are counted once (`of_steps`).
"""

from __future__ import annotations

from dataclasses import dataclass

from attar.model.config import ModelConfig


def window_of(config: ModelConfig) -> int | None:
    """Return the longest sliding window of a model; None where no layer has one."""
    return max((window for window in config.windows if window is not None), default=None)


@dataclass(frozen=True, slots=True)
class SlidingLimits:
    """Bounds of the sliding group: its window, the slots of a block, and the rows of all steps under way together.

    Raises ValueError for numbers below 1.
    """

    window: int
    block: int
    step_rows: int

    def __post_init__(self) -> None:
        if min(self.window, self.block, self.step_rows) < 1:
            raise ValueError("a window, a block and a step have at least one token")

    @property
    def held(self) -> int:
        """Return the most blocks that a sequence holds, besides those for the rows of steps."""
        return (self.window - 2) // self.block + 3

    @property
    def of_steps(self) -> int:
        """Return the most blocks that the rows of steps add, of all sequences together."""
        return self.step_rows // self.block

    def promised(self, tokens: int) -> int:
        """Return the most blocks of a sequence of up to `tokens` tokens, besides those for the rows of steps."""
        return min(-(-tokens // self.block), self.held)

    def first(self, length: int) -> int:
        """Return the place of the first block that a row at position `length` reads."""
        return max(0, length - self.window + 1) // self.block


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The bytes of a KV cache, as a function of its number of blocks.

    `block_bytes` are those of a block in all layers, `sliding_bytes` the part of them in layers with a sliding window,
    and `each` the blocks of a request of the full context. With `limits`, the sliding group has blocks of its own where
    that saves memory: enough for `sequences` sequences at once, and for the windows of as many full requests as the
    cache holds.
    """

    block_bytes: int
    each: int = 1
    sequences: int = 1
    sliding_bytes: int = 0
    limits: SlidingLimits | None = None

    def sliding_blocks(self, blocks: int) -> int:
        """Return the blocks of the sliding group beside `blocks` of the others; 0 where all layers have `blocks`."""
        if self.limits is None or not self.sliding_bytes:
            return 0
        windows = max(self.sequences, -(-blocks // self.each))
        found = windows * self.limits.held + self.limits.of_steps
        return found if found < blocks else 0

    def bytes(self, blocks: int) -> int:
        """Return the bytes of a cache of `blocks` blocks. It grows with their number."""
        if not (sliding := self.sliding_blocks(blocks)):
            return blocks * self.block_bytes
        return blocks * (self.block_bytes - self.sliding_bytes) + sliding * self.sliding_bytes

    def most(self, left: int) -> int:
        """Return the most blocks that fit in `left` bytes."""
        if self.limits is None or not self.sliding_bytes:
            return max(0, left) // self.block_bytes
        low, high = 0, 1
        while self.bytes(high) <= left:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= left else (low, middle)
        return low

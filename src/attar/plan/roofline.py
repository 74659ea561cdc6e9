"""How fast one step could be at best: what it reads and what it computes, each over what the machine can.

    reading   = (weights that the step needs + keys and values of every sequence in it) / bandwidth
    computing = sum over products of 2 * rows * outputs * inputs / the rate of such products, and attention

The larger of the two bounds the step from below, and says what more speed would take: fewer bytes, or fewer operations.
Both are estimates, from shapes and from two or three rates of the machine. Each weight counts as read once a step,
whatever caches hold; of experts those that are expected to be chosen, were choices even; a chunk of a prompt reads what
lies before it once. Norms, activations, what is written, adapters and what processes exchange are left out. Where one
of the two is not several times the other, either could have been the one. Torch-free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attar.formats.scheme import Scheme
from attar.model.config import ModelConfig
from attar.plan import costs
from attar.plan.costs import Matrix, Storage

Chunk = tuple[int, int, bool]
"""Rows of one sequence: the position of the first, how many, and whether logits are made of the last."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does at best: bytes read a second, and operations a second of products with weights of a scheme,
    None being dense ones, whose rate is attention's too. `size` gives the bytes that a product reads of a weight, by
    default as the CPU's kernels lay it out."""

    bandwidth: float
    operations: Callable[[Scheme | None], float]
    size: Callable[[Matrix, Scheme | None], int] | None = None


class Roofline:
    """The bounds of steps of one model, stored so, with keys and values kept so, at the rates of one machine.

    All that does not depend on the step is summed here once: a step costs its number of sequences.
    """

    def __init__(self, config: ModelConfig, storage: Storage, kv: str, rates: Rates) -> None:
        self._read: dict[float, float] = defaultdict(float)  # seconds to read linears, by their share of rows
        self._product = 0.0  # seconds of one row's products
        for each in costs.matrices(config):
            scheme = storage.of(each)
            if rates.size is None:
                size = costs.read_bytes(each.rows, each.columns, scheme, storage.dtype)
            else:
                size = rates.size(each, scheme)
            reading = size / rates.bandwidth
            product = 2.0 * each.active * each.rows * each.columns / rates.operations(scheme)
            if each.part == "head":
                self._head = reading, product
            else:
                self._read[each.active] += reading
                self._product += product
        self._windows = Counter(config.windows)
        self._slot = costs.kv_bytes(config, kv) / config.layers / rates.bandwidth  # seconds to read one, of one layer
        self._score = 4.0 * config.heads * config.head_dim / rates.operations(None)  # seconds of one of a row's scores

    def least(self, chunks: Iterable[Chunk]) -> tuple[float, float]:
        """Seconds that a step needs to read, and to compute."""
        total = sampled = slots = scores = 0
        for start, rows, samples in chunks:
            total += rows
            sampled += samples
            for window, layers in self._windows.items():
                slots += layers * (start + rows if window is None else min(start + rows, window))
                scores += layers * seen(start, rows, window)
        reading = sum(each * (1.0 - (1.0 - active) ** total) for active, each in self._read.items())
        reading += self._slot * slots + self._head[0] * (sampled > 0)
        return reading, self._product * total + self._head[1] * sampled + self._score * scores


def seen(start: int, rows: int, window: int | None) -> int:
    """Positions that rows from `start` on see, each those before it and itself, no more than `window`."""
    growing = rows if window is None else max(0, min(rows, window - start))
    return growing * start + growing * (growing + 1) // 2 + (rows - growing) * (window or 0)

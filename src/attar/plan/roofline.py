"""Roofline of one step: a lower bound of its time from the bytes it reads and the operations it computes.

    reading   = (weights that the step needs + keys and values of every sequence in it) / bandwidth
    computing = sum over products of 2 * rows * outputs * inputs / the rate of such products, and attention

The larger of the two bounds the step from below, and shows what would make it faster: fewer bytes, or fewer operations.
Both are estimates, from shapes and from two or three rates of the machine. Each weight counts as read once a step,
whatever caches hold. Experts count by the expected number chosen, if choices are even. A chunk of a prompt reads the
positions before it once. Norms, activations, writes, adapters and communication between processes are left out. Where
neither of the two is several times the other, either may be the limit. Torch-free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attar.formats.scheme import Scheme
from attar.kv.schemes import KvScheme
from attar.model.config import ModelConfig
from attar.plan import costs
from attar.plan.costs import Matrix, Storage

Chunk = tuple[int, int, int]
"""Rows of one sequence: the position of the first, their number, and how many of the last ones have logits."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of a machine.

    bandwidth: bytes read a second. operations: operations a second of products with weights of a scheme; None stands
    for dense weights, and for attention too. size: the bytes that a product reads of a weight, by default in the layout
    of the CPU kernels.
    """

    bandwidth: float
    operations: Callable[[Scheme | None], float]
    size: Callable[[Matrix, Scheme | None], int] | None = None


class Roofline:
    """Bounds of the steps of one model, with given storage and KV scheme, at the rates of one machine.

    All that does not depend on the step is summed here once: a step's bound takes time proportional to its number of
    sequences.
    """

    def __init__(self, config: ModelConfig, storage: Storage, kv: KvScheme, rates: Rates) -> None:
        self._read: dict[float, float] = defaultdict(float)  # seconds to read linears, by their fraction of active rows
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
        self._score = 4.0 * config.heads * config.head_dim / rates.operations(None)  # seconds of one score of a row

    def least(self, chunks: Iterable[Chunk]) -> tuple[float, float]:
        """Return the seconds that a step needs to read, and to compute."""
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
    """Return the total of positions that `rows` rows from `start` on attend to: all before each and itself, at most
    `window`."""
    growing = rows if window is None else max(0, min(rows, window - start))
    return growing * start + growing * (growing + 1) // 2 + (rows - growing) * (window or 0)

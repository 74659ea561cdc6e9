"""Random arguments of every formula of the lab, with Python's answers: what the page's copies must give too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from attar.lab import formulas

COUNT = 500
KINDS = ["fixed", "uniform", "exponential"]


def numbers(r: random.Random, count: int, low: float = -4.0, high: float = 4.0) -> list[float]:
    return [r.uniform(low, high) for _ in range(count)]


def size(r: random.Random, low: float = 1.0, high: float = 1e11) -> float:
    """A number of any order of magnitude."""
    return math.exp(r.uniform(math.log(low), math.log(high)))


def rising(r: random.Random, count: int) -> list[float]:
    found = [r.uniform(0, 5)]
    while len(found) < count:
        found.append(found[-1] + r.uniform(0.01, 9))
    return found


def matrix(r: random.Random, rows: int, columns: int) -> list[list[float]]:
    return [numbers(r, columns) for _ in range(rows)]


def trace(r: random.Random) -> list[Any]:
    count = r.randint(1, 20)
    arrivals = rising(r, count) if r.random() < 0.7 else [0.0] * count
    policy = r.choice(["none", "static", "dynamic", "continuous"])
    return [
        arrivals,
        [float(r.randint(1, 30)) for _ in range(count)],
        r.randint(1, 6),
        policy,
        r.choice([0.0, 5.0, 40.0]),
    ]


def channels(r: random.Random) -> list[Any]:
    count = r.randint(1, 12)
    return [numbers(r, count, 0, 9), numbers(r, count, 0, 2), r.random()]


def product(r: random.Random) -> list[Any]:
    columns = r.randint(1, 12)
    rows, weights = matrix(r, r.randint(1, 4), columns), matrix(r, r.randint(1, 4), columns)
    return [rows, weights, numbers(r, columns, 0.1, 3), r.randint(3, 8), r.randint(3, 8)]


def points(r: random.Random) -> list[Any]:
    count = r.randint(1, 6)
    return [r.uniform(0, 60), rising(r, count), numbers(r, count)]


ARGUMENTS: dict[str, Callable[[random.Random], list[Any]]] = {
    "weight_bytes": lambda r: [size(r), r.uniform(1, 32), r.choice([0, 32, 128]), r.uniform(0, 32)],
    "kv_token_bytes": lambda r: [r.randint(1, 126), r.randint(1, 128), r.choice([64, 80, 128]), r.uniform(1, 32), 16],
    "cache_blocks": lambda r: [size(r), size(r), size(r, 1e3, 1e7)],
    "users_that_fit": lambda r: [r.randint(0, 9999), r.choice([0, 0.02, 0.3]), r.randint(1, 9999), r.choice([16, 64])],
    "read_seconds": lambda r: [size(r), r.randint(0, 99), size(r, 1, 1e6), r.randint(0, 99999), size(r, 1e9, 1e13)],
    "product_seconds": lambda r: [r.randint(1, 999), size(r), size(r, 1e9, 1e15)],
    "attention_seconds": lambda r: [r.randint(1, 999), r.randint(1, 99999), size(r, 1, 1e6), size(r, 1e9, 1e15)],
    "step_seconds": lambda r: numbers(r, 3, 0, 1),
    "bound_seconds": lambda r: numbers(r, 2, 0, 1),
    "ridge_rows": lambda r: [size(r, 1e9, 1e15), r.uniform(2, 32), size(r, 1e9, 1e13)],
    "intensity": lambda r: [r.randint(1, 999), size(r), r.uniform(2, 16), r.randint(1, 9999), size(r), size(r, 1, 1e6)],
    "intensity_limit": lambda r: [size(r), r.randint(1, 99999), size(r, 1, 1e6), size(r, 1, 1e6)],
    "interpolated": points,
    "rounded": lambda r: [r.choice([r.uniform(-9, 9), r.randint(-9, 9) + 0.5, float(r.randint(-9, 9))])],
    "grid": lambda r: [numbers(r, r.randint(1, 9)), r.randint(2, 8)],
    "codes": lambda r: [numbers(r, r.randint(1, 9)), r.randint(2, 8)],
    "stored": lambda r: [numbers(r, r.randint(1, 9)), r.randint(2, 8)],
    "symmetric": lambda r: [r.choice([[0.0, 0.0], numbers(r, r.randint(1, 9))]), r.randint(2, 8)],
    "awq_error": lambda r: [numbers(r, 6), numbers(r, 6, 0.1, 30), r.random(), r.randint(2, 8)],
    "smoothing": channels,
    "difficulty": lambda r: [numbers(r, r.randint(1, 9), 0, 9)],
    "smoothed_error": product,
    "contiguous_waste": lambda r: [r.randint(1, 999), r.randint(999, 9999)],
    "buddy_waste": lambda r: [r.randint(1, 99999)],
    "paged_waste": lambda r: [r.randint(1, 99999), r.choice([1, 16, 64, 256])],
    "mean_tail": lambda r: [r.randint(1, 256)],
    "shared_blocks": lambda r: [r.randint(0, 9999), r.randint(1, 99), r.choice([16, 64])],
    "acceptance": lambda r: [r.random(), r.randint(0, 16)],
    "emitted_tokens": lambda r: [numbers(r, r.randint(0, 16), 0, 1)],
    "chain": lambda r: [numbers(r, r.randint(0, 16), 0, 1)],
    "speculation_gain": lambda r: [r.uniform(1, 9), *numbers(r, 3, 0.01, 2), r.randint(0, 16)],
    "static_utilisation": lambda r: [r.randint(1, 64), r.choice(["uniform", "exponential"])],
    "quantile_lengths": lambda r: [r.randint(0, 40), r.uniform(1, 999), r.choice(KINDS), r.randint(1, 9999)],
    "quantile_arrivals": lambda r: [r.randint(0, 40), r.uniform(0, 50)],
    "running": lambda r: numbers(r, 2, 0, 50),
    "percentile": lambda r: [numbers(r, r.randint(1, 30)), r.random()],
    "starts": trace,
    "online_softmax": lambda r: [numbers(r, r.randint(1, 12), -20, 20), r.randint(1, 5)],
}


def vectors(count: int = COUNT, seed: int = 1) -> list[dict[str, Any]]:
    """Names, arguments and answers, each formula in turn."""
    r, names = random.Random(seed), list(ARGUMENTS)
    found = []
    for number in range(count):
        name = names[number % len(names)]
        given = ARGUMENTS[name](r)
        found.append({"name": name, "given": given, "answer": getattr(formulas, name)(*given)})
    return found

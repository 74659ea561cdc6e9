"""Random numbers that weights begin with, and the numbers that are stored of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def normal(seed: int, stream: int, shape: tuple[int, int]) -> Tensor:
    """Return float32 numbers of standard deviation 0.02, drawn from a counter of (seed, stream)."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, stream + 100], dtype=np.uint64)))
    return torch.from_numpy(0.02 * draw.standard_normal(shape, dtype=np.float32))


def stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return learned weights as they are stored, in bfloat16: a draft reads half the bytes, and is a guess anyway."""
    return {name: weight.detach().bfloat16() for name, weight in weights.items()}

"""Measure c(r), the cost of a decode step of r rows over that of one row: it decides how many drafts a step verifies.

All numbers of rows are measured in turn, again and again, on one sequence of the same length. So other work on the
machine, or a growing context, does not favour any. A step's rows are replayed from a recording where the model has one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from attar.errors import UserError
from attar.execution import kv_cache
from attar.execution.recorded_step import Decoding
from attar.kv.schemes import KvScheme
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder

MOST = 64  # rows
ROUNDS = 15


def parse(text: str) -> tuple[int, ...]:
    """Parse numbers of rows, such as 1,2,4. Raises ValueError for other text, and for numbers not from 1 to 64."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError("option_malformed", f"rows are numbers with commas between them, not {text!r}")
    if not all(1 <= int(part) <= MOST for part in parts):
        raise UserError("option_out_of_range", f"rows are 1 to {MOST}: {text}")
    return tuple(dict.fromkeys(map(int, parts)))


@torch.inference_mode()
def measure(decoder: Decoder, scheme: KvScheme, prompt: int, rows: Sequence[int], rounds: int = ROUNDS) -> list[float]:
    """Return the median seconds of a step of each number of rows, behind a prompt of `prompt` tokens."""
    horizon = prompt + max(rows) + decoder.cache(1).block
    cache = decoder.cache(horizon, 1, scheme, kv_cache.bases(decoder, scheme))
    ids = torch.arange(prompt) % decoder.config.vocab_size
    decoder.forward(ids.to(decoder.device), ForwardBatch((prompt,), horizon, cache), torch.tensor([prompt - 1]))
    if scheme.recent:  # rows of a step lie in one block
        cache.filled = [-(-prompt // cache.block) * cache.block]
    start = list(cache.filled)
    steps = [Decoding(decoder, cache, horizon, rows=each) for each in rows]
    seconds: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds + 1):
        for step, found in zip(steps, seconds, strict=True):
            cache.filled = list(start)
            since = time.perf_counter()
            step.step([1] * len(step.ids))
            found.append(time.perf_counter() - since)
    return [statistics.median(found[1:]) for found in seconds]  # the first was recorded

"""What sparse prefill costs on a text: KL divergence of the next tokens beside full prefill, keys read, and time.

Each window of the text is a prompt and its continuation. The prompt is computed twice, whole and sparsely, as a server
does it. The continuation is teacher-forced on both caches. So the figure is the harm to the tokens of an answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attar.errors import UserError
from attar.evaluation.long_context.windows import PIECE, RowLosses, Subject, log_chances, loss_lines, run
from attar.kv.sparse_prefill import SparsePrefill
from attar.metrics.bootstrap import Interval
from attar.progress import Progress

ROWS = 256  # of a continuation
CONTEXT = 8192
ACTIVATIONS = "int8g128"  # those of `serve`, because prefill is timed


@dataclass(frozen=True)
class SparsePrefillReport:
    """Means over the continuations of prompts. KL divergence is in nats, from full prefill."""

    settings: str
    bound: str  # what a row may lose
    prompt: int  # tokens
    rows: int  # of all continuations
    kl: Interval
    worst: float
    top1: float  # share of rows with the same most probable token
    keys_read: float  # by a row of a prompt, in a layer without a window
    keys_seen: float
    full_seconds: float  # of one prompt
    sparse_seconds: float

    @property
    def speedup(self) -> float:
        """Return how many times as fast prefill becomes."""
        return self.full_seconds / self.sparse_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under the names of the fields."""
        interval = {"value": self.kl.value, "low": self.kl.low, "high": self.kl.high}
        return {**vars(self), "kl": interval, "speedup": self.speedup}

    def table(self) -> str:
        """Return the figures as lines of text."""
        times = f"{self.sparse_seconds:.1f} s, of full prefill {self.full_seconds:.1f} s: {self.speedup:.2f} times"
        lines = (
            f"sparse prefill {self.settings}, {self.rows} rows behind prompts of {self.prompt:,} tokens",
            f"  bound            {self.bound}",
            *loss_lines(self.kl, self.worst, self.top1),
            f"  keys read        {self.keys_read:,.0f} of {self.keys_seen:,.0f}",
            f"  time of a prompt {times} as fast",
        )
        return "\n".join(lines)


def measure(
    model: str,
    text: Path,
    settings: SparsePrefill,
    *,
    context: int = CONTEXT,
    max_tokens: int | None = None,
    kv: str | None = None,
    progress: Progress | None = None,
) -> SparsePrefillReport:
    """Measure sparse prefill on windows of `context` tokens of a text, up to `WINDOWS`, on native kernels.

    Activations are rounded as `serve` does by default. Raises ValueError for a text shorter than one window, and a
    window in which every row reads all keys.
    """
    told = progress or (lambda stage, done, total: None)
    first = context - ROWS
    if settings.until(first) <= settings.whole:
        message = f"{settings} reads every key of a prompt of {first:,} tokens: a longer --context shows its cost"
        raise UserError("option_conflict", message)
    subject = Subject.load(
        model, text, context, max_tokens=max_tokens, kv=kv, activations=ACTIVATIONS, progress=progress
    )
    decoder, windows = subject.decoder, subject.windows()
    cache = decoder.cache(context, scheme=subject.scheme, bases=subject.bases)
    losses, seconds, skipped = RowLosses(), [0.0, 0.0], 0
    with torch.inference_mode():
        run(decoder, cache, windows[0][:PIECE])  # memory that is touched for the first time would be timed
        for number, window in enumerate(windows):
            chances = []
            for i, few in enumerate((None, settings)):
                cache.truncate(0, 0)
                cache.prefill = None
                if few is not None:
                    cache.read_few(few, [first])
                begun = time.perf_counter()
                run(decoder, cache, window[:first], told, (2 * number + i) * context, 2 * len(windows) * context)
                seconds[i] += (time.perf_counter() - begun) / len(windows)
                chances.append(log_chances(decoder, cache, window[first:]))
            losses.add(*chances)
            skipped += 0 if cache.skipped is None else int(cache.skipped)
    config = decoder.config
    heads = config.heads * sum(window is None for window in config.windows) or 1
    whole = sum(n if n > settings.until(first) else settings.tokens_read(n) for n in range(1, first + 1))
    read = whole - skipped / heads / len(windows)
    return SparsePrefillReport(
        str(settings), settings.bound(), first, *losses.means(), read / first, (first + 1) / 2, *seconds
    )

"""What sparse attention costs on a text: KL divergence beside full attention, keys read, bytes and time.

Each window of the text is prefilled once, whole, as a server does it. Its last rows are then computed twice from the
same cache, teacher-forced: with all keys, and with few. So the figure is the harm to the next tokens of an answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.errors import UserError
from attar.evaluation.long_context.windows import RowLosses, Subject, log_chances, loss_lines, run
from attar.execution import kv_cache
from attar.execution.recorded_step import Decoding
from attar.kv.sparse import SparseAttention
from attar.metrics.bootstrap import Interval
from attar.model import sparse_layers
from attar.model.cache import KVCache
from attar.model.decoder import Decoder
from attar.progress import Progress

ROWS = 64  # of a window, that are computed twice
CONTEXT = 4096


@dataclass(frozen=True)
class SparseAttentionReport:
    """Means over the last rows of windows. KL divergence is in nats, from full attention on the same cache."""

    settings: str
    context: int
    rows: int  # in all windows
    kl: Interval
    worst: float
    top1: float  # share of rows with the same most probable token
    keys_read: float  # in a layer that is not dense
    keys_seen: float
    layers: int
    dense: tuple[int, ...]
    cache_bytes: int
    sign_bytes: int
    full_ms: float  # of one row, computed alone
    sparse_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under the names of the fields."""
        return {**vars(self), "kl": {"value": self.kl.value, "low": self.kl.low, "high": self.kl.high}}

    def table(self) -> str:
        """Return the figures as lines of text."""
        dense = ", ".join(map(str, self.dense)) or "none"
        read = f"{self.keys_read:,.0f} of {self.keys_seen:,.0f}"
        lines = (
            f"sparse attention {self.settings}, {self.rows} rows at the end of windows of {self.context:,} tokens",
            *loss_lines(self.kl, self.worst, self.top1),
            f"  keys read        {read}; dense layers of {self.layers}: {dense}",
            f"  cache            {self.cache_bytes / 1e6:,.1f} MB, and {self.sign_bytes / 1e6:,.1f} MB of one-bit keys",
            f"  time of a row    {self.sparse_ms:.1f} ms, with all keys {self.full_ms:.1f} ms",
        )
        return "\n".join(lines)


def measure(
    model: str,
    text: Path,
    settings: SparseAttention,
    *,
    context: int = CONTEXT,
    max_tokens: int | None = None,
    kv: str | None = None,
    progress: Progress | None = None,
) -> SparseAttentionReport:
    """Measure sparse attention on windows of `context` tokens of a text, up to `WINDOWS`, on native kernels.

    Activations stay exact. Raises ValueError for a text shorter than one window, a window in which every row reads all
    keys, and what sparse attention does not go with.
    """
    told = progress or (lambda stage, done, total: None)
    if settings.runs(context - ROWS) is None:
        message = f"{settings} reads every key of a window of {context:,} tokens: a longer --context shows its cost"
        raise UserError("option_conflict", message)
    subject = Subject.load(model, text, context, max_tokens=max_tokens, kv=kv, progress=progress)
    decoder, scheme, windows = subject.decoder, subject.scheme, subject.windows()
    settings.check(scheme, decoder.device.type)
    found = kv_cache.sparse_layers_of(decoder, settings, told)
    losses, seconds = RowLosses(), [0.0, 0.0]
    cache, first = decoder.cache(context, scheme=scheme), context - ROWS
    sparse_layers.attach(cache.layers, decoder, found, context)
    with torch.inference_mode():
        for number, window in enumerate(windows):
            cache.truncate(0, 0)
            cache.dense_until = None
            run(decoder, cache, window[:first], told, number * context, len(windows) * context)
            full, sparse = (_chances(decoder, cache, window[first:], until) for until in (context, first))
            losses.add(full, sparse)
            for i, until in enumerate((context, first)):
                seconds[i] += _time(decoder, cache, window[first:], until) / len(windows)
    lengths = range(context - ROWS + 1, context + 1)
    signs = sum(
        pages.signs.bits.nbytes + pages.signs.scales.nbytes for pages in cache.layers if pages.signs is not None
    )
    return SparseAttentionReport(
        str(settings), context, *losses.means(), sum(map(settings.tokens_read, lengths)) / ROWS, sum(lengths) / ROWS,
        len(found.statistics), found.dense, sum(pages.nbytes for pages in cache.layers) - signs, signs,
        1e3 * seconds[0], 1e3 * seconds[1],
    )  # fmt: skip


def _chances(decoder: Decoder, cache: KVCache, ids: Tensor, until: int) -> Tensor:
    """Return log probabilities of the tokens behind the next rows, float64 [N, V]; the cache forgets the rows."""
    cache.dense_until, first = [until], cache.filled[0]
    found = log_chances(decoder, cache, ids)
    cache.truncate(0, first)
    return found


def _time(decoder: Decoder, cache: KVCache, ids: Tensor, until: int) -> float:
    """Return the least seconds of a decode step over the next rows, one after another."""
    cache.dense_until, first = [until], cache.filled[0]
    decoding, least = Decoding(decoder, cache, cache.capacity), float("inf")
    for token in ids.tolist():
        begun = time.perf_counter()
        decoding.step([token])
        least = min(least, time.perf_counter() - begun)
    cache.truncate(0, first)
    return least

"""What KV eviction costs on a text: KL divergence beside the full cache, bytes kept, and the time of a row.

Each window of the text is run twice through the scheduler and the runner of an engine: with the full cache, and with
the policy. All but its last rows are a prompt; those rows follow it, teacher-forced, as an answer would. The figure is
the harm to these rows. A policy that looks at the end of the prompt knows what is asked there: the words of a text that
goes on are the kind case, a question that comes later is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attar.errors import UserError
from attar.evaluation.long_context.windows import PIECE, RowLosses, Subject, loss_lines
from attar.execution.model_runner import Runner, Wanted
from attar.kv.eviction import Eviction
from attar.metrics.bootstrap import Interval
from attar.model.cache import BLOCK
from attar.progress import Progress
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Outcome, ScheduledTokens

ROWS = 64  # of a window, that are compared
CONTEXT = 4096


@dataclass(frozen=True)
class EvictionReport:
    """Means over the last rows of windows. KL divergence is in nats, from the full cache in the same scheme."""

    settings: str
    context: int
    rows: int  # in all windows
    kl: Interval
    worst: float
    top1: float  # share of rows with the same most probable token
    full_perplexity: float
    perplexity: float
    full_bytes: int  # of one sequence's blocks behind the last row
    kept_bytes: int
    full_ms: float  # of one row, computed alone
    kept_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under the names of the fields."""
        return {**vars(self), "kl": {"value": self.kl.value, "low": self.kl.low, "high": self.kl.high}}

    def table(self) -> str:
        """Return the figures as lines of text."""
        lines = (
            f"KV eviction {self.settings}, {self.rows} rows behind prompts of {self.context - ROWS:,} tokens",
            *loss_lines(self.kl, self.worst, self.top1),
            f"  perplexity       {self.perplexity:.3f}, of the full cache {self.full_perplexity:.3f}",
            f"  cache            {self.kept_bytes / 1e6:,.1f} MB of {self.full_bytes / 1e6:,.1f} MB",
            f"  time of a row    {self.kept_ms:.1f} ms, with the full cache {self.full_ms:.1f} ms",
        )
        return "\n".join(lines)


class _Run(NamedTuple):
    """Log probabilities behind the last rows, float64 [ROWS, V], the blocks held then, and the least time of a row."""

    chances: Tensor
    blocks: int
    seconds: float


def measure(
    model: str,
    text: Path,
    eviction: Eviction,
    *,
    context: int = CONTEXT,
    max_tokens: int | None = None,
    kv: str | None = None,
    progress: Progress | None = None,
) -> EvictionReport:
    """Measure a policy on windows of `context` tokens of a text, up to `WINDOWS`, on native kernels.

    Activations stay exact. Raises ValueError for a text shorter than one window, a window that the budget covers, and
    what eviction does not go with.
    """
    told = progress or (lambda stage, done, total: None)
    if eviction.budget >= context - ROWS:
        message = f"{eviction} drops nothing of {context - ROWS:,} tokens: a longer --context shows its cost"
        raise UserError("option_conflict", message)
    subject = Subject.load(model, text, context, max_tokens=max_tokens, kv=kv, progress=progress)
    runner, windows = subject.evicting_runner(eviction), [window.tolist() for window in subject.windows()]
    each = sum(pages.nbytes for pages in runner.pages) // runner.pages[0].blocks
    found: list[tuple[_Run, _Run]] = []
    for number, window in enumerate(windows):
        full = _run(runner, window, None)
        told("evaluating", 2 * number + 1, 2 * len(windows))
        found.append((full, _run(runner, window, eviction)))
        told("evaluating", 2 * number + 2, 2 * len(windows))
    losses = RowLosses()
    for full, kept in found:
        losses.add(full.chances, kept.chances)
    own = [[_of_text(run[i].chances, w) for run, w in zip(found, windows, strict=True)] for i in range(2)]
    full_perplexity, perplexity = (float(torch.cat(each).mean().neg().exp()) for each in own)
    full_bytes, kept_bytes = (max(run[i].blocks for run in found) * each for i in range(2))
    full_ms, kept_ms = (1e3 * min(run[i].seconds for run in found) for i in range(2))
    return EvictionReport(
        str(eviction), context, *losses.means(), full_perplexity, perplexity, full_bytes, kept_bytes, full_ms, kept_ms
    )


def _run(runner: Runner, window: List[int], eviction: Eviction | None) -> _Run:
    """Run a window, all but its last rows as a prompt."""
    first = len(window) - ROWS
    pool = BlockPool(runner.pages[0].blocks, BLOCK)
    limits = SchedulerConfig(max_running=1, max_step_tokens=PIECE, headroom=0.0)
    scheduler = Scheduler(pool, PrefixCache(pool), limits)
    sequence = Sequence(id="window", prompt_ids=window[:first], max_tokens=ROWS + 1, bypass=True, eviction=eviction)
    scheduler.add([sequence], 0.0)
    chances, blocks, seconds = [], 0, float("inf")

    def watch(chunk: ScheduledTokens, at: int, logits: Tensor) -> None:
        chances.append(logits[max(0, first - chunk.start - at) :].double().log_softmax(-1))

    while len(sequence.tokens) <= len(window):
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        (chunk,) = plan.chunks
        wanted = {"window": Wanted(logits=watch)} if chunk.start + chunk.rows > first else {}
        logits = runner.run(plan, {} if chunk.samples else wanted)
        if chunk.samples and chunk.start >= first:
            chances.append(logits.double().log_softmax(-1))
        if chunk.start > first:
            seconds = min(seconds, time.perf_counter() - began)
        held = sequence.blocks + sequence.pristine
        blocks = len(held)
        end = chunk.start + chunk.rows
        token = window[end] if end < len(window) else 0
        scheduler.commit(plan, {"window": Outcome((token,))} if chunk.samples else {}, 0.0)
    return _Run(torch.cat(chances), blocks, seconds)


def _of_text(chances: Tensor, window: List[int]) -> Tensor:
    """Return the log probabilities of the tokens of a window behind its last rows, as far as there are any."""
    return chances[:-1].gather(1, torch.tensor(window[-ROWS + 1 :])[:, None])[:, 0]

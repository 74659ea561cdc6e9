"""Memory profile of a model on a GPU: measured before the rest becomes the KV cache.

On a CPU all of it is computed from shapes (`plan/`). On a GPU that would be a guess: an allocator that keeps freed
memory, libraries with workspaces, weights that are rearranged at their first use, graphs with a pool of their own. So
the largest step that the limits allow is run on a cache of one block (`ProfileRun`), and tokens are sampled from its
logits. The largest graph is recorded. The allocator is asked each time what it holds. The first step also compiles the
kernels, which would otherwise delay the first request. With adapters a step takes more, so it is run once more with
each of them: their products run one after another, so a step of several takes no more than the worst.

The figure that counts is what torch's allocator has reserved, not the tensors' part of it: gaps between tensors are
used up too. Memory unknown to torch, the driver's own and the kernels' code, is the rest of what the GPU has lost.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attar.execution import cuda_graphs as graphs
from attar.execution.model_runner import Runner
from attar.kv.schemes import KvScheme
from attar.model.decoder import Decoder
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.sampling import device_sampler
from attar.sampling.sampler import Sampler
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.step_plan import ScheduledTokens, StepPlan


class GpuMemory:
    """Memory of a CUDA device in bytes, as reported by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        """Return the bytes free to any process."""
        return torch.cuda.mem_get_info(self.device)[0]

    def held(self) -> int:
        """Return the bytes that this process has reserved for tensors."""
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        """Return the most bytes reserved since `settle`."""
        return torch.cuda.max_memory_reserved(self.device)

    def settle(self) -> None:
        """Wait for the device, release unused memory, and restart the peak."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes used of a GPU that had `available` before this process took any."""

    available: int
    weights: int  # in the layout after their first use
    step: int  # the largest step besides, at its peak
    graphs: int  # memory of recorded decode steps
    driver: int  # unknown to the allocator


class ProfileRun:
    """The largest step that `limits` allow, with sampling, over a cache of one block; also with each of the decoder's
    `adapters`, which are numbered from 1."""

    def __init__(
        self,
        decoder: Decoder,
        scheme: KvScheme,
        limits: SchedulerConfig,
        context: int,
        record: graphs.Record | None = None,
        runner: Callable[..., Runner] = Runner,
        adapters: int = 0,
    ) -> None:
        most, vocab = limits.together, decoder.config.vocab_size
        self.runner = runner(decoder, 1, context, scheme, most, None, record, limits.max_drafts)
        self.pages = sum(pages.nbytes for pages in self.runner.pages)  # bytes of the KV cache
        rows = [max(1, min(context, limits.max_step_tokens - most + 1)), *[1] * (most - 1)]
        logits = min(rows[0], 1 + limits.max_drafts)  # drafts of one sequence have as many as those of several
        self._plans = [_plan(rows, self.runner.block, adapter, logits) for adapter in range(adapters + 1)]
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=0)
        self._samplers = [Sampler(params, (0,), vocab) for _ in range(len(rows) - 1 + logits)]
        self.others = 0  # bytes of their own of the graphs smaller than the largest: logits, and block tables twice
        if self.runner.graphs is not None:
            width = -(-context // self.runner.block)
            self.others = sum(4 * rows * (vocab + 2 * width) for rows in self.runner.graphs.sizes[:-1])

    def step(self) -> None:
        for plan in self._plans:
            device_sampler.sample(self.runner.run(plan), self._samplers)

    @torch.inference_mode()
    def record(self) -> None:
        """Record the largest graph, where graphs are used."""
        if self.runner.graphs is not None:
            self.runner.graphs.of(self.runner.graphs.most)


def _plan(rows: Sequence[int], block: int, adapter: int, logits: int) -> StepPlan:
    """Plan a step with `rows[i]` rows of sequence i, the last `logits` of the first with logits.

    All use the adapter but the last, if it is not alone: an adapter's rows are gathered where there are others, which
    takes more memory than all rows in place.
    """
    takes, plan = [adapter] * max(1, len(rows) - 1) + [0] * (len(rows) > 1), StepPlan()
    for tokens, number in zip(rows, takes, strict=True):
        sequence = Tokens(id="trial", prompt_ids=[0] * tokens, max_tokens=1, adapter=number)
        sequence.blocks = [0] * -(-tokens // block)  # all block 0: the values that it reads are meaningless
        plan.chunks.append(ScheduledTokens(sequence, 0, tokens, 1 if plan.chunks else logits))
    return plan


def measure(memory: GpuMemory, available: int, trial: ProfileRun) -> MemoryProfile:
    """Run the trial and measure. Raises torch.OutOfMemoryError where not even that fits."""
    trial.step()
    memory.settle()
    before = memory.held()
    trial.step()
    peak = memory.peak()
    memory.settle()
    settled = memory.held()
    trial.record()
    memory.settle()
    recorded = memory.held()
    graphs, driver = recorded - settled + trial.others, max(0, available - memory.free() - recorded)
    return MemoryProfile(available, before - trial.pages, peak - before, graphs, driver)

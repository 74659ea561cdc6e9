"""Runs of attar's own scheduler on a trace, in integers, for the lab's page: what a server's steps would hold.

A step is the unit of time, whatever its rows. Prompts have one token, as the page's own timeline assumes. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attar.lab import formulas
from attar.protocol.scheduler_config import Policy, SchedulerConfig
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.step_plan import Outcome

BLOCK, MOST_STEPS = 64, 100_000
REQUESTS, GAP, LENGTH, LENGTHS, DELAY = 16, 5.0, 40.0, "exponential", 20.0
"""The page's first trace: requests, mean steps between them, mean tokens and their distribution, and `max_delay`."""


def of_page() -> list[dict[str, Any]]:
    """Run the page's first trace under every policy, at several numbers of slots."""
    arrivals = formulas.quantile_arrivals(REQUESTS, GAP)
    lengths = formulas.quantile_lengths(REQUESTS, LENGTH, LENGTHS, math.inf)
    policies: tuple[Policy, ...] = ("none", "static", "dynamic", "continuous")
    slots = {policy: (1,) if policy == "none" else (2, 4, 8) for policy in policies}
    return [replay(arrivals, lengths, policy, each, DELAY) for policy in policies for each in slots[policy]]


def replay(
    arrivals: Sequence[float], lengths: Sequence[float], policy: Policy, slots: int, delay: float, blocks: int = 4096
) -> dict[str, Any]:
    """Run requests that arrive at these steps and generate so many tokens, with at most `slots` running.

    Return the steps until the last one ends, tokens a step, the steps that each waited, and preemptions. `starts` are
    the steps at which they began. Raises Refused where a request exceeds the `blocks` of the cache.
    """
    limits = SchedulerConfig(
        policy, max_running=slots, max_step_tokens=max(512, slots), max_waiting=len(arrivals) + 1, max_delay=delay
    )
    pool = BlockPool(blocks, BLOCK)
    scheduler = Scheduler(pool, PrefixCache(pool), limits)
    left = [
        Tokens(id=str(number), prompt_ids=[number + 1], max_tokens=int(length)) for number, length in enumerate(lengths)
    ]
    began: dict[str, int] = {}
    now, count, tokens = 0, 0, 0
    while (left or scheduler.sequences) and now < MOST_STEPS:
        while left and arrivals[int(left[0].id)] <= now:
            scheduler.add([left.pop(0)], now)
        step = scheduler.plan(now)
        for each in step.admitted:
            began.setdefault(each.id, now)
        sampled = {chunk.sequence.id: Outcome((0,)) for chunk in step.chunks if chunk.samples}
        now += 1
        scheduler.commit(step, sampled, now)
        scheduler.collect()
        tokens += len(sampled)
        count = now if sampled else count
    starts = [began[str(number)] for number in range(len(lengths))]
    waits = [start - arrival for start, arrival in zip(starts, arrivals, strict=True)]
    return {
        "policy": policy, "slots": slots, "steps": count, "rate": tokens / count, "waits": waits,
        "preemptions": scheduler.preemptions, "starts": starts,
    }  # fmt: skip

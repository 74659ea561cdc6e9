"""What paging saves: the three wastes of a cache that gives each request one contiguous run of slots.

Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (SOSP 2023), section
3.1. A request that may grow to `most` tokens, will grow to `last`, and now has `length`, occupies as many contiguous
slots as its longest. Of those, last - length are *reserved* (used later, idle now) and most - last are lost to
*internal* fragmentation. Free slots are lost to *external* fragmentation while the next request fits their number but
no hole.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Outcome

SLOTS, BLOCK, STEPS = 4096, 16, 400
SIZES = [128, 256, 512, 1024]  # what clients ask for at most


@dataclass
class Wastes:
    """Slots, summed over the steps of a trace."""

    used: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0

    @property
    def share_used(self) -> float:
        return self.used / (SLOTS * STEPS)


def trace() -> list[tuple[int, int, int]]:
    """Requests as (tokens of the prompt, tokens in the end, tokens at most)."""
    numbers, requests = random.Random(0), []
    for _ in range(400):
        most = numbers.choice(SIZES)
        prompt = numbers.randint(8, most // 4)
        requests.append((prompt, prompt + numbers.randint(1, (most - prompt) // 2), most))
    return requests


def contiguous(requests: list[tuple[int, int, int]]) -> Wastes:
    """First fit, in order of arrival; a token a step."""
    wastes, waiting = Wastes(), list(requests)
    running: list[list[int]] = []  # place, length now, in the end, at most; in order of place
    for _ in range(STEPS):
        running = [[place, length + 1, last, most] for place, length, last, most in running if length < last]
        while waiting:
            length, last, most = waiting[0]
            ends = [0, *(place + size for place, _, _, size in running)]
            holes = zip(ends, [*(place for place, *_ in running), SLOTS], strict=True)
            place = next((start for start, end in holes if end - start >= most), None)
            if place is None:
                break
            running = sorted([*running, [place, length, last, most]])
            del waiting[0]
        free = SLOTS - sum(most for *_, most in running)
        wastes.used += sum(length for _, length, _, _ in running)
        wastes.reserved += sum(last - length for _, length, last, _ in running)
        wastes.internal += sum(most - last for _, _, last, most in running)
        wastes.external += free if waiting and waiting[0][2] <= free else 0
    return wastes


def paged(requests: list[tuple[int, int, int]]) -> Wastes:
    """The same by the engine's own pool and scheduler: what a request holds beyond its tokens is in its last block,
    and no free block is lost, since any will do."""
    pool = BlockPool(SLOTS // BLOCK, BLOCK)
    limits = SchedulerConfig(max_running=256, max_step_tokens=SLOTS, max_waiting=len(requests), max_preemptions=STEPS)
    scheduler, wastes = Scheduler(pool, PrefixCache(pool), limits), Wastes()
    lasts = {}
    for i, (length, last, most) in enumerate(requests):
        sequence = Sequence(id=f"{i}", prompt_ids=[i] * length, max_tokens=most - length)
        lasts[sequence.id] = last
        scheduler.add([sequence], 0.0)
    for now in range(STEPS):
        step = scheduler.plan(float(now))
        for sequence in scheduler.running:
            held, length = len(sequence.blocks) * BLOCK, len(sequence.tokens)
            assert 0 <= held - length < BLOCK
            later = min(lasts[sequence.id], held) - length
            wastes.used += length
            wastes.reserved += later
            wastes.internal += held - length - later
        ends = [(c.sequence, len(c.sequence.tokens) + 1 >= lasts[c.sequence.id]) for c in step.chunks if c.samples]
        scheduler.commit(step, {sequence.id: Outcome((0,), end) for sequence, end in ends}, float(now))
    return wastes


def test_contiguous_slots_waste_in_three_ways_and_blocks_in_one() -> None:
    requests = trace()
    before, after = contiguous(requests), paged(requests)
    assert min(before.reserved, before.internal, before.external) > 0
    assert before.share_used < 0.4
    assert (after.reserved + after.internal) / after.used < 0.06
    assert after.share_used > 0.9


def test_the_example_of_one_short_sequence() -> None:
    """100 tokens: in blocks of 16 they waste 12 of 112 slots; in a run of 2048, 1948."""
    pool = BlockPool(128, 16)
    slots = pool.needed(100) * pool.size
    assert (slots - 100, round((slots - 100) / slots, 3), round((2048 - 100) / 2048, 3)) == (12, 0.107, 0.951)

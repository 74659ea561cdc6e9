"""Blocks of a sliding window: where matches end, what is evicted first, and what a pool must hold. Random lives of the
whole scheduler are in `simulation.py`."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.scheduling.sliding import SlidingBlocks
from attar.scheduling.step_plan import Outcome

SIZE = 4
STEP = 8


class Made:
    """A scheduler with a window over `sliding` blocks. Sequences are run until they end, one after another."""

    def __init__(self, window: int, sliding: int, blocks: int = 64) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.sliding = SlidingBlocks(BlockPool(sliding, SIZE), window, STEP)
        self.cache = PrefixCache(self.pool, beside=self.sliding)
        limits = SchedulerConfig(max_running=2, max_step_tokens=STEP)
        self.scheduler = Scheduler(self.pool, self.cache, limits, sliding=self.sliding)
        self.most = 0

    def run(self, prompt: list[int], id: str = "a") -> Sequence:
        sequence = Sequence(id=id, prompt_ids=prompt, max_tokens=1)
        self.scheduler.add([sequence], 0.0)
        while self.scheduler.sequences:
            step = self.scheduler.plan(0.0)
            self.most = max(self.most, self.sliding.pool.active)
            outcomes = {chunk.sequence.id: Outcome((1,)) for chunk in step.chunks if chunk.samples}
            self.scheduler.commit(step, outcomes, 0.0)
            self.scheduler.check()
        return sequence

    def reached(self, tokens: list[int]) -> int:
        return self.cache.match(b"", array("i", tokens)).length


@given(st.integers(1, 20), st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_a_match_is_the_longest_whose_window_has_no_hole(window: int, has: list[bool], data: st.DataObject) -> None:
    made = SlidingBlocks(BlockPool(64, SIZE), window, STEP)
    made._beside = {place: place for place, there in enumerate(has) if there}
    length = data.draw(st.integers(0, len(has) * SIZE))

    def whole(end: int) -> bool:
        """Whether a row at `end` finds each position before it that it reads."""
        return all(has[at // SIZE] for at in range(max(0, end - window + 1) // SIZE * SIZE, end))

    ends = [length, *(end for end in range(length) if end % SIZE == 0)]
    assert made.reach(list(range(len(has))), length) == max(end for end in ends if whole(end))


def test_a_long_prompt_takes_no_more_than_its_bound_and_leaves_its_end() -> None:
    made = Made(window=6, sliding=6)
    prompt = list(range(100))
    sequence = made.run(prompt)
    assert made.most <= made.sliding.limits.held + made.sliding.limits.of_steps
    assert made.sliding.released > 90 // SIZE
    assert made.reached(prompt) == 100
    assert made.reached(prompt[:50]) < 50, "its window was evicted"
    assert sequence.sliding == []
    assert made.sliding.pool.active == 0


def test_ends_of_prompts_outlast_what_windows_have_passed() -> None:
    """The end of a short prompt is still there after a long one; in order of release alone it would be gone."""
    made = Made(window=6, sliding=12)
    short, long = list(range(20)), list(range(1000, 1160))
    made.run(short)
    made.run(long)
    assert made.reached(short) == 20
    assert made.reached(long) == 160


def test_what_a_match_has_taken_stays_longer() -> None:
    made = Made(window=6, sliding=20)
    shared, long = list(range(16)), list(range(1000, 1160))
    made.run([*shared, *range(500, 530)])
    assert made.reached(shared) == 16
    made.run([*shared, *range(600, 630)])
    made.run(long)
    assert made.reached(shared) == 16


def test_an_evicted_block_of_the_tree_takes_its_neighbour_along() -> None:
    made = Made(window=6, sliding=20, blocks=10)
    made.run(list(range(30)))
    assert made.sliding.pool.cached > 0
    made.cache.flush()
    assert made.sliding.pool.free == made.sliding.pool.total


def test_sequences_wait_until_their_windows_have_room() -> None:
    made = Made(window=6, sliding=6)
    both = [Sequence(id=id, prompt_ids=range(at, at + 40), max_tokens=1) for id, at in (("a", 0), ("b", 100))]
    for each in both:
        made.scheduler.add([each], 0.0)
    step = made.scheduler.plan(0.0)
    assert step.admitted == both[:1]
    made.scheduler.check()


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks"):
        SlidingBlocks(BlockPool(4, SIZE), 6, STEP)

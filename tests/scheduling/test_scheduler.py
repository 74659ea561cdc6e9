"""The scheduler, one rule at a time. How the rules get on with each other is for the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from attar.protocol.scheduler_config import PRESETS, SchedulerConfig
from attar.scheduling.admission import Refused
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.deadlines import MANY_ENDED
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Copy, Outcome, StepPlan

SIZE = 4


class Engine:
    """A scheduler whose every step takes one second, and whose model always says 7."""

    def __init__(self, blocks: int = 64, **limits: object) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(self.pool, self.cache, SchedulerConfig(**{"headroom": 0.0, **limits}))  # type: ignore[arg-type]
        self.now = 0.0

    def add(self, id: str, prompt: Iterable[int], max_tokens: int = 4, n: int = 1, **more: object) -> list[Sequence]:
        prompt = list(prompt)
        names = [id] if n == 1 else [f"{id}.{i}" for i in range(n)]
        choices = [Sequence(id=name, prompt_ids=prompt, max_tokens=max_tokens, **more) for name in names]  # type: ignore[arg-type]
        self.scheduler.add(choices, self.now)
        return choices

    def plan(self) -> StepPlan:
        return self.scheduler.plan(self.now)

    def ahead(self) -> StepPlan:
        step = self.scheduler.ahead(self.now)
        assert step is not None
        return step

    def commit(self, step: StepPlan, **failures: str) -> None:
        self.now += 1
        outcomes = {chunk.sequence.id: Outcome((7,)) for chunk in step.chunks if chunk.samples}
        outcomes |= {id: Outcome(failure=code) for id, code in failures.items()}
        self.scheduler.commit(step, outcomes, self.now)
        self.pool.check()
        self.cache.check()
        self.scheduler.check()

    def step(self) -> list[tuple[str, int]]:
        """Run one; what it ran."""
        step = self.plan()
        ran = [(chunk.sequence.id, chunk.rows) for chunk in step.chunks]
        self.commit(step)
        return ran

    def finish(self) -> list[tuple[str, str | None]]:
        """Run until all have ended; who ended how, in order."""
        while self.scheduler.sequences:
            self.step()
        return [(sequence.id, sequence.ending) for sequence in self.scheduler.collect()]


def test_a_sequence_runs_from_prompt_to_end() -> None:
    engine = Engine()
    (a,) = engine.add("a", range(6), max_tokens=3)
    assert [engine.step() for _ in range(3)] == [[("a", 6)], [("a", 1)], [("a", 1)]]
    assert list(a.tokens) == [0, 1, 2, 3, 4, 5, 7, 7, 7]
    assert engine.scheduler.collect() == [a]
    assert engine.scheduler.collect() == []
    assert (a.ending, a.status, a.blocks) == ("finished", Status.ENDED, [])


def test_decode_goes_first_then_prompts_in_chunks_then_newcomers() -> None:
    engine = Engine(max_running=4, max_step_tokens=8)
    engine.add("a", range(8))
    engine.add("b", range(10, 30))
    assert engine.step() == [("a", 8)]
    engine.add("c", range(40, 44))
    assert engine.step() == [("a", 1), ("b", 7)]
    assert engine.step() == [("a", 1), ("b", 7)]
    assert engine.step() == [("a", 1), ("b", 6), ("c", 1)]
    assert engine.step() == [("b", 1), ("c", 3)]


def test_a_decoder_has_its_row_in_every_step_whoever_ranks_before_it() -> None:
    engine = Engine(max_running=2, max_step_tokens=4)
    engine.add("worse", range(50, 52), max_tokens=9, priority=5)
    assert engine.step() == [("worse", 2)]
    engine.add("better", range(20), priority=-5)
    assert [engine.step() for _ in range(6)] == [[("worse", 1), ("better", 3)]] * 6


def test_nobody_is_let_in_when_the_budget_is_spent() -> None:
    """It would hold blocks, and count as running, for nothing."""
    engine = Engine(max_running=4, max_step_tokens=4)
    engine.add("a", range(8))
    (b,) = engine.add("b", range(20, 28))
    for _ in range(2):
        step = engine.plan()
        assert [sequence.id for sequence in step.sequences] == ["a"]
        assert (b.status, b.blocks) == (Status.QUEUED, [])
        engine.commit(step)
    assert engine.step() == [("a", 1), ("b", 3)]


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    engine = Engine(max_running=1, max_step_tokens=3)
    engine.add("a", range(7))
    samples = []
    for _ in range(4):
        step = engine.plan()
        samples.append([(chunk.start, chunk.rows, chunk.samples) for chunk in step.chunks])
        engine.commit(step)
    assert samples == [[(0, 3, 0)], [(3, 3, 0)], [(6, 1, 1)], [(7, 1, 1)]]


def test_several_tokens_may_be_accepted_at_once() -> None:
    engine = Engine()
    (a,) = engine.add("a", range(5), max_tokens=6)
    step = engine.plan()
    engine.scheduler.commit(step, {"a": Outcome((1, 2, 3))}, 1.0)
    assert list(a.tokens[5:]) == [1, 2, 3]
    assert engine.step() == [("a", 3)]  # their keys and values


def test_a_prompt_may_be_run_for_its_own_sake() -> None:
    engine = Engine()
    engine.add("a", range(5), max_tokens=0)
    step = engine.plan()
    engine.scheduler.commit(step, {"a": Outcome()}, 1.0)
    assert [sequence.ending for sequence in engine.scheduler.collect()] == ["finished"]


def test_blocks_are_free_in_the_step_that_ends_a_sequence() -> None:
    engine = Engine(blocks=4)
    engine.add("a", range(9), max_tokens=1)
    engine.add("b", range(20, 29), max_tokens=1)
    step = engine.plan()
    assert engine.pool.active == 3
    assert [sequence.id for sequence in step.admitted] == ["a"]
    engine.commit(step)
    assert engine.pool.active == 0
    assert engine.step() == [("b", 9)]


def test_a_followed_prompt_is_shared_to_the_token() -> None:
    engine = Engine()
    engine.add("a", range(10), max_tokens=1)
    engine.finish()
    (b,) = engine.add("b", [*range(9), 50, 51])
    step = engine.plan()
    assert [chunk[1:4] for chunk in step.chunks] == [(9, 2, 1)]
    assert [(copy.slots, copy.target) for copy in step.copies] == [(1, b.blocks[2])]
    assert engine.pool.states()[step.copies[0].source] == 1  # held until the commit
    engine.commit(step)
    assert (b.reused, b.reuse_ended, b.differs_at) == (9, "differs", 9)
    assert (engine.cache.asked, engine.cache.reused) == (10 + 11, 9)


def test_the_last_token_of_a_prompt_is_always_run() -> None:
    engine = Engine()
    engine.add("a", range(8), max_tokens=1)
    engine.finish()
    (b,) = engine.add("b", range(8), max_tokens=1)
    assert engine.step() == [("b", 1)]
    assert (b.reused, b.reuse_ended) == (7, "complete")


def test_bypass_computes_everything_and_counts_nowhere() -> None:
    engine = Engine()
    engine.add("a", range(8), max_tokens=1, bypass=True)
    engine.finish()
    (b,) = engine.add("b", range(8), max_tokens=1, bypass=True)
    assert engine.step() == [("b", 8)]
    assert (b.reused, b.reuse_ended, engine.cache.asked) == (0, "bypassed", 0)
    engine.add("c", range(8), max_tokens=1)
    assert engine.step() == [("c", 1)]  # what bypasses may still be reused


def test_a_copy_is_given_up_where_its_source_is_the_block_that_is_missing() -> None:
    engine = Engine(blocks=2)
    engine.add("a", range(6), max_tokens=1)
    engine.finish()
    (b,) = engine.add("b", [*range(5), 50, 51], max_tokens=2)
    step = engine.plan()
    assert step.copies == []
    assert (b.reused, b.reuse_ended) == (4, "no_room")


def test_choices_share_the_prompt_of_the_first() -> None:
    engine = Engine()
    a, b, c = engine.add("r", range(10), n=3)
    assert engine.step() == [("r.0", 10)]
    step = engine.plan()
    assert [(chunk.sequence.id, chunk.start) for chunk in step.chunks] == [("r.0", 10), ("r.1", 9), ("r.2", 9)]
    assert step.copies == [Copy(a.blocks[2], b.blocks[2], 1, b), Copy(a.blocks[2], c.blocks[2], 1, c)]
    assert a.blocks[:2] == b.blocks[:2] == c.blocks[:2]


def test_what_is_asked_and_reused_counts_once_a_request() -> None:
    """Of eight choices of a new prompt seven find it, which the first has just computed: that is no reuse."""
    engine = Engine()
    engine.add("cold", range(3), n=8)
    engine.finish()
    assert (engine.cache.asked, engine.cache.reused) == (3, 0)
    engine.add("warm", range(3), n=8)
    engine.finish()
    assert (engine.cache.asked, engine.cache.reused) == (3 + 3, 2)
    engine.add("more", range(3))
    engine.finish()
    assert (engine.cache.asked, engine.cache.reused) == (6 + 3, 2 + 2)


def test_the_first_choice_that_runs_is_counted() -> None:
    """Also where it is not the first of the request; and not again where that ends meanwhile."""
    engine = Engine(max_running=1)
    engine.add("r", range(10), n=3)
    engine.scheduler.cancel("r.0", engine.now)
    assert engine.step() == [("r.1", 10)]
    engine.scheduler.cancel("r.1", engine.now)
    engine.finish()
    assert (engine.cache.asked, engine.cache.reused) == (10, 0)


def test_where_the_first_choice_asks_for_nothing_nobody_does() -> None:
    """Prompt log probabilities are computed by the first, and what the others find is its."""
    engine = Engine()
    first, second = (Sequence(id=f"r.{i}", prompt_ids=range(8), max_tokens=2, bypass=i == 0) for i in range(2))
    engine.scheduler.add([first, second], engine.now)
    engine.finish()
    assert (first.reuse_ended, second.reused) == ("bypassed", 7)
    assert (engine.cache.asked, engine.cache.reused) == (0, 0)


def test_whoever_starts_over_is_not_counted_again() -> None:
    engine = Engine(blocks=5)
    engine.add("a", range(8), max_tokens=9)
    engine.add("b", range(20, 28), max_tokens=9)
    engine.finish()
    assert engine.scheduler.preemptions > 0
    assert (engine.cache.asked, engine.cache.reused) == (16, 0)


def test_whoever_is_admitted_without_a_chunk_can_fail_in_the_step_too() -> None:
    engine = Engine(policy="static", max_running=2, max_step_tokens=4)
    engine.add("a", range(4))
    engine.add("b", range(10, 14))
    step = engine.plan()
    assert ([sequence.id for sequence in step.admitted], len(step.chunks)) == (["a", "b"], 1)
    engine.commit(step, b="internal")  # its block could not be copied
    assert engine.finish() == [("b", "internal"), ("a", "finished")]
    assert engine.pool.cached == 1 + 1  # all of them of a


@pytest.mark.parametrize("running", [False, True])
def test_the_next_choice_takes_over_where_the_first_is_cancelled(running: bool) -> None:
    engine = Engine(max_running=2, max_step_tokens=4)
    engine.add("r", range(10), n=3)
    if running:
        assert engine.step() == [("r.0", 4)]
    engine.scheduler.cancel("r.0", engine.now)
    assert engine.step() == [("r.1", 4)]
    assert engine.finish() == [("r.0", "cancelled"), ("r.1", "finished"), ("r.2", "finished")]


def test_a_beginning_that_another_just_computes_is_waited_for() -> None:
    engine = Engine(max_running=4, max_step_tokens=8)
    engine.add("a", range(14))
    (b,) = engine.add("b", [*range(9), 50])
    (c,) = engine.add("c", [0, 1, 2, 60])  # has less than a block in common
    assert engine.step() == [("a", 8)]
    assert engine.step() == [("a", 6)]  # b would find 8 now, but soon 9
    assert engine.step() == [("a", 1), ("b", 1), ("c", 1)]
    assert (b.reused, c.reused) == (9, 3)


def test_less_than_a_block_is_not_waited_for() -> None:
    engine = Engine()
    engine.add("a", range(9))
    engine.add("b", [0, 1, 2, 60, 61])
    engine.add("c", range(9), cache_salt=b"other")
    assert engine.step() == [("a", 9), ("b", 5), ("c", 9)]


def test_a_prompt_computed_twice_is_kept_once() -> None:
    engine = Engine()
    a, b = *engine.add("a", range(9)), *engine.add("b", range(9), bypass=True)
    assert engine.step() == [("a", 9), ("b", 9)]
    assert a.blocks[:2] == b.blocks[:2]
    assert a.blocks[2] != b.blocks[2]  # into which each writes on
    assert engine.pool.active == 4


@pytest.mark.parametrize("steps,status", [(0, Status.QUEUED), (1, Status.PREFILL), (2, Status.DECODE)])
def test_cancelled_in_any_state(steps: int, status: Status) -> None:
    engine = Engine(max_running=1, max_step_tokens=8)
    (a,) = engine.add("a", range(12), max_tokens=9)
    for _ in range(steps):
        engine.step()
    assert a.status is status
    for id in ("a", "a", "nobody"):
        engine.scheduler.cancel(id, engine.now)
    assert [sequence.ending for sequence in engine.scheduler.collect()] == ["cancelled"]
    assert engine.pool.active == 0


def test_cancelled_during_a_step_its_blocks_stay_until_the_commit() -> None:
    engine = Engine()
    (a,) = engine.add("a", range(6))
    step = engine.plan()
    engine.scheduler.cancel("a", engine.now)
    assert engine.scheduler.collect() == [a]
    assert (a.blocks, engine.pool.active) == ([], 2)
    engine.commit(step)
    assert (a.output, engine.pool.active) == (0, 0)


def test_one_that_fails_fails_alone_and_leaves_nothing_behind() -> None:
    engine = Engine()
    engine.add("a", range(6))
    engine.add("b", range(20, 26))
    step = engine.plan()
    engine.commit(step, a="bad_logits")
    assert [(s.id, s.ending) for s in engine.scheduler.collect()] == [("a", "bad_logits")]
    assert engine.cache.match(b"", step.chunks[0].sequence.tokens).length == 0
    assert engine.finish() == [("b", "finished")]


def test_deadlines_of_those_that_have_ended_do_not_pile_up() -> None:
    engine = Engine()
    engine.add("stays", range(6), deadline=5000.0)
    engine.step()
    for i in range(10 * MANY_ENDED):
        engine.add(f"a{i}", range(6), deadline=6000.0)
        engine.scheduler.cancel(f"a{i}", engine.now)
    assert len(engine.scheduler._deadlines) < 2 * MANY_ENDED
    assert engine.scheduler.wake() == 5000.0


def test_nobody_is_woken_for_the_deadline_of_one_that_has_ended() -> None:
    """An engine with nothing to do would look at its clock from then on, and at nothing else."""
    engine = Engine()
    engine.add("ends", range(6), deadline=2.0)
    engine.add("stays", range(6), deadline=3.0)
    engine.scheduler.cancel("ends", engine.now)
    engine.step()
    assert engine.scheduler.wake() == 3.0
    engine.scheduler.cancel("stays", engine.now)
    assert engine.scheduler.wake() is None


def test_deadlines() -> None:
    engine = Engine(max_running=1, max_step_tokens=8)
    engine.add("a", range(6), max_tokens=9, deadline=2.0)
    engine.add("b", range(6), deadline=1.5)
    assert engine.scheduler.wake() == 0.0
    engine.step()
    engine.scheduler.expire(1.4)
    assert engine.scheduler.collect() == []
    engine.now = 1.5
    step = engine.plan()
    engine.scheduler.expire(2.0)
    assert [(s.id, s.ending) for s in engine.scheduler.collect()] == [("b", "deadline"), ("a", "deadline")]
    assert engine.pool.active == 2, "of a, which the step runs"
    engine.commit(step)
    assert engine.pool.active == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_whoever_is_late_has_ended_when_a_step_is_planned(ahead: bool) -> None:
    engine = Engine(max_running=2)
    (a, b) = (*engine.add("a", range(6), max_tokens=9, deadline=2.0), *engine.add("b", range(20, 26), max_tokens=9))
    steps = [engine.plan()] if ahead else []
    engine.now = 2.0
    steps.append(engine.ahead() if ahead else engine.plan())
    assert [sequence for sequence in engine.scheduler.collect() if sequence.ending == "deadline"] == [a]
    assert [chunk.sequence for chunk in steps[-1].chunks] == [b]


@pytest.mark.parametrize("where", ["admitted", "grown", "preempted", "kept", "cancelled"])
def test_a_broken_promise_of_pool_or_tree_ends_more_than_one_request(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is to be served from blocks that may be another's: the engine's process ends, and a new one starts."""

    def broken(*asked: object) -> None:
        raise AssertionError("a block with two owners")

    engine = Engine(blocks=5)
    engine.add("a", range(8), max_tokens=5)
    if where == "preempted":
        engine.add("b", range(20, 28), max_tokens=5)
    step = None if where == "admitted" else engine.plan()
    if step is not None and where != "kept":
        engine.commit(step)
    where_it_breaks = {"admitted": (engine.cache, "match"), "grown": (engine.pool, "allocate")}
    monkeypatch.setattr(*where_it_breaks.get(where, (engine.cache, "insert")), broken)
    then: dict[str, Callable[[], object]] = {
        "kept": lambda: engine.commit(step) if step is not None else None,
        "cancelled": lambda: engine.scheduler.cancel("a", 0.0),
    }
    with pytest.raises(AssertionError, match="two owners"):
        then.get(where, engine.plan)()


def test_refusals() -> None:
    engine = Engine(blocks=4, max_waiting=2)
    with pytest.raises(Refused, match=r"10 tokens and up to 8 more need 5 cache blocks of 4; there are 4") as refused:
        engine.add("a", range(10), max_tokens=8)
    assert refused.value.code == "too_long"
    engine.add("b", range(10), max_tokens=7)  # of the last token nothing is ever cached
    with pytest.raises(Refused, match="the queue holds 2: no room for 2") as refused:
        engine.add("c", range(2), n=2)
    assert refused.value.code == "full"
    assert set(engine.scheduler.sequences) == {"b"}


@pytest.mark.parametrize("order,priority", [("ab", 0), ("ba", 1)])
def test_the_last_in_order_is_preempted_and_its_prefix_comes_back(order: str, priority: int) -> None:
    engine = Engine(blocks=5)
    prompts = {"a": range(8), "b": range(20, 28)}
    for id in order:
        engine.add(id, prompts[id], max_tokens=4, priority=priority if id == "b" else 0)
    engine.step()
    step = engine.plan()  # both need a third block, and one is left
    assert [sequence.id for sequence in step.preempted] == ["b"]
    engine.commit(step)
    assert engine.pool.cached == 2
    assert [engine.step() for _ in range(2)] == [[("a", 1)]] * 2
    step = engine.plan()
    assert [(chunk.sequence.id, chunk.start, chunk.rows) for chunk in step.chunks] == [("b", 8, 1)]


def test_preemption_is_by_recompute_and_bounded() -> None:
    engine = Engine(blocks=6, max_preemptions=1)
    (a,) = engine.add("a", range(8), max_tokens=16)
    (b,) = engine.add("b", range(20, 28), max_tokens=16, priority=1)
    while not engine.scheduler.preemptions:
        engine.step()
    assert (b.status, b.preemptions, b.computed) == (Status.PREEMPTED, 1, 0)
    assert engine.finish() == [("a", "finished"), ("b", "finished")]
    assert list(b.tokens) == [*range(20, 28), *[7] * 16]
    assert engine.scheduler.preemptions == 1
    assert a.preemptions == 0


def test_whoever_was_preempted_often_enough_gets_all_it_needs_at_once() -> None:
    engine = Engine(blocks=8, max_preemptions=0)
    (a,) = engine.add("a", range(8), max_tokens=13)
    (b,) = engine.add("b", range(20, 28), max_tokens=13)
    engine.step()
    assert (len(a.blocks), b.status) == (5, Status.QUEUED)
    engine.finish()
    assert engine.scheduler.preemptions == 0


def test_admission_leaves_headroom_to_the_running() -> None:
    engine = Engine(blocks=10, headroom=0.2)
    engine.add("a", range(16))
    engine.add("b", range(20, 36))
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine = Engine(blocks=10, headroom=0.3)
    engine.add("a", range(16))
    engine.add("b", range(20, 36))
    engine.step()
    assert len(engine.scheduler.running) == 1


def test_nobody_is_passed_more_often_than_the_limit() -> None:
    engine = Engine(policy="none", max_passed=2)
    engine.add("low", range(2), max_tokens=1, priority=5)
    order = []
    for i in range(6):
        engine.add(f"{i}", range(2), max_tokens=1)
        order += [id for id, _ in engine.step()]
    assert order[:4] == ["0", "1", "low", "2"]


def test_policies_end_the_same_trace_in_their_own_order() -> None:
    def steps(policy: str) -> tuple[int, list[str]]:
        engine = Engine(policy=policy, max_running=2, max_step_tokens=64)
        for i, tokens in enumerate([8, 2, 8, 2]):
            engine.add(f"{i}", range(10 * i, 10 * i + 4), max_tokens=tokens)
        ended = [id for id, _ in engine.finish()]
        return int(engine.now), ended

    assert steps("none") == (8 + 2 + 8 + 2, ["0", "1", "2", "3"])
    assert steps("static") == (8 + 8, ["1", "0", "3", "2"])
    assert steps("dynamic") == steps("static")
    assert steps("continuous") == (10, ["1", "0", "2", "3"])


def test_a_static_batch_is_admitted_whole_whatever_the_budget() -> None:
    engine = Engine(policy="static", max_running=3, max_step_tokens=4)
    for i in range(3):
        engine.add(f"{i}", range(10 * i, 10 * i + 6))
    step = engine.plan()
    assert [sequence.id for sequence in step.admitted] == ["0", "1", "2"]
    assert step.tokens == 4
    engine.commit(step)
    assert len(engine.finish()) == 3


def test_dynamic_batches_wait_for_company_but_not_for_ever() -> None:
    engine = Engine(policy="dynamic", max_running=2, max_delay=5.0)
    engine.add("a", range(4), max_tokens=1)
    assert engine.step() == []
    assert engine.scheduler.wake() == 5.0
    engine.now = 5.0
    assert engine.step() == [("a", 4)]
    engine.add("b", range(4), max_tokens=1)
    engine.add("c", range(4), max_tokens=1)
    assert engine.scheduler.wake() == 6.0  # at once: they are as many as it waits for
    assert [id for id, _ in engine.step()] == ["b", "c"]


def test_time_is_accounted_for() -> None:
    engine = Engine(blocks=6, max_running=2, max_step_tokens=8)
    sequences = [engine.add(f"{i}", range(10 * i, 10 * i + 8), max_tokens=10)[0] for i in range(3)]
    engine.finish()
    for sequence in sequences:
        spans = {status.value: seconds for status, seconds in sequence.spans.items()}
        assert sum(spans.values()) == sequence.since - sequence.arrival
        assert (spans["preempted"] > 0) == (sequence.preemptions > 0)
        assert spans["decode"] > spans["prefill"] > 0
    assert any(sequence.preemptions for sequence in sequences)
    assert sequences[2].spans[Status.QUEUED] > sequences[0].spans[Status.QUEUED] == 0


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "magic"}, {"max_running": 0}, {"max_waiting": 0}, {"max_step_tokens": 31}, {"max_delay": -1.0},
     {"max_passed": -1}, {"max_preemptions": -1}, {"headroom": 1.0}],
    ids=str,
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SchedulerConfig(**wrong)  # type: ignore[arg-type]


def test_presets_trade_gaps_for_throughput() -> None:
    assert set(PRESETS) == {"latency", "throughput", "long-context"}
    assert PRESETS["latency"].max_step_tokens < PRESETS["long-context"].max_step_tokens
    assert PRESETS["latency"].max_step_tokens < PRESETS["throughput"].max_step_tokens
    assert PRESETS["long-context"].max_running < PRESETS["latency"].max_running < PRESETS["throughput"].max_running


# Ahead of a step


def test_a_step_ahead_goes_on_behind_tokens_that_are_to_come() -> None:
    engine = Engine(max_running=3, max_step_tokens=8)
    (a,) = engine.add("a", range(6), max_tokens=3)
    engine.add("b", range(10, 24), max_tokens=1)
    first = engine.plan()
    second = engine.ahead()
    assert [(chunk.sequence.id, *chunk[1:4]) for chunk in first.chunks] == [("a", 0, 6, 1), ("b", 0, 2, 0)]
    assert [(chunk.sequence.id, *chunk[1:4]) for chunk in second.chunks] == [("a", 6, 1, 1), ("b", 2, 7, 0)]
    assert (a.computed, a.planned, len(a.tokens), a.inflight_tokens) == (0, 7, 6, 2)
    engine.commit(first)
    assert (a.computed, a.planned, len(a.tokens), a.inflight_tokens) == (6, 7, 7, 1)
    third = engine.ahead()
    assert [(chunk.sequence.id, *chunk[1:4]) for chunk in third.chunks] == [("a", 7, 1, 1), ("b", 9, 5, 1)]
    engine.commit(second)
    assert not engine.ahead().chunks, "both end by their length"
    engine.commit(third)
    assert list(a.tokens[6:]) == [7, 7, 7]
    assert [sequence.ending for sequence in engine.scheduler.collect()] == ["finished", "finished"]


def test_the_row_behind_the_last_token_is_for_nothing() -> None:
    """What the prefix tree learns was chosen and computed, and blocks stay as long as a step may use them."""
    engine = Engine()
    (a,) = engine.add("a", range(7), max_tokens=20)
    first = engine.plan()
    second = engine.ahead()
    assert len(a.blocks) == 2
    engine.scheduler.commit(first, {"a": Outcome((5,), finished=True)}, 1.0)
    assert [sequence.ending for sequence in engine.scheduler.collect()] == ["finished"]
    assert engine.pool.active == 2
    assert [token for _, _, node in engine.cache.nodes() for token in node.tokens] == [*range(7)]
    engine.scheduler.check()
    engine.scheduler.commit(second, {}, 2.0)
    assert (engine.pool.active, engine.pool.cached) == (0, 2)
    assert list(a.tokens[7:]) == [5]


@pytest.mark.parametrize("how", ["cancelled", "deadline", "failed"])
def test_whoever_ends_with_two_steps_under_way_ends_at_once(how: str) -> None:
    engine = Engine()
    (a,) = engine.add("a", range(7), max_tokens=20, deadline=0.5)
    first = engine.plan()
    second = engine.ahead()
    if how == "cancelled":
        engine.scheduler.cancel("a", 0.0)
    elif how == "deadline":
        engine.scheduler.expire(0.5)
    engine.scheduler.commit(first, {"a": Outcome(failure="internal")} if how == "failed" else {}, 1.0)
    assert [sequence.ending for sequence in engine.scheduler.collect()] == ["internal" if how == "failed" else how]
    assert engine.pool.active == 2
    engine.scheduler.commit(second, {}, 2.0)
    assert engine.pool.free == engine.pool.total, "nothing of it was ever known to be good"
    assert len(a.tokens) == 7


def test_nobody_gives_way_to_a_step_ahead() -> None:
    engine = Engine(blocks=4)
    engine.add("a", range(7))
    engine.add("b", range(10, 17))
    first = engine.plan()
    second = engine.ahead()
    engine.commit(first)
    assert engine.scheduler.ahead(engine.now) is None
    engine.commit(second)
    assert [sequence.id for sequence in engine.plan().preempted] == ["b"]


def test_somebody_new_begins_in_a_step_ahead() -> None:
    engine = Engine(max_running=1)
    engine.add("a", range(7), max_tokens=20)
    first = engine.plan()
    engine.add("b", range(7))
    second = engine.ahead()
    engine.scheduler.commit(first, {"a": Outcome((5,), finished=True)}, 1.0)
    third = engine.ahead()
    assert [(chunk.sequence.id, chunk.rows) for chunk in third.chunks] == [("b", 1)], "the rest is shared, and copied"
    assert third.copies[0].slots == 2
    engine.scheduler.commit(second, {}, 2.0)
    engine.commit(third)


def test_a_step_ahead_has_one_row_for_each_that_decodes() -> None:
    engine = Engine()
    engine.add("a", range(5), max_tokens=6)
    first = engine.plan()
    engine.ahead()
    with pytest.raises(AssertionError, match="the row of one token"):
        engine.scheduler.commit(first, {"a": Outcome((1, 2))}, 1.0)


def test_steps_are_committed_in_their_order() -> None:
    engine = Engine()
    engine.add("a", range(5))
    engine.plan()
    second = engine.ahead()
    with pytest.raises(AssertionError, match="in their order"):
        engine.commit(second)


def test_a_sequence_that_outgrows_its_horizon_starts_over() -> None:
    """All of its keys are others then: nothing computed before is used, nor found by a prompt of the other horizon."""
    engine = Engine()
    (a,) = engine.add("a", range(6), max_tokens=5, horizons=(8, 99))
    ran = []
    while engine.scheduler.sequences:
        ran.append((a.horizon, engine.step()))
    assert ran == [
        (8, [("a", 6)]), (8, [("a", 1)]), (8, [("a", 1)]), (8, [("a", 9)]), (99, [("a", 1)])
    ]  # fmt: skip
    assert (list(a.tokens), a.preemptions, engine.scheduler.preemptions) == ([*range(6), *[7] * 5], 0, 0)
    (b,) = engine.add("b", range(6), horizons=(8, 99))
    (c,) = engine.add("c", [*a.tokens, 1], horizons=(8, 99))
    engine.step()
    assert (b.horizon, b.reused) == (8, 5)
    assert (c.horizon, c.reused) == (99, 10)


def test_no_step_is_planned_ahead_past_a_horizon() -> None:
    engine = Engine()
    engine.add("a", range(6), max_tokens=5, horizons=(7, 99))
    step = engine.plan()
    follower = engine.ahead()
    engine.commit(step)
    assert engine.scheduler.ahead(engine.now) is None
    engine.commit(follower)
    assert engine.step() == [("a", 8)]

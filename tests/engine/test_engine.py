"""The engine on a small model: what a request gets does not depend on who else is there, nor on their mishaps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from attar.engine import inflight
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.requests.outputs import Choice, Request
from attar.kernels import dispatch, ops
from attar.kv.schemes import SCHEMES
from attar.model.cache import ForwardBatch
from attar.model.config import Rope
from attar.model.decoder import Decoder
from attar.protocol.messages import Delta, Embed, Embedding, Event, Failed, Finished, PromptLogprobs, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import Policy, SchedulerConfig
from tests.engine.conftest import CONTEXT, ROOM, TIGHT, Answers, answers, make_engine, run, run_as_they_come

Make = Callable[..., Decoder]

SEEDS = int(os.environ.get("TEST_INVARIANCE_SEEDS", "12"))


def some_requests(seed: int, count: int, vocab: int) -> list[Submit | Embed]:
    """Prompts that share beginnings, of many kinds."""
    draw = random.Random(seed)
    common = [tuple(draw.randrange(vocab) for _ in range(draw.choice((3, 64, 70, 100)))) for _ in range(3)]
    asks: list[Submit | Embed] = []
    for i in range(count):
        own = tuple(draw.randrange(vocab) for _ in range(draw.randrange(1, 20)))
        prompt = draw.choice(common)[: draw.randrange(1, 101)] + own
        if draw.random() < 0.1:
            asks.append(Embed(str(i), prompt, draw.choice(("mean", "last"))))
            continue
        params = SamplingParams(
            max_tokens=draw.choice((0, 1, 5, 30, 70)),
            temperature=draw.choice((0.0, 0.0, 0.7, 1.5)),
            top_k=draw.choice((0, 5)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            logit_bias=draw.choice(({}, {3: 5.0, 7: -100.0})),
            seed=draw.randrange(1000),
            logprobs=draw.choice((None, 0, 3)),
            prompt_logprobs=draw.choice((None, None, None, 2)),
        )
        cache_salt = draw.choice((b"", b"", b"other"))
        asks.append(Submit(str(i), prompt, params, draw.choice((1, 1, 1, 3)), cache_salt, draw.randrange(3)))
    return asks


@pytest.mark.parametrize("seed", range(SEEDS))
def test_company_chunks_prefix_hits_and_preemption_change_no_bit(decoder: Decoder, seed: int) -> None:
    company(decoder, seed, 14)


ROUNDED = sorted({*SCHEMES} - {"float32", "kivi4", "kivi2"})  # which are in the test above, and in the one below


@pytest.mark.parametrize("kv", ROUNDED)
@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_nor_do_they_where_keys_and_values_are_rounded(decoder: Decoder, kv: str, seed: int) -> None:
    company(decoder, seed, 7, kv)


@pytest.mark.parametrize("kv", ["kivi4", "kivi2"])
@pytest.mark.parametrize("seed", range(SEEDS // 4))
@pytest.mark.usefixtures("decoder")
def test_nor_in_groups_of_heads_that_are_wide_enough(tiny: Path, kv: str, seed: int) -> None:
    company(LLM(tiny, activations="int8g32", verify=False).decoder, seed, 7, kv)


@pytest.mark.parametrize("kv", ["float32", *ROUNDED])
def test_the_first_step_of_all_may_be_recorded(decoder: Decoder, kv: str) -> None:
    """That of a prompt of one token, before which nothing was computed."""
    made = make_engine(decoder, kv=kv)
    assert len(answers(run(made, [Submit("a", (5,), SamplingParams(max_tokens=3, seed=0))]))) == 1


def company(decoder: Decoder, seed: int, count: int, kv: str | None = None) -> None:
    draw = random.Random(-1 - seed)
    asks = some_requests(seed, count, decoder.config.vocab_size)
    alone: Answers = {}
    one = make_engine(decoder, kv=kv)
    for ask in asks:
        alone |= answers(run(one, [ask]))
        one.cache.flush()
    policy = draw.choice(("continuous", "continuous", "static", "dynamic", "none"))
    limits = SchedulerConfig(
        policy=policy, max_running=draw.choice((2, 4, 8)), max_step_tokens=draw.choice((8, 17, 64))
    )
    made = make_engine(decoder, draw.choice((ROOM, TIGHT)), limits, kv=kv)
    together = answers(run_as_they_come(made, asks, draw))
    assert together.keys() == alone.keys()
    for key, answer in together.items():
        assert answer == alone[key], f"choice {key}"
    assert made.pool.active == 0


GROWING = {
    "longrope": Rope(10000.0, 16, "longrope", original_context=24, short_factor=(1.0,) * 8, long_factor=(3.0,) * 8),
    "dynamic": Rope(10000.0, 16, "dynamic", factor=4.0, original_context=24),
}


@pytest.fixture(params=GROWING)
def growing(request: pytest.FixtureRequest, tiny_decoder: Make) -> Decoder:
    """A model whose angles change as a sequence grows: past 24 positions, and for `dynamic` past 48, 96 and 192."""
    return tiny_decoder(scheme="w4g32", store=dispatch.store("exact"), rope=GROWING[request.param])


def test_a_greedy_text_does_not_depend_on_max_tokens(growing: Decoder) -> None:
    """Angles are chosen by the length that there is, and the text goes on as one computed in one piece would."""
    prompt = tuple(range(10))
    made = make_engine(growing)
    found = [
        run_greedy(made, f"{count}", prompt, count) for count in (1, 10, 14, 15, 16, 60)
    ]  # fmt: skip
    longest = found[-1]
    assert all(tokens == longest[: len(tokens)] for tokens in found)
    horizons = made.runner.horizons
    text = prompt + tuple(longest)
    for length in (10, 23, 24, 25, 40, 49, 69):
        horizon = next(at for at in horizons if at >= length)
        logits = growing.forward(torch.tensor(text[:length]), ForwardBatch((length,), horizon))
        assert int(logits[-1].argmax()) == text[length], f"after {length} tokens"


def run_greedy(made: Engine, name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    events = run(made, [Submit(name, prompt, SamplingParams(max_tokens=count, temperature=0, seed=0))])
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.parametrize("seed", range(2))
def test_company_changes_no_bit_where_sequences_start_over(growing: Decoder, seed: int) -> None:
    company(growing, seed, 14)


def test_a_tight_pool_does_preempt(decoder: Decoder) -> None:
    """Else the test above would not see it."""
    made = make_engine(decoder, TIGHT, SchedulerConfig(max_step_tokens=64, headroom=0.0))
    asks = [Submit(str(i), (i + 1,) * 60, SamplingParams(max_tokens=70, temperature=0, seed=0)) for i in range(4)]
    found = answers(run(made, asks))
    assert made.scheduler.preemptions > 0
    for ask in asks:
        assert found[ask.id, 0] == answers(run(make_engine(decoder), [ask]))[ask.id, 0]


def test_what_followers_share_is_not_computed_again(decoder: Decoder) -> None:
    made = make_engine(decoder)
    prompt = tuple(range(90))
    greedy = SamplingParams(max_tokens=2, temperature=0, seed=0)
    run(made, [Submit("a", prompt, greedy)])
    (end,) = [e for e in run(made, [Submit("b", prompt, greedy)]) if isinstance(e, Finished)]
    assert end.report is not None
    assert end.report.reused_tokens == 89
    assert end.report.reuse_ended == "complete"
    (end,) = [e for e in run(made, [Submit("c", (*prompt[:80], 5, 5, 5), greedy)]) if isinstance(e, Finished)]
    assert end.report is not None
    assert (end.report.reused_tokens, end.report.differs_at) == (80, 80)
    (end,) = [e for e in run(made, [Submit("d", prompt, greedy, cache_salt=b"own")]) if isinstance(e, Finished)]
    assert end.report is not None
    assert end.report.reused_tokens == 0


@pytest.mark.parametrize("kv", [None, "int8", "klt4"])
def test_a_vector_of_the_last_position_reuses_what_its_prompt_shares_and_has_the_same_bits(
    decoder: Decoder, kv: str | None
) -> None:
    prompt = tuple(i * 7 % decoder.config.vocab_size for i in range(100))
    alone = answers(run(make_engine(decoder, kv=kv), [Embed("a", prompt, "last")]))
    for shared, reused in ((100, 96), (90, 64)):
        made = make_engine(decoder, kv=kv)
        run(made, [Submit("before", prompt[:shared], SamplingParams(max_tokens=1, temperature=0, seed=0))])
        events = run(made, [Embed("a", prompt, "last")])
        assert answers(events) == alone
        (report,) = [event.report for event in events if isinstance(event, Embedding)]
        assert report is not None
        assert report.reused_tokens >= reused


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_vector_that_is_none_fails_its_request_alone(
    decoder: Decoder, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asks = make_engine(decoder), [Embed("a", (1, 2, 3), "mean"), Embed("b", (4, 5, 6), "mean")]
    pool = Request.pool

    def poisoned(self: Request, before: torch.Tensor | None, hidden: torch.Tensor) -> None:
        pool(self, before, torch.full_like(hidden, bad) if self.id == "a" else hidden)

    monkeypatch.setattr(Request, "pool", poisoned)
    found = answers(run(made, asks))
    assert found["a", 0] == ["bad_logits"]
    monkeypatch.undo()
    assert found["b", 0] == answers(run(make_engine(decoder), asks[1:]))["b", 0]
    assert made.pool.active == 0


def test_prompt_logprobs_and_vectors_are_the_models_own(decoder: Decoder) -> None:
    prompt = tuple(i * 7 % decoder.config.vocab_size for i in range(70))
    asks = [
        Submit("p", prompt, SamplingParams(max_tokens=0, prompt_logprobs=0, seed=0)),
        Embed("mean", prompt, "mean"),
        Embed("last", prompt, "last"),
    ]
    found = answers(run(make_engine(decoder), asks))
    step = ForwardBatch((len(prompt),), CONTEXT, decoder.cache(CONTEXT))
    stream, delta = decoder.states(torch.tensor(prompt), step)
    logprobs = decoder.logits(stream, delta).double().log_softmax(-1)
    expected = [(token, logprobs[at, token].item()) for at, token in enumerate(prompt[1:])]
    (of_prompt,) = found["p", -1]
    assert [(each.token_id, each.logprob) for each in of_prompt] == expected  # type: ignore[attr-defined]
    hidden = ops.norm(stream, delta, decoder.final_norm)[1].double()
    vectors = {id: torch.frombuffer(bytearray(found[id, 0][0]), dtype=torch.float32) for id in ("mean", "last")}  # type: ignore[arg-type]
    torch.testing.assert_close(vectors["mean"], hidden.mean(0).float())
    assert torch.equal(vectors["last"], hidden[-1].float())


REFUSED = [
    (Submit("x", (), SamplingParams(seed=0)), "invalid"),
    (Submit("x", (10**6,), SamplingParams(seed=0)), "invalid"),
    (Submit("x", (-1,), SamplingParams(seed=0)), "invalid"),
    (Submit("x", (1,) * CONTEXT, SamplingParams(seed=0)), "too_long"),
    (Submit("x", (1,), SamplingParams(seed=0, logit_bias={10**6: 1.0})), "invalid"),
    (Submit("x", (1,), SamplingParams(seed=0, stop="end")), "invalid"),
    (Embed("x", (1,) * (CONTEXT + 1)), "too_long"),
]


@pytest.mark.parametrize("ask, code", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_are_events(decoder: Decoder, ask: Submit | Embed, code: str) -> None:
    (failed,) = run(make_engine(decoder), [ask])
    assert isinstance(failed, Failed)
    assert failed.code == code


def test_a_full_queue_and_a_passed_deadline(decoder: Decoder) -> None:
    made = make_engine(decoder, limits=SchedulerConfig(max_running=1, max_waiting=1, max_step_tokens=8))
    greedy = SamplingParams(max_tokens=5, temperature=0, seed=0)
    made.submit(Submit("first", (1,), greedy))
    events = made.step()
    for id in ("second", "third"):
        made.submit(Submit(id, (2,), greedy, deadline=0.0 if id == "second" else None))
    found = answers([*events, *run(made)])
    assert found["third", 0] == ["full"]
    assert found["second", 0] == ["deadline"]
    assert found["first", 0][-1] == ("length", 5)


def test_samplers_of_a_request_share_its_prompt_and_none_is_made_for_a_refused_one(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_engine(decoder, limits=SchedulerConfig(max_running=2, max_waiting=3, max_step_tokens=8))
    params = SamplingParams(max_tokens=5, repetition_penalty=1.2, seed=0)
    made.submit(Submit("a", (5, 6, 5, 7), params, n=3))
    choices = list(made.requests.choices.values())
    assert len(choices) == 3
    assert all(choice.sampler.seen is choices[0].sampler.seen for choice in choices)
    assert choices[0].sampler.seen.tolist() == [5, 6, 7]
    monkeypatch.setattr("attar.engine.requests.intake.Sampler", None)
    monkeypatch.setattr("attar.engine.requests.intake.distinct", None)
    made.submit(Submit("b", (5, 6), params))
    assert [event.code for event in made.requests.take() if isinstance(event, Failed)] == ["full"]


def test_requests_of_neighbouring_seeds_share_no_choices(decoder: Decoder) -> None:
    made = make_engine(decoder, limits=SchedulerConfig(max_running=8, max_step_tokens=64))
    for seed in (1, 2, 2**64 - 1):
        made.submit(Submit(str(seed), (5, 6, 7), SamplingParams(max_tokens=5, seed=seed), n=4))
    seeds = [choice.sampler.seed for choice in made.requests.choices.values()]
    assert [seeds[0], seeds[4], seeds[8]] == [1, 2, 2**64 - 1], "the first choice's is the request's"
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_request_ends_once_and_leaves_nothing(decoder: Decoder, phase: str) -> None:
    made = make_engine(decoder, limits=SchedulerConfig(max_running=2, max_step_tokens=8))
    greedy = SamplingParams(max_tokens=50, temperature=0, seed=0)
    made.submit(Submit("other", (9,) * 20, greedy))
    made.submit(Submit("x", (1,) * 30, greedy, n=2))
    events: list[Event] = []
    for _ in range({"queued": 0, "prefill": 4, "decode": 20}[phase]):
        events += made.step()
    made.cancel("x")
    made.cancel("x")
    made.cancel("unknown")
    events += run(made)
    assert [event.code for event in events if isinstance(event, Failed)] == ["cancelled"]
    found = answers(events)
    assert found["other", 0] == answers(run(make_engine(decoder), [Submit("other", (9,) * 20, greedy)]))["other", 0]


@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("steps", [0, 3])
def test_who_is_cancelled_between_steps_is_not_kept_until_somebody_else_comes(
    decoder: Decoder, policy: Policy, steps: int
) -> None:
    made = make_engine(decoder, limits=SchedulerConfig(policy=policy))
    made.submit(Submit("x", (1,) * 30, SamplingParams(max_tokens=50, temperature=0, seed=0), n=2))
    for _ in range(steps):
        made.step()
    made.cancel("x")
    assert [event.id for event in made.requests.take()] == ["x"]
    assert not made.idle
    assert made.runnable
    made.step()
    assert made.idle
    assert not made.requests.choices


def test_one_requests_mishap_is_its_own(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(max_tokens=20, temperature=0, seed=0)
    asks = [Submit(str(i), (i + 1,) * 10, greedy) for i in range(4)]
    expected = answers(run(make_engine(decoder), asks))
    take = Choice.take

    def fails(self: Choice, draw: object) -> Delta:
        if self.request.id == "2" and self.sampler.index == 5:
            raise RuntimeError("planted")
        return take(self, draw)  # type: ignore[arg-type]

    monkeypatch.setattr(Choice, "take", fails)
    found = answers(run(make_engine(decoder), asks))
    assert found["2", 0][-1] == "internal"
    for id in ("0", "1", "3"):
        assert found[id, 0] == expected[id, 0]


def test_a_nan_in_one_row_fails_that_request(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_engine(decoder)
    run_step = made.runner.run

    def poisoned(plan: object, *more: object) -> torch.Tensor:
        logits = run_step(plan, *more).clone()  # type: ignore[arg-type]
        sampling = [chunk.sequence.id for chunk in plan.chunks if chunk.samples]  # type: ignore[attr-defined]
        if "1#0" in sampling:
            logits[sampling.index("1#0"), 5] = float("nan")
        return logits

    monkeypatch.setattr(made.runner, "run", poisoned)
    asks = [Submit(str(i), (i + 1,) * 10, SamplingParams(max_tokens=20, temperature=0, seed=0)) for i in range(3)]
    found = answers(run(made, asks))
    assert found["1", 0] == ["bad_logits"]
    assert found["0", 0] == answers(run(make_engine(decoder), [asks[0]]))["0", 0]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("max_tokens, n", [(0, 1), (3, 2)])
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_of_a_scored_prompt_that_says_nothing_fails_that_request(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, bad: float, rows: int, max_tokens: int, n: int, overlaps: bool
) -> None:
    """Else its answer would have nulls for numbers. Of -inf a whole row, which leaves no token."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, prompt_logprobs=1)
    asks = [Submit(str(i), tuple(range(i, i + 20)), params, n) for i in range(3)]
    limits = SchedulerConfig(max_running=4, max_step_tokens=rows)
    expected = answers(run(make_engine(decoder, limits=limits), asks))
    score = Request.score

    def poisoned(self: Request, start: int, logits: torch.Tensor) -> PromptLogprobs | None:
        if self.id == "1" and start <= 5 < start + len(logits):
            logits = logits.clone()
            logits[5 - start, 7 if bad != -torch.inf else slice(None)] = bad
        return score(self, start, logits)

    monkeypatch.setattr(Request, "score", poisoned)
    events = run(make_engine(decoder, limits=limits, overlaps=overlaps), asks)
    assert [event.code for event in events if isinstance(event, Failed)] == ["bad_logits"]
    assert not [event for event in events if isinstance(event, Delta | PromptLogprobs | Finished) and event.id == "1"]
    found = answers(events)
    del found["1", 0]
    assert found == {key: answer for key, answer in expected.items() if key[0] != "1"}


def test_the_last_row_of_a_scored_prompt_counts_only_where_it_chooses(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = Request.score

    def poisoned(self: Request, start: int, logits: torch.Tensor) -> PromptLogprobs | None:
        return score(self, start, torch.cat((logits[:-1], torch.full_like(logits[-1:], torch.nan))))

    monkeypatch.setattr(Request, "score", poisoned)
    ask = Submit("a", (1, 2, 3, 4), SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0))
    assert len(answers(run(make_engine(decoder), [ask]))["a", -1][0]) == 3  # type: ignore[arg-type]


def test_tokens_that_cannot_be_are_legal_in_a_scored_prompt(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Request.score

    def masked(self: Request, start: int, logits: torch.Tensor) -> PromptLogprobs | None:
        logits = logits.clone()
        logits[:, 2:9] = -torch.inf
        return score(self, start, logits)

    monkeypatch.setattr(Request, "score", masked)
    ask = Submit("a", (1, 2, 30, 4), SamplingParams(max_tokens=2, temperature=0, seed=0, prompt_logprobs=1))
    found = answers(run(make_engine(decoder), [ask]))
    (of_prompt,) = found["a", -1]
    assert [each.logprob == -torch.inf for each in of_prompt] == [True, False, True]  # type: ignore[attr-defined]
    assert found["a", 0][-1] == ("length", 2)


def test_a_step_that_raises_fails_those_in_it_and_no_later_one(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_engine(decoder)
    ask = Submit("a", (1, 2, 3), SamplingParams(max_tokens=20, temperature=0, seed=0))
    made.submit(ask)
    made.step()
    with monkeypatch.context() as patch:
        patch.setattr(made.runner.recordings, "replay", lambda *asked: 1 / 0)
        (failed,) = [event for event in made.step() if isinstance(event, Failed)]
    assert failed.code == "internal"
    assert answers(run(made, [ask])) == answers(run(make_engine(decoder), [ask]))


@pytest.mark.parametrize("what", ["run", "draw"])
def test_a_device_that_is_lost_when_a_step_is_run_again_ends_the_engine(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is nobody's failure, and nothing can be computed there any more."""
    made = make_engine(decoder)
    made.submit(Submit("a", (1, 2, 3), SamplingParams(max_tokens=20, temperature=0, seed=0)))
    errors = iter((RuntimeError("planted"), torch.AcceleratorError("the device is gone")))

    def raises(*asked: object) -> None:
        raise next(errors)

    for where, name in [(made.runner, "run")] if what == "run" else [(inflight, "draw_reached"), (inflight, "sample")]:
        monkeypatch.setattr(where, name, raises)
    with pytest.raises(torch.AcceleratorError):
        made.step()


@pytest.mark.parametrize("kv, reused", [("int4", 80), ("klt2", 64)])
def test_schemes_that_keep_unfinished_blocks_apart_share_whole_ones(decoder: Decoder, kv: str, reused: int) -> None:
    made, prompt = make_engine(decoder, kv=kv), tuple(range(1, 81))
    params = SamplingParams(max_tokens=1, temperature=0, seed=0)
    run(made, [Submit("a", prompt, params)])
    assert made.cache.reused == 0
    run(made, [Submit("b", (*prompt, 90, 91), params)])
    assert made.cache.reused == reused


@pytest.mark.parametrize("kv", ["int4", "klt2"])
def test_prompts_of_several_blocks_in_one_step_keep_apart(
    decoder: Decoder, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(*_: object) -> NoReturn:
        raise AssertionError("the step raised, and is healed one by one")

    monkeypatch.setattr(inflight.Launcher, "_apart", apart)
    draw = random.Random(5)
    params = SamplingParams(max_tokens=3, temperature=0, seed=0, logprobs=3)
    prompts = [tuple(draw.randrange(decoder.config.vocab_size) for _ in range(n)) for n in (180, 30, 170, 130)]
    asks = [Submit(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    limits, alone = SchedulerConfig(max_step_tokens=1024), dict[tuple[str, int], list[object]]()
    for ask in asks:
        alone |= answers(run(make_engine(decoder, limits=limits, kv=kv), [ask]))
    assert answers(run(make_engine(decoder, limits=limits, kv=kv), asks)) == alone
    short = SchedulerConfig(max_step_tokens=48)
    assert answers(run(make_engine(decoder, limits=short, kv=kv), asks)) == alone


def test_equal_short_prompts_start_together_where_only_whole_blocks_are_shared(decoder: Decoder) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, seed=0)
    made = make_engine(decoder, kv="klt2")
    for i in range(4):
        made.submit(Submit(str(i), tuple(range(1, 11)), params))
    made.step()
    assert len(made.scheduler.running) == 4

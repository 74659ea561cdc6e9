"""The sampler against transformers' processors, the exact distribution, and one that takes row after row."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from attar.kernels.noise import draws, gumbel
from attar.protocol.request import SamplingParams, TokenLogprob
from attar.sampling import device_sampler
from attar.sampling import sampler as module
from attar.sampling.sampler import (
    SORTED,
    BadLogits,
    SampledToken,
    Sampler,
    distinct,
    logprobs_of,
    penalized,
    sample,
)
from tests.errors import user_error

PROBABILITY_ATOL = 1e-12  # the same formulas in float64, sums in another order
CHI2_999 = 24.32  # 99.9 % quantile of 7 degrees of freedom, the most there are below
DRAWS = 10_000
TOTAL_VARIATION = 0.015  # about three times what so many draws have by chance
TOKEN = st.integers(0, 19)
INF = float("inf")


def draw(logits: torch.Tensor, samplers: list[Sampler]) -> list[SampledToken]:
    drawn = sample(logits, samplers)
    assert all(isinstance(one, SampledToken) for one in drawn)
    return drawn  # type: ignore[return-value]


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [V] that step 7 draws from, for logits without penalties."""
    scaled = (logits.double() - logits.max())[None] / params.temperature
    return module._filter(scaled, [params])[0].softmax(-1)


# The distribution


@st.composite
def filters(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "temperature": draw(st.sampled_from([0.3, 1.0, 2.5])),
        "top_k": draw(st.sampled_from([0, 1, 3, 7, 40, 1000])),
        "top_p": draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05])),
        "min_p": draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
    }


@settings(max_examples=60, deadline=None)
@given(filters(), st.integers(0, 2**31), st.sampled_from([2, 11, 300]))
def test_filters_equal_transformers(values: dict[str, Any], seed: int, size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    scores = hf.TemperatureLogitsWarper(values["temperature"])(None, logits.double()[None])
    if values["top_k"]:
        scores = hf.TopKLogitsWarper(values["top_k"])(None, scores)
    if values["top_p"] < 1:
        scores = hf.TopPLogitsWarper(values["top_p"])(None, scores)
    scores = hf.MinPLogitsWarper(values["min_p"])(None, scores) if values["min_p"] else scores
    ours = distribution(logits, SamplingParams(**values))
    assert torch.equal(ours > 0, scores[0].softmax(-1) > 0)
    torch.testing.assert_close(ours, scores[0].softmax(-1), rtol=0, atol=PROBABILITY_ATOL)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.2, 3), st.lists(TOKEN, min_size=1, max_size=8), st.lists(TOKEN, max_size=8))
def test_repetition_penalty_equals_transformers(penalty: float, prompt: list[int], output: list[int]) -> None:
    logits = torch.randn(20, dtype=torch.float64) * 4
    state = Sampler(SamplingParams(repetition_penalty=penalty), prompt, 20)
    for token in output:
        state.commit(token)
    oracle = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())
    torch.testing.assert_close(penalized(logits[None], [state]), oracle, rtol=1e-15, atol=0)


def test_presence_and_frequency_count_the_output_alone() -> None:
    state = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [1, 1, 2], 4)
    for token in (3, 2, 3, 3):
        state.commit(token)
    assert penalized(torch.zeros((1, 4), dtype=torch.float64), [state]).tolist() == [[0.0, 0.0, -0.75, -1.25]]


def test_penalties_act_before_greedy_choice() -> None:
    logits = torch.tensor([[1.0, 0.9, -1.0]])
    state = Sampler(SamplingParams(temperature=0, frequency_penalty=0.2), [], 3)
    chosen = []
    for _ in range(4):
        chosen.append(draw(logits, [state])[0].token_id)
        state.commit(chosen[-1])
    assert chosen == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}],
    ids=repr,
)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5, -3.0, 1.5, 0.0])
    expected = distribution(logits, SamplingParams(**values))
    states = [Sampler(SamplingParams(seed=seed, **values), [], 8) for seed in range(DRAWS // 10)]
    for state, index in zip(states, itertools.cycle(range(10))):
        state.index = index
    tokens = []
    for _ in range(10):  # ten tokens of each seed: seeds and counters must both serve
        tokens += [one.token_id for one in draw(logits.expand(len(states), -1), states)]
        for state in states:
            state.index += 10
    counts = torch.tensor(tokens).bincount(minlength=8).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi2 = ((counts - DRAWS * expected)[kept] ** 2 / (DRAWS * expected[kept])).sum()
    assert chi2 < CHI2_999, f"chi2 {chi2:.1f} over {int(kept.sum())} tokens"
    assert 0.5 * (counts / DRAWS - expected).abs().sum() < TOTAL_VARIATION


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0, -INF]])
    states = [Sampler(SamplingParams(temperature=temperature, seed=seed), [], 4) for seed in range(50)]
    tokens = {one.token_id for one in draw(logits.expand(50, -1), states)}
    assert tokens == ({0} if temperature < 1 else {0, 1, 2})


# Ties and edges


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])
    assert draw(logits[None], [Sampler(SamplingParams(temperature=0), [], 5)])[0].token_id == 1
    for values, kept in (
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 1.0}, [1, 2, 3]),
    ):
        assert distribution(logits, SamplingParams(**values)).nonzero().flatten().tolist() == kept, values


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 99))
def test_top_k_one_is_greedy(values: list[int], seed: int) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    greedy = Sampler(SamplingParams(temperature=0), [], len(values))
    narrow = Sampler(SamplingParams(top_k=1, seed=seed), [], len(values))
    assert draw(logits, [greedy])[0].token_id == draw(logits, [narrow])[0].token_id


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
def test_any_k_keeps_what_a_sort_of_everything_would(top_p: float) -> None:
    """Few that are found in order and many that are not, equals at the edge or none, together as alone."""
    size = 1000
    ks = [1, 2, size // SORTED, size // SORTED + 1, size // 2, size - 1, size, size + 1, 0]
    numbers = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(ks), size, generator=numbers)
    for logits in (drawn, drawn.round()):
        logits[:, 7] = -torch.inf
        scaled = logits.double() - logits.max(-1, keepdim=True).values
        expected = torch.full_like(scaled, -torch.inf)
        for row, kept, k in zip(scaled, expected, ks, strict=True):
            ids = np.argsort(-row.numpy(), kind="stable")[: k or size]
            probabilities = row[ids].exp()
            sums = probabilities.cumsum(-1)
            few = ids[(sums - probabilities < top_p * sums[-1]).numpy()] if top_p < 1 else ids
            kept[few] = row[few]
        params = [SamplingParams(top_k=k, top_p=top_p) for k in ks]
        assert torch.equal(module._filter(scaled, params), expected)
        alone = [module._filter(row[None], [each]) for row, each in zip(scaled, params, strict=True)]
        assert torch.equal(torch.cat(alone), expected)


def test_a_k_of_the_whole_vocabulary_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come with every request, and a vocabulary takes longer to sort than to do all else with."""
    logits = torch.randn(2, 500)
    monkeypatch.setattr(torch.Tensor, "topk", lambda *_: pytest.fail("sorted"))
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("sorted"))
    draw(logits, [Sampler(SamplingParams(top_k=k, seed=0), [], 500) for k in (500, 499)])


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    kept = {p: int((distribution(logits, SamplingParams(top_p=p)) > 0).sum()) for p in (0.4, 0.6, 0.74, 0.8, 0.9)}
    assert kept == {0.4: 1, 0.6: 2, 0.74: 2, 0.8: 3, 0.9: 4}
    equal = torch.zeros(4)  # sums are exact here: two of four reach one half
    kept = {p: int((distribution(equal, SamplingParams(top_p=p)) > 0).sum()) for p in (0.25, 0.5, 0.75)}
    assert kept == {0.25: 1, 0.5: 2, 0.75: 3}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 50), -INF)
    logits[0, 17] = -1e30
    for values in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 50, "top_p": 0.99}):
        assert draw(logits, [Sampler(SamplingParams(seed=3, **values), [], 50)])[0].token_id == 17


# Rows do not meet


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.02},
    {"top_k": 1000, "top_p": 0.5, "min_p": 0.001, "temperature": 1.7},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2, "logprobs": 4},
    {"temperature": 0, "repetition_penalty": 2.0, "logprobs": 0},
    {"logprobs": 20, "top_p": 0.7},
]


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
def test_a_row_is_bitwise_what_it_is_alone() -> None:
    size = 40_000  # past the size at which torch splits one reduction over threads
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(MIXED), size, generator=generator) * 3
    logits[:, 100:200] = 4.0  # ties

    def states() -> list[Sampler]:
        return [Sampler(SamplingParams(seed=i, **values), [1, 2, 3], size) for i, values in enumerate(MIXED)]

    torch.set_num_threads(1)
    alone = [sample(logits[i : i + 1], [state])[0] for i, state in enumerate(states())]
    assert all(isinstance(one, SampledToken) for one in alone)
    torch.set_num_threads(2)
    assert sample(logits, states()) == alone
    order = torch.randperm(len(MIXED), generator=generator).tolist()
    shuffled = states()
    assert sample(logits[order], [shuffled[i] for i in order]) == [alone[i] for i in order]

    # The probabilities too, not just the choices they led to.
    params = [SamplingParams(**values) for values in MIXED if values.get("temperature") != 0]
    scaled = logits[: len(params)].double() - logits[: len(params)].double().amax(-1, keepdim=True)
    together = module._filter(scaled, params)
    for i, one in enumerate(params):
        assert torch.equal(module._filter(scaled[i : i + 1], [one])[0], together[i])


class OneRow:
    """The same steps for one row, token by token and with whole sorts: what `sample` must equal to the bit."""

    def __init__(self, params: SamplingParams, prompt: list[int], size: int) -> None:
        self.params = params
        self.output: list[int] = []
        self.seen = torch.zeros(size, dtype=torch.bool)
        self.counts = torch.zeros(size, dtype=torch.float64)
        if params.repetition_penalty != 1:
            self.seen[prompt] = True

    def commit(self, token: int) -> None:
        self.output.append(token)
        self.seen[token] = True
        self.counts[token] += 1

    def penalized(self, row: torch.Tensor) -> torch.Tensor:
        params, x = self.params, row.double().clone()
        for token, bias in params.logit_bias.items():
            x[token] += bias
        r = params.repetition_penalty
        x = torch.where(self.seen, torch.where(x > 0, x / r, x * r), x)
        return x - params.presence_penalty * (self.counts > 0) - params.frequency_penalty * self.counts

    def draw(self, row: torch.Tensor) -> SampledToken | None:
        params, x = self.params, self.penalized(row)
        if not math.isfinite(x.max()):
            return None
        token = int((x == x.max()).nonzero()[0])
        if params.temperature:
            noise = gumbel(draws([params.seed or 0], [len(self.output)]), len(x))[0]
            token = int((self.filtered((x - x.max()) / params.temperature) + noise).numpy().argmax())
        return SampledToken(token, None if params.logprobs is None else self.logprobs(row, token, params.logprobs))

    def filtered(self, scaled: torch.Tensor) -> torch.Tensor:
        k, p = self.params.top_k or len(scaled), self.params.top_p
        ranked, order = scaled.sort(descending=True, stable=True)
        sums = ranked[:k].exp().cumsum(-1)
        mass = sums[-1] if k < len(scaled) else scaled.exp().cumsum(-1)[-1]
        keep = order[:k][(sums - ranked[:k].exp() < p * mass) | (p == 1)]
        kept = torch.full_like(scaled, -INF)
        kept[keep] = scaled[keep]
        floor = torch.tensor(self.params.min_p, dtype=torch.float64).log()
        return kept.masked_fill(kept < floor, -INF)

    @staticmethod
    def logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprob:
        values = row.double().log_softmax(-1)
        ranked = values.sort(descending=True, stable=True)
        top = zip(ranked.indices[:count].tolist(), ranked.values[:count].tolist(), strict=True)
        return TokenLogprob(token, values[token].item(), tuple(top))


@st.composite
def anything(draw: st.DrawFn, size: int) -> tuple[SamplingParams, list[int]]:
    """Parameters, and a prompt."""
    token, pick = st.integers(0, size - 1), lambda *of: draw(st.sampled_from(of))
    params = SamplingParams(
        temperature=pick(0.0, 0.0, 0.6, 1.0, 2.5),
        top_k=pick(0, 0, 1, 5, 1000),
        top_p=pick(1.0, 1.0, 0.9, 0.3),
        min_p=pick(0.0, 0.0, 0.1),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.7),
        presence_penalty=pick(0.0, 0.0, 0.3, -1.1),
        frequency_penalty=pick(0.0, 0.0, 0.1, -0.7),
        logit_bias=draw(st.one_of(st.just({}), st.dictionaries(token, st.floats(-100, 100), max_size=4))),
        logprobs=pick(None, None, 0, 3, 20),
        seed=draw(st.integers(0, 2**32)),
    )
    return params, draw(st.lists(token, max_size=6))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([2, 17, 600]), st.sampled_from([torch.float32, torch.float64]))
def test_rows_of_every_kind_together_equal_one_after_another(
    data: st.DataObject, size: int, dtype: torch.dtype
) -> None:
    """Ties among them, and rows that are no good. More rows than one piece has."""
    asks = data.draw(st.lists(anything(size), min_size=1, max_size=2 * module.AT_ONCE + 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    samplers = [Sampler(params, prompt, size) for params, prompt in asks]
    rows = [OneRow(params, prompt, size) for params, prompt in asks]
    for _ in range(3):
        logits = (torch.randn((len(asks), size), generator=generator) * 3).to(dtype)
        logits[:, ::3] = logits[:, ::3].round()
        spoilt = torch.randint(0, 12, (len(asks),), generator=generator)
        for value, number in ((float("nan"), 0), (INF, 1), (-INF, 2)):
            logits[spoilt == number, size // 2 :] = value
        logits[spoilt == 3] = -INF
        copy = logits.clone()
        changed = torch.stack([row.penalized(own) for row, own in zip(rows, logits, strict=True)])
        assert torch.equal(penalized(logits, samplers).nan_to_num(), changed.nan_to_num())
        found = sample(logits, samplers)
        assert torch.equal(logits.nan_to_num(), copy.nan_to_num())
        for draw, sampler, row, own in zip(found, samplers, rows, logits, strict=True):
            expected = row.draw(own)
            assert (None if isinstance(draw, BadLogits) else draw) == expected
            if expected is not None:
                sampler.commit(expected.token_id)
                row.commit(expected.token_id)


class Alternating:
    """A mask that lets even and odd tokens follow one another."""

    finished = failed = False

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0

    def allowed(self, drafts: Sequence[int] = ()) -> torch.Tensor:
        odd = (self.count + len(drafts)) % 2
        words = [sum(1 << bit for bit in range(31) if bit % 2 == odd) for _ in range(-(-self.size // 32))]
        return torch.tensor(words, dtype=torch.int32)

    def forced(self) -> bytes:
        return b""

    def consume(self, token_id: int) -> None:
        assert token_id % 2 == self.count % 2
        self.count += 1


@pytest.mark.parametrize("choose", [sample, device_sampler.sample], ids=["here", "device"])
@pytest.mark.parametrize("size", [9, 70])
def test_a_mask_decides_what_may_come(choose: Any, size: int) -> None:
    ways = ({"temperature": 0}, {"temperature": 0, "logit_bias": {0: 100.0}}, {"top_p": 0.9, "repetition_penalty": 2.0})

    def states(masked: bool) -> list[Sampler]:
        # Between rows without a mask, which must not notice.
        return [
            Sampler(SamplingParams(seed=3, **way), [1], size, mask=Alternating(size) if masked and i else None)
            for i, way in enumerate(ways)
        ]

    ours, free = states(masked=True), states(masked=False)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        logits = torch.randn((len(ways), size), generator=generator)
        found = choose(logits, ours)
        assert found[0] == choose(logits, free)[0]
        for i in range(1, len(ours)):
            assert found[i].token_id % 2 == step % 2
        assert choose(logits, ours) == found
        for sampler, other, draw in zip(ours, free, found, strict=True):
            sampler.commit(draw.token_id)
            other.commit(draw.token_id)


@pytest.mark.parametrize("choose", [sample, device_sampler.sample])
def test_tokens_that_end_the_output_wait_for_its_fewest_tokens(choose: Any) -> None:
    logits = torch.tensor([[0.5, 1.0, 2.0, 9.0, -1.0]])
    given = {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {2: 0.5, 3: 0.25}, "presence_penalty": 0.5}
    held = Sampler(SamplingParams(min_tokens=2, **given), [1, 3], 5, ending=frozenset({3, 4, 99}))
    free = Sampler(SamplingParams(**given), [1, 3], 5)
    for _ in range(2):
        assert penalized(logits, [held])[0, [3, 4]].tolist() == [-INF, -INF]
        (one,) = choose(logits, [held])
        assert one.token_id not in (3, 4)
        for each in (held, free):
            each.commit(one.token_id)
    assert penalized(logits, [held]).equal(penalized(logits, [free]))
    assert choose(logits, [held])[0].token_id == 3


class Fixed:
    """A mask that allows the same tokens everywhere, and nothing behind a draft."""

    finished = failed = False

    def __init__(self, flags: Sequence[bool]) -> None:
        self.flags = flags

    def allowed(self, drafts: Sequence[int] = ()) -> torch.Tensor:
        packed = np.packbits(np.pad(self.flags, (0, -len(self.flags) % 32)), bitorder="little")
        return torch.from_numpy(packed.view(np.int32)) * (not drafts)

    def forced(self) -> bytes:
        return b""

    def consume(self, token_id: int) -> None:
        """It stays as it is."""


BAD = st.tuples(st.integers(0, 63), st.sampled_from([-INF, INF, math.nan]))


@given(st.data(), st.sampled_from([1, 31, 32, 33, 64]), st.sampled_from([torch.float32, torch.float64]))
def test_a_greedy_choice_is_the_first_of_the_largest_that_are_allowed(
    data: st.DataObject, size: int, dtype: torch.dtype
) -> None:
    """With ties, and in some rows NaN and infinities, among the allowed numbers and the others."""
    rows, flags = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        source = data.draw(st.randoms(use_true_random=False))
        row = [float(source.randrange(20)) for _ in range(size)]
        for place, bad in data.draw(st.lists(BAD, max_size=2)):
            row[place % size] = bad
        rows.append(row)
        share = source.random()
        flags.append(data.draw(st.none() | st.just([source.random() < share for _ in range(size)])))
    greedy = SamplingParams(temperature=0, seed=0)
    samplers = [Sampler(greedy, [], size, mask=None if each is None else Fixed(each)) for each in flags]
    found = sample(torch.tensor(rows, dtype=dtype), samplers)
    for row, each, draw in zip(rows, flags, found, strict=True):
        kept = [x if each is None or each[i] else -INF for i, x in enumerate(row)]
        if any(math.isnan(x) for x in kept) or not math.isfinite(max(kept)):
            assert isinstance(draw, BadLogits)
        else:
            assert draw == SampledToken(kept.index(max(kept)), None)
    behind = [sampler.along([0])[1] for sampler in samplers if sampler.mask is not None]
    assert all(isinstance(draw, BadLogits) for draw in sample(torch.zeros(len(behind), size), behind))


WAYS = (
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {0: 100.0, 3: -100.0}},
    {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.5},
    {"temperature": 0.7, "frequency_penalty": 0.5, "top_k": 5},
)


@given(st.data(), st.sampled_from([9, 32, 33, 64]), st.sampled_from([torch.float32, torch.float64]))
def test_penalties_with_masks_choose_as_if_what_is_not_allowed_were_minus_infinity(
    data: st.DataObject, size: int, dtype: torch.dtype
) -> None:
    """The same token, and the same failures, from logits in which the mask was already applied."""
    rows, masked, plain = [], [], []
    for seed in range(data.draw(st.integers(1, 4))):
        source = data.draw(st.randoms(use_true_random=False))
        row = torch.tensor([float(source.randrange(20)) for _ in range(size)], dtype=dtype)
        for place, bad in data.draw(st.lists(BAD, max_size=2)):
            row[place % size] = bad
        share = source.random()
        flags = [source.random() < share for _ in range(size)]
        params = SamplingParams(seed=seed, **data.draw(st.sampled_from(WAYS)))
        prompt, output = ([source.randrange(size) for _ in range(4)] for _ in range(2))
        for states, mask in ((masked, Fixed(flags)), (plain, None)):
            states.append(Sampler(params, prompt, size, mask=mask))
            for token in output:
                states[-1].commit(token)
        rows.append((row, row.masked_fill(~torch.tensor(flags), -INF)))
    found = sample(torch.stack([row for row, _ in rows]), masked)
    wanted = sample(torch.stack([row for _, row in rows]), plain)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == theirs or (isinstance(ours, BadLogits) and isinstance(theirs, BadLogits))


def test_a_mask_that_allows_nothing_fails_its_row_alone() -> None:
    mask = Alternating(3)
    mask.allowed = lambda drafts=(): torch.zeros(1, dtype=torch.int32)  # type: ignore[method-assign]
    greedy = SamplingParams(temperature=0, seed=0)
    found = sample(torch.randn(2, 3), [Sampler(greedy, [], 3, mask=mask), Sampler(greedy, [], 3)])
    assert isinstance(found[0], BadLogits)
    assert isinstance(found[1], SampledToken)


@pytest.mark.parametrize("bad", [[float("nan"), 1.0, 2.0], [-INF, -INF, -INF], [INF, 1.0, 2.0]], ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_fail_their_row_alone(bad: list[float], temperature: float) -> None:
    good = torch.tensor([0.3, 0.1, 0.2])
    params = SamplingParams(temperature=temperature, top_p=0.9, logprobs=1, seed=1)
    lone = draw(good[None], [Sampler(params, [], 3)])[0]
    drawn = sample(torch.stack([good, torch.tensor(bad), good]), [Sampler(params, [], 3) for _ in range(3)])
    assert drawn[0] == drawn[2] == lone
    assert isinstance(drawn[1], BadLogits)


def test_seed_and_index_fix_the_text() -> None:
    logits = torch.randn(64)

    def text(params: SamplingParams) -> list[int]:
        state = Sampler(params, [], 64)
        tokens = []
        for _ in range(12):
            for _ in range(2):  # a draw that is not committed changes nothing
                token = draw(logits[None], [state])[0].token_id
            state.commit(token)
            tokens.append(token)
        return tokens

    noise = gumbel(draws([11] * 12, range(12)), 64)
    assert text(SamplingParams(seed=11)) == (logits.double() + noise).numpy().argmax(-1).tolist()
    assert text(SamplingParams(seed=11)) != text(SamplingParams(seed=12))
    state = Sampler(SamplingParams(), [], 64)
    assert state.params.seed == state.seed  # a drawn seed is there to be reported
    first = Sampler(SamplingParams(seed=state.seed), [], 64)
    assert draw(logits[None], [state]) == draw(logits[None], [first])


# Log probabilities


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, 30)
    plain = logits[0].double().log_softmax(-1)
    params = SamplingParams(logprobs=3, temperature=0.2, top_k=1, repetition_penalty=1.9, seed=0)
    one = draw(logits, [Sampler(params, [4, 5], 30)])[0]
    assert one.logprobs is not None
    assert one.logprobs.token_id == one.token_id
    assert one.logprobs.logprob == pytest.approx(plain[one.token_id].item(), abs=1e-14)
    best = plain.topk(3)
    assert [index for index, _ in one.logprobs.top] == best.indices.tolist()
    assert [value for _, value in one.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-14)


def test_logprob_ties_are_in_order_of_id_and_counts_are_kept() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    for count, ids in ((0, []), (2, [1, 2]), (20, [1, 2, 3, 0])):
        one = draw(logits, [Sampler(SamplingParams(temperature=0, logprobs=count), [], 4)])[0]
        assert one.logprobs is not None
        assert [index for index, _ in one.logprobs.top] == ids
    assert draw(logits, [Sampler(SamplingParams(temperature=0), [], 4)])[0].logprobs is None


@pytest.mark.parametrize("choose", [sample, device_sampler.sample], ids=["here", "device"])
def test_logprobs_of_named_tokens(choose: Any) -> None:
    """As a reranker asks for two words, whatever is likely; beside rows that ask for others, or for none."""
    logits = torch.randn(4, 30)
    plain = logits.double().log_softmax(-1)
    params = [
        SamplingParams(seed=1, logprob_token_ids=(7, 3), logit_bias={9: 100}),
        SamplingParams(seed=2, logprobs=2),
        SamplingParams(temperature=0, logprob_token_ids=(int(logits[2].argmax()), 0)),
        SamplingParams(seed=3),
    ]
    named, likely, greedy, none = (each.logprobs for each in choose(logits, [Sampler(p, [], 30) for p in params]))
    assert [token for token, _ in named.top] == [7, 3]
    assert named.token_id == 9
    for row, one in ((0, named), (2, greedy)):
        wanted = [plain[row, token].item() for token in (one.token_id, *(token for token, _ in one.top))]
        assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(wanted, abs=1e-12)
    assert [token for token, _ in greedy.top] == [greedy.token_id, 0]
    assert len(likely.top) == 2
    assert none is None


def test_named_tokens_are_in_the_vocabulary_and_few() -> None:
    with user_error("token_out_of_vocabulary", "logprob_token_ids"):
        Sampler(SamplingParams(logprob_token_ids=[4]), [], 4)
    with user_error("option_out_of_range", "logprob_token_ids"):
        SamplingParams(logprob_token_ids=range(129))
    with user_error("option_conflict"):
        SamplingParams(logprob_token_ids=[1], logprobs=1)


def test_logprobs_of_a_row_without_numbers_are_none_and_others_keep_theirs() -> None:
    """A prompt's logits are scored unseen."""
    logits = torch.randn(3, 30)
    logits[1, 4] = float("nan")
    one, bad, other = logprobs_of(logits, [(0, 1, 3), (1, 2, 3), (2, 3, 1)])
    assert math.isnan(bad.logprob)
    assert bad.top == ()
    assert [one, other] == [OneRow.logprobs(logits[0], 1, 3), OneRow.logprobs(logits[2], 3, 1)]
    assert logprobs_of(logits, []) == []


def test_refuses_a_prompt_outside_the_vocabulary() -> None:
    with user_error("token_out_of_vocabulary"):
        Sampler(SamplingParams(repetition_penalty=1.2), [1, 9], 4)


@pytest.mark.parametrize("choose", [sample, device_sampler.sample], ids=["here", "device"])
def test_choices_share_what_they_know_of_their_prompt(choose: Any) -> None:
    """Whoever shares it draws as whoever does not, also where an output or a bias names a token of the prompt."""
    prompt, size = [7, 3, 7, 11, 3], 40
    params = [
        SamplingParams(seed=i, repetition_penalty=1.7, logit_bias=bias, frequency_penalty=0.3, logprobs=2)
        for i, bias in enumerate(({}, {3: 4.0, 5: -1.0}, {0: 2.0, 39: 2.0}))
    ]
    shared = distinct(prompt, size)
    assert shared.tolist() == [3, 7, 11]
    ours, theirs = [Sampler(p, shared, size) for p in params], [Sampler(p, prompt, size) for p in params]
    assert all(one.seen is shared for one in ours)
    rows = [OneRow(p, prompt, size) for p in params]
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        logits = torch.randn((len(params), size), generator=generator)
        found = choose(logits, ours)
        assert found == choose(logits, theirs) == [row.draw(own) for row, own in zip(rows, logits, strict=True)]
        for token, each in zip((3, 3, 20), zip(ours, theirs, rows, strict=True), strict=True):
            for one in each:
                one.commit(token)
    assert shared.tolist() == [3, 7, 11]
    assert [len(one.changes) // module.CHANGE for one in ours] == [1, 2, 3], "of outputs and biases alone"


def test_a_prompt_that_a_penalty_looks_at_is_no_plain_choice() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, seed=0)
    assert draw(torch.tensor([[3.0, 2.0]]), [Sampler(params, [0], 2)])[0].token_id == 1


def test_logits_are_left_alone() -> None:
    logits = torch.randn(2, 20, dtype=torch.float64)
    copy = logits.clone()
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1, top_k=3, seed=1)
    sample(logits, [Sampler(params, [1, 2], 20) for _ in range(2)])
    assert torch.equal(logits, copy)


# Golden tokens

GOLDEN = Path(__file__).with_name("seeded_tokens.json")


def seeded_tokens(values: dict[str, Any]) -> list[int]:
    """Return 48 tokens drawn with these parameters, from logits that are products of integers."""
    state = Sampler(SamplingParams(**values), [3, 5, 8], 1000)
    ids = torch.arange(1000)
    tokens = []
    for step in range(48):
        logits = ((ids * (7919 + 2 * step)) % 1009).float() / 128
        tokens.append(draw(logits[None], [state])[0].token_id)
        state.commit(tokens[-1])
    return tokens


def test_seeded_tokens_stay_what_they_were() -> None:
    """A text of a seed is the same in every version. A change here is one that users see: the changelog names it."""
    for golden in json.loads(GOLDEN.read_text()):
        assert seeded_tokens(golden["params"]) == golden["tokens"], golden["params"]

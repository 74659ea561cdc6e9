"""Noise from counters: known answers, numpy's generator, the distribution of choices, and their coupling."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attar.kernels import ops, ref
from attar.kernels.noise import draws, gumbel, logarithm, philox4x64, seed_of_choice

WORD = st.integers(0, 2**64 - 1)
LOGARITHM_ULP = 2.0  # of the result, where the argument is not next to 1
DRAWS = 1_000_000
TOTAL_VARIATION = 0.005  # about twice what so many draws from 50 tokens have by chance
RUNS = 20
LEAST_P = 1e-3 / RUNS
FARTHEST = 2.2  # of empirical and true distribution, times the root of the count: by chance once in 10,000
COUPLED = 0.01


# The generator


def test_philox_known_answers() -> None:
    """From the `kat_vectors` of the Random123 distribution, philox4x64 with 10 rounds."""
    assert philox4x64((0,) * 4, (0,) * 2) == (
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    )  # fmt: skip
    ones = 2**64 - 1
    assert philox4x64((ones,) * 4, (ones,) * 2) == (
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    )  # fmt: skip
    counter = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
    assert philox4x64(counter, (0x452821E638D01377, 0xBE5466CF34E90C6C)) == (
        0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6,
    )  # fmt: skip


@given(st.tuples(WORD, WORD, WORD, st.integers(0, 2**64 - 2)), st.tuples(WORD, WORD))
def test_philox_equals_numpy(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    before = (sum(word << (64 * i) for i, word in enumerate(counter)) - 1) % 2**256  # numpy counts up, then computes
    state = np.array([(before >> (64 * i)) % 2**64 for i in range(4)], dtype=np.uint64)
    oracle = np.random.Philox(counter=state, key=np.array(key, dtype=np.uint64))
    assert list(philox4x64(counter, key)) == [int(word) for word in oracle.random_raw(4)]


def test_choices_have_seeds_of_their_own() -> None:
    seeds = {seed_of_choice(seed, number) for seed, number in itertools.product(range(20), range(20))}
    assert len(seeds) == 20 * 20
    assert [seed_of_choice(seed, 0) for seed in (0, 7, 2**64 - 1)] == [0, 7, 2**64 - 1]


# The logarithm and the noise


def test_logarithm_equals_the_librarys() -> None:
    x = np.concatenate([np.random.default_rng(0).uniform(size=100_000), 2.0 ** np.arange(-60, 60), [1 - 2**-53]])
    exact = np.log(x)
    assert (np.abs(logarithm(torch.from_numpy(x)).numpy() - exact) <= LOGARITHM_ULP * np.spacing(np.abs(exact))).all()
    assert logarithm(torch.ones(1, dtype=torch.float64)).item() == 0.0


def noise_of(seed: int, index: int, count: int) -> NDArray[np.float64]:
    return gumbel(draws([seed], [index]), count)[0].numpy()


@given(WORD, WORD, st.integers(1, 40))
def test_noise_is_a_function_of_seed_index_and_token(seed: int, index: int, count: int) -> None:
    noise = noise_of(seed, index, count)
    assert noise.shape == (count,)
    assert np.array_equal(noise, noise_of(seed, index, 40)[:count])
    words = [word >> 12 for block in range(10) for word in philox4x64((index, 0, block, 0), (seed, 2))]
    expected = -np.log(-np.log((np.array(words[:count], dtype=np.float64) + 0.5) / 2**52))
    np.testing.assert_allclose(noise, expected, rtol=1e-14, atol=1e-14)


def test_noise_has_gumbels_distribution() -> None:
    noise = gumbel(draws([5] * 200, range(200)), 1000).flatten().numpy()
    ranks, below = np.arange(len(noise)) / len(noise), np.exp(-np.exp(-np.sort(noise)))
    assert np.abs(ranks - below).max() * len(noise) ** 0.5 < FARTHEST


def test_noise_of_other_counters_is_independent() -> None:
    """Ranks of neighbours by seed, by index and by token do not agree more often than by chance."""
    one = noise_of(3, 9, 20_000)
    for other in (noise_of(4, 9, 20_000), noise_of(3, 10, 20_000), np.roll(one, 1), np.roll(one, 4)):
        ranks = [each.argsort().argsort() for each in (one, other)]
        assert abs(np.corrcoef(*ranks)[0, 1]) < 0.03  # four standard deviations


# Choices


def chosen(logits: NDArray[np.float64], seed: int, count: int, start: int = 0) -> NDArray[np.int64]:
    """Return `count` choices from logits [V], at the indices from `start` on."""
    found = []
    for first in range(start, start + count, 1 << 16):
        indices = range(first, min(first + (1 << 16), start + count))
        rows = torch.from_numpy(logits).expand(len(indices), -1)
        found.append(ops.gumbel_max(rows, draws([seed] * len(indices), indices)).numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("run", range(RUNS))
def test_choices_have_the_exact_distribution(run: int) -> None:
    rng = np.random.default_rng(run)
    size = int(rng.integers(2, 51))
    logits = rng.normal(size=size) * rng.uniform(0.1, 3)
    dropped = rng.random(size) < 0.3
    dropped[rng.integers(size)] = False
    logits[dropped] = -np.inf
    expected = np.exp(logits - np.logaddexp.reduce(logits))
    counts = np.bincount(chosen(logits, run, DRAWS), minlength=size)
    assert counts[dropped].sum() == 0
    assert np.abs(counts / DRAWS - expected).sum() / 2 < TOTAL_VARIATION
    likely = expected * DRAWS > 5  # what the chi-square approximation needs
    if likely.sum() > 1:
        rest = [counts[~likely].sum()], [expected[~likely].sum() * DRAWS]
        observed = np.concatenate([counts[likely], *([rest[0]] if rest[1][0] > 5 else [])])
        wanted = np.concatenate([expected[likely] * DRAWS, *([rest[1]] if rest[1][0] > 5 else [])])
        chi2 = ((observed - wanted) ** 2 / wanted).sum()
        freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
        assert torch.special.gammaincc(freedom, torch.tensor(chi2 / 2, dtype=torch.float64)) > LEAST_P


def agreement(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return the probability that two draws with one noise agree, sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / ratios.sum(1)).sum())


def test_draws_that_share_noise_agree_as_often_as_the_closed_form_says() -> None:
    rng = np.random.default_rng(1)
    for run in range(4):
        p, q = rng.dirichlet(np.full(30, 0.5), 2)
        agree = (chosen(np.log(p), run, 200_000) == chosen(np.log(q), run, 200_000)).mean()
        assert agree == pytest.approx(agreement(p, q), abs=COUPLED)
        assert abs(agree - (chosen(np.log(p), run, 200_000) == chosen(np.log(q), run + 9, 200_000)).mean()) > COUPLED


def test_the_closed_form_is_above_the_bound_of_every_coupling_without_communication() -> None:
    rng = np.random.default_rng(2)
    for _ in range(1000):
        p, q = rng.dirichlet(np.full(int(rng.integers(2, 60)), rng.uniform(0.05, 2)), 2) + 1e-12
        distance = np.abs(p - q).sum() / 2
        assert agreement(p, q) >= (1 - distance) / (1 + distance) - 1e-9


@pytest.mark.parametrize("size", [1, 3, 4, 5, 50, 4099])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e300])
def test_backends_choose_what_the_reference_chooses(size: int, spread: float) -> None:
    """The native kernel skips tokens that no noise could lift: it must never skip the best."""
    rng = np.random.default_rng(size)
    rows = torch.from_numpy(-np.abs(rng.normal(size=(40, size))) * spread)
    rows[rng.random((40, size)) < 0.2] = -torch.inf
    rows[3] = -torch.inf
    rows[4] = -torch.inf
    rows[4, -1] = 0
    numbers = draws(rng.integers(0, 2**64, 40, dtype=np.uint64).tolist(), range(40))
    expected = ref.gumbel_max(rows, numbers)
    assert torch.equal(ops.gumbel_max(rows, numbers), expected)
    assert torch.equal(ops.gumbel_max(rows.repeat(1, 2)[:, :size], numbers), expected)  # not contiguous


def test_equal_sums_go_to_the_lowest_id() -> None:
    """Numbers so large that the noise vanishes in them."""
    rows = torch.full((1, 9), -1e300, dtype=torch.float64)
    rows[0, [3, 6]] = 1e300
    assert all(ops.gumbel_max(rows, draws([seed], [0])).item() == 3 for seed in range(20))

"""KVQuant's code as published: by its definition, number by number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.kv.kvquant_published import calibrate
from attar.kv.published import ONE_SIDE, PUBLISHED

HEADS, SIZE, ROWS = 2, 16, 400
FLOAT16 = 2**-10  # of a number: half a step, and centre and range are rounded too
CLOSE = 1e-3  # of numbers around 1, in 16 bits
SPREAD = 0.05  # of the spread, which levels of a few numbers keep


def numbers(seed: int) -> Tensor:
    """Channels of other means and spreads, with tails."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, HEADS, SIZE, generator=generator) ** 3
    return x * torch.rand(HEADS, SIZE, generator=generator) + torch.randn(HEADS, SIZE, generator=generator)


def quantile(x: Tensor, share: float) -> float:
    """Between the two nearest of sorted numbers, in proportion."""
    at, each = share * (len(x) - 1), x.double().sort().values.tolist()
    return float(each[int(at)] + (at - int(at)) * (each[min(int(at) + 1, len(each) - 1)] - each[int(at)]))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_keys_by_channel(bits: int) -> None:
    k, weights, first = numbers(1), torch.ones(ROWS, HEADS, SIZE), torch.zeros(ROWS, dtype=torch.bool)
    first[0] = True
    code = calibrate(k, k, weights, weights, PUBLISHED[f"nuq{bits}-published"])
    assert code.keys is not None
    ours = code.round_keys(k, first)
    apart = 0
    for g in range(HEADS):
        for d in range(SIZE):
            low, high = quantile(k[:, g, d], ONE_SIDE), quantile(k[:, g, d], 1 - ONE_SIDE)
            centre, half = (float(torch.tensor(each / 2).half()) for each in (high + low, high - low))
            for n in range(0, ROWS, 7):
                x = float(k[n, g, d])
                read = x
                if low <= x <= high and n:
                    levels = code.keys.chosen.tolist()
                    nearest = min(range(len(levels)), key=lambda i: abs(levels[i] - (x - centre) / half))
                    read = float(code.keys.read[nearest]) * half + centre
                assert float(ours[n, g, d]) == pytest.approx(read, abs=CLOSE * max(1, abs(x)))
            inside = (k[1:, g, d] >= low) & (k[1:, g, d] <= high)
            apart += int((~inside).sum())
    assert code.outliers == pytest.approx(apart, abs=2)
    assert code.numbers == (ROWS - 1) * HEADS * SIZE


@pytest.mark.parametrize("bits", [2, 4])
def test_values_by_token(bits: int) -> None:
    """Greatest and least of each token are stored apart; the rest is on its grid."""
    v, weights, first = numbers(2), torch.ones(ROWS, HEADS, SIZE), torch.zeros(ROWS, dtype=torch.bool)
    code = calibrate(v, v, weights, weights, PUBLISHED[f"nuq{bits}-published"])
    assert code.values is not None
    ours = code.round_values(v, first)
    for token, read in zip(v[::9].flatten(1), ours[::9].flatten(1), strict=True):
        order = token.argsort()
        ends, inside = order[[0, -1]], order[1:-1]
        assert ((read - token)[ends].abs() <= FLOAT16 * token[ends].abs()).all()
        low, high = token[inside].min(), token[inside].max()
        centre, half = (high + low) / 2, (high - low) / 2
        grid = code.values.read * half + centre
        assert ((read[inside, None] - grid).abs().amin(1) <= 2 * FLOAT16 * token.abs().max()).all()
        best = (token[inside, None] - (code.values.chosen * half + centre)).abs().amin(1)
        if bits > 2:
            assert ((read - token)[inside].abs() <= best + 2 * FLOAT16 * token.abs().max()).all()


def test_levels_lie_where_errors_count() -> None:
    """Weights that leave one half of the numbers out draw all levels to the other."""
    k, nothing = numbers(3), torch.ones(ROWS, HEADS, SIZE)
    middle = k.median(0).values
    code = calibrate(k, k, (k > middle).float(), nothing, PUBLISHED["nuq3-published"])
    even = calibrate(k, k, nothing, nothing, PUBLISHED["nuq3-published"])
    assert code.keys is not None
    assert even.keys is not None
    assert code.keys.chosen.mean() > even.keys.chosen.mean() + 0.1


def test_two_bits_keep_mean_and_spread() -> None:
    k, weights = numbers(4), torch.rand(ROWS, HEADS, SIZE, generator=torch.Generator().manual_seed(5))
    code = calibrate(k, k, weights, weights, PUBLISHED["nuq2-published"])
    assert code.keys is not None
    assert code.ranges is not None
    inside = (k >= code.ranges.low) & (k <= code.ranges.high)
    x = ((k - (code.ranges.high + code.ranges.low) / 2) / ((code.ranges.high - code.ranges.low) / 2))[inside]
    read = code.keys.round(x)
    assert float(read.mean() - x.mean()) == pytest.approx(0, abs=SPREAD * float(x.std()))
    assert float(read.std() / x.std()) == pytest.approx(1, abs=SPREAD)


def test_the_first_token_stays() -> None:
    k, weights, first = numbers(6), torch.ones(ROWS, HEADS, SIZE), torch.arange(ROWS) % 50 == 0
    code = calibrate(k, k, weights, weights, PUBLISHED["nuq2-published"])
    for ours in (code.round_keys(k, first), code.round_values(k, first)):
        assert torch.equal(ours[first], k[first].half().float())
        assert (ours[~first] - k[~first]).abs().mean() > CLOSE

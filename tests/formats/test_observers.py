"""Observers: exact identities, errors that must not grow, and a slow scalar reading of entropy calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attar.formats import affine, observers, packing
from attar.formats.observers import KL, MSE, Histogram, MinMax, Observer, Percentile, kl_threshold, mse_range
from attar.formats.scheme import Grid
from tests.errors import user_error

INT8 = Grid("int", 8, granularity="tensor")
BIN = 2.0 / observers.FINE_BINS  # of the largest magnitude, at most

ALL: dict[str, Callable[[], Observer]] = {
    "minmax": MinMax,
    "ema": lambda: MinMax(momentum=0.5),
    "percentile": Percentile,
    "mse": lambda: MSE(INT8),
    "kl": KL,
}


def heavy_tailed(count: int = 20_000, seed: int = 0) -> Tensor:
    """Student's t with 3 degrees of freedom, as a ratio of normals."""
    generator = torch.Generator().manual_seed(seed)
    chi = torch.randn(3, count, generator=generator).square().sum(0)
    return torch.randn(count, generator=generator) / (chi / 3).sqrt()


def rounding_error(x: Tensor, extremes: tuple[Tensor, Tensor], grid: Grid) -> float:
    scale, zero = affine.qparams(*extremes, grid)
    values = affine.to_values(affine.round_to_grid(x[None], scale, zero, grid), scale, zero)
    return float((values[0] - x).square().mean())


@pytest.mark.parametrize("name", ALL)
def test_contract(name: str) -> None:
    observer = ALL[name]()
    with user_error("linear_without_tokens"):
        observer.range()
    for bad in (torch.nan, torch.inf):
        with user_error("not_finite"):
            observer.observe(torch.tensor([[1.0, bad]]))
    x = heavy_tailed().view(100, 200)
    observer.observe(x.bfloat16())
    low, high = observer.range()
    for bound in (low, high):
        assert bound.dtype == torch.float32
        assert bound.shape == (1,)
    assert float(x.bfloat16().min()) <= float(low) < 0 < float(high) <= float(x.bfloat16().max())
    scale, _ = affine.qparams(low, high, INT8)
    assert scale.shape == (1,)


@pytest.mark.parametrize("name", ["minmax", "percentile", "mse", "kl"])
def test_batches_and_their_order_do_not_matter(name: str) -> None:
    x = heavy_tailed(4000)
    x[17] = 900.0
    whole, parts = ALL[name](), ALL[name]()
    whole.observe(x)
    for piece in reversed(x.split(333)):
        parts.observe(piece)
    assert whole.range() == parts.range()


@pytest.mark.parametrize("name", ALL)
def test_all_zeros(name: str) -> None:
    observer = ALL[name]()
    observer.observe(torch.zeros(3, 4))
    assert [float(bound) for bound in observer.range()] == [0.0, 0.0]


@pytest.mark.parametrize("name", ALL)
def test_a_constant_keeps_its_range(name: str) -> None:
    observer, x = ALL[name](), torch.full((3, 4), -0.7)
    observer.observe(x)
    assert observer.range() == (x[0, :1], x[0, :1])


def test_moving_average() -> None:
    observer = MinMax(momentum=0.25)
    for low, high in ((-1.0, 3.0), (-5.0, 1.0), (0.0, 9.0)):
        observer.observe(torch.tensor([low, high]))
    # low: -1, -1 + (-5 + 1) / 4 = -2, -2 + 2 / 4 = -1.5; high: 3, 2.5, 2.5 + 6.5 / 4
    assert [float(bound) for bound in observer.range()] == [-1.5, 4.125]
    with pytest.raises(ValueError, match="momentum"):
        MinMax(momentum=0.0)


def test_histogram_merges_exactly() -> None:
    x = heavy_tailed(3000)
    streamed, direct = Histogram(64), Histogram(64)
    for piece in (x * 1e-4, x, x * 50):
        streamed.observe(piece)
    direct.observe(torch.cat([x * 1e-4, x, x * 50]))
    assert streamed.exponent == direct.exponent
    assert torch.equal(streamed.counts, direct.counts)
    values = torch.cat([x * 1e-4, x, x * 50])
    edges = torch.cat([direct.centres - direct.width / 2, direct.centres[-1:] + direct.width / 2]).double()
    assert float(edges[0]) <= float(values.min())
    assert float(edges[-1]) > float(values.max())
    counted = [int(((values >= low) & (values < high)).sum()) for low, high in pairwise(edges)]
    # Negative bins are closed at their far end, which no random value hits.
    assert direct.occurrences.tolist() == counted


def test_percentile_hundred_is_minmax() -> None:
    whole, plain = Percentile(100), MinMax()
    for seed in range(3):
        for observer in (whole, plain):
            observer.observe(heavy_tailed(999, seed) * 10**seed)
    assert whole.range() == plain.range()


@pytest.mark.parametrize("percentile", [60.0, 90.0, 99.0, 99.9])
def test_percentile_is_the_quantile_rounded_outwards(percentile: float) -> None:
    x = heavy_tailed(10_001)
    observer = Percentile(percentile)
    observer.observe(x)
    low, high = (float(bound) for bound in observer.range())
    ordered, left_out = x.sort().values, math.floor((1 - percentile / 100) * x.numel())
    width = BIN * float(x.abs().max())
    assert 0 <= float(ordered[left_out]) - low <= width
    assert 0 <= high - float(ordered[-1 - left_out]) <= width


def test_percentile_of_one_sided_values() -> None:
    observer = Percentile(99.0)
    observer.observe(heavy_tailed().abs() + 1)
    low, high = (float(bound) for bound in observer.range())
    assert 1 <= low < high


@pytest.mark.parametrize("bits, symmetric, most", [(8, True, 0.95), (8, False, 0.95), (4, True, 0.5), (4, False, 0.5)])
def test_mse_observer_is_better_than_minmax(bits: int, symmetric: bool, most: float) -> None:
    grid, x = Grid("int", bits, symmetric, "tensor"), heavy_tailed()
    mse, plain = MSE(grid), MinMax()
    for piece in x.split(3000):
        mse.observe(piece)
        plain.observe(piece)
    assert rounding_error(x, mse.range(), grid) < most * rounding_error(x, plain.range(), grid)


def scalar_kl(counts: list[int], levels: int) -> int:
    """Entropy calibration as its author describes it, one bin at a time."""
    best, least = 0, math.inf
    for cut in range(levels, len(counts) + 1):
        p = [float(count) for count in counts[:cut]]
        p[-1] += sum(counts[cut:])
        runs: list[list[int]] = [[] for _ in range(levels)]
        for j in range(cut):
            runs[j * levels // cut].append(j)
        q = [0.0] * cut
        for run in runs:
            filled = [j for j in run if counts[j]]
            for j in filled:
                q[j] = sum(counts[i] for i in run) / len(filled)
        total_p, total_q = sum(p), sum(q)
        divergence = 0.0
        for a, b in zip(p, q, strict=True):
            if a > 0:
                divergence += math.inf if b == 0 else a / total_p * math.log((a / total_p) / (b / total_q))
        if divergence < least - observers.SAME_DIVERGENCE:
            best, least = cut, divergence
    return best


@pytest.mark.parametrize("kind", ["smooth", "gaps", "outlier", "sparse", "rough", "rougher"])
def test_kl_threshold_equals_the_scalar_reading(kind: str) -> None:
    """On fixed histograms of 256 bins and 32 levels: the reference takes cubic time."""
    bins, levels = 256, 32
    position = torch.arange(bins)
    counts = (4000 * torch.exp(-((position / 45.0) ** 1.2))).long()
    if kind == "gaps":
        counts[position % 3 == 1] = 0
    elif kind == "outlier":
        counts[150:] = 0
        counts[-1] = 3
    elif kind == "sparse":
        counts = counts * (position % 37 == 0)
    elif kind.startswith("rough"):
        noise = torch.rand(bins, generator=torch.Generator().manual_seed(len(kind)))
        counts = (counts * noise**4).long() + (noise > 0.5)
    assert kl_threshold(counts, levels) == scalar_kl(counts.tolist(), levels)


def test_kl_threshold_of_2048_bins() -> None:
    """The calibrator's own size, by its result: the reference is too slow for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator).abs()
    x[0] = 40.0
    counts = torch.histc(x, bins=2048, min=0, max=40.0).long()
    cut = kl_threshold(counts) * 40.0 / 2048
    assert 2.5 < cut < 5.0, "the lone outlier is given up and nearly all of the bell kept"


def test_kl_range_clips_a_lone_outlier_and_keeps_a_uniform_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    bell, flat = KL(), KL()
    x = torch.randn(100_000, generator=generator)
    x[7] = 60.0
    bell.observe(x)
    flat.observe(torch.rand(100_000, generator=generator) * 2 - 1)
    low, high = (float(bound) for bound in bell.range())
    assert low == pytest.approx(float(x.min()), abs=0.7)
    assert 3 < high < 6
    assert float(flat.range()[1]) > 0.95


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("bits, symmetric", [(2, True), (3, False), (4, True), (4, False), (8, True)])
def test_mse_range_never_loses_to_minmax(bits: int, symmetric: bool, granularity: str) -> None:
    """By construction, for every group on its own, in the squared error when norm is 2."""
    grid = Grid("int", bits, symmetric, granularity, 32 if granularity == "group" else None)  # type: ignore[arg-type]
    weight = heavy_tailed(16 * 64).view(16, 64)

    def error(extremes: tuple[Tensor, Tensor]) -> Tensor:
        scale, zero = affine.qparams(*extremes, grid, torch.bfloat16)
        squares = (affine.to_values(affine.round_to_grid(weight, scale, zero, grid), scale, zero) - weight).square()
        return squares.sum() if granularity == "tensor" else affine.by_scale(squares, scale.shape[-1]).sum(-1)

    found, plain = mse_range(weight, grid, torch.bfloat16, norm=2.0), affine.min_max(weight, grid)
    assert found[0].shape == plain[0].shape
    slack = 1e-6 * error(plain)  # sums in another order
    assert bool((error(found) <= error(plain) + slack).all())
    if bits <= 4:
        assert float(error(found).sum()) < 0.95 * float(error(plain).sum())


@pytest.mark.parametrize("norm", [2.0, observers.NORM])
def test_powers_of_errors(norm: float) -> None:
    x = heavy_tailed(10_000)
    x[:3] = torch.tensor([0.0, -1.0, 1e-30])
    wanted = x.double().abs() ** norm
    torch.testing.assert_close(observers._power(x.clone(), norm).double(), wanted, rtol=2.0**-17, atol=1e-37)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mse_range_tries_every_factor(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    """Groups that leave the search early end with the range of the full search, to the bit."""
    grid = Grid("int", bits, symmetric, "group", 32)
    weight = heavy_tailed(128 * 96).view(128, 96)
    weight[3], weight[4, 40:], weight[5] = 0.0, 0.0, 2e-7 * weight[5]  # scales that underflow in float16
    weight[6] = weight[6].abs() + 3
    low, high = affine.min_max(weight, grid)
    least, best = torch.full_like(low, torch.inf), (low, high)
    for step in range(observers.STEPS + 1):
        factor = 1 - (1 - observers.LOWEST) * step / observers.STEPS
        scale, zero = affine.qparams(low * factor, high * factor, grid, dtype)
        values = affine.to_values(affine.round_to_grid(weight, scale, zero, grid), scale, zero)
        error = affine.by_scale(observers._power(values.float() - weight, observers.NORM), low.shape[1]).sum(-1)
        better, least = error < least, torch.minimum(error, least)
        best = best[0].where(~better, low * factor), best[1].where(~better, high * factor)
    assert all(torch.equal(a, b) for a, b in zip(mse_range(weight, grid, dtype), best, strict=True))


@pytest.mark.parametrize("inference", [False, True])
def test_a_search_on_threads_has_the_bits_of_one(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch keeps its number of threads, where a part of the search fails too."""
    monkeypatch.setattr(observers, "AT_ONCE", 256)
    weight, grid = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)), Grid("int", 4, True, "group", 32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = mse_range(weight, grid, torch.bfloat16)
        torch.set_num_threads(3)
        with torch.inference_mode(inference):
            several = mse_range(weight.clone(), grid, torch.bfloat16)
        assert torch.get_num_threads() == 3
        with user_error("not_finite"):
            mse_range(weight * 1e6, grid, torch.float16)  # a scale overflows
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def test_mse_range_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, grid = heavy_tailed(12 * 32).view(12, 32), Grid("int", 4, True, "group", 16)
    whole = mse_range(weight, grid)
    monkeypatch.setattr(packing, "_SLICE", 64)
    assert all(torch.equal(a, b) for a, b in zip(mse_range(weight, grid), whole, strict=True))


def test_observers_meet_the_protocol() -> None:
    made: list[Observer] = [make() for make in ALL.values()]
    assert len({type(observer) for observer in made}) == 4

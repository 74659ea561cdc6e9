"""Lookup tables with sparse outliers: optimality of the means, the sum of both parts, and damaged files."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.formats.codecs import kmeans, lookup
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from tests.errors import user_error

LLOYD_MAX = {"lut2": 0.1175, "lut3": 0.03454, "lut4": 0.009497}  # of N(0, 1), Max 1960; a table for each row is below
HALF = 1e-3  # relative: float16


def heavy_tailed(rows: int = 16, columns: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(rows, columns, generator=generator) / torch.rand(rows, columns, generator=generator).sqrt()


def error(weight: Tensor, name: str, sensitivity: Tensor | None = None) -> Tensor:
    scheme = Scheme.parse(name)
    difference = lookup.quantize(weight, scheme, sensitivity).dequantize() - weight
    return (difference.square() * (1 if sensitivity is None else sensitivity)).sum()


@pytest.mark.parametrize("name", LLOYD_MAX)
def test_gaussians_reach_the_best_scalar_quantizer(name: str) -> None:
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1))
    found = float(error(weight, name)) / weight.numel()
    assert 0.9 * LLOYD_MAX[name] < found < 1.005 * LLOYD_MAX[name]


def test_every_centre_is_the_mean_of_its_cell() -> None:
    weight, count = heavy_tailed().double(), torch.rand(16, 512, generator=torch.Generator().manual_seed(2)).double()
    count[3] = 0  # nothing counts: as if all did
    found = kmeans.centres(weight, count, 4)
    assert (found.diff(dim=1) >= 0).all()
    count[3] = 1
    nearest = (weight[..., None] - found[:, None]).abs().argmin(-1)
    for cell in range(4):
        inside = (nearest == cell) * count
        mean = (inside * weight).sum(1) / inside.sum(1)
        torch.testing.assert_close(found[:, cell], mean, rtol=2e-2, atol=2e-2)


def test_sensitivities_are_what_is_minimised() -> None:
    weight = heavy_tailed()
    sensitivity = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) ** 8
    for name in ("lut3", "lut3-s45"):
        assert (
            error(weight, name, sensitivity)
            < 0.9 * ((lookup.quantize(weight, Scheme.parse(name)).dequantize() - weight).square() * sensitivity).sum()
        )


def test_a_table_is_better_than_a_grid_and_outliers_better_still() -> None:
    weight = heavy_tailed()
    grid = codec("int").quantize(weight, Scheme.parse("w4")).dequantize()
    assert error(weight, "lut4") < 0.2 * (grid - weight).square().sum()
    assert error(weight, "lut4-s45") < 0.8 * error(weight, "lut4")


def test_dense_and_sparse_add_up() -> None:
    weight = heavy_tailed(24, 200)
    sensitivity = torch.ones_like(weight)
    sensitivity[11, 7] = 1e9
    packed = lookup.quantize(weight, Scheme.parse("lut4-s45"), sensitivity)
    starts, places = packed.parts["starts"].long(), packed.parts["places"].long()
    count = round(0.0045 * weight.numel())
    assert len(places) == count == int(starts[-1])
    largest = weight.abs().flatten().topk(count - 3).values.min()
    listed = {(row, int(c)) for row in range(24) for c in places[starts[row] : starts[row + 1]]}
    assert (11, 7) in listed, "the most sensitive is kept apart although it is small"
    assert {(i // 200, i % 200) for i in (weight.abs().flatten() > largest).nonzero().flatten().tolist()} <= listed
    values = packed.dequantize()
    for row, column in listed:
        assert float(values[row, column]) == pytest.approx(float(weight[row, column]), rel=2 * HALF)
    assert packed.dequantize(rows=slice(9, 15)).equal(values[9:15])
    assert packed.dequantize(torch.bfloat16).equal(values.bfloat16())


def test_the_same_weight_gives_the_same_bytes() -> None:
    weight = heavy_tailed().half().float()  # with equal magnitudes
    first, second = (lookup.quantize(weight, Scheme.parse("lut3-s5")).parts for _ in range(2))
    assert all(first[part].equal(second[part]) for part in first)


def test_few_different_values() -> None:
    weight = torch.zeros(3, 64)
    weight[1, ::2] = 1.5
    assert lookup.quantize(weight, Scheme.parse("lut2")).dequantize().equal(weight)


def test_sizes() -> None:
    assert Scheme.parse("lut4").bits_per_weight((4096, 4096)) == 4 + 16 * 16 / 4096
    sparse = Scheme.parse("lut3-s45").bits_per_weight((4096, 4096))
    assert sparse == pytest.approx(3 + 16 * 8 / 4096 + 0.0045 * 48 + 32 / 4096, abs=1e-4)


@pytest.mark.parametrize(
    "part, at, value",
    [("places", 3, 512), ("places", 0, -1), ("starts", 5, 9999), ("starts", 0, -4), ("starts", 16, 0)],
)
def test_outliers_outside_of_the_matrix_are_refused(part: str, at: int, value: int) -> None:
    packed = lookup.quantize(heavy_tailed(), Scheme.parse("lut4-s45"))
    parts = {name: tensor.clone() for name, tensor in packed.parts.items()}
    parts[part][at] = value
    with user_error("checkpoint_malformed"):
        PackedTensor(packed.scheme, packed.shape, parts).dequantize()


def test_refusals() -> None:
    scheme, weight = Scheme.parse("lut4"), heavy_tailed()
    weight[2, 2] = 1e6
    with user_error("not_finite"):
        lookup.quantize(weight, scheme)
    with pytest.raises(ValueError, match="finite and not negative"):
        lookup.quantize(heavy_tailed(), scheme, -torch.ones(16, 512))

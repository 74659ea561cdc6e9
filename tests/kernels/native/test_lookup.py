"""Products with weights of tables. The oracle is float64 on the numbers that are stored; every way to compute a row
gives the same bits: every level, threads, rows beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attar import _native
from attar.formats.codecs import lookup
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import ops, ref
from attar.kernels.native import linear as native
from attar.kernels.native import rows
from attar.kernels.operands import Linear
from attar.plan import costs
from tests.errors import user_error
from tests.kernels.native.test_linear import LEVELS, threads

TOLERANCE = 1e-6  # of the sum of magnitudes: sixteen chains of float32, and a fold
SCHEMES = ("lut4", "lut3", "lut2", "lut4-s5", "lut3-s45", "lut4-s200-f32", "lut3-bf16")
SHAPES = ((7, 5), (64, 33), (160, 16), (300, 70))  # inputs, outputs


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(scheme: str, inputs: int, outputs: int, seed: int = 0, bias: bool = True) -> Linear:
    weight = randn(outputs, inputs, seed=seed) * randn(outputs, 1, seed=seed + 1).exp()
    packed = lookup.quantize(weight, Scheme.parse(scheme))
    return Linear(f"linear{seed}", packed, randn(outputs, seed=seed + 2) if bias else None)


def prepared(each: Linear, arena: _native.Arena) -> Linear:
    each = copy.copy(each)
    native.prepare(each, arena)
    return each


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_gives_the_same_bits_near_the_oracle(scheme: str, inputs: int, outputs: int) -> None:
    linears = (stored(scheme, inputs, outputs), stored(scheme, inputs, 20, seed=7, bias=False))
    arena = _native.Arena()
    ready = tuple(prepared(each, arena) for each in linears)
    x = randn(50, inputs, seed=3)
    found, at = ops.linear(x, ready), 0
    for each in linears:
        assert isinstance(each.weight, PackedTensor)
        weight, bias = each.weight.dequantize(torch.float64), 0.0 if each.bias is None else each.bias.double()
        wanted, size = x.double() @ weight.T + bias, x.double().abs() @ weight.abs().T + abs(bias)
        got = found[:, at : at + each.shape[0]].double()
        assert ((got - wanted).abs() <= TOLERANCE * size).all()
        at += each.shape[0]
    for level in LEVELS:
        assert native.linear(x, ready, level).equal(found), level
        for some in (slice(0, 1), slice(3, 10), slice(30, 47)):
            assert native.linear(x[some].contiguous(), ready, level).equal(found[some]), level
    with threads(2):
        assert ops.linear(x, ready).equal(found)


@pytest.mark.parametrize("level", LEVELS)
def test_more_rows_than_are_taken_at_a_time(level: str) -> None:
    ready = (prepared(stored("lut4", 2048, 20), _native.Arena()),)
    x = randn(75, 2048)  # chunks are of 32
    found = native.linear(x, ready, level)
    assert torch.cat([native.linear(row[None], ready, level) for row in x]).equal(found)


def test_rows_are_reordered_and_divided() -> None:
    each, order = stored("lut3-s45", 96, 10), torch.randperm(96, generator=torch.Generator().manual_seed(5))
    changed = copy.copy(each)
    changed.permutation, changed.input_scale = order, randn(96, seed=9).exp()
    x = randn(6, 96)
    arena = _native.Arena()
    found = ops.linear(x, (prepared(changed, arena),))
    assert found.equal(ops.linear((x[:, order] / changed.input_scale).contiguous(), (prepared(each, arena),)))
    torch.testing.assert_close(found, ref.linear(x, (changed,)), rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_finite_harms_itself_alone() -> None:
    ready = prepared(stored("lut4-s45", 64, 10), _native.Arena())
    x = randn(9, 64)
    want = ops.linear(x, (ready,))
    x[4, 3] = torch.nan
    found = ops.linear(x, (ready,))
    assert found[4].isnan().all()
    assert found[[0, 3, 5, 8]].equal(want[[0, 3, 5, 8]])


def test_weights_of_other_forms_can_stand_beside_it() -> None:
    arena = _native.Arena()
    linears = [stored("lut4", 64, 10), stored("lut3", 64, 6, seed=4), Linear("dense", randn(8, 64))]
    ready = [prepared(each, arena) for each in linears]
    x = randn(5, 64)
    assert not native.gateable(ready[:2])
    alone = [ops.linear(x, (each,)) for each in ready]
    assert ops.linear(x, ready).equal(torch.cat(alone, 1))


@pytest.mark.parametrize("scheme", ["lut4", "lut3-s45"])
def test_rows_of_an_embedding(scheme: str) -> None:
    each = stored(scheme, 70, 33)
    assert isinstance(each.weight, PackedTensor)
    ready = prepared(each, _native.Arena())
    ids = torch.tensor([0, 32, 5, 5])
    found = rows.embed(rows.Table(ready.weight), ids, 2.0)  # type: ignore[arg-type]
    assert found.equal(each.weight.dequantize()[ids] * 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_read_is_what_was_planned(scheme: str) -> None:
    each = stored(scheme, 192, 33)
    assert isinstance(each.weight, PackedTensor)
    ready = prepared(each, _native.Arena())
    assert isinstance(ready.weight, native.PackedWeight)
    assert ready.weight.read_bytes == costs.read_bytes(33, 192, each.weight.scheme)


def test_damaged_outliers_are_refused() -> None:
    each = stored("lut4-s200", 64, 10)
    assert isinstance(each.weight, PackedTensor)
    for name, at, value in (
        ("places", 3, 64),
        ("places", 0, -1),
        ("starts", 2, 1000),
        ("starts", 10, 3),
        ("starts", 0, 1),
    ):
        parts = {part: tensor.clone() for part, tensor in each.weight.parts.items()}
        parts[name][at] = value
        damaged = Linear("damaged", PackedTensor(each.weight.scheme, each.weight.shape, parts))
        with user_error("quantization_invalid"):
            native.prepare(damaged, _native.Arena())

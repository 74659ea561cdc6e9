"""Products with weights of two levels. The oracle is float64 on the numbers that the kernels are given; every way to
compute a row gives the same bits: every level, the path for few rows and the one for many, threads, rows beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attar import _native
from attar.formats.codecs import progressive
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import ops, ref
from attar.kernels.native import linear as native
from attar.kernels.operands import Linear
from attar.plan import costs
from tests.errors import user_error
from tests.kernels.native.test_linear import LEVELS, NEVER, many_from, threads

TOLERANCE = 3e-7  # of the sum of magnitudes: sums are exact, so conversion, two scales and the bias are what rounds
SHAPES = ((32, 32, 5), (32, 96, 33), (64, 192, 64), (128, 384, 70))  # group, inputs, outputs


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(group: int, inputs: int, outputs: int, seed: int = 0, search: str = "mse", bias: bool = True) -> Linear:
    scheme = Scheme.parse(f"qserve-g{group}").with_scale_dtype("bfloat16")
    weight = randn(outputs, inputs, seed=seed) * randn(outputs, 1, seed=seed + 1).exp()
    packed = progressive.quantize(weight, scheme, search)
    return Linear(f"linear{seed}", packed, randn(outputs, seed=seed + 2) if bias else None)


def prepared(each: Linear, arena: _native.Arena) -> Linear:
    each = copy.copy(each)
    native.prepare(each, arena)
    return each


def oracle(x: Tensor, each: Linear) -> tuple[Tensor, Tensor]:
    """The product [N, O] in float64, and the sum of the magnitudes of its terms."""
    assert isinstance(each.weight, PackedTensor)
    codes, scale = ref.quantize_rows_int8(x)
    rows, weight = codes.double() * scale.double(), each.weight.dequantize(torch.float64)
    bias = torch.zeros(each.shape[0]) if each.bias is None else each.bias
    return rows @ weight.T + bias.double(), rows.abs() @ weight.T.abs() + bias.double().abs()


@pytest.mark.parametrize(("group", "inputs", "outputs"), SHAPES)
def test_every_way_gives_the_same_bits_near_the_oracle(group: int, inputs: int, outputs: int) -> None:
    linears = (stored(group, inputs, outputs), stored(group, inputs, 20, seed=7, search="minmax", bias=False))
    arena = _native.Arena()
    ready = tuple(prepared(each, arena) for each in linears)
    x = randn(50, inputs, seed=3)
    found = ops.linear(x, ready)
    at = 0
    for each in linears:
        want, size = oracle(x, each)
        got = found[:, at : at + each.shape[0]].double()
        assert ((got - want).abs() <= TOLERANCE * size).all()
        at += each.shape[0]
    torch.testing.assert_close(found, ref.linear(x, linears), rtol=1e-4, atol=1e-4)  # which rounds rows alike
    for level in LEVELS:
        for many in (0, NEVER):
            with many_from(many):
                assert native.linear(x, ready, level).equal(found), (level, many)
                for rows in (slice(0, 1), slice(3, 10), slice(30, 47)):
                    assert native.linear(x[rows].contiguous(), ready, level).equal(found[rows]), (level, many)
    with threads(2):
        assert ops.linear(x, ready).equal(found)


def test_the_greatest_numbers_of_all_do_not_overflow() -> None:
    inputs = 1024
    scheme = Scheme.parse("qserve-g32")
    factor = torch.full((2, inputs // 32), 17, dtype=torch.uint8)
    codes = torch.tensor([[0], [15]], dtype=torch.int8).expand(2, inputs).contiguous()
    packed = progressive.encode(codes, torch.ones(2, 1), factor, torch.full_like(factor, 128), scheme)
    assert packed.dequantize()[:, 0].tolist() == [-128, 127]
    ready = prepared(Linear("greatest", packed), _native.Arena())
    x = torch.full((40, inputs), -1.0)
    rounded, scale = ref.quantize_rows_int8(x[:1])
    want = float(rounded[0, 0] * scale) * inputs * torch.tensor([-128.0, 127.0])
    for level in LEVELS:
        for many in (0, NEVER):
            with many_from(many):
                torch.testing.assert_close(native.linear(x, (ready,), level), want.expand(40, 2))


def test_a_row_that_is_not_finite_harms_itself_alone() -> None:
    ready = prepared(stored(32, 64, 10), _native.Arena())
    x = randn(9, 64)
    want = ops.linear(x, (ready,))
    x[4, 3] = torch.nan
    for many in (0, NEVER):
        with many_from(many):
            found = ops.linear(x, (ready,))
        assert found[4].isnan().all()
        assert found[[0, 3, 5, 8]].equal(want[[0, 3, 5, 8]])


def test_weights_of_other_forms_can_stand_beside_it() -> None:
    arena = _native.Arena()
    linears = [stored(32, 64, 10), stored(64, 64, 6, seed=4), Linear("dense", randn(8, 64))]
    ready = [prepared(each, arena) for each in linears]
    x = randn(5, 64)
    assert not native.gateable(ready[:2])
    alone = [ops.linear(x, (each,)) for each in ready]
    assert ops.linear(x, ready).equal(torch.cat(alone, 1))


def test_what_is_read_is_what_was_planned() -> None:
    each = stored(64, 192, 33)
    assert isinstance(each.weight, PackedTensor)
    ready = prepared(each, _native.Arena())
    assert isinstance(ready.weight, native.PackedWeight)
    assert ready.weight.read_bytes == costs.read_bytes(33, 192, each.weight.scheme)


def test_what_cannot_be_multiplied_is_refused() -> None:
    each = stored(32, 64, 10)
    assert isinstance(each.weight, PackedTensor)
    parts = {name: part.clone() for name, part in each.weight.parts.items()}
    parts["factor"][7] = 255
    damaged = Linear("damaged", PackedTensor(each.weight.scheme, each.weight.shape, parts))
    with user_error("quantization_invalid"):
        native.prepare(damaged, _native.Arena())
    weights = Scheme.parse("qserve-g32-weight").with_scale_dtype("bfloat16")
    alone = Linear("alone", PackedTensor(weights, each.weight.shape, each.weight.parts))
    assert native.against(alone) == "weights of two levels meet rows of int8 alone"
    divided = Linear("divided", each.weight, input_scale=torch.ones(64))
    assert "reordered or divided" in str(native.against(divided))
    assert native.against(each) is None

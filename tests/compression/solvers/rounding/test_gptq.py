"""GPTQ against the plain form of what it computes: Optimal Brain Quantization in float64, one column after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.compression.recipe.methods import Gptq, Order, ScaleSearch
from attar.compression.solvers.rounding import gptq, rtn
from attar.compression.solvers.rounding.gptq import Hessian
from attar.formats import affine
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from tests.errors import user_error

ERROR_TOLERANCE = 1e-4  # relative, of float32 errors against float64 ones

SWEEPS: list[tuple[Order, bool]] = [("natural", True), ("natural", False), ("activation", True)]
"""Order of columns, and whether groups are static."""


def problem(seed: int, rows: int = 16, columns: int = 16, tokens: int = 256) -> tuple[Tensor, Tensor]:
    """A weight [O, I] and correlated inputs [N, I], float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ (mixing + torch.eye(columns))
    return weight, x * torch.rand(columns, generator=generator, dtype=torch.float64).mul(3).exp()


def hessian(x: Tensor, dtype: torch.dtype = torch.float64) -> Hessian:
    found = Hessian(x.shape[1], dtype)
    found.add(x)
    return found


def solve(
    weight: Tensor,
    x: Tensor,
    name: str,
    order: Order = "activation",
    search: ScaleSearch = "minmax",
    block: int = 128,
    damping: float = 0.01,
    static: bool = True,
) -> gptq.GptqResult:
    prepared = gptq.prepare(hessian(x, weight.dtype), damping, order)
    options = Gptq(block=block, order=order, scale_search=search, static_groups=static)
    return gptq.solve(weight, prepared, Scheme.parse(name), options)


def codes_of(packed: PackedTensor) -> Tensor:
    return affine.decode(packed)[0] if packed.scheme.weight.kind == "int" else packed.parts["codes"].float()


def obq(
    weight: Tensor, h: Tensor, scheme: Scheme, order: Order, static: bool, search: ScaleSearch, damping: float
) -> Tensor:
    """Codes by the definition: after each column, all others move, and the inverse loses that column."""
    grid, columns = scheme.weight, weight.shape[1]
    group = columns // grid.groups(columns)
    w = weight.clone()
    scale, zero = rtn.group_scales(w, grid, torch.float32, search)
    inverse = torch.linalg.inv(h + damping * h.diagonal().mean() * torch.eye(columns, dtype=h.dtype))
    sweep = range(columns) if order == "natural" else h.diagonal().argsort(descending=True).tolist()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for k in sweep:
        if not static and group < columns and k % group == 0:
            whole = replace(grid, granularity="channel", group_size=None)
            one, shift = rtn.group_scales(w[:, k : k + group], whole, torch.float32, search)
            scale[:, k // group] = one[:, 0]
            if zero is not None and shift is not None:
                zero[:, k // group] = shift[:, 0]
        at = slice(k // group, k // group + 1)
        s, z = scale[:, at].double(), None if zero is None else zero[:, at]
        codes[:, k] = affine.round_to_grid(w[:, k, None], s, z, grid)[:, 0]
        rounded = affine.to_values(codes[:, k, None], s, z)[:, 0]
        w -= torch.outer((w[:, k] - rounded) / inverse[k, k], inverse[k])
        inverse -= torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return codes


@pytest.mark.parametrize(("order", "static"), SWEEPS)
@pytest.mark.parametrize("name", ["w4g4", "w3g8-asym", "w4", "w2g16"])
@pytest.mark.parametrize("search", ["minmax", "mse"])
def test_codes_are_those_of_obq(name: str, order: Order, static: bool, search: ScaleSearch) -> None:
    weight, x = problem(seed=1)
    found = solve(weight, x, name, order, search, block=8, static=static)
    expected = obq(weight, hessian(x).mean, Scheme.parse(name), order, static, search, damping=0.01)
    assert torch.equal(codes_of(found.packed), expected)


@pytest.mark.parametrize("search", ["minmax", "mse"])
def test_static_groups_have_the_scales_of_rounding_to_nearest(search: ScaleSearch) -> None:
    weight, x = problem(seed=1)
    plain = rtn.solve(weight.float(), Scheme.parse("w4g4"), scale_search=search).parts["scale"]
    before, after = (
        solve(weight.float(), x.float(), "w4g4", "natural", search, static=static).packed.parts["scale"]
        for static in (True, False)
    )
    assert torch.equal(before, plain)
    assert torch.equal(after[:, 0], plain[:, 0])
    assert not torch.equal(after, plain)


@pytest.mark.parametrize(("order", "static"), SWEEPS)
@pytest.mark.parametrize("name", ["w4g8", "w4", "w3g32-asym", "w4-tensor"])
def test_the_block_size_changes_nothing(name: str, order: Order, static: bool) -> None:
    weight, x = problem(seed=2, columns=64)
    codes = [codes_of(solve(weight, x, name, order, block=block, static=static).packed) for block in (1, 8, 24, 128)]
    assert all(torch.equal(codes[0], other) for other in codes[1:])


@pytest.mark.parametrize(("order", "static"), SWEEPS)
@pytest.mark.parametrize("name", ["w4g16", "w3g16-asym", "w8a8", "w5-tensor-asym", "fp8", "fp8-e5m2", "fp8g16-weight"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_independent_inputs_leave_rounding_to_nearest(name: str, order: Order, static: bool, scale_dtype: str) -> None:
    """With H = 1 there is nothing to make up for: what remains is the codec, so the arithmetic of both must agree."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    scheme = Scheme.parse(name).with_scale_dtype(scale_dtype)
    identity = Hessian(64)
    identity.mean, identity.tokens = torch.eye(64), 64
    prepared = gptq.prepare(identity, order=order)
    found = gptq.solve(weight, prepared, scheme, Gptq(order=order, scale_search="minmax", static_groups=static))
    expected = codec(scheme.weight.kind).quantize(weight, scheme)
    for part, tensor in expected.parts.items():
        assert torch.equal(found.packed.parts[part], tensor), part
    assert found.error == found.rtn_error


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(["w4g64", "w3g32", "w4g16-asym", "w2g64", "w4", "fp8"]),
    sweep=st.sampled_from(SWEEPS),
    search=st.sampled_from(["minmax", "mse"]),
)
def test_it_costs_no_more_than_rounding_to_nearest(
    seed: int, name: str, sweep: tuple[Order, bool], search: ScaleSearch
) -> None:
    weight, x = problem(seed, columns=64)
    found = solve(weight.float(), x.float(), name, sweep[0], search, static=sweep[1])
    assert found.error <= found.rtn_error


@pytest.mark.parametrize("order", ["natural", "activation"])
def test_errors_are_those_of_the_outputs(order: Order) -> None:
    weight, x = problem(seed=4, rows=40, columns=96, tokens=200)
    found = solve(weight.float(), x.float(), "w4g32", order, "mse")
    outputs = (x @ weight.T).square().sum()
    error = (x @ (found.packed.dequantize().double() - weight).T).square().sum() / outputs
    assert found.error == pytest.approx(float(error), rel=ERROR_TOLERANCE)
    plain = rtn.solve(weight.float(), Scheme.parse("w4g32"), scale_search="mse").dequantize().double()
    error = (x @ (plain - weight).T).square().sum() / outputs
    assert found.rtn_error == pytest.approx(float(error), rel=ERROR_TOLERANCE)


@pytest.mark.parametrize("order", ["natural", "activation"])
def test_float32_and_float64_agree(order: Order) -> None:
    weight, x = problem(seed=5, rows=32, columns=128, tokens=512)
    double = solve(weight, x, "w4g32", order)
    single = solve(weight.float(), x.float(), "w4g32", order)
    assert single.error == pytest.approx(double.error, rel=0.02)


def test_damping_is_relative() -> None:
    weight, x = problem(seed=6)
    assert torch.equal(codes_of(solve(weight, x, "w3g8").packed), codes_of(solve(weight, x * 1024, "w3g8").packed))
    assert not torch.equal(
        codes_of(solve(weight, x, "w3g8").packed), codes_of(solve(weight, x, "w3g8", damping=1.0).packed)
    )


@pytest.mark.parametrize(("order", "static"), SWEEPS)
@pytest.mark.parametrize("name", ["w4g8", "w4g8-asym", "fp8"])
def test_columns_without_input_become_zero(name: str, order: Order, static: bool) -> None:
    weight, x = problem(seed=7)
    x[:, [0, 5, 15]] = 0
    found = solve(weight, x, name, order, static=static)
    dense = found.packed.dequantize()
    assert not dense[:, [0, 5, 15]].any()
    assert dense[:, [1, 6, 14]].any(0).all()
    assert found.error < 0.02


def test_the_hessian_is_left_as_it_was() -> None:
    weight, x = problem(seed=8)
    h = hessian(x)
    before = h.mean.clone()
    gptq.solve(weight, gptq.prepare(h), Scheme.parse("w4g8"))
    assert torch.equal(h.mean, before)


def test_a_hessian_is_the_mean_over_rows() -> None:
    _, x = problem(seed=9, tokens=5000)
    whole, left, right = hessian(x), hessian(x[:100]), hessian(x[100:])
    torch.testing.assert_close(whole.mean, x.T @ x / 5000)
    left.merge(right)
    torch.testing.assert_close(left.mean, whole.mean)
    left.merge(Hessian(16, torch.float64))
    assert left.tokens == whole.tokens == 5000
    single = Hessian(16)
    single.add(x.bfloat16())
    torch.testing.assert_close(single.mean.double(), whole.mean, rtol=0.02, atol=0.02 * float(whole.mean.max()))


def test_one_half_of_a_wide_hessian_is_computed_and_copied_to_the_other() -> None:
    x = torch.randn(50, gptq.SIDE * 2 + 7, generator=torch.Generator().manual_seed(0))
    found = Hessian(x.shape[1])
    for part in x.split(20):
        found.add(part)
        assert torch.equal(found.mean[: gptq.SIDE, gptq.SIDE :], found.mean[gptq.SIDE :, : gptq.SIDE].T)
    torch.testing.assert_close(found.mean, x.T @ x / 50)


def test_the_same_input_gives_the_same_bits() -> None:
    weight, x = problem(seed=10, columns=64)
    a, b = (solve(weight.float(), x.float(), "w4g16", search="mse") for _ in range(2))
    assert all(torch.equal(a.packed.parts[part], b.packed.parts[part]) for part in a.packed.parts)
    assert (a.error, a.rtn_error) == (b.error, b.rtn_error)


@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_inputs_of_zeros_leave_rounding_to_nearest(size: float) -> None:
    """Also those whose squares are lost in float32."""
    weight, x = problem(seed=11)
    zero = Hessian(16)
    zero.add(size * x.float())
    assert zero.silent
    assert not hessian(x).silent
    found = gptq.solve(weight, gptq.prepare(zero), Scheme.parse("w4g8"))
    assert isinstance(found.packed, PackedTensor)
    plain = rtn.solve(weight.float(), Scheme.parse("w4g8"), scale_search="mse")
    torch.testing.assert_close(found.packed.dequantize(), plain.dequantize())
    assert found.error == pytest.approx(found.rtn_error)
    assert found.error == pytest.approx(float((plain.dequantize() - weight).square().sum() / weight.square().sum()))


def test_what_cannot_be_solved_is_refused() -> None:
    with user_error("linear_without_tokens"):
        gptq.prepare(Hessian(4))
    with user_error("not_finite"):
        gptq.prepare(hessian(torch.full((2, 4), torch.inf)))
    with user_error("hessian_singular"):
        gptq.prepare(hessian(torch.ones(2, 4)), damping=0.0)
    with user_error("group_size_indivisible"):
        gptq.solve(torch.randn(4, 48), gptq.prepare(hessian(torch.eye(48))), Scheme.parse("w4g32"))

"""Integer grids: properties of rounding, and the wrong formulas that are in circulation.

Equality with compressed-tensors is in test_compressed_tensors.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.formats import affine, packing
from attar.formats.scheme import Grid, Scheme
from tests.errors import user_error

FLOAT32_SLACK = 1e-5  # of a step: x / scale, zero and the product each round once in float32
MONTE_CARLO = 0.02


def weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def grids() -> st.SearchStrategy[Grid]:
    sharing = st.sampled_from([("tensor", None), ("channel", None), ("group", 8)])
    return st.builds(
        lambda bits, symmetric, share: Grid("int", bits, symmetric, share[0], share[1]),
        st.integers(2, 8),
        st.booleans(),
        sharing,
    )


@settings(deadline=None, max_examples=80)
@given(grid=grids(), seed=st.integers(0, 10_000), spread=st.floats(1e-3, 1e3), offset=st.floats(-3, 3))
def test_error_is_at_most_half_a_step(grid: Grid, seed: int, spread: float, offset: float) -> None:
    """Also at the ends: a symmetric range reaches half a step past the largest code, an asymmetric one ends on codes.

    An asymmetric zero point is rounded, which moves the range by up to half a step, so there the ends may lose one.
    """
    x = (weight(3, 16, seed) + offset) * spread
    scale, zero = affine.qparams(*affine.min_max(x, grid), grid)
    codes = affine.round_to_grid(x, scale, zero, grid)
    assert codes.dtype == torch.int8
    assert grid.qmin <= int(codes.min()) <= int(codes.max()) <= grid.qmax
    error = (affine.to_values(codes, scale, zero) - x).abs()
    steps = affine.by_scale(error, scale.shape[-1]) / scale.unsqueeze(-1)
    at_an_end = affine.by_scale((codes == grid.qmin) | (codes == grid.qmax), scale.shape[-1])
    slack = FLOAT32_SLACK * 2**grid.bits
    assert float(steps.max()) <= (0.5 if grid.symmetric else 1.0) + slack
    assert bool(((steps <= 0.5 + slack) | at_an_end).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_is_exact_and_signs_survive(bits: int, symmetric: bool) -> None:
    """Trap: symmetric codes clamped to 0 .. 2^b - 1 lose every negative value."""
    x = torch.tensor([[-1.0, -0.9, 0.0, 0.9, 1.0], [5.0, 6.0, 7.0, 0.0, 8.0], [-5.0, -6.0, -7.0, 0.0, -8.0]])
    scheme = Scheme(Grid("int", bits, symmetric))
    values = affine.quantize(x, scheme).dequantize()
    assert bool((values[x == 0] == 0).all())
    big = x.abs() > 0.8
    assert torch.equal(values[big].sign(), x[big].sign())


def test_symmetric_scale_is_max_over_half_the_span() -> None:
    """Trap: neither max / (2^(b-1) - 1) nor max / 2^(b-1) nor max / (2^b - 1)."""
    for bits, half in ((2, 1.5), (3, 3.5), (4, 7.5), (8, 127.5)):
        grid = Grid("int", bits)
        scale, zero = affine.qparams(torch.tensor([-3.0]), torch.tensor([2.0]), grid)
        assert zero is None
        assert scale.item() == torch.tensor(3.0 / half).item()
        assert (grid.qmin, grid.qmax) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def test_asymmetric_range_is_forced_to_hold_zero() -> None:
    """Trap: (2.3, 1.7) alone, with the scale of its own range, comes back as (0.6, 0.6)."""
    x = torch.tensor([[2.3, 1.7]])
    codes, scale, zero = affine.decode(affine.quantize(x, Scheme(Grid("int", 4, symmetric=False))))
    assert zero is not None
    assert (codes + 8).tolist() == [[15, 11]]
    assert (zero + 8).tolist() == [[0]]
    assert scale.item() == pytest.approx(2.3 / 15)
    assert affine.to_values(codes, scale, zero)[0].tolist() == pytest.approx([2.3, 11 * 2.3 / 15])


def test_the_worked_tensor_comes_out_right() -> None:
    """Rows of a widely copied example, rounded with zero in the range: unsigned codes and values."""
    x = torch.tensor([[2.3, 1.7], [3.6, -0.7], [3.9, -2.6], [0.7, 0.3]])
    packed = affine.quantize(x, Scheme(Grid("int", 4, symmetric=False)))
    codes, _, _ = affine.decode(packed)
    assert (codes + 8).tolist() == [[15, 11], [15, 0], [15, 0], [15, 6]]
    expected = torch.tensor([[2.3, 1.68667], [3.72667, -0.57333], [3.9, -2.6], [0.7, 0.28]])
    torch.testing.assert_close(packed.dequantize(), expected, atol=1e-5, rtol=0)


def test_finer_sharing_costs_less_error() -> None:
    x = weight(64, 256)
    x[:, 3] *= 20
    x[5] *= 8
    errors = {}
    for name in ("w4-tensor", "w4", "w4g32"):
        for asym in ("", "-asym"):
            errors[name + asym] = (affine.quantize(x, Scheme.parse(name + asym)).dequantize() - x).square().mean()
    assert errors["w4g32"] < errors["w4"] < errors["w4-tensor"]
    assert errors["w4g32-asym"] < errors["w4-asym"] < errors["w4-tensor-asym"]


def test_error_is_step_squared_over_twelve() -> None:
    """The high-resolution model on uniform data, and what one more bit buys: less than 4x until the step halves."""
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))[None]
    low, high = torch.zeros(1, 1), torch.ones(1, 1)
    errors = {}
    for bits in range(2, 9):
        grid = Grid("int", bits, symmetric=False)
        scale, zero = affine.qparams(low, high, grid)
        codes = affine.round_to_grid(x, scale, zero, grid)
        errors[bits] = float((affine.to_values(codes, scale, zero) - x).double().square().mean())
        assert errors[bits] == pytest.approx(scale.item() ** 2 / 12, rel=MONTE_CARLO)
    for bits in range(2, 8):
        ratio = ((2 ** (bits + 1) - 1) / (2**bits - 1)) ** 2
        assert errors[bits] / errors[bits + 1] == pytest.approx(ratio, rel=MONTE_CARLO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_all_zero_groups_stay_zero(dtype: torch.dtype, symmetric: bool) -> None:
    scheme = Scheme(Grid("int", 4, symmetric, "group", 8)).with_scale_dtype(str(dtype).removeprefix("torch."))
    packed = affine.quantize(torch.zeros(2, 16, dtype=dtype), scheme)
    codes, scale, zero = affine.decode(packed)
    assert not codes.any()
    assert bool((scale == torch.finfo(dtype).eps).all())
    assert zero is None or not zero.any()
    assert not packed.dequantize().any()


@settings(deadline=None, max_examples=40)
@given(grid=grids(), rows=st.integers(1, 40), layout=st.sampled_from(["packed", "plain"]), seed=st.integers(0, 99))
def test_encode_and_decode_are_inverse(grid: Grid, rows: int, layout: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scheme = Scheme(grid, layout="packed" if layout == "packed" else "plain")
    low, high = int(grid.qmin), int(grid.qmax) + 1
    codes = torch.randint(low, high, (rows, 24), generator=generator).to(torch.int8)
    scales = scheme.parts((rows, 24))["scale"].shape
    scale = torch.rand(scales, generator=generator)
    zero = None if grid.symmetric else torch.randint(low, high, scales, generator=generator).to(torch.int8)
    packed = affine.encode(codes, scale, zero, scheme, (rows, 24))
    again, scale_again, zero_again = affine.decode(packed)
    assert torch.equal(again, codes)
    assert torch.equal(scale_again, scale)
    assert (zero is None) == (zero_again is None)
    assert zero is None or zero_again is None or torch.equal(zero_again, zero)
    assert torch.equal(packed.dequantize(), affine.to_values(codes, scale, zero))


def test_slices_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, scheme = weight(33, 64), Scheme.parse("w3g32-asym")
    whole = affine.quantize(x, scheme)
    monkeypatch.setattr(packing, "_SLICE", 200)
    sliced = affine.quantize(x, scheme)
    assert all(torch.equal(sliced.parts[name], part) for name, part in whole.parts.items())
    assert torch.equal(sliced.dequantize(), whole.dequantize())


def test_float32_from_bfloat16_scales_is_computed_in_float32() -> None:
    packed = affine.quantize(weight(4, 32).bfloat16(), Scheme.parse("w8g32").with_scale_dtype("bfloat16"))
    codes, scale, _ = affine.decode(packed)
    wide = packed.dequantize(torch.float32)
    assert torch.equal(wide, codes.float() * scale.float())
    assert torch.equal(packed.dequantize(torch.bfloat16), wide.bfloat16())
    assert not torch.equal(wide, wide.bfloat16().float())


def test_bfloat16_from_float32_scales_is_rounded_once() -> None:
    packed = affine.quantize(weight(4, 32), Scheme.parse("w8g32"))
    assert torch.equal(packed.dequantize(torch.bfloat16), packed.dequantize(torch.float32).bfloat16())


def test_a_narrower_scale_is_rounded_before_codes_are_chosen() -> None:
    x = weight(4, 32)
    codes, scale, _ = affine.decode(affine.quantize(x, Scheme.parse("w8").with_scale_dtype("bfloat16")))
    assert scale.dtype == torch.bfloat16
    assert torch.equal(codes, (x / scale.float()).clamp(-128, 127).round().to(torch.int8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_is_refused(bad: float) -> None:
    x = weight(4, 16)
    x[2, 9] = bad
    with user_error("not_finite"):
        affine.quantize(x, Scheme(Grid("int", 4, True, "group", 8)))
    with user_error("not_finite"):
        affine.quantize(x, Scheme.parse("w8-tensor"))
    for scale in (None, torch.ones(1)):
        with user_error("not_finite"):
            affine.fake_quantize(x, Grid(granularity="tensor"), scale)


def test_a_scale_that_overflows_is_refused() -> None:
    x = torch.tensor([[-60000.0, 60000.0]], dtype=torch.float16)
    with user_error("not_finite"):
        affine.quantize(x, Scheme.parse("w2-asym").with_scale_dtype("float16"))


def test_a_column_is_rounded_like_its_weight() -> None:
    """GPTQ rounds one column at a time with its group's scale."""
    x, grid = weight(8, 32), Grid("int", 4, False, "group", 16)
    scale, zero = affine.qparams(*affine.min_max(x, grid), grid)
    assert zero is not None
    whole = affine.round_to_grid(x, scale, zero, grid)
    column = affine.round_to_grid(x[:, 20:21], scale[:, 1:2], zero[:, 1:2], grid)
    assert torch.equal(column, whole[:, 20:21])


def test_tokens_are_rounded_one_by_one() -> None:
    x, grid = weight(5, 16), Grid(granularity="token")
    together = affine.fake_quantize(x, grid)
    assert torch.equal(together, torch.cat([affine.fake_quantize(row[None], grid) for row in x]))
    assert torch.equal(affine.fake_quantize(x.view(5, 1, 16), grid).view(5, 16), together)


def test_a_static_scale_is_used_as_given() -> None:
    x = torch.tensor([[0.6, -1.4, 900.0, -900.0]])
    expected = torch.tensor([[0.5, -1.5, 63.5, -64.0]])
    assert torch.equal(affine.fake_quantize(x, Grid(granularity="tensor"), torch.tensor([0.5])), expected)
    assert affine.fake_quantize(x.bfloat16(), Grid(granularity="tensor"), torch.tensor([0.5])).dtype == torch.bfloat16

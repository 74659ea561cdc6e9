"""Norms, activations and embedding. The oracle is float64; embedding is exact.

Every level of the machine must give the same bits, for any rows beside a row and any threads.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar import _native
from attar.formats.packed import codec
from attar.formats.scheme import Grid, Scheme
from attar.kernels import ops, ref
from attar.kernels.native import extension, rows
from attar.kernels.native import linear as products
from attar.kernels.operands import Activation, Linear, Norm

NORMED = 2e-6  # of a column, relative to what was added up to make it: in LayerNorm the row's mean among them
ACTIVATED = (
    1e-6  # of a column, relative to its input (times the gate): exp and erf within a few units in the last place
)
LEVELS = _native.levels()
KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")
WIDTHS = (1, 15, 16, 17, 64, 100, 896)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

at_every_level = pytest.mark.parametrize("level", LEVELS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN before they are written: what is not written makes every comparison fail."""
    monkeypatch.setattr(extension, "empty", lambda shape: torch.full(shape, torch.nan))


def norm_of(kind: str, columns: int, offset: float = 0.0, bias: bool = False, eps: float = 1e-6) -> Norm:
    weight = randn(columns, seed=1) + 1
    spec = Norm(kind, weight, randn(columns, seed=2) if bias else None, eps, offset, "norm")  # type: ignore[arg-type]
    spec.prepared = True
    return spec


def norm_oracle(x: Tensor, spec: Norm) -> tuple[Tensor, Tensor]:
    """In float64, and the magnitude that rounding errors are relative to."""
    x, weight = x.double(), spec.weight.double() + spec.offset
    bias = torch.zeros(1) if spec.bias is None else spec.bias.double()
    mean = x.mean(-1, keepdim=True) if spec.kind == "layer" else torch.zeros(1)
    scale = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + spec.eps)
    off = x.abs().mean(-1, keepdim=True) if spec.kind == "layer" else torch.zeros(1)
    size = (x.abs() + off) * scale * (weight.abs() + abs(spec.offset)) + bias.abs()
    return (x - mean) * scale * weight + bias, size


# ---- norms

SPECS = [("rms", 0.0, False), ("rms", 1.0, False), ("rms", 0.0, True), ("layer", 0.0, True), ("layer", 0.0, False)]


@at_every_level
@pytest.mark.parametrize("kind, offset, bias", SPECS)
def test_norms_are_what_float64_gives(kind: str, offset: float, bias: bool, level: str) -> None:
    for columns, eps in itertools.product(WIDTHS, (1e-6, 1e-5)):
        spec, x = norm_of(kind, columns, offset, bias, eps), randn(5, columns) * torch.logspace(-3, 4, 5)[:, None]
        delta = randn(5, columns, seed=3)
        for added in (None, delta):
            total, out = rows.norm(x, added, spec, level)
            stream = x if added is None else x + added
            assert torch.equal(total, stream)
            want, size = norm_oracle(stream, spec)
            assert ((out.double() - want).abs() <= NORMED * size).all(), float(((out - want).abs() / size).max())
            assert torch.equal(out, rows.norm(x, added, spec, LEVELS[0])[1])


@pytest.mark.parametrize("kind, offset, bias", SPECS)
def test_norms_are_what_the_reference_gives(kind: str, offset: float, bias: bool) -> None:
    spec, x, delta = norm_of(kind, 192, offset, bias and kind == "layer"), randn(7, 192), randn(7, 192, seed=4)
    for ours, theirs in zip(rows.norm(x, delta, spec), ref.norm(x, delta, spec), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@at_every_level
def test_a_layer_norm_far_from_zero_keeps_what_is_left_of_its_digits(level: str) -> None:
    spec, x = norm_of("layer", 300, bias=True), randn(4, 300) + 1000
    want, size = norm_oracle(x, spec)
    assert ((rows.norm(x, None, spec, level)[1].double() - want).abs() <= NORMED * size).all()


@at_every_level
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_extreme_rows(kind: str, level: str) -> None:
    spec, columns = norm_of(kind, 40), 40
    x = torch.cat([torch.zeros(1, columns), torch.full((1, columns), 1e4), randn(6, columns)])
    x[3, 7], x[5, 39] = torch.nan, torch.inf
    x[6] *= 1e-30
    out = rows.norm(x, None, spec, level)[1]
    assert out[0].eq(0).all()
    assert out[3].isnan().all()
    assert out[5, 39].isnan()
    good = [0, 1, 2, 4, 6, 7]
    assert out[good].isfinite().all()
    assert torch.equal(out[good], rows.norm(x[good], None, spec, level)[1])


# ---- activations


def activate_oracle(x: Tensor, kind: Activation, gated: bool) -> tuple[Tensor, Tensor]:
    x = x.double()
    a, b = x.chunk(2, -1) if gated else (x, torch.ones(1))
    return ref.activate(x, kind, gated), (a * b).abs()


@at_every_level
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_float64_gives(kind: Activation, gated: bool, level: str) -> None:
    for columns in WIDTHS:
        x = randn(6, columns * (2 if gated else 1)) * torch.logspace(-4, 4, 6)[:, None]
        out, (want, size) = rows.activate(x, kind, gated, level), activate_oracle(x, kind, gated)
        assert out.shape == want.shape
        assert ((out.double() - want).abs() <= ACTIVATED * size).all(), float(((out - want).abs() / size).max())
        assert torch.equal(out, rows.activate(x, kind, gated, LEVELS[0]))


@at_every_level
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_extreme_numbers(kind: Activation, level: str) -> None:
    x = torch.tensor([[1e4, -1e4, 87.5, -87.5, 88.8, -88.8, 200.0, -200.0, 1e-38, -1e-38, 0.0, -0.0, 3e38]])
    out, (want, size) = rows.activate(x, kind, False, level), activate_oracle(x, kind, False)
    assert out.isfinite().all()
    assert ((out.double() - want).abs() <= ACTIVATED * size).all()
    ends = rows.activate(torch.tensor([[torch.inf, torch.nan, 1.0], [2.0, 3.0, 4.0]]), kind, False, level)
    assert ends[0, 0] == torch.inf
    assert ends[0, 1].isnan()
    assert ends[1].isfinite().all()
    low = rows.activate(torch.tensor([[-torch.inf]]), kind, False, level)
    assert not low.isfinite().all() or kind == "relu"


@at_every_level
def test_the_exponential_over_all_its_range(level: str) -> None:
    """silu(x) of negative x is almost x e^x: two roundings more than the exponential."""
    x = torch.linspace(-86, 0, 20_001)[None]
    want = F.silu(x.double())
    out = rows.activate(x, "silu", False, level).double()
    assert ((out - want).abs() <= 4e-7 * want.abs() + 1e-36).all(), float(((out - want) / want).abs().max())


# ---- a row's bits are its own


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(st.integers(0, 199), min_size=1, max_size=250),
    threads=st.integers(1, 3),
    level=st.sampled_from(LEVELS),
    columns=st.sampled_from((100, 384)),
)
def test_any_rows_beside_a_row_and_any_threads(chosen: list[int], threads: int, level: str, columns: int) -> None:
    x, delta, gates = randn(200, columns), randn(200, columns, seed=1), randn(200, 2 * columns, seed=2)
    specs = [norm_of("rms", columns, 1.0), norm_of("layer", columns, bias=True)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for spec in specs:
            part = rows.norm(x[chosen], delta[chosen], spec, level)[1]
            assert torch.equal(part, rows.norm(x, delta, spec, LEVELS[0])[1][chosen])
        for kind in KINDS:
            part = rows.activate(gates[chosen], kind, True, level)
            assert torch.equal(part, rows.activate(gates, kind, True, LEVELS[0])[chosen])
    finally:
        torch.set_num_threads(before)


@at_every_level
def test_three_runs_on_the_same_unaligned_buffers_and_nothing_written_beside(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, count, guard = 45, 9, 32
    x = torch.empty(count * 2 * columns + 1)[1:].view(count, 2 * columns).copy_(randn(count, 2 * columns))
    memory = torch.empty(count * 2 * columns + 2 * guard + 1)[1:]
    spec = norm_of("rms", 2 * columns)

    def empty(shape: tuple[int, ...]) -> Tensor:
        return memory[guard : guard + shape[0] * shape[1]].view(shape)

    monkeypatch.setattr(extension, "empty", empty)
    for run, size in (
        (lambda: rows.norm(x, None, spec, level)[1], 2 * columns),
        (lambda: rows.activate(x, "silu", True, level), columns),
        (lambda: rows.activate(x, "gelu", False, level), 2 * columns),
    ):
        results = []
        for _ in range(3):
            memory.fill_(torch.nan)
            results.append(run().clone())
            assert memory[:guard].isnan().all()
            assert memory[guard + count * size :].isnan().all()
        assert results[0].isfinite().all()
        assert all(torch.equal(again, results[0]) for again in results)


# ---- embedding


@pytest.mark.parametrize("bits", range(2, 9))
def test_rows_of_a_packed_table_are_those_of_the_dequantized_weight(bits: int) -> None:
    ids = torch.tensor([0, 36, 36, 17, 1, 16, 15])
    for group, symmetric, dtype in itertools.product((32, 64, None), (True, False), DTYPES):
        columns = 128 if group else 100
        grid = Grid("int", bits, symmetric, "group" if group else "channel", group)
        packed = codec("int").quantize(randn(37, columns), Scheme(grid).with_scale_dtype(extension.number_name(dtype)))
        each = Linear("table", packed)
        products.prepare(each, _native.Arena())
        assert isinstance(each.weight, products.PackedWeight)
        assert torch.equal(rows.embed(rows.Table(each.weight), ids, 1.0), packed.dequantize(torch.float32)[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_dense_tables_scale_and_positions_are_the_references(dtype: torch.dtype) -> None:
    table, learned = randn(50, 33).to(dtype), randn(20, 33, seed=1).to(dtype)
    ids, positions = torch.tensor([49, 0, 7, 7]), torch.tensor([0, 3, 17, 1])
    native = rows.Table(table)
    for scale, second, offset in itertools.product((1.0, 5.75, 44.9), (None, learned), (0, 2)):
        want = ops.embed(table, ids, torch.float32, scale, second, positions, offset)
        assert torch.equal(rows.embed(native, ids, scale, second, positions, offset), want)
    apart = randn(33, 20, seed=1).to(dtype).T  # not contiguous
    want = ops.embed(table, ids, torch.float32, 1.0, apart, positions, 0)
    assert torch.equal(rows.embed(native, ids, 1.0, apart, positions), want)


def test_many_rows_of_a_table_on_several_threads() -> None:
    table, ids = randn(300, 64), torch.arange(1200) % 300
    assert torch.equal(rows.embed(rows.Table(table), ids, 1.0), table[ids])
    assert rows.embed(rows.Table(table), ids[:0], 1.0).shape == (0, 64)


def test_indices_of_tables_beyond_two_to_the_31() -> None:
    """A table of 2^33 numbers, one memory seen through a number of columns that its last rows alone would reach."""
    columns, count = 64, 1 << 27
    last = randn(2, columns)
    base = last.data_ptr() - (count - 2) * columns * 4  # nothing before the last two rows is looked at
    table, out = _native.Table(base, count, columns, "float32"), torch.full((2, columns), torch.nan)
    ids = torch.tensor([count - 2, count - 1])
    _native.embed(table, ids.data_ptr(), 2, 1.0, None, 0, 0, out.data_ptr())
    assert torch.equal(out, last)


# ---- what is refused


def test_rows_that_do_not_fit_are_refused() -> None:
    x, spec = randn(3, 32), norm_of("layer", 32, bias=True)
    with pytest.raises(ValueError, match="rows of 31 columns do not fit a norm over 32"):
        rows.norm(x[:, :31].contiguous(), None, spec)
    with pytest.raises(ValueError, match="what is added to the stream has its shape"):
        rows.norm(x, x[:2], spec)
    with pytest.raises(ValueError, match="what is added to the stream has its shape"):
        rows.norm(randn(32, 32), randn(32, 32).T, spec)
    spec.bias = randn(31)
    with pytest.raises(ValueError, match="do not fit a norm"):
        rows.norm(x, None, spec)
    with pytest.raises(ValueError, match="31 columns are odd"):
        rows.activate(randn(2, 31), "silu", True)


def test_ids_and_positions_outside_their_tables_are_refused() -> None:
    table, ids = rows.Table(randn(10, 8)), torch.tensor([3, 4])
    for bad in (-1, 10, 1 << 62):
        with pytest.raises(ValueError, match="a row that the table does not have"):
            rows.embed(table, torch.tensor([0, bad]), 1.0)
    learned = randn(6, 8)
    for positions, offset in (((0, 6), 0), ((0, 4), 2), ((0, 1), -1)):
        with pytest.raises(ValueError, match="a row that the table does not have"):
            rows.embed(table, ids, 1.0, learned, torch.tensor(positions), offset)
    with pytest.raises(ValueError, match="has the columns of the embedding"):
        rows.embed(table, ids, 1.0, randn(6, 7), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="is read at positions"):
        rows.embed(table, ids, 1.0, learned)
    with pytest.raises(ValueError, match="3 positions do not fit 2 ids"):
        rows.embed(table, ids, 1.0, learned, torch.tensor([0, 1, 2]))


def test_the_extension_refuses_shapes_before_it_reads() -> None:
    """Every address is zero: to read from one would end the process."""
    for count, columns in [(-1, 4), (2, 0), (2, -4), (1 << 62, 4), (1 << 31, 1 << 32)]:
        with pytest.raises(ValueError, match="impossible shape"):
            _native.norm("rms", 0, 0, count, columns, 0, 0, 1e-6, 0.0, 0, 0, "portable")
        with pytest.raises(ValueError, match="impossible shape"):
            _native.activate("silu", False, 0, count, columns, 0, "portable")
        with pytest.raises(ValueError, match="impossible shape"):
            _native.embed(_native.Table(0, 10, columns, "float32"), 0, count, 1.0, None, 0, 0, 0)
    with pytest.raises(ValueError, match="norms are rms or layer, not batch"):
        _native.norm("batch", 0, 0, 1, 4, 0, 0, 1e-6, 0.0, 0, 0, "portable")
    with pytest.raises(ValueError, match="not swish"):
        _native.activate("swish", False, 0, 1, 4, 0, "portable")
    with pytest.raises(ValueError, match="unknown kernel level sse"):
        _native.activate("silu", False, 0, 1, 4, 0, "sse")

"""Products with 4-bit and 8-bit weights, interpreted, against the reference in float64.

The card counts as one of four multiprocessors there, and four steps are worth a program, so that small shapes are split
too.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.formats import affine
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.kernels import ops, ref
from attar.kernels.operands import Linear, Prepared
from attar.kernels.triton import rows, store, tuning, w4, w8, weights
from attar.kernels.triton.linear import linear

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}  # of outputs, relative to the largest: sums; then one rounding
LOOKED_UP = 1e-6  # of an embedding's numbers: a few roundings of float32
NEIGHBOURS = 0.01  # of outputs, relative to the largest, where rows round to int8: codes may fall to the neighbour
BFLOAT16 = 2.0**-7  # of outputs, relative to the largest: a product and a sum are rounded
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST", 4)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(scheme: str, rows: int, columns: int, seed: int = 0) -> PackedTensor:
    parsed = Scheme.parse(scheme)
    return codec(parsed.weight.kind).quantize(randn(rows, columns, seed=seed), parsed)


def on_grid(scheme: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie on the activation grid of the scheme: rounding them is not what is tested."""
    numbers = torch.Generator().manual_seed(rows)
    if scheme.startswith("fp8"):
        codes = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, generator=numbers)
        x = codes.view(torch.float8_e4m3fn).float() * (torch.randint(0, 2, (rows, columns), generator=numbers) * 2 - 1)
        x[:, ::128] = 448
    else:
        x = torch.randint(-127, 128, (rows, columns), generator=numbers).float()
        x[:, 0] = -127.5
    return (x * 2.0**-6).to(dtype)


def check(x: Tensor, linears: list[Linear]) -> None:
    """Twice: the second time the weights lie side by side."""
    wide = [replace(each, dense=None) for each in linears]
    expected = ref.linear(x.double(), wide)
    for each in linears:
        weights.prepare(each, x.dtype)
    for _ in range(2):
        ours = linear(x, linears)
        assert (ours.shape, ours.dtype) == (expected.shape, x.dtype)
        assert (ours.double() - expected).abs().max() <= TOLERANCE[x.dtype] * expected.abs().max()


@dtypes
@pytest.mark.parametrize("count", [1, 40, 70])
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        ("w4g128", (96, 256)),
        ("w4g128-asym", (64, 1024)),
        ("w4g64", (130, 192)),
        ("w4g32-asym", (200, 96)),
        ("w4g256", (64, 512)),
        ("w4", (64, 96)),
        ("w4-tensor", (70, 128)),
    ],
)
def test_four_bits(scheme: str, shape: tuple[int, int], count: int, dtype: torch.dtype) -> None:
    bias = randn(shape[0], seed=1).to(dtype) if count > 1 else None
    check(randn(count, shape[1]).to(dtype), [Linear("l", packed(scheme, *shape), bias)])


def test_some_of_those_are_split() -> None:
    for kind in ("w4a16", "w8a8"):
        assert tuning.config(kind, 1, 64, 1024, 4).splits > 1  # type: ignore[arg-type]


@dtypes
@pytest.mark.parametrize("count", [1, 40, 70])
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        ("w8a8", (96, 1024)),
        ("w8a8", (70, 80)),
        ("w8a8-static", (64, 256)),
        ("w8", (96, 1024)),
        ("w8-tensor", (70, 80)),
        ("fp8-weight", (70, 80)),
        ("w4a8g64", (96, 256)),
        ("w4a8g128-asym", (64, 1024)),
        ("qserve-g64", (70, 192)),
        ("qserve-g128", (96, 1024)),
        ("fp8", (96, 1024)),
        ("fp8-tensor", (70, 80)),
        ("fp8-block", (300, 384)),
        ("fp8-block", (96, 1024)),
        ("fp8-block-weight", (130, 256)),
    ],
)
def test_eight_bits(scheme: str, shape: tuple[int, int], count: int, dtype: torch.dtype) -> None:
    one = Linear("l", packed(scheme, *shape), randn(shape[0], seed=1).to(dtype) if count > 1 else None)
    if Scheme.parse(scheme).static:
        one.activation_scale = torch.tensor([2.0**-6])
    check(on_grid(scheme, count, shape[1], dtype), [one])


def test_progressive_levels_sum_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits however columns are shared out and whatever rows are beside a row. Both ends of int8 occur."""
    columns = 1024
    source = packed("qserve-g128", 70, columns)
    source.parts["factor"][0], source.parts["offset"][0] = 17, 128
    source.parts["factor"][1], source.parts["offset"][1] = 16, 113
    one, x = Linear("l", source), randn(70, columns)
    wide = ref.linear(x.double(), [replace(one)])
    weights.prepare(one, torch.float32)
    found = []
    for splits in (1, 2, 8):
        cut = tuning.Config(64, 16, splits)
        monkeypatch.setattr(tuning, "config", lambda *given, cut=cut: cut)
        found.append(linear(x, [one]))
    found.append(torch.cat([linear(row[None], [one]) for row in x[:2]] + [linear(x[2:], [one])]))
    assert all(torch.equal(each, found[0]) for each in found[1:])
    assert (found[0].double() - wide).abs().max() <= NEIGHBOURS * wide.abs().max()


@pytest.mark.parametrize("apart", [False, True])
def test_torchs_float8_product_is_ours(apart: bool) -> None:
    """What many rows take, into rows that lie together or apart."""
    one = Linear("l", packed("fp8", 32, 64))
    weights.prepare(one, torch.float32)
    assert isinstance(one.weight, weights.TritonWeight)
    codes, scales = rows.round_rows(on_grid("fp8", 16, 64, torch.float32), torch.float8_e4m3fn)
    ours, bias = torch.empty(16, 32), randn(32)
    w8.product(codes, scales, one.weight, bias, ours)
    theirs = torch.empty(16, 48 if apart else 32, dtype=torch.bfloat16)[:, :32]
    w8.scaled_mm(codes, scales, one.weight, bias, theirs)
    assert (theirs.float() - ours).abs().max() <= BFLOAT16 * ours.abs().max()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("count", [130, 3])
def test_torchs_product_of_blocks_is_ours(count: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a Hopper card's. In its place stand torch's own checks of what it is given, those of both its
    interfaces, and what it is documented to compute; what is left of four rows is multiplied here."""
    real, taken = torch._scaled_mm, []

    def theirs(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, out: Tensor) -> None:
        laid = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (a, b, a_scale, b_scale)
        ]
        real(*laid, out_dtype=out_dtype)
        recipes = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        scaled_mm(*laid[:3], recipes[0], laid[3], recipes[1], output_dtype=out_dtype)
        wide = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out.copy_((a.float() * a_scale.repeat_interleave(128, 1)) @ (b.float() * wide))
        taken.append(len(a))

    outputs, columns = 384, 512
    one = Linear("l", packed("fp8-block", outputs, columns))
    weights.prepare(one, torch.float32)
    assert isinstance(one.weight, weights.TritonWeight)
    codes, scales = rows.round_rows(on_grid("fp8", count, columns, torch.float32), torch.float8_e4m3fn, None, 128)
    bias, ours = randn(outputs), torch.empty(count, outputs)
    w8.product(codes, scales, one.weight, bias, ours)
    monkeypatch.setattr(torch, "_scaled_mm", theirs)
    monkeypatch.setattr(tuning, "rows_from", lambda way, device: 1)
    found = torch.empty(count, outputs + 16 * apart, dtype=torch.bfloat16)[:, :outputs]
    w8.product(codes, scales, one.weight, bias, found)
    assert not taken, "only a Hopper card has it"
    monkeypatch.setattr(w8, "scaled_mm_against_blocks", lambda *given: None)
    w8.product(codes, scales, one.weight, bias, found)
    assert taken == ([128] if count > 4 else [])
    assert (found.float() - ours).abs().max() <= BFLOAT16 * ours.abs().max()


def test_where_torch_multiplies_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(capability: tuple[int, int], cuda: str, dtype: torch.dtype, shape: tuple[int, int]) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return w8.scaled_mm_against_blocks.__wrapped__(torch.device("cuda"), dtype, shape)

    assert reason((9, 0), "12.9", torch.bfloat16, (6144, 4096)) is None
    assert reason((9, 0), "13.0", torch.bfloat16, (4096, 14336)) is None
    assert "Hopper cards alone" in str(reason((10, 0), "12.9", torch.bfloat16, (6144, 4096)))
    assert "since CUDA 12.9" in str(reason((9, 0), "12.8", torch.bfloat16, (6144, 4096)))
    assert "into bfloat16" in str(reason((9, 0), "12.9", torch.float16, (6144, 4096)))
    for shape in ((6144, 4096 + 128), (6144 + 64, 4096)):
        assert "four at a time along a row" in str(reason((9, 0), "12.9", torch.bfloat16, shape))
    assert tuning.rows_from("scaled_mm_blocks", "a card that nobody measured") == tuning.NEVER


@pytest.mark.parametrize("scheme", [None, "w4g32", "w4g32-asym", "qserve-g64", "w8", "w8a8", "fp8", "fp8-block"])
def test_side_by_side(scheme: str | None) -> None:
    """Three that read the same rows, of which one has a bias, are one product, and one memory."""
    columns = 128
    sources = [randn(n, columns, seed=n) if scheme is None else packed(scheme, n, columns, n) for n in (128, 256, 60)]
    linears = [Linear(f"l{i}", source) for i, source in enumerate(sources)]
    linears[1].bias = randn(256, seed=5)
    check(on_grid(scheme or "w8a8", 3, columns, torch.float32), linears)
    first, last = (each.weight for each in (linears[0], linears[2]))
    assert isinstance(first, weights.TritonWeight)
    assert isinstance(last, weights.TritonWeight)
    (fused,) = first.fused.values()
    assert last.codes.untyped_storage().data_ptr() == fused.codes.untyped_storage().data_ptr()


def test_what_does_not_go_side_by_side() -> None:
    """Other forms, outputs that do not fill tiles, and other rows."""
    x = on_grid("w8a8", 2, 64, torch.float32)
    check(x, [Linear("a", packed("w4g32", 60, 64)), Linear("b", packed("w4g32", 64, 64))])
    check(x, [Linear("a", packed("w4g32", 64, 64)), Linear("b", packed("w8a8", 64, 64))])
    blocks = on_grid("fp8-block", 2, 128, torch.float32)
    check(blocks, [Linear("a", packed("fp8-block", 64, 128)), Linear("b", packed("fp8-block", 64, 128, 1))])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    permuted = Linear("a", packed("w4g32", 64, 64), permutation=order)
    divided = Linear("b", packed("w4g32", 64, 64, 1), input_scale=torch.rand(64) + 0.5)
    check(randn(2, 64), [permuted, divided, Linear("c", packed("w4g32", 64, 64, 2))])


def test_a_weight_that_is_gone_leaves_its_neighbours_to_nobody() -> None:
    """Another may lie where it lay."""

    def dense(value: float) -> weights.TritonWeight:
        return weights.TritonWeight("dense", (64, 64), torch.full((64, 64), value))

    first, second = dense(0), dense(1)
    assert weights.side_by_side((first, second)) is not None
    place = id(second)
    del second
    made = [dense(2)]
    while id(made[-1]) != place and len(made) < 1000:
        made.append(dense(2))
    if id(made[-1]) != place:
        pytest.skip("no place in memory was used again")
    fused = weights.side_by_side((first, made[-1]))
    assert fused is not None
    assert torch.equal(fused.codes[64:], made[-1].codes)


def test_many_rows_go_by_way_of_the_dense_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "rows_from", lambda way, device: 4)
    check(randn(5, 128), [Linear("l", packed("w4g64-asym", 70, 128), randn(70))])


@dtypes
@pytest.mark.parametrize("scheme", ["w4g128", "w4g32-asym", "w4-tensor", "qserve-g128"])
def test_four_bits_widen_to_the_very_numbers(scheme: str, dtype: torch.dtype) -> None:
    source = packed(scheme, 70, 256)
    one = Linear("l", source)
    weights.prepare(one, dtype)
    assert isinstance(one.weight, weights.TritonWeight)
    assert torch.equal(w4.dense(one.weight, dtype), source.dequantize(dtype))
    ids = torch.tensor([3, 69, 3])
    assert torch.equal(w4.dense(one.weight, dtype, ids, 3.0), source.dequantize(dtype)[ids] * 3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scheme", ["w4-tensor-asym", "w4g32-asym", "w4a8g64-asym"])
@pytest.mark.parametrize("zero", [-8, 7, 8, 119, -9, 120, 127, -128])
def test_zero_points_that_are_no_codes(zero: int, scheme: str, dtype: torch.dtype) -> None:
    """Stored as int8 they may be any: a kernel multiplies by them, or the reference does. None wraps around."""
    parsed = replace(Scheme.parse(scheme), layout="plain")
    codes, scale, zeros = affine.decode(packed(scheme, 70, 128))
    assert zeros is not None
    zeros = zeros.clone(memory_format=torch.contiguous_format)
    zeros.view(-1)[-1] = zero
    one = Linear("l", affine.encode(codes, scale, zeros, parsed, (70, 128)))
    x = on_grid("w8a8", 3, 128, dtype)
    expected = ref.linear(x.double(), [replace(one)])
    where = store.GpuWeights("cpu", dtype)
    where.take(one)
    fits = -8 <= zero <= 119
    assert (one.name in where.refused) is (not fits and parsed.activation is not None)
    assert (one.name in where.widened) is (not fits and parsed.activation is None)
    found = ops.linear(x, [one])
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_codes_that_are_none_of_sixteen() -> None:
    source = packed("w4a8g64", 64, 128)
    source.parts["codes"][3, 5] = 8
    reason = weights.against(Linear("l", source))
    assert reason == "4-bit codes from -8 to 8 have no Triton kernel, only from -8 to 7"


def test_codes_that_no_kernel_knows_are_widened_and_rows_rounded_otherwise_are_refused() -> None:
    where = store.GpuWeights("cpu", torch.float32)
    one, other = Linear("one", packed("w3g64", 64, 128)), Linear("other", packed("w8a8-asym", 64, 128))
    expected = ref.linear(randn(3, 128).double(), [one])
    for each in (one, other):
        where.take(each)
    assert where.widened == {"one": "w3g64 has no Triton kernel yet"}
    assert list(where.refused) == ["other"]
    assert isinstance(one.weight, weights.TritonWeight)
    assert (linear(randn(3, 128), [one]).double() - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("scheme", [None, "w4g64", "w8", "w8a8", "w3g64", "fp8-block", "qserve-g64"])
def test_embedding(scheme: str | None) -> None:
    """Of any weight, shared with the LM head or not."""
    source = randn(70, 64) if scheme is None else packed(scheme, 70, 64)
    where, head, ids = store.GpuWeights("cpu", torch.float32), Linear("head", source), torch.tensor([0, 69, 5])
    positions, places = randn(9, 64, seed=3), torch.tensor([2, 0, 6])
    expected = ops.embed(source, ids, torch.float32, 8.0, positions, places, 2)
    where.take(head)
    assert isinstance(head.weight, Prepared | PackedTensor)
    for given in (source, head.weight):
        ours = ops.embed(where.table(given), ids, torch.float32, 8.0, positions, places, 2)
        assert torch.allclose(ours, expected, rtol=LOOKED_UP)


def test_rows_of_another_width_are_refused() -> None:
    one = Linear("l", packed("w4g32", 64, 64))
    weights.prepare(one, torch.float32)
    with pytest.raises(ValueError, match="l takes rows of 64 columns, not 32"):
        linear(randn(2, 32), [one])
